"""Why does a task not run? Redis knows what is parked, the result backend what has ended, a worker
what it has."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..engine.events import OUTRANKED, duration, logger
from ..engine.inspection import PARKED, Holder, LockInfo, ParkedMessage, Waiter, work_of
from ..engine.protocol import DEBOUNCE, LINE, MARKER
from ..errors import LockConfigError, RelockError
from .look import SHOWN, Look, Why, held_for

# Seconds in which workers can answer. All of them pass: more workers could answer.
_WORKERS = 1.0
# Why a worker has not begun with a task, by what `query_task` tells; else for want of a slot.
_WAITS_IN_A_WORKER = {"scheduled": " until its ETA", "limited": " for its rate limit"}
# Of a lock, how many holders and waiters to look through; a holder is read faster.
_SOUGHT = 1000, SHOWN
# What has become of a message whose turn has come.
_TURNS = {"resumed": "is on its way to a worker", "owed": "has not been published by any process"}
# Instead of a state: the result backend could not be asked.
_UNASKED = "UNASKED"


@dataclass(frozen=True, slots=True)
class Question:
    """About one task.

    Attributes:
        app: whose result backend and workers are asked; None for neither.
        look: reads the locks.
        consumed: whether a worker consumes a channel (`Backend.consumed`).
    """

    app: Any
    look: Look
    consumed: Callable[[str], bool]
    task_id: str

    def answer(self) -> Why:
        """See `Locks.why`: what is parked, what has ended, what a worker has, what is at any lock,
        what is awaited; and what has ended, or begun, if no more than that is known."""
        if not self.task_id:
            return Why("", "unknown", "nothing is known of a task without an id")
        found = self.look.parked(self.task_id)
        if found is not None and found.text:
            return self._parked(found)
        stored = _stored(self.app, self.task_id)
        ended = stored.ended()
        # A worker that does not have a revoked task stores REVOKED while another one runs it.
        is_revoked = stored.state == "REVOKED"
        if ended is not None and ended.state != "retry" and not is_revoked:
            return ended
        reply, answered = _ask_workers(self.app, self.task_id)
        # A retry that runs has the state RETRY until it ends, unless `task_track_started` is set.
        if reply is not None and (ended is None or reply.state == "active"):
            return self._in_a_worker(reply, ended)
        # Also if some workers answer: one with a solo pool does not while it runs a task, and one
        # that is ending answers nobody.
        is_unknown = reply is None and found is None and (ended is None or is_revoked)
        if is_unknown and (known := self._anywhere()) is not None:
            return known
        if found is not None and ended is None:  # its message is awaited, or can come again
            _, lock = self.look.get(found.name, SHOWN, SHOWN)
            return self._there((lock,)) or self._waiting(found.waiter, lock)
        stored = _stored(self.app, self.task_id)  # it can have ended while the workers were asked
        if (ended := stored.ended()) is None:
            return stored.lost(answered) or self._unknown(stored, answered)
        if ended.state != "retry":
            return ended
        return self._waits_for_its_retry(ended, found, reply, answered)

    def _unknown(self, stored: _Stored, answered: bool) -> Why:
        return Why(
            self.task_id,
            "unknown",
            f"nothing is known of the task {self.task_id}: it is not parked, "
            + ("in no worker that answers, " if answered else "")
            + (
                f"and the result backend could not be asked ({type(stored.result).__name__})"
                if stored.state == _UNASKED
                else "and no result of it was found"
            )
            + ". It might have ended, or wait in the broker, or in a worker that does not answer, "
            + "or be lost with a worker that is gone (with acks_late its message comes again), "
            + "or be a later step of a workflow, which is sent when those before it have ended, or "
            + f"was sent elsewhere, or was {self._marked() or 'never sent'}"
            + ("" if self.app else "; with an app, its result and its workers are asked, too"),
        )

    def _parked(self, found: ParkedMessage) -> Why:
        waiter = found.waiter
        _, lock = self.look.get(found.name, 1, 1)
        waits = duration(found.at - waiter.since)
        ahead = waiter.position - 1
        work = work_of(waiter.task, self.task_id)
        if found.name.startswith(DEBOUNCE):
            is_last = waiter.position == lock.waiting
            pause = _pause_of(lock.holders if is_last else ())
            sentence = f"{work} is a burst of calls that began {waits} ago: {pause}"
            return Why(self.task_id, waiter.state, sentence, found.name, ahead, lock.holders)
        unread = self._without_a_worker(found.text)
        if waiter.state in _TURNS:
            sentence = (
                f"{work} has its turn {_for(waiter.names)} after {waits}: "
                f"its message {_TURNS[waiter.state]}"
            )
            if waiter.sent > 2:
                often = f"it was handed out {waiter.sent} times"
                if not unread:
                    often += "; if the workers' logs have no 'could not be resumed', their queue "
                    often += "has a backlog"
                sentence += f" ({often})"
        else:
            sentence = (
                f"{work} is parked: it has waited {waits} {_for(waiter.names)}, "
                f"{_ahead(waiter, found.name)}; {self._in_the_way(waiter, lock)}"
            )
        sentence += unread
        return Why(self.task_id, waiter.state, sentence, found.name, ahead, lock.holders)

    def _parked_meanwhile(self) -> Why | None:
        """What is to be said of a task that was parked since this began to look."""
        found = self.look.parked(self.task_id)
        return self._parked(found) if found is not None and found.text else None

    def _without_a_worker(self, text: str) -> str:
        """What is to be said of a parked message that no worker of this app gets."""
        from ..worker.parking import channel, homes

        if self.app is None or not text:
            return ""
        message = json.loads(text)
        queue, home = message["queue"], message["home"]
        if home not in homes(self.app):
            return (
                "; it was parked by another app, or for another broker: only a worker with that "
                "broker_url and that app name resumes it"
            )
        if not queue or self.consumed(channel(home, queue)):
            return ""
        replies = _asked(self.app, "active_queues")
        if replies is None:
            return ""
        if not any(queue == each["name"] for every in replies.values() for each in every):
            return f"; no worker that answers consumes its queue {queue!r}"
        # Those that do can be plain ones, as after a rollback.
        told = _asked(self.app, "stats")
        if not told or any("relock" in each for each in told.values()):
            return ""
        return "; no worker that answers has celery-relock, and no other one resumes it"

    def _in_a_worker(self, reply: _Reply, ended: Why | None) -> Why:
        """`ended`: what the result backend said before the workers were asked."""
        node, state, info = reply
        work = work_of(str(info.get("name") or ""), self.task_id)
        where = f"the worker {node}"
        if state in PARKED:
            return self._parked_elsewhere(reply)
        if state != "active":
            when = _WAITS_IN_A_WORKER.get(state, ", which has no free slot for it")
            return Why(self.task_id, "received", f"{work} waits in {where}{when}")
        names = _names(self.app, info)
        locks = [lock for _, lock in self.look.get_all(names, *_SOUGHT)] if names else []
        # It can hold others: of its workflow, or those of a task that this app does not have.
        if (known := self._there(locks) or self._anywhere()) is not None:
            return known
        # What a worker runs can have ended, or failed and be retried, since it answered.
        now = _stored(self.app, self.task_id).ended()
        if now is not None and now != ended:
            return now
        lacks = f"does not hold its {_locks(names)}" if names else "holds no lock of its own"
        pid = info.get("worker_pid")
        return Why(self.task_id, "runs", f"{work} runs in {where} (pid {pid}) and {lacks}")

    def _waits_for_its_retry(
        self, retry: Why, found: ParkedMessage | None, reply: _Reply | None, answered: bool
    ) -> Why:
        """Whether its message is anywhere, and what it keeps from others until that comes."""
        said = [retry.sentence]
        if found is not None:
            place = f"{_for(found.waiter.names)}, {_ahead(found.waiter, found.name)}"
            said.append(f"it has its place {place}")
        if (kept := self._kept()) is not None:
            left = duration(kept[1].lease_left)
            said.append(f"{_called(kept[0].name)} is kept for it for {left} more")
            retry = replace(retry, lock=kept[0].name, holders=kept[0].holders)
        if reply is not None:
            when = _WAITS_IN_A_WORKER.get(reply.state, "")
            said.append(f"the worker {reply.node} has its message{when}")
        elif answered:
            said.append(
                "no worker that answers has its message: it waits in the broker, or in a worker "
                "that does not tell of it, or is lost"
            )
        return replace(retry, sentence="; ".join(said))

    def _kept(self) -> tuple[LockInfo, Holder] | None:
        """A lock that is kept for the task, and its hold there."""
        with suppress(LockConfigError):  # not all locks may be looked at
            for lock in self.look.find("*", *_SOUGHT):
                for holder in () if lock.name.startswith(MARKER) else lock.holders:
                    if holder.kept and holder.task_id == self.task_id:
                        return lock, holder
        return None

    def _parked_elsewhere(self, reply: _Reply) -> Why:
        """A worker found it in its Redis, and we did not before in ours (`worker.control`)."""
        if (now := self._parked_meanwhile()) is not None:
            return now
        lock = str(reply.info.get("lock") or "")
        return Why(
            self.task_id,
            reply.state,
            f"the worker {reply.node} says of the task {self.task_id} that it is parked "
            f"{_for((lock,))}, but the Redis and the namespace that were asked here do not have "
            "it. If it stays so, compare relock_url and relock_namespace with that worker's",
            lock,
            int(reply.info.get("ahead") or 0),
        )

    def _anywhere(self) -> Why | None:
        """What a task does at any lock, or a workflow of which it is a step; None if it is at none,
        or not all locks may be looked at."""
        in_line = None
        try:
            for lock in self.look.find("*", *_SOUGHT):
                if lock.name.startswith(MARKER):
                    continue
                known = self._there((lock,)) or self._of_workflow(lock)
                if known is not None and not lock.name.startswith(LINE):
                    return known
                in_line = in_line or known
        except LockConfigError as error:
            logger.warning("Cannot look for the task at all locks: %s", error)
        return in_line

    def _of_workflow(self, lock: LockInfo) -> Why | None:
        """What is to be said of a step whose workflow is parked for this lock."""
        if self.app is None:
            return None
        from ..worker.message import ENTER
        from ..worker.parking import message_in

        for waiter in lock.waiters:
            found = self.look.parked(waiter.task_id) if waiter.task == ENTER else None
            steps = ""
            with suppress(Exception):  # one that this app cannot read is not its own
                steps = str(message_in(self.app, found.text).payload) if found else ""
            if found is not None and f"'task_id': {self.task_id!r}" in steps:
                waits = replace(self, task_id=waiter.task_id)._parked(found)
                sentence = f"{self.task_id} is a step of a workflow, whose {waits.sentence}"
                return replace(waits, task_id=self.task_id, sentence=sentence)
        return None

    def _marked(self) -> str:
        """What a dedup marker tells of a task of which nothing else is known; "" for nothing."""
        with suppress(LockConfigError):  # `_anywhere` has told that not all may be looked at
            for marker in self.look.find(f"{MARKER}*"):
                for call in marker.holders:
                    if call.task_id == self.task_id:
                        made, left = duration(marker.at - call.since), duration(call.lease_left)
                        return (
                            f"lost; its call was marked {made} ago by {marker.name!r}, which keeps "
                            f"equal calls from being sent for {left} more (lock_dedup)"
                        )
        return ""

    def _there(self, locks: Sequence[LockInfo]) -> Why | None:
        """What a task does at these locks; None if it neither holds one nor waits for one."""
        for lock in locks:
            for holder in lock.holders:
                if holder.task_id == self.task_id and not (holder.kept or holder.cooldown):
                    copy = any(each.execution_id == holder.execution_id for each in lock.waiters)
                    sentence = (
                        f"{_has(holder, _called(lock.name), lock)}{_where(holder)}; its "
                        f"lease has {holder.lease_left:.0f} s left, and is renewed each third of "
                        "lock_ttl unless the process is stopped or cut off"
                        + ("; a copy of its message waits until it has ended" if copy else "")
                    )
                    return Why(self.task_id, "holds", sentence, lock.name, 0, lock.holders)
            for waiter in lock.waiters:
                if waiter.task_id == self.task_id and waiter.state in PARKED:
                    here = ParkedMessage(lock.name, lock.at, waiter, "")
                    return self._parked_meanwhile() or self._parked(here)
                if waiter.task_id == self.task_id:
                    return self._waiting(waiter, lock)
        return None

    def _waiting(self, waiter: Waiter, lock: LockInfo) -> Why:
        ahead, waits = waiter.position - 1, duration(lock.at - waiter.since)
        if waiter.state == "awaited":
            since = lock.at - waiter.due
            sentence = (
                f"{waiter} took its place {_for(waiter.names)} {duration(since)} ago, "
                if since >= 0
                else f"{waiter} is due {_for(waiter.names)} {duration(-since)} from now, "
            ) + f"{_ahead(waiter, lock.name)}: its message has not come to a worker"
            return Why(self.task_id, waiter.state, sentence, lock.name, ahead, lock.holders)
        sentence = (
            f"{waiter} has waited {waits} {_for(waiter.names)} in process {waiter.pid} of "
            f"{waiter.host}, {_ahead(waiter, lock.name)}; {self._in_the_way(waiter, lock)}"
        )
        return Why(self.task_id, "waits", sentence, lock.name, ahead, lock.holders)

    def _in_the_way(self, waiter: Waiter, lock: LockInfo) -> str:
        """Who holds what an execution waits for: this lock, and the others that it needs."""
        if len(waiter.names) == 1:
            holders = self._at(lock, "it", waiter) or "nobody holds it at this moment"
            shares = waiter.shared and any(each.shared for each in lock.holders)
            return holders + (OUTRANKED if shares else "")
        locks = [each for _, each in self.look.get_all(waiter.names, 1, 1)]
        every = [self._at(each, repr(each.name), waiter) for each in locks]
        return "; ".join(filter(None, every)) or "nobody holds them at this moment"

    def _at(self, lock: LockInfo, what: str, waiter: Waiter) -> str:
        """Who holds a lock; else who is first there, and what with that one; "" if that is this
        execution."""
        first = lock.waiters[0] if lock.waiters else waiter
        is_other = first.execution_id != waiter.execution_id
        here = f"nobody holds {what} at this moment"
        if lock.holders:
            here = _held_by(lock, what) + self._meanwhile(lock)
        # It may be another lock that it has to wait for, while a permit of this one is free.
        if is_other and len(first.names) > 1 and first.state in ("waiting", "parked"):
            return f"{here}, and {first}, which is first, waits {_for(first.names)}"
        if lock.holders:
            return here
        if not is_other:
            return ""
        if first.state != "awaited":
            turn = _TURNS.get(first.state)
            return f"{here}, and it is the turn of {first}" + (
                f", whose message {turn}" if turn else ""
            )
        found = self.look.parked(first.task_id)
        # Its turn came, and with it the next wait: its place in the order stays.
        if found is not None and found.text:
            return f"{first}, which is first, waits {_for(found.waiter.names)}"
        return f"the message of {first}, which is first, is awaited"

    def _meanwhile(self, lock: LockInfo) -> str:
        """For which lock the oldest holder waits, in the midst of its body, say; "" for none."""
        needed = self.look.inspection.needed(lock.holders[0].execution_id)
        for execution_id, name in needed.items():
            waiters = self.look.get(name, 1, SHOWN)[1].waiters
            if any(each.execution_id == execution_id for each in waiters):
                return f", and waits for {_called(name)} meanwhile"
        return ""


def _called(name: str) -> str:
    is_line = name.startswith(LINE)
    return f"the {'order of' if is_line else 'lock'} {name.removeprefix(LINE)!r}"


def _for(names: Sequence[str]) -> str:
    if names[0].startswith(LINE):
        return f"in {_called(names[0])}"
    return f"for the {_locks(names)}"


def _locks(names: Sequence[str]) -> str:
    return f"lock{'s' * (len(names) > 1)} {' and '.join(map(repr, names))}"


def _ahead(waiter: Waiter, name: str) -> str:
    """`name`: the lock in whose queue it has its position."""
    number, several = waiter.position - 1, len(waiter.names) > 1
    queue = f" in the queue of {name!r}" if several else ""
    return f"with {number} ahead of it{queue}" if number else f"first{queue or ' in its queue'}"


def _has(holder: Holder, what: str, lock: LockInfo) -> str:
    held = held_for(lock, holder)
    if not held:
        return f"{holder} has its turn in {what}"
    if holder.cooldown:
        left = duration(holder.lease_left)
        return f"{what} cools down for {left} more (lock_cooldown), after {holder}"
    if holder.shared:  # `since` is of the first sharer, which can have left long ago
        return f"{holder} shares {what}, which has been shared without a break for {held}"
    return f"{holder} has held {what} for {held}"


def _where(holder: Holder) -> str:
    if holder.cooldown:
        return ""
    if holder.kept:
        left = duration(holder.lease_left)
        return f", and it is kept for the next step, or the retry, of its workflow, for {left} more"
    return f", in process {holder.pid} of {holder.host}"


def _held_by(lock: LockInfo, what: str) -> str:
    first, others = lock.holders[0], lock.held - 1
    return f"{_has(first, what, lock)}{_where(first)}" + (
        f", and {others} more hold{'s' * (others == 1)} it" if others else ""
    )


def _pause_of(pause: Sequence[Holder]) -> str:
    """What a burst of debounced calls waits for. `pause`: its own one, if that is not over."""
    if pause:
        left = duration(pause[0].lease_left)
        return f"it is sent {left} from now if no more calls come (lock_debounce)"
    return (
        "no more calls came, and a worker has to publish its message: a worker whose app has the "
        "caller's name, and whose broker_url (or broker_write_url) is spelt the same"
    )


class _Stored(NamedTuple):
    """What the result backend has of a task.

    Attributes:
        state: "" if nothing is known; `_UNASKED` if it could not be asked.
        result: its result, or what is told of its state; if it could not be asked, the error.
        work: the task, as people are told of it.
    """

    task_id: str
    state: str = ""
    result: Any = None
    work: str = ""

    def ended(self) -> Why | None:
        """What is to be said of a task that has ended, or will be retried."""
        from celery.exceptions import Retry
        from celery.states import READY_STATES, RETRY

        from ..worker.states import is_dropped

        task_id, state, result, work = self
        if is_dropped(result):
            lock = str(result.get("lock") or "")
            return Why(task_id, "dropped", f"{work} was dropped: {result.get('reason')}", lock)
        if state in READY_STATES:
            said = "" if state == "SUCCESS" else f", {type(result).__name__}: {result}"
            return Why(task_id, "ended", f"{work} has ended: {state}{said}")
        if state == RETRY and isinstance(result, Retry):
            cause = "a shutdown, or a lost connection to the broker"
            return Why(task_id, "retry", f"{work} was cancelled by Celery ({cause})")
        if state == RETRY:
            because = "" if result is None else f": {result}"
            return Why(task_id, "retry", f"{work} waits for its retry{because}")
        return None

    def lost(self, answered: bool) -> Why | None:
        """What is to be said of a task that had to wait, or had begun, if nothing else is known of
        it any more. `answered`: whether any worker did."""
        from celery.states import PENDING, STARTED

        from ..worker.events import BLOCKED

        task_id, state, result, work = self
        if state in ("", _UNASKED, PENDING):
            return None
        payload = result if isinstance(result, dict) else {}
        if state == STARTED and "hostname" in payload:
            return Why(
                task_id,
                "lost",
                f"{work} has begun in the worker {payload['hostname']} (pid {payload.get('pid')}), "
                "and no worker that answers has it any more: it runs in one that does not answer, "
                "or was lost with its process, or its message comes again (acks_late). If it stays "
                "so, send the task again",
            )
        if state != BLOCKED or "blocked_at" not in payload:
            return Why(
                task_id,
                "lost",
                f"{work} has the state {state}, and no worker that answers has it: its message is "
                "in the broker, or in a worker that does not answer, or was lost. If it stays so, "
                "send the task again",
            )
        lock = str(payload.get("lock") or "")
        since = duration(max(time.time() - float(payload.get("blocked_at") or 0), 0.0))
        return Why(
            task_id,
            "lost",
            f"{work} had to wait for the lock {lock!r} {since} ago, and Redis has nothing of it "
            "any more: its message is on its way through the broker, "
            + ("" if answered else "or in a worker that does not answer, ")
            + "or is parked elsewhere (relock_url or relock_namespace was another one then, and "
            "only a worker that has it still resumes it), or was lost with the data of Redis. If "
            "it was lost, send the task again",
            lock,
        )


def _stored(app: Any, task_id: str) -> _Stored:
    if app is None:
        return _Stored(task_id)
    from celery.backends.base import DisabledBackend

    import_tasks(app)  # in a Django project it sets up the backend, too
    try:
        # It cannot be asked: it has no such method (AttributeError).
        if isinstance(app.backend, DisabledBackend):
            return _Stored(task_id)
        meta = app.backend.get_task_meta(task_id)
    except Exception as error:  # noqa: BLE001  # whatever a backend raises
        logger.warning("Cannot read the state of %s: %s", task_id, error)
        return _Stored(task_id, _UNASKED, error)
    work = work_of(str(meta.get("name") or ""), task_id)
    return _Stored(task_id, str(meta.get("status", "")), meta.get("result"), work)


class _Reply(NamedTuple):
    """A worker that has a task: its name, in which of its lists it has the task, what it knows."""

    node: str
    state: str
    info: dict[str, Any]


def _ask_workers(app: Any, task_id: str) -> tuple[_Reply | None, bool]:
    """The worker that has a task; and whether any worker answered."""
    replies = {} if app is None else _asked(app, "query_task", [task_id]) or {}
    had = ((node, tasks) for node, tasks in replies.items() if isinstance(tasks, dict))
    found = [_Reply(node, *tasks[task_id]) for node, tasks in had if task_id in tasks]
    # Another one can have a copy of the message of a task that runs.
    found.sort(key=lambda reply: reply.state != "active")
    return next(iter(found), None), bool(replies)


def _asked(app: Any, question: str, *args: Any) -> dict[str, Any] | None:
    """The answers of the workers, by worker; None if they cannot be asked."""
    from ..worker.broker import remote_control

    try:
        control = remote_control(app)
        if control is None:
            return None
        return getattr(control.inspect(timeout=_WORKERS), question)(*args) or {}
    except Exception as error:  # noqa: BLE001  # whatever a broker's client raises
        logger.warning("Cannot ask the workers: %s", error)
        return None


def import_tasks(app: Any) -> None:
    """Import the modules of an app's tasks, as far as they can be imported here."""
    try:
        app.loader.import_default_modules()
    except Exception as error:  # noqa: BLE001  # whatever an import raises
        logger.warning("Cannot import all task modules of the app: %r", error)


def _names(app: Any, info: dict[str, Any]) -> tuple[str, ...]:
    """The lock names of a call that a worker described."""
    from ..declaration import declaration, is_lockable
    from ..naming.names import Misfit

    import_tasks(app)
    task = app.tasks.get(info.get("name"))
    if not is_lockable(task):
        return ()
    try:
        call = info.get("relock") or {}
        said = call.get("options") or {}, call.get("prefix")
        declared = declaration(type(task)).of_call(*said, is_sent=True)
        return declared.names_of_call(task, info.get("args"), info.get("kwargs"))
    except (RelockError, Misfit) as error:
        logger.warning("Cannot determine the locks of %s: %s", info.get("name"), error)
        return ()
