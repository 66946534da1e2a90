"""Inspect and release locks: for people, and for the programs that they run.

    locks = Locks(app)
    for lock in locks.find("account:*"):
        print(lock.name, lock.holders[0].task, lock.waiting)
    locks.why("7caf55a8-2f4e-4a32-8f6b-0c1a5be0d7d2").sentence
    locks.release("account:42")

Tasks do not need this module, and workers do not load it.
"""

from __future__ import annotations

import dataclasses
import getpass
import json
import logging
import os
import re
import socket
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from . import engines
from .engine import ids
from .engine.events import OUTRANKED, duration, extra
from .engine.inspection import Inspectable, Inspection, ParkedMessage, Place, Survey
from .engine.protocol import COOLDOWN, DEBOUNCE, KEPT, LINE, MARKER, PAUSE, HoldInfo
from .errors import LockConfigError, RelockError
from .settings import store_settings

logger = logging.getLogger("celery_relock")

# Holders and waiters of one lock to show by default.
SHOWN = 100
# Seconds in which workers can answer. All of them pass: more workers could answer.
_WORKERS = 1.0
_DONE = {
    "release": "lock %s: released by force by %s from %s; its holder was %s",
    "cancel": "lock %s: a parked task was cancelled by %s from %s: %s",
    "order": "lock %s: its order goes on, by force by %s from %s, without the message of %s",
}
_LABEL = re.compile(r"(?P<task>.*?)(?:\[(?P<id>.*)\])? (?P<host>\S*):(?P<pid>\d+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Plain:
    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Holder(_Plain):
    """A live hold.

    Attributes:
        token: the fencing token of its permit. Holders with the same token share the permit.
        owner: who can re-enter, usually the id of the workflow.
        execution_id: the id of the execution.
        task: the task's name; "Lock" for a `Lock` outside of tasks; "" if it is not known.
        task_id: the task's id; "" outside of tasks.
        host: the host of the process; "" if it is not known.
        pid: the id of the process; 0 if it is not known.
        since: when the permit began, in seconds since the epoch, by the server's clock. For a
            shared lock: since when it has been shared without a break, by any holder.
        lease_left: seconds until the hold ends if nobody renews it.
        kept: whether the hold is kept for the next step, or the retry, of a workflow, and has no
            process yet.
        cooldown: whether the task has ended and the lock stays held for a while (`lock_cooldown`).
        pause: whether it marks the time in which calls are merged into a burst (`lock_debounce`).
        shared: whether others can hold the lock at the same time (`lock_mode="shared"`).
    """

    token: int
    owner: str
    execution_id: str
    task: str
    task_id: str
    host: str
    pid: int
    since: float
    lease_left: float
    kept: bool = False
    cooldown: bool = False
    pause: bool = False
    shared: bool = False

    def __str__(self) -> str:
        return _work(self.task, self.task_id) or "an unnamed holder"


@dataclass(frozen=True, slots=True)
class Waiter:
    """An execution in the queue of a lock.

    Attributes:
        position: its place in the queue, 1 for the first.
        state: "waiting" in a worker slot, or in another process; "parked", its message is kept in
            Redis; "resumed", its message is on its way to a worker; "awaited", it has a place
            in the order of a lock (`lock_order`), and its message has not come, or can come again.
        since: when it began to wait, in seconds since the epoch, by the server's clock.
        names: the names of all the locks that it waits for.
        shared: whether it will share the lock.

    The others are as for a `Holder`. For a parked execution, `host` and `pid` say which process
    received it.
    """

    position: int
    state: str
    owner: str
    execution_id: str
    task: str
    task_id: str
    host: str
    pid: int
    since: float
    names: tuple[str, ...] = ()
    shared: bool = False

    def __str__(self) -> str:
        return _work(self.task, self.task_id) or "an unnamed execution"


@dataclass(frozen=True, slots=True)
class LockInfo(_Plain):
    """A lock at one moment.

    Attributes:
        name: the lock name. A name of more than 120 bytes is shortened in Redis and ends with a
            digest. All functions here accept both forms; a lock's order (`lock_order`) is found by
            the whole name alone.
        at: the moment, in seconds since the epoch, by the server's clock.
        held: how many executions hold the lock.
        waiting: how many executions are in its queue.
        parked: how many of the waiting executions are parked.
        holders: the oldest holders.
        waiters: the first waiters.
        foreign: whether the key of this name is not a lock, but something of another program.
    """

    name: str
    at: float
    held: int = 0
    waiting: int = 0
    parked: int = 0
    holders: tuple[Holder, ...] = ()
    waiters: tuple[Waiter, ...] = ()
    foreign: bool = False

    @property
    def idle(self) -> bool:
        """Whether nobody holds the lock or waits for it."""
        return not (self.held or self.waiting or self.foreign)


@dataclass(frozen=True, slots=True)
class Why(_Plain):
    """What a task does at this moment.

    Attributes:
        task_id: the task's id.
        state: "holds", it holds its lock; "parked"; "resumed", its message is on its way to a
            worker; "waits", it waits for the lock in a worker slot; "awaited", it has a place in
            the order of its lock, and its message has not come; "received", a worker has its
            message and no free slot; "runs" without holding a lock of its own; "retry", it will
            run again; "dropped"; "ended"; "unknown".
        sentence: the whole answer, for people.
        lock: the name of the lock that it holds or waits for; "" for none.
        ahead: how many executions are ahead of it in the queue.
        holders: who holds the lock.
    """

    task_id: str
    state: str
    sentence: str
    lock: str = ""
    ahead: int = 0
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True, slots=True)
class Stats(_Plain):
    """The locks of a namespace, counted one after the other rather than at one moment.

    Attributes:
        locks: how many locks are held or waited for.
        held: how many locks are held.
        contended: how many locks are waited for.
        holders: how many holds there are. An execution with several locks has one for each.
        waiting: how many places there are in the queues of locks. An execution that waits for
            several has one in each. The calls of an order (`lock_order`) count when their message
            has come and waits for its turn.
        parked: how many of these places are of parked executions.
        markers: dedup markers of calls that are queued or run.
        bursts: messages of `lock_debounce` that wait for further calls, or to be published. They
            and their locks are not counted elsewhere.
        foreign: keys with a lock's name that belong to another program.
        oldest_wait: seconds that the longest-waiting first execution of a queue has waited; 0 if
            nobody waits.
        oldest_wait_lock: the name of the lock for which it waits.
        oldest_hold: seconds for which the lock that was held longest has been held, without those
            that cool down; 0 if none is held.
        oldest_hold_lock: its name.
    """

    locks: int = 0
    held: int = 0
    contended: int = 0
    holders: int = 0
    waiting: int = 0
    parked: int = 0
    markers: int = 0
    bursts: int = 0
    foreign: int = 0
    oldest_wait: float = 0.0
    oldest_wait_lock: str = ""
    oldest_hold: float = 0.0
    oldest_hold_lock: str = ""


