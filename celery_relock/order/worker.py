"""`lock_order` where a message arrives: it waits for its turn, and its execution holds the line
while it waits for the lock and runs, and leaves the line to its retry, or for good.

The line is a lock that the execution acquires before its own, as any lock is acquired: an execution
that comes early is parked, and one that dies is found by the reaper or by the end of its lease. Its
fencing token is the ticket of the place, if nobody has overtaken it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from celery.exceptions import Reject, Retry

from ..declaration import engine_of
from ..engine import ids, reentrancy
from ..engine.engine import Engine
from ..engine.events import LockEvent, logger
from ..engine.hold import Body, MakeHold
from ..engine.lease import Lease
from ..engine.protocol import COMES_AGAIN, LINE, MAY_COME, Successor
from ..errors import RelockError
from ..worker.beside import HeldBeside
from ..worker.conflict import Attempt, lease_of, obtain, release
from ..worker.delivery import afterwards
from ..worker.ending import (
    end_unexecuted,
    ended_as,
    is_acknowledged,
    is_autoretried,
    is_requeued,
    locks_of,
    remember_for,
)
from ..worker.message import Header, header_of, keep_for, keep_header
from ..worker.states import Aside, SentAgain, Waits
from . import client

if TYPE_CHECKING:
    from ..worker.execution import Execution


def around(execution: Execution, body: Body) -> Any:
    """Execute a message under its locks, in the order of its line."""
    message, engine = execution.message, engine_of(execution.declared.app)
    header, locked = header_of(message), execution.run_locked
    name = header.order[0] if header.order else execution.names[0]
    # The step of a workflow lock: the line would wait for the workflow, and it for the line.
    is_step = reentrancy.holding(engine.backend, name) is not None
    if is_step:
        with suppress(RelockError):
            end_unexecuted(engine, [LINE + name], header.execution_id, MAY_COME)
    # One that was parked for the lock itself, before the task had an order, keeps its place there:
    # at the end of the line it would wait for the first call of the line, and that call for it.
    if is_step or (header.order is None and header.parked_at):
        return locked(lambda make_hold: body(partial(make_hold, in_order=False)))
    if header.order is None:
        # It takes its place now. Wherever it comes next, also where the task has no order any more,
        # it is known to have one.
        keep_header(message, header._replace(order=(name, 0)))
    held = _HeldLine(execution, engine, header, name)

    def body_in_turn(make_hold: MakeHold) -> Any:
        held.begin()
        return body(partial(make_hold, in_order=held.in_order))

    def run() -> Any:
        execution.asks_for_line()
        held.arrive()
        return locked(body_in_turn)

    return held.around(run)


class _HeldLine(HeldBeside):
    """What a message that has arrived has of its line."""

    field = client.ORDER

    def __init__(self, execution: Execution, engine: Engine, header: Header, name: str) -> None:
        task = execution.task
        message: Any = execution.message
        super().__init__(task, message)
        self.header = header
        self.name = name
        self.engine = engine
        # Whatever the task does while somebody holds its lock: here it waits for its turn.
        self.options = replace(execution.declared.options, on_conflict="wait")
        # When its turn has come: its ticket, and whether nobody has overtaken it; 0 and None where
        # there are no locks at all.
        self.ticket = 0
        self.in_order: bool | None = None
        self.lease = lease_of(
            partial(_LineLease, backend=engine.backend),
            task,
            message,
            header,
            owner=COMES_AGAIN * bool(task.acks_late) + ids.short(message.id),
            names=(LINE + name,),
            limits=(1,),
            lease=self.options.ttl,
            stuck=reentrancy.stuck(),
        )

    @property
    def to_retry(self) -> list[Any] | None:
        keeps = self.ticket and self.options.order_retry == "keep"
        return [self.name, self.ticket if self.in_order else 0] if keeps else None

    def arrive(self) -> None:
        """Wait for the turn of this execution."""
        held = obtain(Attempt(self.task, self.engine, self.lease, self.options, self.message))
        if held is None:  # lock_on_unavailable="run"
            self.in_order = False
            return
        (self.ticket,) = held.fences
        if self.ticket:
            self.in_order = self.header.order == (self.name, self.ticket)

    def begin(self) -> None:
        """The execution has its locks, and its body comes next."""
        self.begun, why = True, self._why_out_of_order()
        # It waited for its lock, and was frozen meanwhile.
        if self.in_order and self.lease.lost:
            self.in_order, why = False, "it lost its turn while it waited for its lock"
        self.offer()
        # Only now: until it has its lock as well, it can come back here.
        if why:
            logger.warning(
                "%s[%s] does not run in the order of %r: %s",
                *(self.task.name, self.message.id, self.name, why),
            )

    def _why_out_of_order(self) -> str:
        """Why it runs out of its order; "" if it does not, or is the retry that is to do so."""
        is_at_the_end = self.message.retries and self.options.order_retry == "end"
        if self.in_order or is_at_the_end or not self.ticket:
            return ""
        told = self.header.order
        if told and told[1]:
            return "it came after it had been passed over, or its place was lost"
        return "it was sent without a place in it, or an attempt before it has left it"

    def _stays_open(self, error: BaseException | None) -> bool:
        """Also until a retry is sent that gets nothing: a process that is killed before leaves a
        message that is to run again."""
        if super()._stays_open(error):
            return True
        if not (self.task.acks_late and is_autoretried(self.task, error)):
            return False
        afterwards(partial(self._close, error))
        return True

    def end(self, error: BaseException | None) -> None:
        if not self.lease.may_hold:
            if isinstance(error, Exception) and not isinstance(error, Aside | Retry | Reject):
                self._give_up(error)
            return
        self.lease.successor = to = self._successor(error)
        is_fine = error is None or isinstance(error, Exception)
        over = is_fine and is_acknowledged(self.task, error)
        header = header_of(self.message)
        comes_again = to is not None and to.execution_id == header.execution_id
        is_over = over and not comes_again and self.header.own
        ended = ended_as(self.message, self.task) if is_over else ""
        release(self.engine, self.lease, ended)
        if is_fine and not over and not is_requeued(self.task, error) and to is None:
            # Its message is rejected. If the broker brings it back, it is to run, and comes late.
            with suppress(RelockError):
                end_unexecuted(self.engine, [LINE + self.name], header.execution_id, MAY_COME)

    def _successor(self, error: BaseException | None) -> Successor | None:
        me, gap = self.lease.claim.execution_id, self.options.order_gap
        if isinstance(error, SentAgain):
            return Successor(me, error.when + gap)
        sent = None if self.to_retry is None else self.delivery.retry
        # One with another lock name has a place of its own there.
        if sent is not None and sent.header.get("order", [""])[0] == self.name:
            keep = keep_for(gap, sent.fields.get("eta"), sent.fields.get("expires"))
            return Successor(sent.execution_id, keep)
        if not isinstance(error, Waits) or self.begun:
            return None
        # Under this id it comes back: a message without our header was given one of its own.
        return Successor(header_of(self.message).execution_id, gap)

    def _give_up(self, error: Exception) -> None:
        """It ends before its turn: its time to wait is over, or too many wait."""
        if self.header.own:
            of, remember = self.lease.claim, remember_for(self.task, error)
            with suppress(RelockError):
                end_unexecuted(self.engine, of.names, of.execution_id, remember)


# What the execution's lock tells as well.
_OF_THE_LOCK = ("acquired", "released", "lost", "unrenewed", "unprotected")


class _LineLease(Lease):
    """Told of by the name of the lock: to people the line is a part of it."""

    __slots__ = ()

    def tell(self, kind: str, reason: str = "", since: float = 0.0, policy: str = "") -> None:
        # What goes on without its line asks for its lock next, which tells of the outage.
        if kind not in _OF_THE_LOCK and policy != "run":
            super().tell(kind, reason, since, policy)

    def event(self, *told: Any, **_: Any) -> LockEvent:
        names = tuple(name.removeprefix(LINE) for name in self.claim.names)
        return super().event(*told)._replace(names=names, owner="")


def clear_away(engine: Engine, request: Any, remember: float | None, task: Any, **_: Any) -> None:
    """The call is not executed in its order: nobody waits for it."""
    header = header_of(request)
    names: tuple[str, ...] = ()
    if header.order:
        names = header.order[:1]
    elif header.own:  # an id made from the task id was parked under another one, if at all
        _, names = locks_of(task, request, lambda its: its.order)
    end_unexecuted(engine, [LINE + name for name in names], header.execution_id, remember)
