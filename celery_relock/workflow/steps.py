"""Sections: an entry that goes from step to step of a canvas.

Every message of a section that is on its way has a share in the entry. A step that ends leaves its
hold to the messages that go on from it: nobody renews that, so it lasts for the gap and no longer,
and each step takes over what was left to it. The section ends with its last hold: when a last step
is done, when a step fails, is revoked or killed, or when the gap runs out because a message never
arrives. There is no count that could be wrong, and nothing to clean up.

A step's hold has an id of its own, made of the run and the section: the task may take the very same
lock name for itself, and then enters by its call stack.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from celery.exceptions import Ignore, Reject, Retry
from celery.signals import task_postrun

from ..declaration import engine_of
from ..engine import events, ids, reentrancy
from ..engine.engine import Engine
from ..engine.journal import journal
from ..engine.lease import Lease
from ..engine.messages import label_of
from ..engine.protocol import Claim, Held, Successor
from ..errors import LockConflict, LockLost
from ..options import LockOptions
from ..worker import conflict as conflicts
from ..worker import events as telling
from ..worker import headers
from ..worker.attempt import Attempt
from ..worker.release import give_back
from ..worker.states import is_acknowledged
from . import marks
from .carried import Carried, carried_by, carried_in


class Section:
    """A section that the running message has a hold of."""

    __slots__ = ("carried", "engine", "heirs", "lease", "message", "until")

    def __init__(self, carried: Carried, engine: Engine, lease: Lease, message: Any) -> None:
        self.carried = carried
        self.engine = engine
        self.lease = lease
        self.message = message
        self.heirs: list[str] = []
        self.until = 0.0  # when the last of the heirs is due, on this machine's clock

    def leave_to(self, execution_id: str, due: float = 0.0) -> None:
        """The run goes on with it, at a time on this machine's clock. Should this process be killed
        before it has left its hold, its host's reaper does so."""
        self.heirs.append(execution_id)
        self.until = max(self.until, due)
        if journal.on and (successor := self.successor()):
            entry = self.lease.entry()
            journal.change(entry._replace(heirs=successor.execution_id, keep=successor.keep))

    def successor(self) -> Successor | None:
        """Those that it is left to, and for how long."""
        if not self.heirs:
            return None
        keep = self.carried.gap_ttl + max(0.0, self.until - time.time())
        return Successor(" ".join(self.heirs), keep)


_active: ContextVar[tuple[Section, ...]] = ContextVar("relock_sections", default=())


def active() -> tuple[Section, ...]:
    """The sections that the running message has a hold of, the outermost first."""
    return _active.get()


def hold_id(execution_id: str, section: str) -> str:
    """The id of a run's hold of a section."""
    return ids.short(f"{execution_id}/{section}")


def is_unbroken(lease: Lease) -> bool:
    """False for the hold of a section that had ended before this step came."""
    return all(section.carried.unbroken for section in _active.get() if section.lease is lease)


def concerns(message: Any, declared: Any) -> bool:
    """Whether an execution is a step of a workflow, or begins one."""
    held: str = declared.options.hold
    return bool(
        headers.read(message).sections or held == "workflow" or declared.opens_sections or active()
    )


def around(task: Any, message: Any | None, call: Callable[[], Any]) -> Any:
    """Make the call of a task, inside of the sections that its message belongs to."""
    if message is None or message.is_eager:
        return call()
    try:
        _enter(task, message)
        result = call()
    except BaseException as error:
        if _active.get():
            again = isinstance(error, Reject) and error.requeue
            _leave(message, again=again, acknowledged=is_acknowledged(task, error))
        raise
    if _active.get() and not (message.chain or message.callbacks or message.chord):
        # Nothing goes on from here: it is over before anybody sees the result.
        _leave(message)
    return result


def begin(carried: Carried, engine: Engine, lease: Lease, message: Any) -> None:
    """From now on the running message has this lease for a section."""
    _active.set((*_active.get(), Section(carried, engine, lease, message)))


def obtain(attempt: Attempt) -> Held | None:
    """As `conflicts.obtain`. Where the message comes again, what it has of its sections is left to
    it."""
    try:
        return conflicts.obtain(attempt)
    except (Ignore, Retry):
        if attempt.message is not None:
            for section in _active.get():
                section.leave_to(section.lease.claim.execution_id)
        raise


