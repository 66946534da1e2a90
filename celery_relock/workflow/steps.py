"""How the steps of a workflow share one permit, one after the other or side by side.

Every message of the workflow that is on its way has a hold of its own in the permit. A step that
ends leaves its hold to its *successors*, the messages that it has published: nobody renews such a
hold, so it lives for the gap and no longer, until the successor begins and acquires it. The permit
ends with its last hold: when the last step is done, when a step fails, is revoked or killed, or
when the gap ends because a message never arrives. There is no count that could be wrong, and
nothing to clean up.

Two things travel. A *stamp* on each step's signature says which workflow locks the step belongs to:
Celery keeps it through cloning, JSON, chaining and retries, and does not pass it on to what the
body of a step sends. A `WorkflowLock` in our message header tells a step what it needs to know.

The hold of a step has an id of its own, made of the execution and the workflow lock: the task may
declare the very same lock name for itself, and re-enters it then.

From top to bottom: the stamps; what the header carries; the holds of the running step; what is done
around a step; what is done when a message is published or revoked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from ..declaration import engine_of
from ..engine import events, ids, reentrancy
from ..engine.crash import journal
from ..engine.engine import Engine
from ..engine.lease import Lease
from ..engine.protocol import MAY_COME, Held, Successor
from ..errors import LockConfigError, LockConflict, LockLost, RelockError
from ..options import LockOptions
from ..worker.conflict import Attempt, lease_of, obtain, release
from ..worker.delivery import afterwards, delivery_of, known_delivery
from ..worker.ending import end_unexecuted, ended_as, is_acknowledged, is_requeued
from ..worker.message import (
    CANVASES,
    has_begun,
    header_of,
    is_retry,
    keep_for,
    running_request,
    running_task,
)
from ..worker.states import Dropped, SentAgain, Waits, end_dropped

# -- The stamps ----------------------------------------------------------------------------------

#: The name of the stamp. Its value is the list of the workflow locks' ids, the outermost first.
STAMP = "relock_workflow"

#: A signature, or the plain dict that it is in a message.
Step = MutableMapping[str, Any]


def steps_of(signature: Step) -> Iterator[Step]:
    """Every task of a canvas that is sent when all before it succeed, links included. Error
    callbacks are not: what they tell of has failed, and its workflow lock is released."""
    parts = CANVASES.get(signature.get("subtask_type"), ())
    if not parts:
        yield signature
    for name in parts:
        yield from _all_steps(signature["kwargs"][name])
    yield from _all_steps((signature.get("options") or {}).get("link") or ())


def _all_steps(signatures: Any) -> Iterator[Step]:
    for each in [signatures] if isinstance(signatures, MutableMapping) else signatures:
        yield from steps_of(each)


def stamp(canvas: Step, lock: str, which: Callable[[Step], bool] = lambda _: True) -> None:
    """Let every step of a canvas, or those that a function picks, belong to a workflow lock."""
    for step in steps_of(canvas):
        options = step.setdefault("options", {})
        before = stamped(options)
        if lock not in before and which(step):
            _write_stamp(options, options, [*before, lock])


def stamped(stamps: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The workflow locks that a signature's options, or a message's stamps, name."""
    found = (stamps or {}).get(STAMP)
    return tuple(found) if isinstance(found, list | tuple) else ()


def _write_stamp(fields: Any, stamps: Any, locks: list[str]) -> None:
    """Into a signature's options, which are both, or into a message's headers and its stamps."""
    names = fields.get("stamped_headers") or ()
    fields["stamped_headers"] = [*(name for name in names if name != STAMP), STAMP]
    stamps[STAMP] = locks


# -- What the header carries ---------------------------------------------------------------------

# What it says of the options with which it was acquired.
_CARRIED = ("ttl", "gap_ttl", "on_gap", "on_conflict", "max_wait", "on_unavailable")
#: What `locked` takes, each as the option `lock_…` of a task.
OPTIONS = (*_CARRIED, "limit", "mode")


class WorkflowLock(NamedTuple):
    """What a message says of a workflow lock that its step belongs to. Times in seconds.

    `id`: of the canvas that was locked; `fences`: of the permit; the rest as the options of a task.
    """

    id: str
    names: tuple[str, ...]
    limits: tuple[int, ...]
    fences: tuple[int, ...]
    owner: str
    ttl: float
    gap_ttl: float
    on_gap: str
    on_conflict: str
    max_wait: float | None
    on_unavailable: str = "raise"
    #: False once the permit had ended between two steps.
    unbroken: bool = True

    @classmethod
    def of(cls, lock: str, lease: Lease, options: LockOptions) -> WorkflowLock:
        """The workflow lock that begins with this lease."""
        claim, told = lease.claim, {name: getattr(options, name) for name in _CARRIED}
        return cls(lock, claim.names, claim.limits, lease.fences, claim.owner, **told)

    def options(self, task: str) -> LockOptions:
        """How a step acquires its hold if what was left to it is gone. Raises LockConfigError if a
        value cannot be used."""
        told = {name: getattr(self, name) for name in _CARRIED}
        if self.on_gap == "raise":
            told["on_conflict"] = "raise"
        # As defaults: some of it was one where the lock was acquired, and contradicts nothing.
        return LockOptions.collect({}, told, task)


