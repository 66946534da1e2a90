"""Locks in memory change nothing for coroutines: every test that asks for nothing but locks runs
once more on them. And what `relock_enabled=False` is to coroutines."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from celery_relock import Lock as ThreadLock
from celery_relock import LockedTask, engines
from celery_relock.asyncio import Lock
from celery_relock.engine.protocol import LockState
from tests.asyncio import test_cancellation, test_lock
from tests.support import wait_for
from tests.support.coroutines import run

MEMORY = "memory://"

for _module in (test_cancellation, test_lock):
    for _name, _test in vars(_module).items():
        if _name.startswith("test_") and {*inspect.signature(_test).parameters} <= {
            "lock",
            "state",
        }:
            globals()[_name] = _test


@pytest.fixture
def lock(namespace: str) -> Callable[..., Lock]:
    def make(name: str = "a", redis: Any = MEMORY, **options: Any) -> Lock:
        return Lock(redis, name, namespace=namespace, **options)

    return make


@pytest.fixture
def state(namespace: str) -> Callable[[], LockState]:
    backend = engines.engine_for(MEMORY, namespace).backend
    return lambda: backend.inspect("a")


def test_threads_and_coroutines_wait_for_one_another(
    lock: Callable[..., Lock], state: Callable[[], LockState], namespace: str
) -> None:
    order: list[str] = []
    other = ThreadLock(MEMORY, "a", namespace=namespace)

    def in_a_thread() -> None:
        with other:
            order.append("thread")

    async def main() -> None:
        async with lock():
            order.append("first")
            thread = threading.Thread(target=in_a_thread)
            thread.start()
            await asyncio.to_thread(wait_for, lambda: state().waiting == 1)
            later = asyncio.create_task(behind())
            while state().waiting < 2:
                await asyncio.sleep(0)
        await later
        thread.join()

    async def behind() -> None:
        async with lock():
            order.append("coroutine")

    run(main())
    assert order == ["first", "thread", "coroutine"]


@pytest.mark.parametrize("settings", [{"relock_enabled": False}, {"relock_url": MEMORY}])
def test_the_lock_of_a_call_follows_the_settings(settings: dict[str, Any], namespace: str) -> None:
    app = Celery(namespace, set_as_current=False)
    app.conf.update(relock_namespace=namespace, **settings)

    @app.task(base=LockedTask, lock_key="account:{account}", shared=False)
    def charge(account: int) -> None: ...

    async def main() -> None:
        async with charge.async_lock_for(42) as held:
            assert bool(held.fence) is ("relock_url" in settings)
            other = charge.async_lock_for(42)
            got = await asyncio.create_task(other.acquire(blocking=False))
            assert got is ("relock_enabled" in settings)

    run(main())
