"""Locks of coroutines at whichever server Sentinels call the master."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from celery_relock.asyncio import Lock
from celery_relock.backends.redis import sentinel
from tests.support.coroutines import run, until
from tests.support.sentinel import Watched

pytestmark = pytest.mark.slow


def test_a_failover_is_waited_for_and_what_is_held_and_waited_for_outlives_it(
    watched: Callable[..., Watched], namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sentinel, "LOOK_EVERY", 0.0)
    service = watched()
    url = f"{service.url}?master_name={service.service}"
    fences: list[int] = []

    async def waiter() -> None:
        async with Lock(url, "a", namespace=namespace) as one:
            fences.append(one.fence)

    async def main() -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        async with Lock(url, "a", timeout=20, namespace=namespace) as one:
            fences.append(one.fence)
            waits = asyncio.create_task(waiter())
            await until(lambda: one._engine.inspect("a").waiting)
            old = await asyncio.to_thread(service.take_away, "killed")
            # The loop's own threads are busy for longer than a lease.
            loop.set_default_executor(ThreadPoolExecutor(1))
            done = asyncio.run_coroutine_threadsafe(over.wait(), loop)
            busy = asyncio.create_task(asyncio.to_thread(done.result))
            since = one._lease.renewed
            async with Lock(url, "b", namespace=namespace):
                pass
            await until(lambda: one._lease.renewed != since)
            one.check()
            over.set()
            await busy
            assert (await asyncio.to_thread(service.moved_from, old)).port != old.port
        await waits

    run(main(), 90)
    assert fences == sorted(set(fences))
    assert len(fences) == 2