def workflow_locks(message: Any) -> Iterator[WorkflowLock]:
    """The workflow locks in a message's header, without those that cannot be read: a step that has
    one does not run (`_acquire_all`)."""
    for raw in header_of(message).workflow_locks:
        try:
            lock = WorkflowLock(**raw)
            yield lock._replace(
                names=tuple(map(str, lock.names)),
                limits=tuple(map(int, lock.limits)),
                fences=tuple(map(int, lock.fences)),
            )
        except (TypeError, ValueError):
            continue


def hold_id(execution_id: str, lock: str) -> str:
    """The id of an execution's hold of a workflow lock."""
    return ids.short(f"{execution_id}/{lock}")


def hold_ids(message: Any) -> list[str]:
    """Those of a message, also for what `workflow_locks` leaves out."""
    header = header_of(message)
    return [hold_id(header.execution_id, each.get("id", "")) for each in header.workflow_locks]


# -- The holds of the running step ---------------------------------------------------------------


@dataclass(slots=True, eq=False)
class StepHold:
    """The running message's hold of a workflow lock, and to whom it is left."""

    lock: WorkflowLock
    engine: Engine
    lease: Lease
    message: Any
    #: Whether the message is acknowledged for good.
    acknowledged: bool = True
    #: ETA and expiry of the messages that it is left to, by the ids of their holds.
    successors: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    #: Whether the journal has room for one more. To try each of very many would take too long.
    fits: bool = True

    def told(self) -> WorkflowLock:
        """What the next step is told. The body may have downgraded the lock."""
        return self.lock._replace(limits=self.lease.claim.limits)

    def leave_to(self, successor: str, eta: Any = None, expires: Any = None) -> None:
        """Note that the hold is left to another, by the id of that and the times of its message,
        which happens when the message here is over. If this process is killed before that, the
        reaper of its host does it."""
        self.successors[successor] = eta, expires
        self.acknowledged = True  # also after an error that Celery makes a retry of
        if journal.on and self.fits and (left := self.successor()):
            noted = self.lease.entry()._replace(successors=left.execution_id, keep=left.keep)
            self.fits = journal.change(noted)

    def successor(self) -> Successor | None:
        """All successors, and for how many seconds the hold is kept for them; None without any."""
        if not self.successors:
            return None
        keep = max(keep_for(self.lock.gap_ttl, *each) for each in {*self.successors.values()})
        return Successor(" ".join(self.successors), keep)


def holds_of(message: Any | None) -> tuple[StepHold, ...]:
    """The holds of a message that is executed here, that of the outermost workflow lock first."""
    delivery = known_delivery(message)
    return () if delivery is None else delivery.holds


def holds_here() -> tuple[StepHold, ...]:
    """Those of the message that this call stack runs for."""
    return holds_of(running_request())


def owns(message: Any | None, lease: Lease) -> bool:
    """Whether a lease is of a workflow lock, so that it is released, or left to others, here."""
    return any(hold.lease is lease for hold in holds_of(message))


def begin(hold: StepHold) -> None:
    """From now on the running message has this hold, which is left to its successors."""
    hold.lease.unbroken = hold.lock.unbroken
    delivery = delivery_of(hold.message)
    if not delivery.holds:
        # When Celery has published what comes after the task.
        afterwards(partial(_leave_all, hold.message))
    delivery.holds = (*delivery.holds, hold)


def keep_for_chain(attempt: Attempt) -> None:
    """`lock_hold="workflow"`: what a task has acquired is kept for the rest of its chain."""
    message: Any = attempt.message
    lock = WorkflowLock.of(ids.new_id(), attempt.lease, attempt.options)
    for each in (*(message.chain or ()), *(message.callbacks or ())):
        stamp(each, lock.id)
    begin(StepHold(lock, attempt.engine, attempt.lease, message))


# -- Around a step -------------------------------------------------------------------------------


