"""Memory: what a held lock takes up in the server."""

from __future__ import annotations

import redis

from benchmarks.contenders import COMMANDS, KEPT, LIMIT, UNCONTENDED, Make
from benchmarks.rounds import table

_MANY = 2000

# No locks of their own.
_NOT = (LIMIT, KEPT, COMMANDS)


def measure(url: str) -> str:
    """Bytes of the keys of one held lock, how many keys, and the server's growth by many locks."""
    rows = [(name, *_weigh(url, make)) for name, make in UNCONTENDED.items() if name not in _NOT]
    head = ["contender", "`MEMORY USAGE`, bytes per lock", "keys per lock"]
    return table([*head, f"growth of the server by {_MANY:,} locks, bytes per lock"], rows)


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
