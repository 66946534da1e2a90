"""Signals of what happens to locks, for an application's own code. They work as Celery's do.

    from celery_relock.signals import lock_lost

    @lock_lost.connect
    def page(sender=None, names=(), task_id="", **_): ...

Signals, and what each of them tells of:

- `lock_acquired`: an execution acquired a lock, or joined the permit of another execution of its
  workflow (then `reentered` is True);
- `lock_reentered`: a call re-entered what its own call stack holds. Redis was not asked;
- `lock_conflict`: another execution holds the lock; `policy` says what becomes of this one;
- `lock_waiting`: the execution waits in its worker's slot, or a `Lock` in its thread;
- `lock_parked`: its message waits in Redis, and the worker's slot is free;
- `lock_resumed`: a parked message was published again, because its turn has come; sent in the
  process that publishes it, mostly where the lock was released. `sender` is None if that process
  does not have the task;
- `lock_passed`: with `lock_order`, calls that were sent later run before this one, because its
  message had not come within `lock_order_gap`; sent in the main process of a worker. `sender` is
  None. `waited` is how long they have waited for it;
- `lock_dropped`: the execution ends without running its body (`lock_on_conflict="drop"`);
- `lock_released`: the lock was released;
- `lock_lost`: it ended before the work under it did;
- `lock_unrenewed`: Redis could not be reached to renew it; the library tries again until the lease
  ends. Sent for each lock and each try;
- `lock_duplicate`: a call was swallowed, because an equal call is queued or runs (`lock_dedup`);
  sent in the calling process, or in the worker for a call by name. Its arguments are at the end;
- `lock_forced`: the lock was released by force, or a task that was parked for it was cancelled
  (`admin`); sent in the process that did it. Its arguments are at the end;
- `lock_reclaimed`: the lock of a dead process of this worker's host was released; sent in the main
  process of a worker. `sender` is None.

Arguments (later versions can pass more, so take `**kwargs`):

- `sender`: the task object, None for a `Lock` outside of tasks. `connect(…, sender=task)` selects;
- `names`: the lock names, a tuple of texts;
- `owner`: the id of the workflow, whole; `execution_id`: the short id of the execution;
- `fence`: the fencing token, 0 if there is none;
- `reason`: a sentence for people, "" where the signal says it all;
- `since`: seconds since the last good renewal, for `lock_lost`;
- `waited`: seconds since the execution first had to wait, parked ones included; 0 if it never did;
- `held`: seconds for which this execution held the lock; of a lock that a workflow keeps
  (`lock_hold="workflow"`) those of its last step;
- `reentered`: whether it joined a permit that was there;
- `policy`: for `lock_conflict`, a value of `lock_on_conflict`, or "duplicate" for a second copy of
  a message, which waits behind the first one; "" elsewhere;
- `task_id`, `task_name`: of the message that is executed, "" if there is none.

Those of `lock_duplicate`: `sender` and `names` as above, `task_id` of the call that was swallowed,
`duplicate_of` (the task id of the call that is there), `since` (when that one got its dedup marker,
in seconds since the epoch).

Those of `lock_forced`: `sender`, `names`, `task_id`, `task_name` and `fence` as above, of the
holder or the parked task; `action` ("release" or "cancel"), `by` (who), `origin` (from where).

A receiver is called in the process of the task, and for `lock_lost` mostly in a thread that is not
the task's. The task waits for it. If a receiver raises, the error is logged.
"""

from __future__ import annotations

from typing import Any

from celery.exceptions import SoftTimeLimitExceeded
from celery.utils.dispatch import Signal

from .engine import events
from .engine.events import LockEvent

__all__ = [
    "lock_acquired",
    "lock_conflict",
    "lock_dropped",
    "lock_duplicate",
    "lock_forced",
    "lock_lost",
    "lock_parked",
    "lock_passed",
    "lock_reclaimed",
    "lock_reentered",
    "lock_released",
    "lock_resumed",
    "lock_unrenewed",
    "lock_waiting",
]

_FACTS = ("owner", "fence", "reason", "since", "waited", "held", "reentered", "policy")
_ARGUMENTS = {"execution_id", "names", "task_id", "task_name", *_FACTS}

# The kinds of events for which a receiver was connected: the engine makes no others.
_watched: set[str] = set()


class _OfEngine(Signal):  # type: ignore[misc]  # Celery ships no types
    """A signal of what the engine tells; to connect to it makes its events wanted."""

    def connect(self, *args: Any, **kwargs: Any) -> Any:
        """As Celery's `Signal.connect`."""
        _watched.add(self.name.removeprefix("lock_"))
        return super().connect(*args, **kwargs)


lock_acquired = _OfEngine(name="lock_acquired", providing_args=_ARGUMENTS)
lock_reentered = _OfEngine(name="lock_reentered", providing_args=_ARGUMENTS)
lock_conflict = _OfEngine(name="lock_conflict", providing_args=_ARGUMENTS)
lock_waiting = _OfEngine(name="lock_waiting", providing_args=_ARGUMENTS)
lock_parked = _OfEngine(name="lock_parked", providing_args=_ARGUMENTS)
lock_resumed = _OfEngine(name="lock_resumed", providing_args=_ARGUMENTS)
lock_passed = _OfEngine(name="lock_passed", providing_args=_ARGUMENTS)
lock_dropped = _OfEngine(name="lock_dropped", providing_args=_ARGUMENTS)
lock_released = _OfEngine(name="lock_released", providing_args=_ARGUMENTS)
lock_lost = _OfEngine(name="lock_lost", providing_args=_ARGUMENTS)
lock_unrenewed = _OfEngine(name="lock_unrenewed", providing_args=_ARGUMENTS)
lock_reclaimed = _OfEngine(name="lock_reclaimed", providing_args=_ARGUMENTS)
lock_duplicate = Signal(
    name="lock_duplicate", providing_args={"names", "task_id", "duplicate_of", "since"}
)
lock_forced = Signal(
    name="lock_forced",
    providing_args={"names", "task_id", "task_name", "fence", "action", "by", "origin"},
)

_signals = {
    each.name.removeprefix("lock_"): each
    for each in (
        *(lock_acquired, lock_reentered, lock_conflict, lock_waiting, lock_parked, lock_resumed),
        *(lock_passed, lock_dropped, lock_released, lock_lost, lock_unrenewed, lock_reclaimed),
    )
}


def _send(event: LockEvent) -> None:
    work = event.work
    _call_receivers(
        _signals[event.kind],
        sender=None if work is None else work.task,
        names=event.names,
        execution_id=event.execution_id,
        **{name: getattr(event, name) for name in _FACTS},
        task_id="" if work is None else work.id,
        task_name="" if work is None else work.name,
    )


def send_duplicate(
    task: Any, task_id: str, duplicate_of: str, names: tuple[str, ...], since: float
) -> None:
    """A call was swallowed."""
    told = {"names": names, "task_id": task_id, "duplicate_of": duplicate_of, "since": since}
    _call_receivers(lock_duplicate, sender=task, **told)


def send_forced(task: Any, **told: Any) -> None:
    """A lock was released by force, or a parked task was cancelled."""
    _call_receivers(lock_forced, sender=task, **told)


def _call_receivers(signal: Signal, **arguments: Any) -> None:
    for _, answer in signal.send(**arguments):
        # Celery takes it for the receiver's own; it was meant for the task.
        if isinstance(answer, SoftTimeLimitExceeded):
            raise answer


events.let_through(SoftTimeLimitExceeded)
events.subscribe(_send, _watched)