class Locks:
    """The locks of an app, or of a Redis.

    Args:
        place: a Celery app; or what `Lock` accepts: the URL of a Redis, a redis-py client, or a
            function that returns a client.
        namespace: the prefix of all keys, without an app; None for "relock". An app has its own.
        by: who acts, for the log. Default: the user of this process.
        origin: from where. Default: the host and the process id.

    Attributes:
        app (celery.Celery | None): the Celery app; None without one.
        namespace (str): the prefix of all keys.
        by (str): who acts.
        origin (str): from where.

    Every method raises LockUnavailable if Redis cannot be reached, and LockConfigError if Redis
    refuses: it lacks a permission, or its data has the layout of another version.

    Raises:
        LockConfigError: the settings or the URL do not lead to a Redis.
    """

    def __init__(
        self,
        place: Any,
        namespace: str | None = None,
        *,
        by: str | None = None,
        origin: str | None = None,
    ) -> None:
        self.app: Any = place if hasattr(place, "tasks") else None
        self.by = by or _user()
        self.origin = origin or f"{socket.gethostname()}:{os.getpid()}"
        if self.app is None:
            namespace = engines.NAMESPACE if namespace is None else namespace
            self._engine = engines.engine_for(place, namespace)
        else:
            if namespace is not None:
                raise LockConfigError(
                    f"namespace={namespace!r} cannot be given with an app, which has its own "
                    "(relock_namespace)"
                )
            from .declaration import engine_of

            self._engine = engine_of(self.app)
        backend = self._engine.backend
        if not isinstance(backend, Inspectable):
            raise LockConfigError(
                "with relock_url='memory://' or relock_enabled=False there are no locks outside of "
                "the process that works with them. In tests the fixture `relock` shows them"
            )
        self.namespace = store_settings(self.app).namespace if namespace is None else namespace
        self._backend = backend

    def find(
        self, pattern: str = "*", limit: int | None = None, *, markers: bool = False
    ) -> Iterator[LockInfo]:
        """The locks that are held or waited for, in no order, each with its oldest holder and
        its first waiter. A lock that is acquired or released meanwhile can be missing.

        Args:
            pattern: a pattern for lock names, as in Redis: `*`, `?`, `[a-z]`.
            limit: how many locks to yield at most; None for all.
            markers: yield dedup markers instead. The pattern is then for the task name, a tab and
                the lock name.

        Raises:
            LockConfigError: the limit is below 0.
        """
        if limit is not None and limit < 0:
            raise LockConfigError(f"limit={limit}: use a number from 0, or None for all")
        found = self._find(MARKER + pattern if markers else pattern)
        wanted = (each for each in found if each.name.startswith(MARKER) is markers)
        return islice(wanted, limit)

    def get(self, name: str, most: int = SHOWN) -> LockInfo:
        """The lock of this name. If nobody holds it or waits for it, it is `idle`.

        Args:
            name: the lock name.
            most: how many holders and how many waiters to return.
        """
        return self._get(name, most, most)[1]

    def release(self, name: str, task_id: str | None = None) -> tuple[Holder, ...]:
        """Release a lock, and its order (`lock_order`), by force. Its holders notice at once:
        `self.lock.lost` becomes True, and `lock_on_lost` takes effect. The next waiters get the
        lock. If nobody runs in its order, the order goes on without the message that it waits for,
        such as that of a retry; if the message comes, the call runs out of order.

        A holder goes on with its work unless it checks its lock: see `Hold.fence`.

        Args:
            name: the lock name.
            task_id: release only what this task holds, or its place in the order.

        Returns:
            The holders whose holds were released, and the call without which the order goes on;
            empty if nobody, or not this task, held the lock.

        Raises:
            LockConfigError: the key of this name belongs to another program. Nothing was changed.
        """
        if task_id == "":  # an unset variable; and who holds a `Lock` outside of tasks has no id
            raise LockConfigError(
                "task_id is empty: give the id of a task, or None for all holders"
            )
        released = self._release(name, task_id)
        if name.startswith(LINE):
            return released
        known = {each.execution_id for each in released}
        in_line = self._release(LINE + name, task_id, known)
        return (*released, *(each for each in in_line if each.execution_id not in known))

    def _release(
        self, name: str, task_id: str | None, known: Collection[str] = ()
    ) -> tuple[Holder, ...]:
        """`known`: the executions whose release was already announced."""
        # The task can be any of the holders, so ask for all of them.
        key, lock = self._get(name, SHOWN if task_id is None else 1_000_000, 1)
        if lock.foreign:
            raise LockConfigError(
                f"the key of {name!r} is in use for something else; nothing was changed", name=name
            )
        is_line = name.startswith(LINE)
        if not lock.held and not (is_line and lock.waiting):
            return ()
        if task_id is None:
            told = self._ask.force_release(key)
        else:
            mine = [each.execution_id for each in lock.holders if each.task_id == task_id]
            first = lock.waiters[:1] if is_line and not lock.held else ()
            mine += [each.execution_id for each in first if each.task_id == task_id]
            told = tuple(info for each in mine for info in self._ask.force_release(key, each))
        released = tuple(_holder(info, lock.name) for info in told)
        for holder in released:
            if holder.execution_id not in known:
                how = "order" if is_line and holder.owner == KEPT else ""
                of = (name.removeprefix(LINE),), holder.task, holder.task_id, holder.token
                self._tell("release", *of, how=how)
        return released

    def cancel(self, task_id: str) -> bool:
        """End a parked task, as a revoke does: it leaves the queue, its state is REVOKED, its chord
        is notified, its dedup marker is released, `task_revoked` is sent. No worker is needed. If
        this process dies halfway, the task has left the queue without a state.

        A call whose message is awaited in an order (`lock_order`), such as that of a retry, leaves
        the order and is revoked: all this happens when its message comes to a worker.

        Args:
            task_id: the task's id.

        Returns:
            True if the task was parked, or awaited in an order, and its place is free now. False
            if not; then end it with `app.control.revoke`.

        Raises:
            RelockError: there is no app, the app does not have the task, or the message cannot be
                read: nothing was changed. Or the state REVOKED could not be stored: the task has
                left the queue.
        """
        if self.app is None:
            raise LockConfigError("Cancelling a task needs its app, which stores the state REVOKED")
        found = self._parked(task_id)
        if found is None:
            return False
        if not found.text:
            return self._cancel_awaited(task_id, found)
        request = _request_of(self.app, found.text)
        is_out = found.place.state == "resumed"
        if not self._engine.parking.withdraw(found.place.execution_id):
            return False
        names = [name.removeprefix(LINE) for name in found.place.names]
        self._tell("cancel", names, request.name, task_id)
        _revoke(self.app, request, is_out)
        return True

    def _cancel_awaited(self, task_id: str, found: ParkedMessage) -> bool:
        from .worker.states import show_revoked

        of = found.place.execution_id
        self.app.loader.import_default_modules()
        # Not one that runs: its message can come again.
        if found.place.state != "awaited" or not self._engine.parking.withdraw(of):
            return False
        name = _waiter(found.place, found.name).task
        self._tell("cancel", (found.name.removeprefix(LINE),), name, task_id, how="order")
        if (task := self.app.tasks.get(name)) is not None:
            # A worker that starts later knows of no revoke.
            show_revoked(task, task_id, "cancelled")
        # After that: a worker that hears of it withdraws the call itself.
        _tell_workers(self.app, task_id)
        return True

    def why(self, task_id: str) -> Why:
        """Why a task does not run, or what it does.

        Asks Redis, then the result backend, then the workers, which have a second to answer: five
        round trips at most. If nobody knows of the task, all locks are searched for it, with at
        most `SHOWN` holders of each: its worker may not have answered.

        Args:
            task_id: the task's id.
        """
        found = self._parked(task_id)
        if found is not None and found.text:
            return self._why_parked(task_id, found)
        told = _result(self.app, task_id)
        if told is not None and told.state != "retry":
            return told
        workers, answered = _ask_workers(self.app, task_id) if task_id else (None, True)
        # A retry that runs has the state RETRY until it ends, unless `task_track_started` is set.
        if workers is not None and (told is None or workers[1] == "active"):
            return self._why_in_a_worker(task_id, *workers)
        if task_id and workers is None and told is None and found is None:
            # Also if some workers answer: one with a solo pool does not while it runs a task.
            for each in self._find("*", SHOWN):
                if (known := self._why_there(task_id, (each,))) is not None:
                    return known
        if found is not None and told is None:  # its message is awaited, or can come again
            _, lock = self._get(found.name, SHOWN, SHOWN)
            waits = self._why_waiting(task_id, _waiter(found.place, found.name), lock)
            return self._why_there(task_id, (lock,)) or waits
        if (told := _result(self.app, task_id)) is not None:
            if told.state == "retry" and found is not None:
                place = f"{_for(found.place.names)}, {_ahead(found.place.position - 1)}"
                told = dataclasses.replace(
                    told, sentence=f"{told.sentence}; it has its place {place}"
                )
            return told  # it waits for its retry, or has ended while the workers were asked
        return Why(
            task_id,
            "unknown",
            f"nothing is known of the task {task_id}: it is not parked, "
            + ("in no worker that answers, " if answered else "")
            + "and no result of it was found. It might wait in the broker, or was sent elsewhere, "
            "or was never sent"
            + ("" if self.app else "; with an app, its result and its workers are asked, too"),
        )

    def stats(self) -> Stats:
        """Count all locks. Reads every lock, as `find` does."""
        found: dict[str, Any] = dataclasses.asdict(Stats())
        for lock in self._find("*"):
            if lock.foreign or lock.name.startswith(MARKER):
                found["foreign" if lock.foreign else "markers"] += 1
                continue
            if lock.name.startswith(DEBOUNCE):
                found["bursts"] += lock.waiting
                continue
            is_line = lock.name.startswith(LINE)
            if not is_line:
                found["locks"] += 1
                found["held"] += lock.held > 0
                found["contended"] += lock.waiting > 0
                found["holders"] += lock.held
                since = [each.since for each in lock.holders if not each.cooldown]
                lasts = lock.at - min(since, default=lock.at)
                if lasts > found["oldest_hold"]:
                    found["oldest_hold"], found["oldest_hold_lock"] = lasts, lock.name
            # The other places of a line are of calls that are still at the broker, or run.
            found["waiting"] += lock.parked if is_line else lock.waiting
            found["parked"] += lock.parked
            first = next((each for each in lock.waiters if each.state != "awaited"), None)
            waits = 0.0 if first is None else lock.at - first.since
            if waits > found["oldest_wait"]:
                found["oldest_wait"], found["oldest_wait_lock"] = waits, lock.name
        return Stats(**found)

    def _tell(
        self,
        action: str,
        names: Sequence[str],
        task: str,
        task_id: str,
        token: int = 0,
        *,
        how: str = "",
    ) -> None:
        """Announce a forced release or a cancelled task: in the log, by the signal `lock_forced`,
        and by the event `lock-forced`."""
        from . import signals

        facts = {"action": action, "by": self.by, "origin": self.origin, "fence": token}
        logger.warning(
            _DONE[how or action],
            *(", ".join(map(repr, names)), self.by, self.origin),
            _work(task, task_id) or "unnamed",
            extra=extra("forced", names, task, task_id, **facts),
        )
        known = None if self.app is None else self.app.tasks.get(task)
        signals.send_forced(known, names=tuple(names), task_id=task_id, task_name=task, **facts)
        if self.app is not None:
            fields = {"name": task, "locks": list(names), **facts}
            _send_event(self.app, "lock-forced", task_id, fields)

    @cached_property
    def _ask(self) -> Inspection:
        """Whom to ask. Raises LockConfigError if the layout there is not ours."""
        asks = self._backend.inspection()
        asks.has_layout()
        return asks

    def _find(self, pattern: str, most: int = 1) -> Iterator[LockInfo]:
        seen: set[str] = set()
        for keys in self._ask.keys(pattern):
            new = [key for key in dict.fromkeys(keys) if key not in seen]
            seen.update(new)
            for survey in self._ask.survey(new, most, most) if new else ():
                lock = _lock(survey)
                if not lock.idle:
                    yield lock

    def _get(self, name: str, holders: int, waiters: int) -> tuple[str, LockInfo]:
        """A lock, with so many of its holders and waiters, and its key."""
        return self._get_all((name,), holders, waiters)[0]

    def _get_all(
        self, names: Sequence[str], holders: int, waiters: int
    ) -> list[tuple[str, LockInfo]]:
        """Some locks, each with its key."""
        keys = {name: self._ask.keys_of(name) for name in names}
        every = [key for of_name in keys.values() for key in of_name]
        locks = {each.key: _lock(each) for each in self._ask.survey(every, holders, waiters)}
        found = []
        for name in names:
            key = next((each for each in keys[name] if not locks[each].idle), keys[name][0])
            found.append((key, dataclasses.replace(locks[key], name=name)))
        return found

    def _parked(self, task_id: str) -> ParkedMessage | None:
        return self._ask.parked(ids.short(task_id)) if task_id else None

    def _why_parked(self, task_id: str, found: ParkedMessage) -> Why:
        waiter = _waiter(found.place, found.name)
        _, lock = self._get(found.name, 1, 1)
        waits = duration(found.at - waiter.since)
        ahead = waiter.position - 1
        work = _work(waiter.task, task_id)
        if found.name.startswith(DEBOUNCE):
            sentence = f"{work} is a burst of calls that began {waits} ago: {_pause_of(lock)}"
            return Why(task_id, waiter.state, sentence, found.name, ahead, lock.holders)
        if waiter.state == "resumed":
            sentence = (
                f"{work} has its turn {_for(waiter.names)} after {waits}: its message is on "
                "its way to a worker"
            )
        else:
            sentence = (
                f"{work} is parked: it has waited {waits} {_for(waiter.names)}, "
                f"{_ahead(ahead)}; {self._in_the_way(waiter, lock)}"
            )
        sentence += self._without_a_worker(found.text)
        return Why(task_id, waiter.state, sentence, found.name, ahead, lock.holders)

    def _without_a_worker(self, text: str) -> str:
        """What is to be said of a parked message whose queue no worker consumes."""
        from .worker.parking import channel, home, resume_queue

        if self.app is None:
            return ""
        message = json.loads(text)
        queue, of = message["queue"], message["home"]
        if not queue or of != home(self.app):
            return ""
        if self._engine.backend.consumed(channel(of, resume_queue(queue))):
            return ""
        told = _asked(self.app, "active_queues")
        if told is None or any(queue == each["name"] for every in told.values() for each in every):
            return ""
        return f"; no worker that answers consumes its queue {queue!r}"

    def _why_in_a_worker(self, task_id: str, node: str, state: str, info: dict[str, Any]) -> Why:
        work = _work(str(info.get("name") or ""), task_id)
        where = f"the worker {node}"
        if state != "active":
            when = " until its ETA" if state == "scheduled" else ", which has no free slot for it"
            return Why(task_id, "received", f"{work} waits in {where}{when}")
        names = _names(self.app, info)
        locks = [lock for _, lock in self._get_all(names, SHOWN, SHOWN)] if names else []
        if (known := self._why_there(task_id, locks)) is not None:
            return known
        pid = info.get("worker_pid")
        return Why(
            task_id, "runs", f"{work} runs in {where} (pid {pid}) and holds no lock of its own"
        )

    def _why_there(self, task_id: str, locks: Sequence[LockInfo]) -> Why | None:
        """What a task does at these locks; None if it neither holds one nor waits for one."""
        for lock in locks:
            for holder in lock.holders:
                if holder.task_id == task_id and not (holder.kept or holder.cooldown):
                    sentence = (
                        f"{_has(holder, f'the lock {lock.name!r}', lock.at)}{_where(holder)}; its "
                        f"lease has {holder.lease_left:.0f} s left and is renewed while the "
                        "process lives"
                    )
                    return Why(task_id, "holds", sentence, lock.name, 0, lock.holders)
            for waiter in lock.waiters:
                if waiter.task_id == task_id:
                    return self._why_waiting(task_id, waiter, lock)
        return None

    def _why_waiting(self, task_id: str, waiter: Waiter, lock: LockInfo) -> Why:
        ahead, waits = waiter.position - 1, duration(lock.at - waiter.since)
        if waiter.state == "awaited":
            sentence = (
                f"{waiter} took its place {_for(waiter.names)} {waits} ago, {_ahead(ahead)}: its "
                "message has not come to a worker"
            )
            return Why(task_id, waiter.state, sentence, lock.name, ahead, lock.holders)
        sentence = (
            f"{waiter} has waited {waits} {_for(waiter.names)} in process {waiter.pid} of "
            f"{waiter.host}, {_ahead(ahead)}; {self._in_the_way(waiter, lock)}"
        )
        return Why(task_id, "waits", sentence, lock.name, ahead, lock.holders)

    def _in_the_way(self, waiter: Waiter, lock: LockInfo) -> str:
        """Who holds what an execution waits for: this lock, and the others that it needs."""
        if len(waiter.names) == 1:
            shares = bool(lock.holders) and lock.holders[0].shared and waiter.shared
            return _held_by(lock, waiter, "it") + (OUTRANKED if shares else "")
        locks = [each for _, each in self._get_all(waiter.names, 1, 1)]
        held = [_held_by(each, waiter, repr(each.name)) for each in locks if each.holders]
        return "; ".join(held) or "nobody holds them at this moment"


