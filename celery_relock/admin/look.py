"""How locks are read and counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from ..engine import ids
from ..engine.events import duration
from ..engine.inspection import Holder, Inspectable, Inspection, LockInfo, ParkedMessage, Plain
from ..engine.protocol import DEBOUNCE, LINE, MARKER
from ..errors import LockUnavailable

# Holders and waiters of one lock to show by default.
SHOWN = 100


@dataclass(frozen=True, slots=True)
class Why(Plain):
    """What a task does at this moment.

    Attributes:
        task_id: the task's id.
        state: "holds", it holds its lock; "parked"; "owed", parked, and its turn has come;
            "resumed", its message is on its way to a worker; "waits", it waits for the lock in a
            worker slot; "awaited", it has a place in the order of its lock, and its message has not
            come; "received", a worker has its message and no free slot; "runs" without holding a
            lock of its own; "retry", it waits for its retry; "dropped"; "ended"; "lost", it has a
            state that says that it was parked or had begun, and nothing else is known of it any
            more; "unknown".
        sentence: the whole answer, for people.
        lock: the name of the lock that it holds or waits for, or that is kept for its retry, of
            several one; "" for none.
        ahead: how many executions are ahead of it in the queue of that lock.
        holders: who holds that lock.
    """

    task_id: str
    state: str
    sentence: str
    lock: str = ""
    ahead: int = 0
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True, slots=True)
class Stats(Plain):
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
            # In a line those that have come wait for the first call, if that has not.
            came = (each for each in lock.waiters if each.state != "awaited" or lock.parked)
            first = next(came, None)
            waits = 0.0 if first is None else lock.at - first.since
            if waits > found["oldest_wait"]:
                found["oldest_wait"], found["oldest_wait_lock"] = waits, lock.name
        return cls(**found)


def once_each(found: Iterable[Iterable[LockInfo]]) -> Iterator[LockInfo]:
    """The locks like one of several patterns: a name can be like more of them."""
    seen: set[str] = set()
    for lock in chain.from_iterable(found):
        if lock.name not in seen:
            seen.add(lock.name)
            yield lock


def permits_in(locks: Sequence[LockInfo]) -> frozenset[str] | None:
    """The tokens to pass to `release(permits=)`, so that it frees only those who were shown; who
    shares a lock, and the first call of an order where nobody runs, by its execution. None, for
    all, if not all holders were shown."""
    if any(lock.held > len(lock.holders) for lock in locks):
        return None
    meant = {permit_of(each) for lock in locks for each in lock.holders}
    lines = (lock for lock in locks if lock.name.startswith(LINE) and not lock.held)
    return frozenset(meant | {each.execution_id for line in lines for each in line.waiters[:1]})


def permit_of(holder: Holder) -> str:
    """What `permits_in` has of a holder."""
    return holder.execution_id if holder.shared else str(holder.token)


def held_for(lock: LockInfo, holder: Holder) -> str:
    """For how long a holder has a lock, for people; "" in an order: it is not known there."""
    return "" if lock.name.startswith(LINE) else duration(lock.at - holder.since)


class Look:
    """Reads locks, for `Locks` and `why`."""

    def __init__(self, backend: Inspectable) -> None:
        self._backend = backend

    @cached_property
    def inspection(self) -> Inspection:
        """Whom to ask. Raises LockConfigError if the layout there is not ours."""
        asks = self._backend.inspection()
        # In a cluster the server that knows can be away, and that of the lock be there.
        with suppress(LockUnavailable):
            asks.has_layout()
        return asks

    def find(
        self, pattern: str, holders: int = 1, waiters: int = 1, *, past_cooldowns: bool = False
    ) -> Iterator[LockInfo]:
        """The locks like a pattern, each with so many of its holders and waiters; of a lock whose
        oldest holder cools down with all holders, if one that does not is looked for."""
        seen: set[str] = set()
        for keys in self.inspection.keys(pattern):
            new = [key for key in dict.fromkeys(keys) if key not in seen]
            seen.update(new)
            locks = self.inspection.survey(new, 1, 1) if new else []
            for key, first in zip(new, locks, strict=True):
                lock, cools = first, any(each.cooldown for each in first.holders)
                if holders > 1 and max(lock.held, lock.waiting) > 1:
                    # By a script of its own: all waiters of fifty locks keep a server busy.
                    (lock,) = self.inspection.survey([key], holders, waiters)
                elif past_cooldowns and cools and lock.held > 1:
                    (lock,) = self.inspection.survey([key], lock.held, 1)
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
        locks = dict(zip(every, self.inspection.survey(every, holders, waiters), strict=True))
        found = []
        for name in names:
            key = next((each for each in keys[name] if not locks[each].idle), keys[name][0])
            found.append((key, dataclasses.replace(locks[key], name=name)))
        return found

    def parked(self, task_id: str) -> ParkedMessage | None:
        """The message of a task that is parked, or awaited in an order."""
        return self.inspection.parked(ids.short(task_id)) if task_id else None