def open_for(message: Any | None, engine: Engine, lease: Lease, options: LockOptions) -> None:
    """If a task keeps its lock for the rest of its chain: from now on it is that of a section."""
    if message is None or options.hold != "workflow":
        return
    section = ids.new_id()
    for each in (*(message.chain or ()), *(message.callbacks or ())):
        marks.mark(each, section)
    begin(carried_by(section, lease, lease.fences, options), engine, lease, message)


def owns(lease: Lease) -> bool:
    """Whether a lease is given back, or left to others, as that of a section."""
    return any(section.lease is lease for section in _active.get())


def _enter(task: Any, message: Any) -> None:
    if _active.get():  # of a message whose end this process was not told
        _leave(_active.get()[0].message)
    for carried in carried_in(message):
        section = _section(task, message, carried)
        try:
            _take(task, section)
        except BaseException:
            give_back(section.engine, section.lease, ended=False)
            raise


def _section(task: Any, message: Any, carried: Carried) -> Section:
    engine, header = engine_of(task.app), headers.read(message)
    claim = Claim(
        execution_id=hold_id(header.execution_id, carried.id),
        attempt_id=ids.new_attempt_id(),
        owner=carried.owner,
        names=carried.names,
        limits=carried.limits,
        lease=carried.ttl,
        label=label_of(task.name, message.id),
        # The step before may not have left its hold yet: then this one joins it.
        ancestors=header.ancestors,
        stuck=reentrancy.stuck(),
    )
    lease = engine.lease(claim)
    lease.work = telling.work_for(task, message)
    return Section(carried, engine, lease, message)


def _take(task: Any, section: Section) -> None:
    carried, lease = section.carried, section.lease
    options = carried.options(task.name)
    try:
        held = obtain(Attempt(task, section.engine, lease, options, section.message))
    except LockConflict as conflict:
        if carried.on_gap != "raise":
            raise
        # Somebody else is in, so what was left to this step is gone.
        raise _tell(task, section, ()) from conflict
    if held is None:
        return  # Redis is away, and the task is to run all the same
    if held.fences != carried.fences:
        error = _tell(task, section, held.fences)
        if carried.on_gap == "raise":
            raise error
        section.carried = carried._replace(fences=held.fences, unbroken=False)
    reentrancy.push(lease)
    _active.set((*_active.get(), section))


def _tell(task: Any, section: Section, fences: tuple[int, ...]) -> LockLost:
    """Tell that the entry had ended. Returns the error that says so."""
    carried, claim = section.carried, section.lease.claim
    names = ", ".join(map(repr, claim.names))
    reason = (
        f"its entry (fence {max(carried.fences)}) ended between two steps of the workflow, "
        f"lock_gap_ttl={carried.gap_ttl:g} s; {task.name} "
        + ("entered anew" if fences else "did not get in")
    )
    if events.wanted("lost"):
        told = (claim.names, claim.execution_id, claim.owner, max(fences, default=0), reason)
        events.tell(events.LockEvent("lost", *told, work=section.lease.work))
    return LockLost(
        f"the lock {names} was not held all the time: {reason}; lock_on_gap={carried.on_gap!r}",
        name=claim.names[0],
        owner=claim.owner,
        remaining=0.0,
    )


def _leave(message: Any, *, again: bool = False, acknowledged: bool = True) -> None:
    """Leave all sections to what goes on from this message, or end them."""
    if again:
        for section in _active.get():
            section.leave_to(section.lease.claim.execution_id)
    sections, remembered = _active.get(), acknowledged and headers.read(message).own
    _active.set(())
    for section in reversed(sections):
        lease = section.lease
        reentrancy.pop(lease)
        lease.successor = section.successor()
        over = remembered and lease.claim.execution_id not in section.heirs
        give_back(section.engine, lease, ended=over)


def _end(task_id: str = "", **_: Any) -> None:
    """Celery has published what goes on from the task, if anything does."""
    sections = _active.get()
    if sections and sections[0].message.id == task_id:
        _leave(sections[0].message)


task_postrun.connect(_end, weak=False, dispatch_uid="celery_relock.sections")