def _for(names: Sequence[str]) -> str:
    if names[0].startswith(LINE):
        return f"in the order of {names[0].removeprefix(LINE)!r}"
    return f"for the lock{'s' * (len(names) > 1)} {' and '.join(map(repr, names))}"


def _ahead(number: int) -> str:
    return f"with {number} ahead of it" if number else "first in its queue"


def _has(holder: Holder, what: str, at: float) -> str:
    held = duration(at - holder.since)
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
        return ", and it is kept for the next step, or the retry, of its workflow"
    return f", in process {holder.pid} of {holder.host}"


def _held_by(lock: LockInfo, waiter: Waiter, what: str) -> str:
    if not lock.holders:
        ahead = [each for each in lock.waiters[:1] if each.position < waiter.position]
        if ahead and ahead[0].state == "awaited":
            return f"the message of {ahead[0]}, which is first, is awaited"
        return f"nobody holds {what} at this moment"
    first, others = lock.holders[0], lock.held - 1
    return f"{_has(first, what, lock.at)}{_where(first)}" + (
        f", and {others} more hold{'s' * (others == 1)} it" if others else ""
    )


def _pause_of(lock: LockInfo) -> str:
    """What a burst of debounced calls waits for."""
    if lock.holders:
        left = duration(lock.holders[0].lease_left)
        return f"it is sent {left} from now if no more calls come (lock_debounce)"
    return (
        "no more calls came, and a worker has to publish its message: a worker whose app has the "
        "caller's name, and whose broker_url (or broker_write_url) is spelt the same"
    )


