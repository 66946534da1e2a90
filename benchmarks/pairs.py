"""Uncontended: one process acquires and releases a lock that nobody else wants."""

from __future__ import annotations

import functools
import statistics
import time

import redis

from benchmarks.contenders import LIMIT, UNCONTENDED, Held
from benchmarks.rounds import interleave, ratios, spread, table
from celery_relock.lock import Lock

#: The backends that tests use instead of a Redis.
IN_MEMORY = "celery-relock `Lock`, `memory://`"


def measure(url: str, rounds: int, pairs: int) -> str:
    """Pairs per second as a ratio to the limit, and the server's time for a pair."""
    client = redis.Redis.from_url(url)
    locks = {name: make(client, "account:42") for name, make in UNCONTENDED.items()}
    locks[IN_MEMORY] = Lock("memory://", "account:42")
    for lock in locks.values():
        _time(lock, pairs)
    seconds = interleave(
        {name: functools.partial(_time, lock, pairs) for name, lock in locks.items()}, rounds
    )
    rows = [
        (
            name,
            spread(ratios(seconds[LIMIT], seconds[name])),
            "none" if name == IN_MEMORY else f"{_server_micros(client, lock, pairs):.0f}",
        )
        for name, lock in locks.items()
    ]
    title = "pairs/s, ratio to the limit: median (middle half)"
    return table(["contender", title, "server, µs per pair"], rows)


def _time(lock: Held, pairs: int) -> float:
    started = time.perf_counter()
    for _ in range(pairs):
        lock.acquire()
        lock.release()
    return time.perf_counter() - started


def _server_micros(client: redis.Redis, lock: Held, pairs: int) -> float:
    """The server's time for the commands of a pair, the median of three tries."""
    tries = []
    for _ in range(3):
        client.config_resetstat()
        _time(lock, pairs)
        stats = client.info("commandstats")
        # A script's time includes the commands that it calls; contenders that take the lock with a
        # plain SET have fewer than two scripts to a pair.
        scripts = [each for name, each in stats.items() if "eval" in name]
        micros = sum(each["usec"] for each in scripts)
        if sum(each["calls"] for each in scripts) < 2 * pairs:
            micros += stats["cmdstat_set"]["usec"]
        tries.append(micros / pairs)
    return statistics.median(tries)