def around(task: Any, message: Any, call: Callable[[], Any]) -> Any:
    """Execute a step, with its own locks, under the holds of its workflow locks."""
    delivery = delivery_of(message)
    try:
        _acquire_all(task, message)
        result = call()
    except Dropped as dropped:  # by `on_conflict` of a workflow lock that was not kept for it
        _leave_all(message)
        return end_dropped(task, message, dropped)
    except BaseException as error:
        if delivery.holds:  # no call: a signal's exception would take the place of this error
            _end(task, message, error)
        raise
    if not (message.chain or message.callbacks or message.chord):
        _leave_all(message)  # nothing goes on from here: released before the result can be seen
    return result


def _end(task: Any, message: Any, error: BaseException) -> None:
    """A step ends with an error."""
    for hold in holds_of(message):
        hold.acknowledged = is_acknowledged(task, error)
    comes_again = isinstance(error, Waits | SentAgain) or is_requeued(task, error)
    if comes_again or not isinstance(error, Exception):
        _leave_all(message, again=comes_again)
    # Else when the message is over: what lies around `run` (autoretry, a class's own `__call__`)
    # can still make a retry of this error, a result, or another call of the body.


def _acquire_all(task: Any, message: Any) -> None:
    locks, told = [], header_of(message).workflow_locks
    for lock in workflow_locks(message):
        with suppress(TypeError, ValueError, RelockError):
            locks.append((lock, lock.options(task.name)))
    if len(locks) < len(told):
        raise LockConfigError(
            f"{task.name}[{message.id}] does not run: it belongs to a workflow lock, of which its "
            f"message says what this version of celery-relock cannot read ({told!r:.300}). Bring "
            "the workers to the version that sent it"
        )
    for lock, options in locks:
        hold = _hold_for(task, message, lock)
        try:
            _acquire(task, hold, options)
        except BaseException:
            release(hold.engine, hold.lease)
            raise


def _hold_for(task: Any, message: Any, lock: WorkflowLock) -> StepHold:
    engine, header = engine_of(task.app), header_of(message)
    lease = lease_of(
        engine.lease,
        task,
        message,
        header,
        execution_id=hold_id(header.execution_id, lock.id),
        owner=lock.owner,
        names=lock.names,
        limits=lock.limits,
        lease=lock.ttl,
        # If the step before has not left its hold yet, this one joins it as a descendant. A retry
        # would run beside the attempt before.
        ancestors=() if message.retries else header.ancestors,
        stuck=reentrancy.stuck(),
    )
    lease.of_workflow = True
    return StepHold(lock, engine, lease, message)


def _acquire(task: Any, hold: StepHold, options: LockOptions) -> None:
    lock, lease = hold.lock, hold.lease
    try:
        held = obtain(Attempt(task, hold.engine, lease, options, hold.message, lock.fences))
    except LockConflict as conflict:
        if lock.on_gap != "raise":
            raise
        # Somebody else holds the lock, so the hold that was left to this step has ended.
        raise _tell_lost(task, hold, ()) from conflict
    if held is None:  # Redis cannot be reached, and lock_on_unavailable="run"
        hold.engine.later.add(partial(_give_up, hold))
        return
    if held.fences != lock.fences:
        error = _tell_lost(task, hold, held.fences)
        if lock.on_gap == "raise":
            raise error
        hold.lock = lock._replace(fences=held.fences, unbroken=False)
    reentrancy.push(lease)
    begin(hold)


def _give_up(hold: StepHold) -> None:
    """The step goes on without its hold. It can come again, as it may have to wait for a lock of
    its own: its hold does not count as ended."""
    engine, claim = hold.engine, hold.lease.claim
    engine.release(hold.lease)  # an answer can have been lost
    end_unexecuted(engine, claim.names, claim.execution_id, MAY_COME, is_left=True)
    engine.parking.withdraw(claim.execution_id, MAY_COME, claim.attempt_id)


def _tell_lost(task: Any, hold: StepHold, fences: tuple[int, ...]) -> LockLost:
    """Tell by the signal `lock_lost` that the permit had ended, and return the error for it."""
    lock, claim = hold.lock, hold.lease.claim
    names = ", ".join(map(repr, claim.names))
    reason = (
        f"its permit (fence {max(lock.fences)}) ended between two steps of the workflow, "
        f"lock_gap_ttl={lock.gap_ttl:g} s; {task.name} "
        + ("acquired a new one" if fences else "could not acquire a new one")
    )
    if events.wanted("lost"):
        # For how long it was held before, no step knows.
        events.tell(hold.lease.event("lost", reason)._replace(held=0.0))
    return LockLost(
        f"the lock {names} was not held all the time: {reason}; lock_on_gap={lock.on_gap!r}",
        name=claim.names[0],
        owner=claim.owner,
        remaining=0.0,
    )


