"""All that a backend has of some locks, read past its verbs, as plain values."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any, NamedTuple

from tests.support.desk import Desk
from tests.support.memory_desk import MemoryDesk


class RealHold(NamedTuple):
    attempt_id: str
    owner: str
    fence: int
    shared: bool


@dataclass
class RealLock:
    """Live holds by execution and when each lease ends, the executions in the queue in order with
    what is known of each, and whether each key that exists has a lifetime."""

    holds: dict[str, RealHold] = field(default_factory=dict)
    lapsed: set[str] = field(default_factory=set)
    ends: dict[str, int] = field(default_factory=dict)
    queue: dict[str, dict[str, Any]] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    lifetimes: dict[str, int] = field(default_factory=dict)

    @property
    def fences(self) -> set[int]:
        return {hold.fence for hold in self.holds.values()}


@singledispatch
def read(desk: Desk, names: tuple[str, ...]) -> dict[str, RealLock]:
    pipe = desk.client.pipeline(transaction=True)
    for name in names:
        keys = desk.keys.lock(name), desk.keys.of_lock("q", name), desk.keys.of_lock("w", name)
        pipe.hgetall(keys[0]).zrange(keys[1], 0, -1).hgetall(keys[2])
        pipe.hgetall(f"{desk.keys.prefix(0)}m:{name}")
        pipe.pttl(keys[0]).pttl(keys[1]).pttl(keys[2])
    replies = iter(pipe.execute())
    return {name: _lock(*(next(replies) for _ in range(7))) for name in names}


@read.register
def _(desk: MemoryDesk, names: tuple[str, ...]) -> dict[str, RealLock]:
    locks = desk.backend.state.locks
    return {name: _lock_in_memory(desk, locks.get(name)) for name in names}


def _lock_in_memory(desk: MemoryDesk, lock: Any) -> RealLock:
    if lock is None:
        return RealLock(lifetimes={"holds": -2, "queue": -2, "waiters": -2})
    alive = {run: hold for run, hold in lock.holds.items() if hold.expiry > 0.001}
    places = lock.queue.items()
    first = {run for run, place in places if next(iter(place.limits)) == lock.name}
    texts = {run: place.request.message for run, place in places if place.parked}
    life = -2 if not places else -1 if lock.messages else 1
    return RealLock(
        {run: RealHold(h.attempt_id, h.owner, h.fence, h.shared) for run, h in alive.items()},
        lock.holds.keys() - alive.keys(),
        {run: int(hold.expiry * 1000) for run, hold in alive.items()},
        {run: desk.place(run, lock.name) for run in lock.queue},
        {run: texts[run] if run in first else "" for run in lock.messages},
        {"holds": 1 if lock.holds else -2, "queue": life, "waiters": life},
    )


class RealParking(NamedTuple):
    """What a backend has of parked executions beside their locks: which lock each is at (and each
    task's execution), what is to be looked at some time, by home who is owed a sender, and how many
    messages of how many bytes it counts."""

    index: dict[str, str]
    due: set[str]
    owed: dict[str, set[str]]
    counted: tuple[int, int]


@singledispatch
def read_parking(desk: Desk, homes: tuple[str, ...]) -> RealParking:
    prefix = desk.keys.prefix(0)
    pipe = desk.client.pipeline(transaction=True).hgetall(f"{prefix}parked")
    pipe.zrange(desk.keys.due(), 0, -1).hmget(desk.keys.meta(), "parked", "bytes")
    for home in homes:
        pipe.zrange(f"{prefix}owed:{home}", 0, -1)
    index, due, counted, *owed = pipe.execute()
    return RealParking(
        {key.decode(): value.decode() for key, value in index.items()},
        {member.decode() for member in due},
        {home: {run.decode() for run in runs} for home, runs in zip(homes, owed, strict=True)},
        (int(counted[0] or 0), int(counted[1] or 0)),
    )


@read_parking.register
def _(desk: MemoryDesk, homes: tuple[str, ...]) -> RealParking:
    state = desk.backend.state
    of_task = {f"#{task}": run for task, run in state.of_task.items()}
    return RealParking(
        {run: next(iter(place.limits)) for run, place in state.parked.items()} | of_task,
        {f"l {name}" for name in state.look_at} | {f"r {run}" for run in state.resume_at},
        {home: set(state.owed[home]) for home in homes},
        (len(state.parked), state.parked_bytes),
    )


def _lock(
    holds: dict[bytes, bytes],
    queue: list[bytes],
    waiters: dict[bytes, bytes],
    messages: dict[bytes, bytes],
    *lifetimes: int,
) -> RealLock:
    found = RealLock()
    for run, record in holds.items():
        if run.startswith(b"@"):
            assert run[1:] in holds, f"{run!r} has no hold"
            continue
        assert b"@" + run in holds, f"nobody knows who {run!r} is"
        expiry, fence, attempt_id, owner, letter = record.decode().split(" ")
        if int(expiry) > 1:
            found.holds[run.decode()] = RealHold(attempt_id, owner, int(fence), letter.isupper())
            found.ends[run.decode()] = int(expiry)
        else:
            found.lapsed.add(run.decode())
    assert set(queue) == set(waiters), "the queue and what is known of the waiters differ"
    found.queue = {run.decode(): json.loads(waiters[run]) for run in queue}
    found.messages = {run.decode(): text.decode() for run, text in messages.items()}
    found.lifetimes = dict(zip(("holds", "queue", "waiters"), lifetimes, strict=True))
    return found