def _result(app: Any, task_id: str) -> Why | None:
    """What the result backend says, if the task has ended or will be retried."""
    if app is None:
        return None
    from celery.states import READY_STATES, RETRY

    try:
        app.loader.import_default_modules()  # in a Django project it sets up the backend, too
        meta = app.backend.get_task_meta(task_id)
    except NotImplementedError:
        return None  # no result backend
    except Exception as error:  # noqa: BLE001  # whatever a backend raises
        logger.warning("Cannot read the state of %s: %s", task_id, error)
        return None
    state, result = str(meta.get("status", "")), meta.get("result")
    work = _work(str(meta.get("name") or ""), task_id)
    if isinstance(result, dict) and result.get("relock") == "dropped":
        lock = str(result.get("lock") or "")
        return Why(task_id, "dropped", f"{work} was dropped: {result.get('reason')}", lock)
    if state in READY_STATES:
        said = "" if state == "SUCCESS" else f", {type(result).__name__}: {result}"
        return Why(task_id, "ended", f"{work} has ended: {state}{said}")
    if state == RETRY:
        because = "" if result is None else f": {result}"
        return Why(task_id, "retry", f"{work} will run again{because}")
    return None


def _ask_workers(app: Any, task_id: str) -> tuple[tuple[str, str, dict[str, Any]] | None, bool]:
    """The worker that has a task, in which of its lists, and what it knows about the task; and
    whether any worker answered."""
    replies = {} if app is None else _asked(app, "query_task", [task_id]) or {}
    for node, tasks in replies.items():
        if isinstance(tasks, dict) and task_id in tasks:
            state, info = tasks[task_id]
            return (node, state, info), True
    return None, bool(replies)


