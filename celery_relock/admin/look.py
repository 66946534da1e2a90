"""Locks as people see them, and how they are read."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..engine import ids
from ..engine.inspection import Inspectable, Inspection, ParkedMessage, Place, Survey
from ..engine.protocol import COOLDOWN, DEBOUNCE, KEPT, LINE, MARKER, PAUSE, HoldInfo

# Holders and waiters of one lock to show by default.
SHOWN = 100
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
        return work_of(self.task, self.task_id) or "an unnamed holder"


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
        return work_of(self.task, self.task_id) or "an unnamed execution"


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

    @classmethod
    def of(cls, locks: Iterable[LockInfo]) -> Stats:
        """Count these locks."""
        found: dict[str, Any] = dataclasses.asdict(cls())
        for lock in locks:
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
        return cls(**found)


class Look:
    """Reads locks, for `Locks` and `why`."""

    def __init__(self, backend: Inspectable) -> None:
        self._backend = backend

    @cached_property
    def inspection(self) -> Inspection:
        """Whom to ask. Raises LockConfigError if the layout there is not ours."""
        asks = self._backend.inspection()
        asks.has_layout()
        return asks

    def find(self, pattern: str, most: int = 1) -> Iterator[LockInfo]:
        """The locks like a pattern, each with so many of its holders and waiters."""
        seen: set[str] = set()
        for keys in self.inspection.keys(pattern):
            new = [key for key in dict.fromkeys(keys) if key not in seen]
            seen.update(new)
            for survey in self.inspection.survey(new, most, most) if new else ():
                lock = _lock(survey)
                if not lock.idle:
                    yield lock

    def get(self, name: str, holders: int, waiters: int) -> tuple[str, LockInfo]:
        """A lock, with so many of its holders and waiters, and its key."""
        return self.get_all((name,), holders, waiters)[0]

    def get_all(
        self, names: Sequence[str], holders: int, waiters: int
    ) -> list[tuple[str, LockInfo]]:
        """Some locks, each with its key."""
        keys = {name: self.inspection.keys_of(name) for name in names}
        every = [key for of_name in keys.values() for key in of_name]
        locks = {each.key: _lock(each) for each in self.inspection.survey(every, holders, waiters)}
        found = []
        for name in names:
            key = next((each for each in keys[name] if not locks[each].idle), keys[name][0])
            found.append((key, dataclasses.replace(locks[key], name=name)))
        return found

    def parked(self, task_id: str) -> ParkedMessage | None:
        """The message of a task that is parked, or awaited in an order."""
        return self.inspection.parked(ids.short(task_id)) if task_id else None


def _lock(survey: Survey) -> LockInfo:
    return LockInfo(
        survey.name,
        survey.at,
        survey.held,
        survey.waiting,
        survey.parked,
        tuple(holder_of(each, survey.name) for each in survey.holds),
        tuple(waiter_at(each, survey.name) for each in survey.places),
        survey.foreign,
    )


def holder_of(info: HoldInfo, name: str) -> Holder:
    """The holder, as people see it."""
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


def waiter_at(place: Place, name: str) -> Waiter:
    """The execution that has a place in the queue of a lock."""
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


def work_of(task: str, task_id: str) -> str:
    """`task[id]`, with what is known."""
    if task and task_id:
        return f"{task}[{task_id}]"
    return f"the task {task_id}" if task_id else task
