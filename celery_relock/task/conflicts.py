"""What a run does when its lock is held by somebody else, or Redis is away."""

from __future__ import annotations

import logging
import random
import time
from dataclasses import replace
from typing import Any

from celery.exceptions import Ignore, Retry

from ..core.answers import Busy, Duplicate, Ended, Held
from ..core.engine import Engine
from ..core.lease import Lease
from ..core.messages import describe_conflict
from ..core.options import LockOptions
from ..errors import LockConflict, LockUnavailable
from . import headers
from .headers import RunHeader

logger = logging.getLogger("celery_relock")

# Seconds until a message is sent again for the first time, and the longest pause it grows to.
_FIRST, _LONGEST = 0.25, 10.0


def obtain(
    task: Any, engine: Engine, lease: Lease, options: LockOptions, request: Any | None
) -> Held:
    """Take the lock as the task's `lock_on_conflict` says.

    Raises:
        LockConflict: it is held by somebody else, and the policy, or the time to wait, ends here.
        Retry: the message was sent again and this run is over.
        Ignore: this is a copy of a run that has ended, or lives elsewhere.
        LockUnavailable, LockConfigError: from the store.
    """
    inline = request is None or request.is_eager
    policy = options.on_conflict
    waits_here = policy == "block" or (inline and policy != "raise")
    answer = engine.acquire(lease, options.patience if waits_here else 0.0)
    if isinstance(answer, Held):
        return answer
    text = "" if isinstance(answer, Ended) else describe_conflict(lease.claim.names[0], answer)
    lease.tell("conflict", text)
    if isinstance(answer, Ended):
        raise Ignore("a late copy of a run that has ended")
    if inline:
        raise _conflict(options, answer, text)
    header = headers.read(request)
    if isinstance(answer, Duplicate):
        # Never an error: that would overwrite the state of the copy that lives. This one comes
        # back as the same run: discarded if the first has ended, in its place if it has died.
        run = lease.claim.run
        attempt = replace(headers.next_attempt(header), run=run)
        pause = min(max(answer.remaining, _FIRST), _LONGEST)
        return _send_again(task, engine, lease, request, attempt, pause, Ignore(text))
    if policy != "retry":
        raise _conflict(options, answer, text)
    attempt = headers.next_attempt(header)
    left = None if options.max_wait is None else attempt.since + options.max_wait - time.time()
    if left is not None and left <= 0:
        raise _conflict(options, answer, text)
    pause = pause_before(attempt.attempts)
    pause = pause if left is None else min(pause, left)
    return _send_again(task, engine, lease, request, attempt, pause, None, text)


def unavailable(
    task: Any, options: LockOptions, request: Any | None, error: LockUnavailable
) -> None:
    """Redis is away. Returns if the task is to run all the same, unprotected.

    Raises:
        LockUnavailable: `lock_on_unavailable="raise"`, or there is no message to send again.
        Retry: the message was sent again.
    """
    if options.on_unavailable == "run":
        logger.error("%s RUNS WITHOUT ITS LOCK (lock_on_unavailable='run'): %s", task.name, error)
        return
    if options.on_unavailable == "raise" or request is None or request.is_eager:
        raise error
    attempt = headers.next_attempt(headers.read(request))
    pause = pause_before(attempt.attempts)
    _publish(task, request, attempt, pause)
    raise Retry(f"Redis is away, again in {pause:.1f} s: {error}", exc=error, when=pause)


def pause_before(attempt: int) -> float:
    """Seconds to wait before the given attempt (from 1): doubling, and random by half, so that runs
    that met the same holder do not all come back at once."""
    longest = min(_LONGEST, _FIRST * 2 ** min(attempt, 16))
    return random.uniform(longest / 2, longest)


def _send_again(
    task: Any,
    engine: Engine,
    lease: Lease,
    request: Any,
    attempt: RunHeader,
    pause: float,
    ending: Exception | None,
    text: str = "",
) -> Held:
    """Send the message again and end this run; if it cannot be sent, wait here for the lock.

    Neither the retries of the task nor its id, chain, chord, links, stamps or expiry change.
    """
    try:
        _publish(task, request, attempt, pause)
    except Exception as error:
        # This delivery may be acknowledged already, so the run must not end here: it would be lost.
        # It goes on as the run that could not be sent, should a copy have come through after all.
        logger.warning("%s could not be sent again and waits in its slot: %s", task.name, error)
        lease.claim = lease.claim._replace(run=attempt.run)
        answer = engine.acquire(lease, None)
        if isinstance(answer, Held):
            return answer
        raise Ignore("a copy of this run came through and has ended") from error
    if ending is not None:
        raise ending
    error_told = LockConflict(text, name=lease.claim.names[0])
    raise Retry(f"{text}; again in {pause:.1f} s", exc=error_told, when=pause)


def _publish(task: Any, request: Any, attempt: RunHeader, pause: float) -> None:
    signature = task.signature_from_request(request, countdown=pause, retries=request.retries)
    with headers.resending(attempt):
        signature.apply_async()


def _conflict(options: LockOptions, answer: Any, text: str) -> LockConflict:
    busy = answer if isinstance(answer, Busy) else None
    bound = "" if options.max_wait is None else f", lock_max_wait={options.max_wait:g} s"
    return LockConflict(
        f"{text}; lock_on_conflict={options.on_conflict!r}{bound}",
        name=busy.name if busy else None,
        owner=busy.owner if busy else None,
        remaining=answer.remaining,
    )