def _asked(app: Any, question: str, *args: Any) -> dict[str, Any] | None:
    """The answers of the workers, by worker; None if they cannot be asked."""
    try:
        return getattr(app.control.inspect(timeout=_WORKERS), question)(*args) or {}
    except Exception as error:  # noqa: BLE001  # whatever a broker's client raises
        logger.warning("Cannot ask the workers: %s", error)
        return None


def _names(app: Any, info: dict[str, Any]) -> tuple[str, ...]:
    """The lock names of a call that a worker described."""
    from .declaration import declaration, is_locked

    app.loader.import_default_modules()
    task = app.tasks.get(info.get("name"))
    if task is None or not is_locked(type(task)):
        return ()
    try:
        call = info.get("relock") or {}
        declared = declaration(type(task)).of_call(call.get("options") or {}, call.get("prefix"))
        return declared.names_of_call(task, info.get("args"), info.get("kwargs")) or ()
    except RelockError as error:
        logger.warning("Cannot determine the locks of %s: %s", info.get("name"), error)
        return ()


def _request_of(app: Any, text: str) -> Any:
    """A parked message, as a worker would have received it.

    Raises:
        RelockError: the app does not have its task, or the message cannot be read.
    """
    from celery.worker.request import Request
    from celery.worker.strategy import proto1_to_proto2

    from .worker.parking import message_in

    message = message_in(app, text)
    try:
        app.loader.import_default_modules()
        if "task" in message.headers:
            body, headers, decoded, utc = message.body, message.headers, False, True
        else:
            body, headers, decoded, utc = proto1_to_proto2(message, message.payload)
        task = app.tasks.get(headers["task"])
        if task is not None:
            return Request(
                message,
                app=app,
                task=task,
                hostname=socket.gethostname(),
                body=body,
                headers=headers,
                decoded=decoded,
                utc=utc,
            )
    except Exception as error:
        raise RelockError(f"the parked message cannot be read: {error!r}") from error
    raise RelockError(
        f"the parked message is of the task {headers['task']!r}, which this app "
        f"({app.main or 'without a name'}) does not have: use the app that sent it"
    )


