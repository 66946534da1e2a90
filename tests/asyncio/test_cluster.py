"""Locks of coroutines in a Redis Cluster: the same as those of tasks and threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis.asyncio

import celery_relock
from celery_relock.asyncio import Lock
from celery_relock.backends.redis.backend import RedisBackend
from celery_relock.engine.engine import MOST_CALLS
from celery_relock.engine.protocol import LockState
from celery_relock.errors import LockConfigError, LockUnavailable
from celery_relock.lock import LockNotOwned
from tests.asyncio.test_cancellation import held as waits
from tests.asyncio.test_cancellation import wherever_it_is_cancelled
from tests.backends.redis.test_cluster_failover import gone
from tests.support import RedisServer, wait_for
from tests.support.cluster import ClusterServers
from tests.support.coroutines import run, until

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(cluster_with_replicas: ClusterServers) -> Iterator[ClusterServers]:
    """All nodes are there when a test begins."""
    yield cluster_with_replicas
    cluster_with_replicas.mend()


@pytest.fixture
def backend(cluster: ClusterServers, namespace: str) -> RedisBackend:
    """What the server has, as another process sees it."""
    return cluster.backend(namespace)


@pytest.fixture
def lock(cluster: ClusterServers, namespace: str) -> Callable[..., Lock]:
    """Make a lock: `lock()`, `lock("b", timeout=5)`."""

    def make(name: str = "a", redis: Any = cluster.url, **options: Any) -> Lock:
        return Lock(redis, name, namespace=namespace, **options)

    return make


MakeLock = Callable[..., Lock]


async def server_says(holds: Callable[[], Any]) -> Any:
    """What it returns as soon as that is true. It asks a server."""
    return await asyncio.to_thread(wait_for, holds, 30)


def test_locks_at_every_node_are_those_of_threads(
    cluster: ClusterServers, lock: MakeLock, namespace: str
) -> None:
    names = [cluster.name_at(node, namespace) for node in cluster.masters()]

    async def main() -> None:
        for name in names:
            async with lock(name) as one, one:
                assert await one.owned()
                assert await one.extend(5)
                assert one.fence > 0
                other = celery_relock.Lock(cluster.url, name, namespace=namespace)
                assert not await asyncio.to_thread(other.acquire, blocking=False)
            assert not await one.locked()
            with other:
                assert not await lock(name).acquire(blocking=False)
                assert other.fence > 0

    run(main())


def test_coroutines_and_threads_wait_in_one_queue_at_each_node(
    cluster: ClusterServers, lock: MakeLock, backend: RedisBackend, namespace: str
) -> None:
    names = [cluster.name_at(node, namespace) for node in cluster.masters()]
    order: dict[str, list[str]] = {name: [] for name in names}

    def thread(name: str) -> None:
        with celery_relock.Lock(cluster.url, name, namespace=namespace):
            order[name].append("thread")

    async def coroutine(name: str, who: str) -> None:
        async with lock(name):
            order[name].append(who)

    async def main() -> None:
        holders, waiting = [lock(name) for name in names], []
        for one in holders:
            await one.acquire()
        for count, who in enumerate(("first", "thread", "last"), start=1):
            for name in names:
                waiter = (
                    asyncio.to_thread(thread, name) if who == "thread" else coroutine(name, who)
                )
                waiting.append(asyncio.create_task(waiter))
            await server_says(
                lambda n=count: all(backend.inspect(each).waiting == n for each in names)
            )
        for one in holders:
            await one.release()
        await asyncio.gather(*waiting)

    run(main())
    assert order == {key: ["first", "thread", "last"] for key in names}


def test_clients_of_clusters(cluster: ClusterServers, lock: MakeLock) -> None:
    url = f"redis://127.0.0.1:{cluster.nodes[0].port}"

    async def main() -> None:
        async with redis.asyncio.RedisCluster.from_url(url) as client:
            one = client.lock("a", timeout=5, lock_class=Lock)
            assert isinstance(one, Lock)
            async with one:
                assert not await Lock(cluster.url, "a").acquire(blocking=False)
            async with lock(redis=client), lock(redis=lambda: client, name="b"):
                with cluster.client() as of_threads:
                    assert await lock(redis=of_threads).locked()
        with pytest.raises(LockConfigError, match=r"use celery_relock\.asyncio\.Lock"):
            celery_relock.Lock(client, "a")  # type: ignore[arg-type]

    run(main())


def test_a_single_server_is_no_cluster(lock: MakeLock, redis_server: RedisServer) -> None:
    async def main() -> None:
        one = lock(redis=f"redis+cluster://127.0.0.1:{redis_server.port}")
        with pytest.raises(LockConfigError, match="not a node of a Redis Cluster"):
            await one.acquire()

    run(main())


def test_a_loss_is_told(lock: MakeLock, backend: RedisBackend) -> None:
    async def main() -> None:
        one = lock(timeout=60)
        await one.acquire()
        await until(lambda: one._engine.inbox.listening.hears)
        await asyncio.to_thread(backend.force_release, "a")
        await until(lambda: one.lost)
        with pytest.raises(LockNotOwned):
            await one.release()

    run(main())


def test_busy_threads_of_the_loop_delay_nothing(lock: MakeLock) -> None:
    async def main() -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        loop.set_default_executor(ThreadPoolExecutor(1))
        done = asyncio.run_coroutine_threadsafe(over.wait(), loop)
        busy = asyncio.create_task(asyncio.to_thread(done.result))
        await asyncio.sleep(0)
        async with lock("never asked for before"):
            over.set()
        await busy

    run(main())


def test_nothing_is_left_wherever_a_waiter_is_cancelled(
    lock: MakeLock, backend: RedisBackend
) -> None:
    def state() -> LockState:
        return backend.inspect("a")

    run(wherever_it_is_cancelled(waits, "late", lock, state))


def test_a_lock_follows_its_slot(
    cluster: ClusterServers, lock: MakeLock, backend: RedisBackend, namespace: str
) -> None:
    source, slot = cluster.master_of_lock("a", namespace), cluster.slot_of("a", namespace)
    to = next(each for each in cluster.masters() if each is not source)

    async def waiter(name: str) -> int:
        async with lock(name) as one:
            return one.fence

    async def main() -> None:
        one = lock(timeout=4)
        await one.acquire()
        fence = one.fence
        waits = asyncio.create_task(waiter("a"))
        await server_says(lambda: backend.inspect("a").waiting == 1)
        await asyncio.to_thread(cluster.begin_move, slot, to)
        # Its bucket is empty but for these: the lock itself is asked for where it is on its way to.
        await asyncio.to_thread(cluster.move_keys, slot, source, to)
        since = one._lease.renewed
        await until(lambda: one._lease.renewed != since)
        await asyncio.to_thread(cluster.end_move, slot, source, to)
        assert await one.owned()
        await one.release()
        assert await waits > fence
        assert await waiter("a") > fence

    run(main())
    cluster.end_move(slot, cluster.begin_move(slot, source), source)


def test_a_node_is_killed_and_its_replica_takes_over(
    cluster: ClusterServers, lock: MakeLock, backend: RedisBackend, namespace: str
) -> None:
    master = cluster.master_of_lock("a", namespace)
    free = cluster.name_at(master, namespace, ["a"])

    async def waiter(holder: Lock) -> None:
        async with lock() as one:
            assert one.fence > fences["a"]

    fences: dict[str, int] = {}

    async def main() -> None:
        async with lock(timeout=20) as one:
            fences["a"] = one.fence
            waits = asyncio.create_task(waiter(one))
            await server_says(lambda: backend.inspect("a").waiting == 1)
            await asyncio.to_thread(cluster.copied, master)
            killed = asyncio.create_task(asyncio.to_thread(cluster.fail_over, master))
            since = one._lease.renewed
            async with lock(free):  # waits for the replica
                pass
            await killed
            await until(lambda: one._lease.renewed != since)
            one.check()
        await waits

    run(main())


def test_a_master_that_is_gone_for_good_keeps_no_coroutine_from_the_others(
    cluster: ClusterServers, namespace: str
) -> None:
    dead = cluster.master_of_lock("a", namespace)
    alive = next(each for each in cluster.masters() if each is not dead)
    other = cluster.name_at(alive, namespace)

    def lock(name: str) -> Lock:
        return Lock(f"{cluster.url}?patience=8", name, namespace=namespace)

    async def main() -> float:
        away = [asyncio.create_task(lock("a").acquire()) for _ in range(MOST_CALLS)]
        await asyncio.sleep(0.5)
        began = time.monotonic()
        async with lock(other):
            took = time.monotonic() - began
        for failed in await asyncio.gather(*away, return_exceptions=True):
            assert isinstance(failed, LockUnavailable)
        return took

    for name in ("a", other):  # so that the process knows who serves it
        run(lock(name).locked())
    with gone(cluster, dead):
        assert run(main()) < 4
