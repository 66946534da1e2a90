"""`lock_dedup` where a run begins and ends: its marker is taken over, renewed, and freed.

A message that no `LockedTask.apply_async` has sent (`send_task`, `celery call`) was held against no
marker. That is made up for here: where another call of the same name is queued, or runs, it is a
duplicate. Every other message was sent because it is to run, and does, with a marker or without.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

from celery.exceptions import Reject, Retry
from celery.signals import before_task_publish, task_revoked

from ..declaration import Declaration, declaration
from ..engine import ids
from ..engine.hold import Hold
from ..engine.lease import State
from ..engine.protocol import KEPT, Conflict, Ended, Successor
from ..errors import LockUnavailable, RelockError
from ..worker import headers as run_headers
from ..worker.attempt import Late
from ..worker.release import give_back
from ..worker.states import Aside, end_dropped
from . import canvas, marker
from . import client as dedup
from .client import Call
from .marker import Marker

logger = logging.getLogger("celery_relock")

Body = Callable[[Hold], Any]


def concerns(message: Any, declared: Declaration) -> bool:
    """Whether a message may have a dedup marker."""
    return declared.options.dedup is not None or run_headers.read(message).dedup is not None


def around(
    task: Any,
    declared: Declaration,
    message: Any | None,
    names: tuple[str, ...],
    locked: Callable[[Body], Any],
    body: Body,
) -> Any:
    """Run a body by way of `locked`, which takes its locks, and look after its marker meanwhile."""
    call = None if message is None else _call(task, declared, message, names)
    if call is None:
        return locked(body)
    arrival, raised = _Arrival(call, message), None
    token = _running.set(arrival)
    try:
        there = arrival.take()
        if there is not None:
            return _is_duplicate(call, message, there)
        return locked(arrival.begins(body))
    except BaseException as error:
        raised = error
        raise
    finally:
        try:
            arrival.leave(raised)
        finally:
            _running.reset(token)
            # A signal's exception may have come before the line above had begun.
            if arrival.has:
                arrival.leave(raised)


def _call(task: Any, declared: Declaration, message: Any, names: tuple[str, ...]) -> Call | None:
    """The call that a message is for; None if it has nothing to do with markers."""
    told, mode = run_headers.read(message).dedup, declared.options.dedup
    if told is not None and told[0]:
        # As it was sent: the task's options, and so its lock names, may be others here.
        made = Marker(*told)
    elif mode is None or told == ("", marker.OFF):
        return None
    else:
        made = Marker(marker.name_for(task.name, names), marker.until(mode))
    return Call(task, declared.engine, declared.options, names, made)


def _is_duplicate(call: Call, message: Any, there: marker.Found) -> Any:
    error = dedup.error_for(call, there)
    logger.info("task %s is not run: %s", message.id, error)
    if call.options.on_duplicate == "raise":
        raise error
    return end_dropped(call.task, message, dedup.dropped(call, there))


class _Arrival:
    """A message that has arrived, and what it has of its marker."""

    def __init__(self, call: Call, message: Any) -> None:
        self.call = call
        self.message = message
        self.begun = False
        self.successor: Successor | None = None
        self._run = run_headers.read(message).call
        claim = marker.claim_for(
            call.marker.name, self._run, message.id, call.options.ttl, ids.new_attempt_id()
        )
        self._lease = marker.Quiet(claim, call.engine.backend, 0.0)

    def take(self) -> marker.Found | None:
        """Take the marker over. Returns whose it is if this call is a duplicate."""
        call, task_id = self.call, self.message.id
        asks = self._is_a_call_by_name()
        try:
            if call.marker.until == marker.TIME:
                keep = float(call.options.dedup) if asks else 0.0
                return dedup.claim(call, self._run, task_id, keep) if asks else None
            answer = call.engine.acquire(self._lease)
            replaces = (
                asks and call.options.on_duplicate == "replace" and isinstance(answer, Conflict)
            )
            # First in the place of the one that is queued, as if this had been sent just now.
            if replaces and dedup.claim(call, self._run, task_id, marker.QUEUED) is None:
                answer = call.engine.acquire(self._lease)
        except LockUnavailable as error:
            logger.debug("%s begins without its marker: %s", call.task.name, error)
            return None
        return marker.found(answer) if asks else None

    def _is_a_call_by_name(self) -> bool:
        header = run_headers.read(self.message)
        # What a worker without this library sends may be a step, and nothing would tell.
        unknown = self.message.parent_id and not header.own
        return header.dedup is None and not unknown and not canvas.is_member(self.message)

    def begins(self, body: Body) -> Body:
        """The body, with what happens to the marker when it begins."""

        def begin(hold: Hold) -> Any:
            self._begin()
            return body(hold)

        return begin

    def _begin(self) -> None:
        self.begun = True
        if self.call.marker.until == marker.DONE and not self.has:
            self._take_late()
        if self.call.marker.until == marker.TIME and self.call.options.on_duplicate == "replace":
            with suppress(LockUnavailable):
                marker.begin(self.call.engine, self.call.marker.name, self._run, self.message.id)
        if self.call.marker.until != marker.START:
            return
        # Gone before the first line of the body: whoever calls from now on gets a run of its own.
        try:
            if self._was_replaced():
                raise Late("replaced by a later call while it waited for its lock")
            self._give_up()
        except LockUnavailable:
            if self.call.options.on_unavailable != "run":
                raise

    def _was_replaced(self) -> bool:
        """Whether a later call has taken its marker away; its lease may have run out as well."""
        if self.call.options.on_duplicate != "replace" or not self.has:
            return False
        return isinstance(self.call.engine.backend.acquire(self._lease.claim), Ended)

    def _take_late(self) -> None:
        """That of the attempt before, which has ended meanwhile: it was killed, or parked."""
        with suppress(LockUnavailable):
            self.call.engine.acquire(self._lease)

    @property
    def has(self) -> bool:
        return self._lease.state in (State.HELD, State.LOST)

    def _give_up(self) -> None:
        """Free the marker for good: no other attempt of this run, or copy of it, gets it again."""
        engine = self.call.engine
        if self.has:
            engine.release(self._lease, ended=True)
        elif self._lease.state is not State.RELEASED:
            marker.drop(engine, self.call.marker.name, self._run, ended=marker.REMEMBER)

    def leave(self, error: BaseException | None) -> None:
        """The run is over, or comes again."""
        if self.call.marker.until == marker.TIME:
            return
        lease = self._lease
        lease.successor = self._goes_to(error)
        if lease.successor is None and not self.has:
            with suppress(RelockError):
                self._give_up()
            return
        give_back(self.call.engine, lease, ended=lease.successor is None)

    def _goes_to(self, error: BaseException | None) -> Successor | None:
        own = self._lease.claim.execution_id
        if isinstance(error, Reject) and error.requeue:
            return Successor(own, marker.QUEUED)
        if self.begun:
            # Not after another error: it may be that of the retry which could not be sent.
            return self.successor if error is None or isinstance(error, Retry) else None
        if isinstance(error, Retry):
            return Successor(own, marker.QUEUED)
        parked = isinstance(error, Aside) and not isinstance(error, Late)
        return Successor(own, marker.PARKED) if parked else None


_running: ContextVar[_Arrival | None] = ContextVar("relock_arrival", default=None)


def _write(headers: Any = None, body: Any = None, **_: Any) -> None:
    """A retry is published while the body still runs: the marker goes on to it."""
    arrival = _running.get()
    if arrival is None or not isinstance(headers, dict):
        return
    if arrival.call.marker.until != marker.DONE or not arrival.begun:
        return
    fields = headers if "id" in headers else body if isinstance(body, dict) else {}
    header = headers.get(run_headers.NAME)
    if header and run_headers.is_retry(fields, arrival.message):
        keep = marker.keep_for(arrival.call.task, dict(fields))
        arrival.successor = Successor(marker.hold_id(header["execution_id"]), keep)
        header["dedup"] = list(arrival.call.marker)


def _free(sender: Any = None, request: Any = None, terminated: bool = False, **_: Any) -> None:
    """The call was revoked, or has expired, before it ran: another one may be sent."""
    try:
        declared = declaration(type(sender))
        header = run_headers.read(request)
        made = Marker(*header.dedup) if header.dedup else _marker_of(sender, declared, request)
        if made is None or not made.name or (terminated and made.until == marker.TIME):
            return
        engine, own = declared.engine, marker.hold_id(header.call)
        # Also for a retry that comes to be revoked before the body that sent it has ended.
        engine.backend.release([made.name], own, KEPT, "run", marker.REMEMBER)
    except RelockError as error:
        logger.warning("the marker of %s stays until it ends: %s", request.id, error)


def _marker_of(task: Any, declared: Declaration, request: Any) -> Marker | None:
    mode = declared.options.dedup
    if mode is None or declared.rule.off:
        return None
    call = dedup.call_of(task, declared, mode, request.args or (), request.kwargs or {})
    return None if call is None else call.marker


before_task_publish.connect(_write, weak=False, dispatch_uid="celery_relock.arrival")
task_revoked.connect(_free, weak=False, dispatch_uid="celery_relock.arrival")