def _revoke(app: Any, request: Any, is_out: bool) -> None:
    """Do what a worker does with a revoked message. `is_out`: the broker can have a copy of it."""
    from celery.worker.state import revoked

    # Its receiver of `task_revoked` clears away what the call leaves.
    from .worker import revocation  # noqa: F401
    from .worker.states import stores_no_result

    revoked.add(request.id)
    try:
        request.revoked()
    except Exception as error:
        raise RelockError(
            f"{request.name}[{request.id}] has left the queue of its lock, and its state REVOKED "
            f"could not be stored: {error!r}"
        ) from error
    finally:
        revoked.discard(request.id)
    # `state`: without it a monitor would go on showing BLOCKED (`worker.events.show`).
    fields = {"terminated": False, "signum": None, "expired": False, "state": "REVOKED"}
    _send_event(app, "task-revoked", request.id, fields)
    if is_out and stores_no_result(request.task):
        # No stored state tells its worker that it was cancelled.
        _tell_workers(app, request.id)


def _tell_workers(app: Any, task_id: str) -> None:
    try:
        app.control.revoke(task_id)
    except Exception as error:  # noqa: BLE001  # whatever a broker's client raises
        logger.warning("Cannot tell the workers that %s is revoked: %s", task_id, error)


def _send_event(app: Any, kind: str, task_id: str, fields: dict[str, Any]) -> None:
    from .worker.events import dispatcher

    try:
        with dispatcher(app, kind) as sender:
            sender.send(kind, uuid=task_id, **fields)
    except Exception as error:  # noqa: BLE001  # whatever a broker's client raises
        logger.warning("Cannot send the event %s: %s", kind, error)


