"""What a run does when its lock is held by somebody else, or Redis is away."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from typing import Any

from celery.exceptions import Ignore, Retry
from celery.signals import worker_init
from celery.states import READY_STATES

from ..core import ids
from ..core.answers import Busy, Duplicate, Ended, Held
from ..core.engine import Engine
from ..core.lease import Lease
from ..core.messages import describe_conflict
from ..core.options import LockOptions
from ..errors import LockConflict, LockUnavailable
from . import headers
from .owner import running_request

logger = logging.getLogger("celery_relock")

# Seconds until a message is sent again for the first time, and the longest pause it grows to.
_FIRST, _LONGEST = 0.25, 10.0
# How long a worker that lives may take from giving a lock back to storing the result, in seconds.
_STORING = 2.0


def obtain(
    task: Any, engine: Engine, lease: Lease, options: LockOptions, message: Any | None
) -> Held | None:
    """Take the lock as the task's options say. None: the body is to run without it.

    Args:
        message: the request of the message that is run; None for an inline or eager call, which
            cannot be sent again.

    Raises:
        LockConflict: it is held by somebody else, and the policy, or the time to wait, ends here.
        Retry: the message was sent again and this run is over.
        Ignore: this is a copy of a run that has ended, or lives elsewhere.
        LockUnavailable, LockConfigError: from the store.
    """
    while True:
        try:
            return _obtain(task, engine, lease, options, message)
        except LockUnavailable as error:
            if options.on_unavailable == "run":
                logger.error(
                    "%s RUNS WITHOUT ITS LOCK (lock_on_unavailable='run'): %s", task.name, error
                )
                return None
            if options.on_unavailable == "raise" or message is None:
                raise
            pause = _pause(message, options)
            if pause is None:
                raise
            if _sent_again(task, message, pause):
                raise Retry(f"{error}; again in {pause:.1f} s", exc=error, when=pause) from None
        # Neither Redis nor the broker is there: the run stays in its slot, or it would be lost.
        time.sleep(pause)


def _obtain(
    task: Any, engine: Engine, lease: Lease, options: LockOptions, message: Any | None
) -> Held:
    policy = options.on_conflict
    waits = policy == "block" or (message is None and policy != "raise")
    answer = _ask(task, engine, lease, message, options.patience if waits and _may_wait() else 0.0)
    if isinstance(answer, Held):
        return answer
    text = describe_conflict(lease.claim.names[0], answer)
    lease.tell("conflict", text)
    error = _conflict(options, answer, text)
    if message is None:
        raise error
    if isinstance(answer, Duplicate):
        # Never an error: that would overwrite the state of the copy that lives. This one comes back
        # as the same run: discarded if the first has ended, in its place if it has died.
        pause = min(max(answer.remaining, _FIRST), _LONGEST)
        if _sent_again(task, message, pause):
            raise Ignore(text)
        return _stay(task, engine, lease, message, None, error)
    pause_or_end = _pause(message, options) if policy == "retry" else None
    if pause_or_end is None:
        raise error
    if _sent_again(task, message, pause_or_end):
        raise Retry(f"{text}; again in {pause_or_end:.1f} s", exc=error, when=pause_or_end)
    return _stay(task, engine, lease, message, _left(message, options), error)


def _stay(
    task: Any,
    engine: Engine,
    lease: Lease,
    message: Any,
    wait: float | None,
    error: LockConflict,
) -> Held:
    """Wait in the worker's slot for a message that could not be sent again.

    Its delivery may be acknowledged already, so to end here would lose it. Should it have been sent
    in spite of the error, it is a copy of this very run.
    """
    answer = _ask(task, engine, lease, message, wait)
    if isinstance(answer, Held):
        return answer
    raise error


def _ask(
    task: Any, engine: Engine, lease: Lease, message: Any | None, wait: float | None
) -> Held | Busy | Duplicate:
    """Ask for the lock. Raises Ignore if the run has ended already and nothing is left to do."""
    answer = engine.acquire(lease, wait)
    while isinstance(answer, Ended):
        if message is None or not _is_owed(task, message):
            raise Ignore("a late copy of a run that has ended")
        # The same name for all late copies, so that they are copies of one another too.
        lease.claim = lease.claim._replace(run=ids.short(f"{lease.claim.run}+again"))
        lease.again(ids.nonce())
        answer = engine.acquire(lease, wait)
    return answer


def _is_owed(task: Any, message: Any) -> bool:
    """Whether the message still has to be run, though the body of a run of it has ended.

    The lock is given back before Celery stores the result and publishes the next step. With
    `acks_late`, a worker that dies in between leaves a message that is delivered again on purpose:
    it is discarded only if the result is there. A copy of a run that ended without one (`Ignore`,
    `self.retry`) runs again, as it does without a lock; so does one that stores no result but has
    a next step.
    """
    if not task.acks_late:
        return False
    if _ignores_result(task, message):
        return bool(message.chain or message.callbacks or message.errbacks)
    until = time.monotonic() + _STORING
    while time.monotonic() < until:
        try:
            if task.AsyncResult(message.id).state in READY_STATES:
                return False
        except Exception:
            logger.warning("no result of %s to look at: it runs again", message.id, exc_info=True)
            return True
        time.sleep(0.1)
    return True


def _pause(message: Any, options: LockOptions) -> float | None:
    """Seconds until the message is to be sent again, None when `lock_max_wait` is over."""
    pause = pause_before(headers.read(message).attempts + 1)
    left = _left(message, options)
    return pause if left is None else min(pause, left) if left > 0 else None


def _left(message: Any, options: LockOptions) -> float | None:
    """What is left of `lock_max_wait`, None without one."""
    if options.max_wait is None:
        return None
    return headers.read(message).again().since + options.max_wait - time.time()


def pause_before(attempt: int) -> float:
    """Seconds to wait before the given attempt (from 1): doubling, and random by half, so that runs
    that met the same holder do not all come back at once."""
    longest = min(_LONGEST, _FIRST * 2 ** min(attempt, 16))
    return random.uniform(longest / 2, longest)


def _sent_again(task: Any, message: Any, pause: float) -> bool:
    """Send the message again, to come back after a pause. False if that failed.

    Its id, parent, chain, chord, links, stamps, expiry and count of retries stay as they are.
    """
    signature = task.signature_from_request(
        message,
        countdown=pause,
        retries=message.retries,
        ignore_result=_ignores_result(task, message),
        **_destination(task, message),
    )
    try:
        with headers.resending(message, headers.read(message).again()):
            signature.apply_async(add_to_parent=False)
    except Exception:
        logger.warning("%s was not sent again, it stays in its slot", task.name, exc_info=True)
        return False
    return True


def _destination(task: Any, message: Any) -> dict[str, Any]:
    """What Celery does not say by itself when it sends a message to where it came from.

    Kombu's virtual transports (Redis, SQS …) take an exchange for a direct one until this process
    has declared it: by a topic exchange the message would reach no queue, and be lost.
    """
    info = message.delivery_info or {}
    for queue in task.app.amqp.queues.values():
        exchange = queue.exchange
        if exchange and exchange.name == info.get("exchange") and exchange.type != "direct":
            key = info.get("routing_key")
            return {"queue": queue, "exchange": exchange.name, "routing_key": key}
    return {}


def _ignores_result(task: Any, message: Any) -> bool:
    told = vars(message).get("ignore_result")
    return bool(task.ignore_result if told is None else told)


def _conflict(options: LockOptions, answer: Any, text: str) -> LockConflict:
    busy = answer if isinstance(answer, Busy) else None
    bound = "" if options.max_wait is None else f", lock_max_wait={options.max_wait:g} s"
    return LockConflict(
        f"{text}; lock_on_conflict={options.on_conflict!r}{bound}",
        name=busy.name if busy else None,
        owner=busy.owner if busy else None,
        remaining=answer.remaining,
    )


_worker_pid = 0


def _remember_worker(**_: Any) -> None:
    global _worker_pid
    _worker_pid = os.getpid()


# Celery calls some errbacks inline in a worker's main process, when a child is lost. Whoever waits
# there stops the whole worker: no heartbeat, no new task.
worker_init.connect(_remember_worker, weak=False, dispatch_uid="celery_relock.worker_pid")


def _may_wait() -> bool:
    return not (
        _worker_pid == os.getpid()
        and running_request() is None
        and threading.current_thread() is threading.main_thread()
    )
