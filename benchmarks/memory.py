"""Memory: how many bytes of the server a lock, a waiter, a message or a tombstone uses."""

from __future__ import annotations

from collections.abc import Callable

import redis

from benchmarks.contenders import COMMANDS, KEPT, LIMIT, UNCONTENDED, Make
from benchmarks.growth import Bench
from benchmarks.rounds import table

_MANY = 2000

# No locks of their own.
_NOT = (LIMIT, KEPT, COMMANDS)


def measure(url: str) -> str:
    """The bytes and the number of a held lock's keys, and the server's growth by many locks."""
    rows = [(name, *_weigh(url, make)) for name, make in UNCONTENDED.items() if name not in _NOT]
    head = ["contender", "`MEMORY USAGE`, bytes per lock", "keys per lock"]
    return table([*head, f"growth of the server by {_MANY:,} locks, bytes per lock"], rows)


def redis_bytes(url: str) -> str:
    """The server's bytes for each item that a namespace has many of, by the server's growth."""
    rows = []
    for name, prepare in KINDS.items():
        with redis.Redis.from_url(url) as client:
            client.flushdb()
            bench = Bench(url, "relock")
            prepare(bench, 1)
            before = _dataset(client)
            prepare(bench, _MANY)
            rows.append((name, f"{(_dataset(client) - before) / _MANY:.0f}"))
            bench.close()
            client.flushdb()
    return table(["one more", "bytes of the server"], rows)


def _held(bench: Bench, count: int) -> None:
    for number in range(count):
        bench.held(bench.new(), f"account:{count}:{number}")


def _holder(bench: Bench, count: int) -> None:
    for _ in range(count):
        bench.held(bench.new(), "semaphore", limit=1_000_000)


def _ended(bench: Bench, count: int) -> None:
    for _ in range(count):
        execution = bench.held(bench.new() + "-as-long-as-ids", "account:42")
        bench.release(execution, "account:42", ended="execution", remember=3600.0)


KINDS: dict[str, Callable[[Bench, int], object]] = {
    "held lock": _held,
    "holder of one semaphore": _holder,
    "execution that waits in a process": Bench.waiters,
    "parked execution, with a message of 500 bytes": Bench.parked,
    "execution that has ended, for as long as it is remembered": _ended,
}


def _weigh(url: str, make: Make) -> tuple[object, ...]:
    with redis.Redis.from_url(url) as client:
        client.flushdb()
        first = make(client, "warm-up")
        first.acquire()
        first.release()
        before = set(client.scan_iter(count=1000))
        lock = make(client, "account:42")
        lock.acquire()
        keys = set(client.scan_iter(count=1000)) - before
        size = sum(client.memory_usage(key) for key in keys)
        lock.release()
        return size, len(keys), f"{_growth(client, make):.0f}"


def _growth(client: redis.Redis, make: Make) -> float:
    before = _dataset(client)
    locks = [make(client, f"account:{number}") for number in range(_MANY)]
    for lock in locks:
        lock.acquire()
    grown = _dataset(client) - before
    for lock in locks:
        lock.release()
    return grown / _MANY


def _dataset(client: redis.Redis) -> int:
    return int(client.info("memory")["used_memory"])