def _leave_all(message: Any, *, again: bool = False) -> None:
    """Leave each hold to its successors; release those without any."""
    delivery = delivery_of(message)
    for hold in reversed(delivery.holds):
        lease = hold.lease
        if again:  # the same message, as the same execution
            hold.leave_to(lease.claim.execution_id)
        reentrancy.pop(lease)
        lease.successor = hold.successor()
        comes_again = lease.claim.execution_id in hold.successors
        over = hold.acknowledged and not comes_again
        release(hold.engine, lease, ended_as(message) if over else "")
    # Only now: what a signal's exception keeps from being released is released after the message.
    delivery.holds = ()


# -- What goes on from a step --------------------------------------------------------------------


def on_publish(headers: Any, body: Any, header: Any) -> None:
    """Write into the header of a message, before it is published, which holds are left to it."""
    running = running_request()
    if running is None:
        return
    holds = holds_of(running)
    # `told`: the locks that the next message may need. It is told of those that its stamp names.
    # A retry's header has those of the attempt before, also what that could not acquire: it must
    # not run without them.
    told = {lock.get("id"): lock for lock in header.get("workflow_locks") or ()}
    if not has_begun(running):
        told = {lock.id: lock._asdict() for lock in workflow_locks(running)} | told
    told |= {hold.lock.id: hold.told()._asdict() for hold in holds}
    if not told:
        return
    if _goes_on(headers, body, running):
        stamps = headers["stamps"] = dict(headers.get("stamps") or {})
        _write_stamp(headers, stamps, list(told))
    named = stamped(headers.get("stamps"))
    if locks := [lock for each, lock in told.items() if each in named]:
        header["workflow_locks"] = locks
        if not has_begun(running):
            _take_over(running)
        # The call stack does not show them where the body ran in a context of its own.
        mine = [hold.lease.claim.execution_id for hold in holds_of(running)]
        which = "before" if is_retry(headers, running) else "ancestors"
        header[which] = [*dict.fromkeys((*mine, *header.get(which, ())))]


def _take_over(running: Any) -> None:
    """A step goes on though its own `__call__` has skipped its `run`: what was left to it goes on,
    too. What cannot be had, the next step acquires as `on_gap` says."""
    taken = {hold.lock.id for hold in holds_of(running)}
    for lock in (each for each in workflow_locks(running) if each.id not in taken):
        hold = _hold_for(running_task(), running, lock)
        held = None
        with suppress(RelockError):
            held = hold.engine.acquire(hold.lease, 0.0)
        if isinstance(held, Held) and held.fences == lock.fences:
            reentrancy.push(hold.lease)
            begin(hold)
        else:
            release(hold.engine, hold.lease)


def on_published(headers: Any, header: Any) -> None:
    """The message is published, so it is a successor. One that could not be sent is none."""
    holds = holds_here()
    told = {each["id"] for each in header.get("workflow_locks") or ()}
    for hold in holds:
        if hold.lock.id in told:
            hold.leave_to(
                hold_id(header["execution_id"], hold.lock.id),
                *(headers.get("eta"), headers.get("expires")),
            )


def on_replace(message: Any, canvas: Any) -> None:
    """The running task is replaced by a canvas: let its steps belong to the task's workflow locks.

    What was to come after the task stays as it was.
    """
    holds = holds_of(message)
    if not holds:
        return
    rest = [step for each in message.chain or () for step in steps_of(each)]
    ids_of_rest = {(step.get("options") or {}).get("task_id") for step in rest} - {None}
    links = [step for each in message.callbacks or () for step in steps_of(each)]

    def is_new(step: Step) -> bool:
        return step.get("options", {}).get("task_id") not in ids_of_rest and step not in links

    for hold in holds:
        stamp(canvas, hold.lock.id, is_new)


def clear_away(engine: Engine, request: Any, remember: float | None, **_: Any) -> None:
    """A step is not executed: release what was left to it. One that has begun has it no more, and
    releases by itself."""
    for lock in workflow_locks(request):
        own = hold_id(header_of(request).execution_id, lock.id)
        end_unexecuted(engine, lock.names, own, remember, is_left=True)


def _goes_on(headers: Mapping[str, Any], body: Any, message: Any) -> bool:
    """Whether a message without a stamp continues the workflow of the message that sends it.

    It does if it is a retry, a member that the task adds to its chord, or the task that waits for
    the members of a chord where the result backend cannot.
    """
    if is_retry(headers, message):
        return True
    if headers.get("task") == "celery.chord_unlock":
        return any(_has_stamp(each) for each in body[0] if isinstance(each, Mapping))
    joins = bool(message.group and message.chord and headers.get("group") == message.group)
    # The body of the chord names its group as well, but is no member.
    return joins and bool(body[2].get("chord"))


def _has_stamp(signature: Mapping[str, Any]) -> bool:
    return any(stamped(step.get("options")) for step in steps_of(dict(signature)))