def _lock(survey: Survey) -> LockInfo:
    return LockInfo(
        survey.name,
        survey.at,
        survey.held,
        survey.waiting,
        survey.parked,
        tuple(_holder(each, survey.name) for each in survey.holds),
        tuple(_waiter(each, survey.name) for each in survey.places),
        survey.foreign,
    )


def _holder(info: HoldInfo, name: str) -> Holder:
    told, cools = _told(info.label), info.execution_id.startswith(COOLDOWN)
    if name.startswith(MARKER):  # its label is for `dedup.marker`: task id, execution id
        told = name.split("\t")[1], info.label.partition("\t")[0].rpartition(" ")[0], "", 0
    pauses = info.execution_id == PAUSE
    return Holder(
        info.fence,
        ids.full(info.owner),
        info.execution_id,
        *told,
        since=info.fence / 1e6,
        lease_left=info.remaining,
        kept=info.attempt_id == KEPT and not cools and not pauses,
        cooldown=cools,
        pause=pauses,
        shared=info.shared,
    )


def _waiter(place: Place, name: str) -> Waiter:
    task, task_id, host, pid = _told(place.label)
    return Waiter(
        place.position,
        place.state,
        ids.full(place.owner),
        place.execution_id,
        task,
        task_id or ids.full(place.task),
        host,
        pid,
        place.since,
        place.names or (name,),
        place.shared,
    )


def _told(label: str) -> tuple[str, str, str, int]:
    """Task, task id, host and process id, as `engine.events.label_of` wrote them."""
    found = _LABEL.fullmatch(label)
    if found is None:
        return label, "", "", 0
    return found["task"], found["id"] or "", found["host"], int(found["pid"])


def _work(task: str, task_id: str) -> str:
    if task and task_id:
        return f"{task}[{task_id}]"
    return f"the task {task_id}" if task_id else task


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return f"uid {os.getuid()}"
