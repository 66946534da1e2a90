"""Coroutines that wait for one lock in one process: the memory of each, and the time of a
hand-over; for our lock, and for redis.asyncio's own lock, which polls."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis.asyncio

from benchmarks.rounds import table
from celery_relock.asyncio import Lock

# Seconds between two tries of a lock that polls: redis-py's default.
_POLL = 0.1


def measure(url: str, waiters: int, pairs: int = 1000) -> str:
    """A table: the memory and the hand-over with so many waiters, and an uncontended pair."""
    rows = []
    for name, lock in (("celery-relock", _ours), ("redis.asyncio", _theirs)):
        # Polling waiters get the lock by chance, at most one in 0.1 s: a few waiters show that.
        count = waiters if lock is _ours else min(waiters, 50)
        kib, hand = asyncio.run(_contended(lock, url, count))
        pair = asyncio.run(_pair(lock, url, pairs))
        shown = (f"{kib:.1f}", f"{hand * 1000:.2f}", f"{pair * 1e6:.0f}")
        rows.append((name, f"{count:,}", *shown))
    head = ["lock", "waiting coroutines", "KiB each", "ms from hand to hand", "µs uncontended"]
    return table(head, rows)


def _ours(url: str) -> Callable[[str], Any]:
    return lambda name: Lock(url, name, namespace="bench")


def _theirs(url: str) -> Callable[[str], Any]:
    client = redis.asyncio.Redis.from_url(url)
    return lambda name: client.lock(f"theirs:{name}", timeout=30, sleep=_POLL)


async def _contended(
    lock: Callable[[str], Callable[[str], Any]], url: str, count: int
) -> tuple[float, float]:
    make = lock(url)
    served = 0

    async def work() -> None:
        nonlocal served
        async with make("many"):
            served += 1

    async with make("many"):
        gc.collect()
        before = _resident()
        tasks = [asyncio.create_task(work()) for _ in range(count)]
        if lock is _ours:
            while (await make("many")._engine.inspect("many")).waiting < count:
                await asyncio.sleep(0.1)
        else:
            await asyncio.sleep(1)
        kib = (_resident() - before) / 1024 / count
    began = time.perf_counter()
    await asyncio.gather(*tasks)
    assert served == count
    return kib, (time.perf_counter() - began) / count


async def _pair(lock: Callable[[str], Callable[[str], Any]], url: str, count: int) -> float:
    make = lock(url)
    async with make("one"):
        pass
    began = time.perf_counter()
    for _ in range(count):
        async with make("one"):
            pass
    return (time.perf_counter() - began) / count


def _resident() -> int:
    """The bytes of this process's memory."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096
