"""What a run does when its lock is held by somebody else, or Redis is away."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded
from celery.signals import worker_init

from ..engine.events import describe_conflict
from ..engine.lease import State
from ..engine.protocol import Conflict, Deadlocked, Duplicate, Ended, Full, Held, Parked
from ..errors import LockConfigError, LockConflict, LockUnavailable, RelockError
from ..options import POLICIES, LockOptions
from . import headers, sending
from .attempt import Attempt, ask, call_off, deadlock
from .owner import running_request
from .patience import FIRST, LONGEST, left_of, look_after, pause_for
from .sending import sent_again
from .states import Aside, Dropped, SentAgain, show_blocked

logger = logging.getLogger("celery_relock")


def obtain(attempt: Attempt) -> Held | None:
    """Take the lock as the task's options say. None: the body is to run without it.

    Raises:
        LockConflict: it is held by somebody else, and the policy, or the time to wait, ends here.
        Dropped: the policy is not to run then.
        SentAgain: the message was sent again and this run is over.
        Aside: the message is parked, or is a copy of a run that has ended or lives elsewhere.
        LockUnavailable, LockConfigError: from the store.
    """
    task, options, message = attempt.task, attempt.options, attempt.message
    while True:
        try:
            return _obtain(attempt)
        except SoftTimeLimitExceeded:
            # The task fails by it, so nothing of it may run later.
            _end_waiting(attempt)
            raise
        except LockUnavailable as error:
            if options.on_unavailable == "run":
                _end_waiting(attempt)
                logger.error(
                    "%s RUNS WITHOUT ITS LOCK (lock_on_unavailable='run'): %s", task.name, error
                )
                return None
            pause = None
            if options.on_unavailable == "retry" and message is not None:
                pause = pause_for(message, options)
            if pause is None:
                _end_waiting(attempt)
                raise
            if sent_again(task, message, pause):
                raise SentAgain(f"{error}; again in {pause:.1f} s", exc=error, when=pause) from None
        # Neither Redis nor the broker is there: the run stays in its slot, or it would be lost.
        time.sleep(pause)


def _end_waiting(attempt: Attempt) -> None:
    """The run ends here, or goes on without its lock: should it be parked, which cannot be told
    while Redis is away, it must not run once more later."""
    if attempt.message is not None and attempt.lease.state is not State.HELD:
        attempt.engine.parking.withdraw_later(attempt.lease.claim.execution_id)


def _obtain(attempt: Attempt) -> Held:
    message, options = attempt.message, attempt.options
    answer = ask(attempt, _first_wait(attempt))
    if isinstance(answer, Held):
        return answer
    text = describe_conflict(attempt.lease.claim.names[0], answer)
    error = _conflict(options, answer, text)
    attempt.lease.tell("conflict", str(error))
    _warn_of_an_ancestor(attempt, answer)
    if isinstance(answer, Duplicate) and message is not None:
        return _wait_behind(attempt, answer, error)
    policy = _policy(options, answer, error)
    if policy == "drop":
        _leave(attempt, answer)
        raise Dropped(error)
    if policy == "wait" and message is not None:
        return _park(attempt, answer, error)
    if policy == "retry" and message is not None:
        return _send_again(attempt, answer, error)
    if callable(options.on_conflict) and policy in ("block", "wait", "retry"):
        # Which it is was not known when the lock was first asked for.
        return _stay(attempt, options.patience if _may_wait() else 0.0, error)
    _leave(attempt, answer)
    raise error


def _warn_of_an_ancestor(attempt: Attempt, answer: Conflict | Duplicate) -> None:
    """Say it once where the holder is whoever sent this task: should the holder wait for it, both
    would wait for ever, and the server cannot see that."""
    if attempt.message is None or not isinstance(answer, Conflict):
        return
    header = headers.read(attempt.message)
    if header.attempts or not header.ancestors:
        return
    try:
        holds = attempt.engine.inspect(answer.name).holds
    except RelockError:
        return
    holder = next((each for each in holds if each.execution_id in header.ancestors), None)
    if holder is not None:
        logger.warning(
            "%s[%s] waits for the lock %r, which its own ancestor %s holds. That is how children "
            "exclude each other; but should the ancestor wait for this task, both wait until a "
            "time limit: then call the task directly, or declare lock_reentrant='descendants'",
            *(attempt.task.name, attempt.message.id, answer.name, holder.label),
        )


def _first_wait(attempt: Attempt) -> float:
    """Seconds to wait in the slot at once: what cannot wait anywhere else, does so there."""
    policy = attempt.options.on_conflict
    waits = policy == "block" or (attempt.message is None and policy in ("wait", "retry"))
    return attempt.options.patience if waits and _may_wait() else 0.0


def _policy(options: LockOptions, answer: Conflict | Duplicate, error: LockConflict) -> str:
    policy = options.on_conflict
    if not callable(policy):
        return str(policy)
    if isinstance(answer, Conflict) and answer.parked:
        return "wait"  # as was chosen when it was parked
    try:
        chosen = policy(error)
    except Exception as failure:
        raise LockConfigError(
            f"task {options.task}: the callable in lock_on_conflict failed: {failure!r}"
        ) from failure
    if chosen not in POLICIES:
        raise LockConfigError(
            f"task {options.task}: the callable in lock_on_conflict must return one of "
            f"{', '.join(map(repr, POLICIES))}; it returned {chosen!r:.100}"
        )
    return str(chosen)


def _wait_behind(attempt: Attempt, answer: Duplicate, error: LockConflict) -> Held:
    """A copy of a run that lives. Never an error: that would overwrite the state of the one that
    lives. It comes back: to be discarded if the first has ended, in its place if it has died."""
    policy, message, found = attempt.options.on_conflict, attempt.message, None
    if policy == "wait" or callable(policy):
        found = _parked(attempt, None)
    if isinstance(found, Held):
        return found
    if isinstance(found, Ended):
        return _obtain(attempt)
    pause = min(max(answer.remaining, FIRST), LONGEST)
    if isinstance(found, Parked) or sent_again(attempt.task, message, pause):
        raise Aside(str(error))
    return _stay(attempt, None, error)


def _park(attempt: Attempt, answer: Conflict | Duplicate, error: LockConflict) -> Held:
    left = left_of(attempt.message, attempt.options)
    if left is not None and left <= 0:
        _leave(attempt, answer)
        raise error
    if not (isinstance(answer, Conflict) and answer.parked):
        # Before it is parked: later, somebody may have sent it on and stored the result already.
        show_blocked(attempt.task, attempt.message, error, answer)
    found = _parked(attempt, left)
    if isinstance(found, Held):
        return found
    if isinstance(found, Full):
        raise LockConflict(
            f"{found.parked} runs are parked for the lock {found.name!r} already, which is "
            f"lock_max_parked; {error}",
            *error.args[1:],
        )
    if isinstance(found, Deadlocked):
        _leave(attempt, answer)
        raise deadlock(attempt, found)
    if isinstance(found, Parked):
        raise Aside(f"parked, {found.rank} ahead: {error}")
    return _send_again(attempt, answer, error) if found is None else _obtain(attempt)


def _parked(
    attempt: Attempt, left: float | None
) -> Held | Parked | Full | Duplicate | Deadlocked | Ended | None:
    """Leave the message in line for the lock. None: it cannot be parked."""
    task, engine, lease, options, message = attempt
    bounds = {"patience": look_after(left, message), "most": options.max_parked}
    header = headers.read(message).again().made_own()
    park_request = sending.park_request(task, message, header, **bounds)
    if park_request is None:
        return None
    if header.first:
        # Two messages without a header may be copies, or two that are wanted: each is a run.
        lease.claim = lease.claim._replace(execution_id=header.execution_id)
    return engine.park(lease, park_request)


def _leave(attempt: Attempt, answer: Conflict | Duplicate) -> None:
    """A run that was parked ends here without the lock."""
    if isinstance(answer, Conflict) and answer.parked:
        attempt.engine.parking.withdraw(attempt.lease.claim.execution_id)


def _send_again(attempt: Attempt, answer: Conflict | Duplicate, error: LockConflict) -> Held:
    message = attempt.message
    pause = pause_for(message, attempt.options)
    if pause is None:
        _leave(attempt, answer)
        raise error
    try:
        again = sent_again(attempt.task, message, pause)
    except SoftTimeLimitExceeded:
        call_off(attempt)
        raise
    if again:
        raise SentAgain(f"{error}; again in {pause:.1f} s", exc=error, when=pause)
    return _stay(attempt, left_of(message, attempt.options), error)


def _stay(attempt: Attempt, wait: float | None, error: LockConflict) -> Held:
    """Wait in the worker's slot, for a message that could not be sent again too.

    Its delivery may be acknowledged already, so to end here would lose it. Should it have been sent
    in spite of the error, it is a copy of this very run.
    """
    answer = ask(attempt, wait)
    if isinstance(answer, Held):
        return answer
    _leave(attempt, answer)
    raise error


def _conflict(options: LockOptions, answer: Any, text: str) -> LockConflict:
    busy = answer if isinstance(answer, Conflict) else None
    bound = "" if options.max_wait is None else f", lock_max_wait={options.max_wait:g} s"
    policy = getattr(options.on_conflict, "__qualname__", options.on_conflict)
    return LockConflict(
        f"{text}; lock_on_conflict={policy!r}{bound}",
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
