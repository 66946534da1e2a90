"""What happens to locks, told to whoever wants to know: the log by default."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import LockLost

logger = logging.getLogger("celery_relock")


class Work(NamedTuple):
    """The task that a lock is for.

    Attributes:
        task: the task object, None where it is not known (a process that is dead).
        name: of the task.
        id: of the message that runs, "" without one.
        node: the worker's node name, "" if unknown.
    """

    task: Any
    name: str
    id: str
    node: str = ""


NO_TASK = Work(None, "", "")


@dataclass(frozen=True, slots=True)
class LockEvent:
    """Something that happened to a run's lock.

    Attributes:
        kind: "acquired", "released", "conflict", "lost" or "reclaimed".
        names: the lock names.
        run, owner: short ids.
        fence: of the entry, 0 if there is none.
        reason: a sentence for people, "" where the kind says it all.
        since: seconds since the last good renewal, for "lost".
        work: the task that the lock is for, None outside of tasks.
    """

    kind: str
    names: tuple[str, ...]
    execution_id: str
    owner: str
    fence: int = 0
    reason: str = ""
    since: float = 0.0
    work: Work | None = None


Listener = Callable[[LockEvent], None]

# For an operator: what happens to every lock is for debugging, what keeps a run waiting is worth a
# line, and a warning is what should not happen.
_LEVELS = {"acquired": logging.DEBUG, "released": logging.DEBUG, "conflict": logging.INFO}


class _Subscription:
    """An object of its own for each: the same listener may be there twice, and be ended once."""

    __slots__ = ("listener", "wants")

    def __init__(self, listener: Listener, wants: Callable[[str], bool]) -> None:
        self.listener = listener
        self.wants = wants


_subscriptions: list[_Subscription] = []
_thrown_in: tuple[type[Exception], ...] = (LockLost,)


def subscribe(
    listener: Listener, wants: Callable[[str], bool] = lambda kind: True
) -> Callable[[], None]:
    """Call `listener` at every event whose kind it `wants`, maybe from another thread. Returns what
    ends it."""
    ours = _Subscription(listener, wants)
    _subscriptions.append(ours)

    def end() -> None:
        with suppress(ValueError):
            _subscriptions.remove(ours)

    return end


def let_through(kind: type[Exception]) -> None:
    """An exception that arrives from outside wherever a thread is, as a time limit's does. It is
    meant for the work, so a listener that it happens to hit does not keep it."""
    global _thrown_in
    _thrown_in = (*_thrown_in, kind)


def is_thrown_in(error: BaseException) -> bool:
    """Whether an exception is such a one, or ends the process or the greenlet."""
    return isinstance(error, _thrown_in) or not isinstance(error, Exception)


def wanted(kind: str) -> bool:
    """Whether anybody would hear of such an event; most locks are taken without anybody looking."""
    if logger.isEnabledFor(_LEVELS.get(kind, logging.WARNING)):
        return True
    return bool(_subscriptions) and any(each.wants(kind) for each in _subscriptions)


def tell(event: LockEvent) -> None:
    """Log the event and call the listeners. A lock does not fail by being watched: what a listener
    raises is logged."""
    level = _LEVELS.get(event.kind, logging.WARNING)
    if logger.isEnabledFor(level):
        logger.log(level, "%s", sentence(event), extra=_facts(event))
    for each in tuple(_subscriptions):
        try:
            if each.wants(event.kind):
                each.listener(event)
        except _thrown_in:
            raise
        except Exception:
            logger.exception("a listener for lock events failed: %r", each.listener)


def sentence(event: LockEvent) -> str:
    """The event for people."""
    text = f"lock {', '.join(map(repr, event.names))} {event.kind}: owner {event.owner}"
    if event.work is not None and event.work.name:
        text += f", task {event.work.name}[{event.work.id}]"
    if event.fence:
        text += f", fence {event.fence}"
    if event.since:
        at = time.strftime("%H:%M:%S", time.localtime(time.time() - event.since))
        text += f", last renewal at {at} ({event.since:.1f} s ago)"
    if event.reason:
        text += f"; {event.reason}"
    return text


def _facts(event: LockEvent) -> dict[str, object]:
    """For the log record: plain values, so that any formatter can write them."""
    facts: dict[str, object] = {
        "lock_event": event.kind,
        "lock_names": list(event.names),
        "lock_run": event.execution_id,
        "lock_owner": event.owner,
        "lock_fence": event.fence,
        "lock_reason": event.reason,
        "lock_since": event.since,
    }
    if event.work is not None:
        # By the names under which Celery's own formatter for tasks has them.
        facts |= {"task_id": event.work.id, "task_name": event.work.name}
    return facts
