"""`lock_dedup` where a message arrives and its execution ends: the marker is taken over, renewed,
and freed.

A message that no `LockedTask.apply_async` has sent (`send_task`, `celery call`) was not held
against any marker. That is made up for here: if another call of the same name is queued or runs, it
is a duplicate. Every other message was sent because it is to run, and does, with a marker or
without.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from ..declaration import engine_of
from ..engine.engine import Engine
from ..engine.events import logger
from ..engine.hold import Body, MakeHold
from ..engine.lease import State
from ..engine.protocol import Answer, Ended, HoldInfo, Successor
from ..errors import LockUnavailable, RelockError
from ..worker.beside import HeldBeside
from ..worker.conflict import Attempt, release, without_redis
from ..worker.ending import end_unexecuted, is_requeued, locks_of, remember_for, withdraw_later
from ..worker.message import QUEUED, header_of
from ..worker.states import Late, SentAgain, Waits, end_dropped, show_revoked
from . import client, marker
from .client import MarkedCall
from .marker import Found, Marker

if TYPE_CHECKING:
    from ..worker.execution import Execution

# States of a lease that had the marker, or was released already.
_HAD = (State.HELD, State.LOST, State.RELEASED)


def around(execution: Execution, locked: Callable[[Body], Any]) -> Any:
    """Execute a message that says something of a marker, or whose task does, and look after its
    marker meanwhile.

    Args:
        locked: acquires its locks, calls the body that it is given, and releases.
    """
    call, message = _call(execution), execution.message
    header = header_of(message)
    if header.receiver and header.marker and call.marker.until != marker.TIME:
        # Others have copies of it, and no copy can wait for all of them: with the first that comes
        # the call counts no longer.
        name, first = call.marker.name, call.execution_id
        call.engine.later.try_now(partial(marker.drop, call.engine, name, first, ended=True))
        return locked(execution.run_body)
    held = _HeldMarker(call, message)
    held.delivery.ended_for_good = held.ask_replaced

    def marked_body(make_hold: MakeHold) -> Any:
        held.begin(make_hold)
        return execution.run_body(make_hold)

    def run() -> Any:
        execution.asks_for_marker()
        there = held.arrive()
        if there is not None:
            return _swallow(call, message, there)
        try:
            held.refuse_replaced()
            return locked(marked_body)
        except Late:
            held.show_replaced()
            raise

    return held.around(run)


def _call(execution: Execution) -> MarkedCall:
    task, declared, names = execution.task, execution.declared, execution.names
    message: Any = execution.message
    header = header_of(message)
    told, own = header.dedup, (message.id, header.first_execution_id)
    if told is not None and told[0]:
        # As it was sent: the task's options, and so its lock names, may be others here.
        made = Marker(*told)
    else:
        made = Marker.of(task.name, names, declared.options.dedup)
    return MarkedCall(task, engine_of(declared.app), declared.options, names, made, *own)


def _swallow(call: MarkedCall, message: Any, there: Found) -> Any:
    """It ends here, before it has asked for its locks: when its message comes once more, the other
    call may be over."""
    client.tell(call, there)
    raises, header = call.options.on_duplicate == "raise", header_of(message)
    error = client.error_for(call, there) if raises else None
    if header.own:
        remember = remember_for(call.task, error)
        with suppress(RelockError):
            end_unexecuted(call.engine, call.names, header.execution_id, remember)
    if error is not None:
        raise error
    return end_dropped(call.task, message, client.dropped(call, there))


class _HeldMarker(HeldBeside):
    """What a message that has arrived has of its call's marker."""

    field = client.DEDUP

    def __init__(self, call: MarkedCall, message: Any) -> None:
        super().__init__(call.task, message)
        self.call = call
        self.replaced = False
        told, mine = header_of(message).dedup, call.marker
        if message.retries or (told is not None and not told[0]):
            mine = mine._replace(until=marker.OWN)
        self.lease = marker.lease_of(
            call.engine, mine, call.execution_id, message.id, call.options.ttl
        )

    @property
    def held(self) -> bool:
        """Whether it has the marker, lost or not."""
        return self.lease.state in (State.HELD, State.LOST)

    @property
    def to_retry(self) -> list[Any] | None:
        until, before = self.call.marker.until, marker.DONE
        # With "replace", a call that has not begun must not keep later ones out by its retry.
        if not self.begun and self.call.options.on_duplicate != "replace":
            before = marker.START
        is_left = until in (before, marker.DONE) and (self.begun or self.held)
        return [*self.call.marker] if is_left else None

    def arrive(self) -> Found | None:
        """Take the marker over. Returns whose it is if this call is a duplicate."""
        there = self._ask_whose()
        # Of another call with its id it is none: what that returns is the result that its caller
        # gets, and the result of a duplicate would take its place.
        return None if there is None or there.task_id == self.message.id else there

    def _ask_whose(self) -> Found | None:
        by_name = _is_called_by_name(self.message)
        try:
            if self.call.marker.until == marker.TIME:
                if not by_name:
                    return None  # its marker is of when it was sent, and the option may be another
                return client.claim(self.call, float(self.call.options.dedup or 0))
            if self._acquire() is None or not by_name:
                return None
            # As if it had been sent just now: perhaps the other one is over, or to be replaced.
            there = client.claim(self.call, QUEUED)
            return self._acquire() if there is None else there
        except LockUnavailable as error:
            logger.debug("%s begins without its dedup marker: %s", self.call.task.name, error)
            return None

    def _acquire(self) -> Found | None:
        answer = self.call.engine.acquire(self.lease)
        self._hear(answer)
        return marker.found(answer)

    def _hear(self, answer: Answer | None) -> None:
        # What is stored of a call can be missing, or still be unseen: its caller's transaction.
        taken = isinstance(answer, Ended) and (answer.replaced or self.held)
        self.replaced = self.replaced or taken

    def begin(self, make_hold: MakeHold) -> None:
        """The execution has its locks, and its body comes next."""
        self.begun = True
        until, replaces = self.call.marker.until, self.call.options.on_duplicate == "replace"
        if until == marker.START:
            # Before the first line: a call from now on gets an execution of its own.
            while not self._start(make_hold, replaces):
                pass
        elif until == marker.DONE:
            if not self.held:
                # That of the attempt before, which has ended meanwhile: it was killed, or parked.
                with suppress(LockUnavailable):
                    self._acquire()
            self.offer()
        elif replaces:
            with suppress(LockUnavailable):  # from now on it is not
                hold = self._hold()
                self._ask(0.0 if hold is None else hold.remaining)
        self.refuse_replaced()

    def refuse_replaced(self) -> None:
        """Raise Late if it is known that a later call has replaced this one."""
        if self.replaced:
            raise Late("was replaced by a later call")

    def _start(self, make_hold: MakeHold, replaces: bool) -> bool:
        """Free the marker, unless the call was replaced. False to try once more.

        Raises:
            SentAgain, LockUnavailable: as from `obtain`.
        """
        try:
            if not (replaces and self._was_replaced()):
                self._free()
        except LockUnavailable as error:
            if self.call.options.on_unavailable != "run":
                self._put_off(make_hold, error)
                return False
        return True

    def _put_off(self, make_hold: MakeHold, error: LockUnavailable) -> None:
        """Returns where neither Redis nor the broker can be reached, and it still has its locks: a
        body that is to run later must not begin without them."""
        call = self.call
        attempt = Attempt(self.task, call.engine, self.lease, call.options, self.message)
        while True:
            time.sleep(without_redis(attempt, error) or 0.0)
            if not make_hold().lost:
                return

    def _free(self) -> None:
        """No other attempt of this execution, and no copy of its message, gets the marker again."""
        engine, before = self.call.engine, self.lease.state
        if self.lease.may_hold:
            engine.release(self.lease, ended="execution")
        if before not in _HAD:
            marker.drop(engine, self.call.marker.name, self.call.execution_id, ended=True)

    def _was_replaced(self) -> bool:
        if self.held and not self.replaced:
            # Its lease can have run out as well.
            self._ask(self.lease.claim.lease)
        elif not self.replaced and self._hold() is None:
            self._ask(0.0)
        return self.replaced

    def _hold(self) -> HoldInfo | None:
        return marker.hold_of(self.call.engine, self.call.marker.name, self.call.execution_id)

    def _ask(self, seconds: float) -> None:
        """Hear whether it was replaced; if not, it has the marker for so many seconds more."""
        claim = self.lease.claim._replace(lease=seconds)
        self._hear(self.call.engine.backend.acquire(claim))

    def ask_replaced(self) -> bool:
        """Whether a later call is known to have replaced this one."""
        with suppress(LockUnavailable):
            return self._was_replaced()
        return False

    def show_replaced(self) -> None:
        """Store REVOKED where it is not stored: `get()` of the call would never return.

        The later call could not store it, or did so in a transaction that was rolled back. Or
        BLOCKED was written over it, as the execution was about to be parked.
        """
        if self.ask_replaced():
            # What waits for it, or for its message, was perhaps not removed by the later call.
            withdraw_later(self.call.engine, header_of(self.message).execution_id)
            reason = "replaced by a later call"
            show_revoked(self.call.task, self.message.id, reason, self.message)

    def end(self, error: BaseException | None) -> None:
        if self.call.marker.until == marker.TIME:
            return  # it is left as it is
        engine, own = self.call.engine, self.lease.claim.execution_id
        self.lease.successor = to = self._successor(error)
        comes_again = to is not None and to.execution_id == own
        if to is not None and not comes_again and self.lease.state is State.NEW:
            # It was quicker than what was left to it by the attempt before.
            with suppress(RelockError):
                self._acquire()
        # Of a process that is about to end, Celery may put the message back. That one was replaced
        # is remembered.
        is_over = not self.task.acks_late or isinstance(error, Exception | None)
        is_over = is_over and not comes_again and not self.replaced
        had = self.lease.state in _HAD
        release(engine, self.lease, "execution" if is_over and to is None else "")
        if is_over and not had:
            with suppress(RelockError):  # what its sender, or its parking, has kept for it
                end_unexecuted(engine, [self.call.marker.name], own)

    def _successor(self, error: BaseException | None) -> Successor | None:
        me = self.lease.claim.execution_id
        if isinstance(error, SentAgain) or is_requeued(self.task, error):
            return Successor(me, QUEUED)
        if isinstance(error, Waits) and not self.begun:
            return Successor(me, marker.PARKED)
        sent = None if self.to_retry is None else self.delivery.retry
        if sent is None:
            return None
        keep = marker.counts_for(self.task, sent.fields)
        return Successor(marker.hold_id(sent.execution_id), keep)


def _is_called_by_name(message: Any) -> bool:
    """Whether a message is a call of its own that was held against no marker yet."""
    header = header_of(message)
    if header.dedup is not None:
        return False
    # A sender without this library does not say whether it goes on from a task.
    if message.parent_id and not header.own:
        return False
    canvas = (message.chain, message.chord, message.group, message.callbacks, message.errbacks)
    return not any((*canvas, message.retries, message.replaced_task_nesting))


def clear_away(
    engine: Engine, request: Any, remember: float | None, task: Any, began: bool
) -> None:
    """The call is not executed: another one may be sent."""
    header = header_of(request)
    told = header.dedup
    # One that was sent without a marker got its own when it came, and has it while it is parked.
    made = Marker(*told) if told and told[0] else _marker_by_name(task, request)
    if made is None or (began and made.until == marker.TIME):
        return
    # Also for a retry that is revoked before the body that sent it has ended.
    own = marker.hold_id(header.first_execution_id)
    end_unexecuted(engine, [made.name], own, remember)


def _marker_by_name(task: Any, request: Any) -> Marker | None:
    options, names = locks_of(task, request, lambda its: its.dedup)
    return Marker.of(task.name, names, options.dedup) if names else None
