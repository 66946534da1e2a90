"""An attempt to take the locks of a call: what it asks with, and for which message."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, NamedTuple

from celery.states import READY_STATES, RETRY

from ..engine import events, ids
from ..engine.engine import Engine
from ..engine.events import describe_deadlock
from ..engine.lease import Lease
from ..engine.protocol import KEPT, Conflict, Deadlocked, Duplicate, Ended, Held
from ..errors import LockDeadlock, RelockError
from ..options import LockOptions
from . import headers
from .sending import stores_no_result
from .states import Aside

logger = logging.getLogger("celery_relock")

# How long a worker that lives may take from giving a lock back to storing the result, in seconds.
_STORING = 2.0
# For how long it is known that a run has ended that may come once more, in seconds.
_CALLED_OFF = 3600.0


# Asked where an execution turns out to have ended: True if nothing of it is to run again, whatever
# its stored state says. `dedup` sets it for a call that a later one may replace.
ended_for_good: ContextVar[Callable[[], bool] | None] = ContextVar(
    "relock_ended_for_good", default=None
)


class Late(Aside):
    """A late copy of a run that has ended: nothing of it comes again."""


class Attempt(NamedTuple):
    """An attempt to take the locks of a call.

    Attributes:
        message: the request of the message that is run; None for an inline or eager call, which
            can neither be parked nor sent again.
    """

    task: Any
    engine: Engine
    lease: Lease
    options: LockOptions
    message: Any | None


def ask(attempt: Attempt, wait: float | None) -> Held | Conflict | Duplicate:
    """Ask for the lock. Raises Late if the run has ended already and nothing is left to do."""
    task, engine, lease, _, message = attempt
    answer = engine.acquire(lease, wait)
    while isinstance(answer, Ended):
        if message is None or not _is_owed(task, message):
            raise Late("a late copy of a run that has ended")
        # The same name for all late copies, so that they are copies of one another too.
        lease.claim = lease.claim._replace(
            execution_id=ids.short(f"{lease.claim.execution_id}+again")
        )
        lease.again(ids.new_attempt_id())
        answer = engine.acquire(lease, wait)
    if isinstance(answer, Deadlocked):
        raise deadlock(attempt, answer)
    return answer


def call_off(attempt: Attempt) -> None:
    """The run ends here, so a message of it that is out, though nobody heard so, is a late copy."""
    engine, claim = attempt.engine, attempt.lease.claim
    if attempt.message is None or not headers.read(attempt.message).own:
        return  # an id made from the task id is not remembered
    with suppress(RelockError):
        told = ("run", _CALLED_OFF, engine.parking.home)
        engine.parking.forward(
            engine.backend.release(claim.names, claim.execution_id, KEPT, *told).messages
        )


def deadlock(attempt: Attempt, answer: Deadlocked) -> LockDeadlock:
    """The error of a wait that would never end."""
    claim = attempt.lease.claim
    text = describe_deadlock(answer.path)
    attempt.lease.tell("conflict", text)
    return LockDeadlock(f"{attempt.task.name}: {text}", name=claim.names[0], owner=claim.owner)


def _is_owed(task: Any, message: Any) -> bool:
    """Whether the message still has to be run, though the body of a run of it has ended.

    The lock is given back before Celery stores the result and publishes the next step. With
    `acks_late`, a worker that dies in between leaves a message that is delivered again on purpose:
    it is discarded only if the result is there. A copy of a run that ended without one (`Ignore`)
    runs again, as it does without a lock; so does one that stores no result but has a next step.
    """
    if not task.acks_late:
        return False
    is_for_good = ended_for_good.get()
    if is_for_good is not None and is_for_good():
        return False
    if stores_no_result(task, message):
        return bool(message.chain or message.callbacks or message.errbacks)
    # That of the first attempt: later it may be that of an attempt before.
    first = not message.retries and not headers.read(message).attempts
    done = READY_STATES | {RETRY} if first else READY_STATES
    until = time.monotonic() + _STORING
    while time.monotonic() < until:
        try:
            if task.AsyncResult(message.id).state in done:
                return False
        except Exception as error:
            if events.is_thrown_in(error):
                raise
            logger.warning("no result of %s to look at: it runs again", message.id, exc_info=True)
            return True
        time.sleep(0.1)
    return True
