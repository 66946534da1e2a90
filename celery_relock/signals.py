"""Signals for an application's own code: what happens to locks. They work as Celery's signals do.

    from celery_relock.signals import lock_lost

    @lock_lost.connect
    def page(sender=None, names=(), task_id="", **_): ...

The signals:

- `lock_acquired`: an execution acquired a lock, or joined the permit of another execution of its
  workflow (then `reentered` is True);
- `lock_reentered`: a call re-entered a lock that its own call stack holds, without a command to
  Redis;
- `lock_conflict`: another execution holds the lock; `policy` says what happens to this execution;
- `lock_waiting`: an execution waits in its worker slot, or a `Lock` waits in its thread;
- `lock_parked`: the message of an execution waits in Redis, and its worker slot is free;
- `lock_resumed`: a parked message was published again because its turn has come; sent in the
  process that publishes it, usually the process that released the lock. `sender` is None if that
  process does not have the task;
- `lock_passed`: with `lock_order`, calls that were sent later run before this call, because its
  message did not arrive within `lock_order_gap`; sent in the main process of a worker. `sender` is
  None. `waited` is how long the later calls waited for the message;
- `lock_dropped`: an execution ends without running its body (`lock_on_conflict="drop"`);
- `lock_unavailable`: Redis could not be reached for an execution's locks, for as long as it tried;
  `policy` says what happens to this execution (`lock_on_unavailable`). With "retry", sent for each
  try;
- `lock_unprotected`: an execution runs without its locks, because Redis could not be reached
  (`lock_on_unavailable="run"`);
- `lock_released`: a lock was released;
- `lock_lost`: a hold ended before its work did;
- `lock_unrenewed`: Redis could not be reached to renew a lock; the library tries again until the
  lease ends. Sent for each lock and each try;
- `lock_duplicate`: a call was not sent, because an equal call is queued or runs (`lock_dedup`);
  sent in the calling process, or in the worker for a call by name. For its arguments, see below;
- `lock_forced`: a lock was released by force, or a task that was parked for it was cancelled
  (`celery_relock.admin`); sent in the process that did so. For its arguments, see below;
- `lock_reclaimed`: the lock of a dead process on this worker's host was released; sent in the main
  process of a worker. `sender` is None.

The arguments (later versions can pass more, so accept `**kwargs`):

- `sender`: the task object; None for a `Lock` outside of tasks. `connect(…, sender=task)` selects;
- `names` (tuple of str): the lock names;
- `owner` (str): the whole id of the workflow; `execution_id` (str): the short id of the execution;
- `fence` (int): the fencing token, or 0;
- `reason` (str): a sentence for people; "" if the signal needs no explanation;
- `since` (float): for `lock_lost`, seconds since the last successful renewal;
- `waited` (float): seconds since the execution first had to wait, parked or not; 0 if it did not;
- `held` (float): seconds for which this execution held the lock; if a workflow keeps the lock
  (`lock_hold="workflow"`), the seconds of its last step;
- `reentered` (bool): whether the execution joined a permit of its workflow;
- `policy` (str): for `lock_conflict`, a value of `lock_on_conflict`, or "duplicate" for a second
  copy of a message, which waits behind the first copy; for `lock_unavailable`, a value of
  `lock_on_unavailable`; otherwise "";
- `task_id`, `task_name` (str): of the message that is executed; "" if there is none.

`lock_duplicate` has `sender` and `names` as above; `task_id`, of the call that was not sent;
`duplicate_of`, the task id of the equal call; `since`, when the equal call got its dedup marker, in
seconds since the epoch.

`lock_forced` has `sender`, `names`, `task_id`, `task_name` and `fence` as above, of the holder or
the parked task; `action` ("release" or "cancel"); `by` (who did it); `origin` (from where).

A receiver is called in the process of the task; for `lock_lost`, usually in another thread than the
task's. The task waits for the receiver. If a receiver raises, the error is logged.
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
    "lock_unavailable",
    "lock_unprotected",
    "lock_unrenewed",
    "lock_waiting",
]

_FACTS = ("owner", "fence", "reason", "since", "waited", "held", "reentered", "policy")
_ARGUMENTS = {"execution_id", "names", "task_id", "task_name", *_FACTS}

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
    work = event.work
    send(
        _signals[event.kind],
        sender=None if work is None else work.task,
        names=event.names,
        execution_id=event.execution_id,
        **{name: getattr(event, name) for name in _FACTS},
        task_id="" if work is None else work.id,
        task_name="" if work is None else work.name,
    )


def send(signal: Signal, **arguments: Any) -> None:
    """Call the receivers of a signal. What they raise is logged, but for a time limit."""
    for _, answer in signal.send(**arguments):
        # Celery returns it as if the receiver had raised it, but the time limit is the task's.
        if isinstance(answer, SoftTimeLimitExceeded):
            raise answer


events.let_through(SoftTimeLimitExceeded)
events.subscribe(_pass_on, _watched)
