"""Signals for an application's own code: what happens to locks. They work as Celery's signals do.

    from celery_relock.signals import lock_lost

    @lock_lost.connect
    def page(sender=None, names=(), task_id="", **_): ...

The page "Signals, events and logs" says of each signal when and where it is sent, and what its
receivers get. Later versions can pass more, so accept `**kwargs`.
"""

from __future__ import annotations

from typing import Any

from celery.exceptions import SoftTimeLimitExceeded
from celery.utils.dispatch import Signal

from .engine import events
from .engine.events import NO_TASK, LockEvent
from .engine.interrupt import let_through

_ARGUMENTS = {*LockEvent._fields, "task_id", "task_name"} - {"kind", "work"}

# The signal of each kind of engine event.
_signals: dict[str, _OfEngine] = {}
# The kinds with a receiver: the engine makes no others.
_watched: set[str] = set()


class _OfEngine(Signal):  # type: ignore[misc]  # Celery ships no types
    """A signal for one kind of engine event. The engine makes the event once somebody connects."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, providing_args=_ARGUMENTS)
        self.kind = name.removeprefix("lock_")
        _signals[self.kind] = self

    def connect(self, *args: Any, **kwargs: Any) -> Any:
        """As Celery's `Signal.connect`."""
        _watched.add(self.kind)
        return super().connect(*args, **kwargs)


lock_acquired = _OfEngine("lock_acquired")
lock_reentered = _OfEngine("lock_reentered")
lock_conflict = _OfEngine("lock_conflict")
lock_waiting = _OfEngine("lock_waiting")
lock_parked = _OfEngine("lock_parked")
lock_resumed = _OfEngine("lock_resumed")
lock_passed = _OfEngine("lock_passed")
lock_dropped = _OfEngine("lock_dropped")
lock_unavailable = _OfEngine("lock_unavailable")
lock_unprotected = _OfEngine("lock_unprotected")
lock_released = _OfEngine("lock_released")
lock_lost = _OfEngine("lock_lost")
lock_unrenewed = _OfEngine("lock_unrenewed")
lock_reclaimed = _OfEngine("lock_reclaimed")
lock_duplicate = Signal(
    name="lock_duplicate", providing_args={"names", "task_id", "duplicate_of", "since"}
)
lock_forced = Signal(
    name="lock_forced",
    providing_args={"names", "task_id", "task_name", "fence", "action", "by", "origin"},
)


def _pass_on(event: LockEvent) -> None:
    facts = event._asdict()
    signal, work = _signals[facts.pop("kind")], facts.pop("work") or NO_TASK
    send(signal, sender=work.task, task_id=work.id, task_name=work.name, **facts)


def send(signal: Signal, **arguments: Any) -> None:
    """Call the receivers of a signal. What they raise is logged, but for a time limit."""
    for _, answer in signal.send(**arguments):
        # Celery returns it as if the receiver had raised it, but the time limit is the task's.
        if isinstance(answer, SoftTimeLimitExceeded):
            raise answer


let_through(SoftTimeLimitExceeded)
events.subscribe(_pass_on, _watched)
