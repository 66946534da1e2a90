"""`celery_relock.asyncio.Lock`: the same locks as those of threads and tasks, for coroutines."""

from __future__ import annotations

import asyncio
import gc
import inspect
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from celery import Celery
from redis.asyncio.lock import Lock as RedisLock

import celery_relock
from celery_relock import LockedTask
from celery_relock.asyncio import Lock
from celery_relock.engine import asyncio as coroutines
from celery_relock.engine.asyncio import TaskLease
from celery_relock.engine.engine import MOST_CALLS
from celery_relock.engine.events import LockEvent
from celery_relock.engine.platform import clock
from celery_relock.engine.protocol import LockState
from celery_relock.engine.renewal import keepalive
from celery_relock.errors import LockConfigError, LockUnavailable
from celery_relock.lock import LockNeverFree, LockNotAcquired, LockNotOwned, LockNotTaken
from tests.support import RedisServer, programs, wait_for
from tests.support.coroutines import run, until
from tests.support.listening import subscribe
from tests.support.proxy import Proxy
from tests.support.redis_server import calls_of

MakeLock = Callable[..., Lock]
State = Callable[[], LockState]


def test_it_has_the_interface_of_redis_asyncio(lock: MakeLock) -> None:
    for name in ("acquire", "release", "locked", "owned", "extend", "reacquire"):
        theirs = inspect.signature(getattr(RedisLock, name)).parameters
        assert [*inspect.signature(getattr(Lock, name)).parameters] == [*theirs]

    async def main() -> None:
        one = lock(timeout=50)
        assert await one.acquire(token="mine")
        assert await one.owned()
        assert await one.locked()
        assert one.fence > 0
        assert 30 < one.remaining < 50
        assert await one.extend(50)
        assert 80 < one.remaining < 100
        assert await one.reacquire()
        assert one.remaining < 50
        one.check()
        await one.release()
        assert not await one.locked()
        with pytest.raises(LockNotTaken, match="not held by this asyncio task"):
            await one.release()

    run(main())


def test_the_next_waiter_hears_before_the_coroutine_that_waited_too(
    lock: MakeLock, own_redis: Callable[..., RedisServer]
) -> None:
    """As with threads, see tests/engine/test_waiters.py."""
    server = own_redis()

    async def main() -> None:
        client, first, second = server.client(), lock(redis=server.url), lock(redis=server.url)
        await first.acquire()
        waits = asyncio.create_task(second.acquire())
        await until(lambda: first._engine.inspect("a").waiting)
        await first.release()
        await waits
        before = calls_of(client, "ping")
        await second.release()
        # The inbox sends one, too, every few seconds.
        assert calls_of(client, "ping") > before

    run(main())


def test_with_replicas_looking_asks_none_of_them(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        one = Lock(redis_url, "account:42", namespace=namespace, min_replicas=1)
        assert not await one.locked()
        assert not await one.owned()

    run(main())


def test_a_loop_that_is_closed_with_its_tasks_is_forgotten_and_so_is_what_they_have(
    lock: MakeLock, state: State
) -> None:
    locks = lock(thread_local=False), lock()

    async def use() -> weakref.ref[asyncio.AbstractEventLoop]:
        await locks[0].acquire()
        _left.append(asyncio.ensure_future(locks[1].acquire()))
        await until(lambda: state().waiting)
        return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.new_event_loop()
    closed = loop.run_until_complete(asyncio.wait_for(use(), 60))
    loop.close()
    del loop
    keepalive.look_now(locks[0]._engine.backend)
    wait_for(lambda: not [e for e in keepalive.leases() if e.backend is locks[0]._engine.backend])
    _left.clear()

    def is_gone() -> bool:  # a thread may still tell of the lock that is lost
        gc.collect()
        return closed() is None

    wait_for(is_gone)


_left: list[asyncio.Future[bool]] = []


@pytest.mark.parametrize("how", ["the loop is closed", "the coroutine is closed"])
@pytest.mark.parametrize("when", ["granted then", "asked before"])
def test_what_a_coroutine_waited_for_that_does_not_go_on_is_the_next_ones(
    lock: MakeLock, redis_url: str, namespace: str, state: State, how: str, when: str
) -> None:
    told: list[LockEvent] = []
    holder, one = celery_relock.Lock(redis_url, "a", namespace=namespace), lock()
    copy_context().run(holder.acquire)

    async def wait() -> None:
        acquiring.append(one.acquire())
        _left.append(asyncio.ensure_future(acquiring[0]))
        await until(lambda: state().waiting)

    acquiring: list[Any] = []
    loop = asyncio.new_event_loop()
    loop.run_until_complete(asyncio.wait_for(wait(), 60))
    end = subscribe(told.append, {"acquired", "released", "lost"})
    if how == "the loop is closed":
        loop.close()
    else:
        acquiring[0].close()
    if when == "asked before":
        keepalive.look_now(one._engine.backend)
        wait_for(lambda: not state().waiting, what="its place to be given up")
    holder.release()
    with celery_relock.Lock(redis_url, "a", namespace=namespace, blocking_timeout=15):
        assert state().holds
    end()
    assert [event.kind for event in told] == ["released", "acquired", "released"], told
    loop.close()
    _left.clear()


def test_loops_of_several_threads_share_an_inbox_and_a_few_threads(
    lock: MakeLock, client: redis.Redis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, most, inside = 0, 0, 0
    backend = lock()._engine.backend
    acquire = backend.acquire

    def counted(*args: Any) -> Any:
        nonlocal calls, most
        calls += 1
        most = max(most, calls)
        try:
            return acquire(*args)
        finally:
            calls -= 1

    monkeypatch.setattr(backend, "acquire", counted)

    async def work() -> None:
        nonlocal inside
        async with lock():
            inside += 1
            assert inside == 1
            await asyncio.sleep(0)
            inside -= 1

    async def main() -> None:
        await asyncio.gather(*(work() for _ in range(30)))

    for _ in "12":  # and then loops that come later
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda _: run(main()), range(3)))
    assert most <= MOST_CALLS
    assert len(client.pubsub_channels(f"{namespace}:*")) == 1


def test_a_forked_child_has_threads_and_an_inbox_of_its_own(redis_url: str, namespace: str) -> None:
    said = programs.run(
        """
        import asyncio
        from celery_relock.asyncio import Lock

        def lock(name="a"):
            return Lock(URL, name, namespace=NAMESPACE)

        async def work():
            async with lock():
                await asyncio.sleep(0)

        async def main():
            await asyncio.gather(work(), work())

        asyncio.run(main())
        child = os.fork()
        if child == 0:
            assert threads() == 1
            asyncio.run(main())
            os._exit(7)
        asyncio.run(main())
        say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
        redis_url,
        namespace,
    )
    assert said == ["7"]


def test_a_forked_child_does_not_hold_what_its_parent_has_acquired_by_run_until_complete(
    redis_url: str, namespace: str
) -> None:
    said = programs.run(
        """
        import asyncio
        from celery_relock.asyncio import Lock
        from celery_relock.named_lock import LockNotTaken

        lock, loop = Lock(URL, "a", namespace=NAMESPACE), asyncio.new_event_loop()
        assert loop.run_until_complete(lock.acquire())
        child = os.fork()
        if child == 0:
            own = asyncio.new_event_loop()
            assert not lock.lost and not lock.fence
            assert own.run_until_complete(lock.acquire(blocking=False)) is False
            try:
                own.run_until_complete(lock.release())
            except LockNotTaken:
                os._exit(7)
            os._exit(1)
        say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), lock.lost)
        loop.run_until_complete(lock.release())
        """,
        redis_url,
        namespace,
    )
    assert said == ["7 False"]


def test_a_loop_goes_on_in_its_thread_when_the_main_thread_has_ended(
    redis_url: str, namespace: str
) -> None:
    said = programs.run(
        """
        import asyncio
        from concurrent.futures import ThreadPoolExecutor
        from celery_relock.asyncio import Lock

        def has_ended():
            try:
                ThreadPoolExecutor().submit(int)
            except RuntimeError:
                return True

        begun = threading.Event()

        async def main():
            async with Lock(URL, "a", namespace=NAMESPACE) as lock:
                begun.set()  # Python 3.12 begins no thread once the main one has ended
                while not has_ended():
                    await asyncio.sleep(0.01)
            async with Lock(URL, "b", namespace=NAMESPACE):
                say(await lock.locked())

        threading.Thread(target=lambda: asyncio.run(main())).start()
        begun.wait(30)
        """,
        redis_url,
        namespace,
    )
    assert said == ["False"]


def native_threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def test_one_object_excludes_the_tasks_that_use_it(lock: MakeLock) -> None:
    inside: list[int] = []
    shared = lock()

    async def work(number: int) -> int:
        async with shared:
            inside.append(number)
            assert inside == [number]
            await asyncio.sleep(0.001)
            inside.remove(number)
            return shared.fence

    async def main() -> None:
        threads, ours = native_threads(), asyncio.all_tasks()
        fences = await asyncio.gather(*map(work, range(100)))
        assert len(set(fences)) == 100
        # However many wait. One more thread renews, and one hears.
        assert native_threads() - threads <= MOST_CALLS + 2
        async with shared:
            assert asyncio.all_tasks() == ours, "somebody may cancel it"

    run(main())


def test_who_re_enters(lock: MakeLock) -> None:
    async def main() -> None:
        one, two = lock(), lock()
        mine, ours = lock("b", owner="order 42"), lock("b", owner="order 42")
        async with one, one, mine:
            child = asyncio.create_task(one.acquire())  # called here, so it is this task's
            assert await child
            await one.release()

            async def another() -> tuple[bool, bool]:
                return await one.acquire(blocking=False), await ours.acquire(blocking=False)

            assert await asyncio.create_task(another()) == (False, True)
            assert await two.acquire(blocking=False) is False
            with pytest.raises(LockNeverFree):
                await two.acquire()
        assert not await one.locked()

    run(main())


def test_a_timeout_around_acquire_acquires_for_the_caller(lock: MakeLock) -> None:
    async def main() -> None:
        one = lock()
        assert await asyncio.wait_for(one.acquire(), 5)
        assert one.fence
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.create_task(asyncio.wait_for(lock().acquire(), 0.05))
        await asyncio.shield(one.release())
        assert not await one.locked()

    run(main())


def test_waiters_of_threads_and_of_tasks_are_served_in_turn(
    lock: MakeLock, redis_url: str, namespace: str, state: State
) -> None:
    order: list[str] = []

    def thread() -> None:
        with celery_relock.Lock(redis_url, "a", namespace=namespace):
            order.append("thread")

    async def coroutine(name: str) -> None:
        async with lock():
            order.append(name)

    async def queued(count: int) -> None:
        await until(lambda: state().waiting >= count)

    async def main() -> None:
        async with lock():
            waiting = [asyncio.create_task(coroutine("first"))]
            await queued(1)
            waiting.append(asyncio.create_task(asyncio.to_thread(thread)))
            await queued(2)
            waiting.append(asyncio.create_task(coroutine("last")))
            await queued(3)
        await asyncio.gather(*waiting)

    run(main())
    assert order == ["first", "thread", "last"]


def test_a_grant_that_comes_before_the_waiter_sleeps_is_not_missed(
    lock: MakeLock, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    doze = TaskLease.doze

    async def late(lease: TaskLease, _: float, over: Callable[[], bool]) -> None:
        await until(over)
        await doze(lease, 3600.0, over)  # a slice would make up for what it has missed

    monkeypatch.setattr(TaskLease, "doze", late)

    async def main() -> None:
        async with lock():
            waits = asyncio.create_task(lock().acquire())
            await until(lambda: state().waiting)
        assert await asyncio.wait_for(waits, 10)

    run(main())


def test_a_wait_has_an_end(lock: MakeLock, state: State) -> None:
    async def main() -> None:
        async with lock():
            assert await lock().acquire(blocking_timeout=0.1) is False
            with pytest.raises(LockNotAcquired, match=r"held by Lock .*not acquired within 0\.1 s"):
                async with lock(blocking_timeout=0.1):
                    raise AssertionError("inside")
            assert state().waiting == 0

    run(main())


def test_the_lease_is_renewed_until_the_task_ends(lock: MakeLock) -> None:
    async def holder(one: Lock, release: bool) -> None:
        await one.acquire()
        await asyncio.sleep(2.8)
        assert await one.owned()
        if release:
            await one.release()

    async def main() -> None:
        # All are kept, so nothing is garbage.
        locks = [lock(name, timeout=2.4) for name in "ab"]  # a busy machine may stop for a second
        released = asyncio.create_task(holder(locks[0], release=True))
        left = asyncio.create_task(holder(locks[1], release=False))
        await asyncio.gather(released, left)
        assert not await lock("a").locked()
        assert await lock("b").locked()
        async with lock("b", blocking_timeout=30):  # by the end of the lease
            pass

    run(main())


def test_a_loop_that_is_blocked_for_longer_than_the_lease_keeps_its_lock_and_its_place(
    lock: MakeLock, state: State
) -> None:
    async def main() -> None:
        async with lock(timeout=2) as one:
            waits = asyncio.create_task(lock(timeout=2).acquire())
            await until(lambda: state().waiting)
            time.sleep(3)
            one.check()
            assert await one.owned()
            assert state().waiting
        assert await waits

    run(main())


def test_a_lock_that_was_lost_while_the_loop_was_blocked_is_lost_at_once(lock: MakeLock) -> None:
    async def main() -> None:
        one = lock(timeout=0.2, renew=False)
        await one.acquire()
        time.sleep(0.3)
        assert one.lost
        with pytest.raises(LockNotOwned):
            one.check()
        with pytest.raises(LockNotOwned):
            await one.release()
        async with lock():
            pass

    run(main())


def test_a_lock_that_is_shared_outlives_the_task_that_acquired_it(lock: MakeLock) -> None:
    async def main() -> None:
        one = lock(thread_local=False)
        await as_another(one.acquire)
        ended = clock()
        keepalive.look_now(one._engine.backend)
        await asyncio.to_thread(wait_for, lambda: one._lease.renewed > ended)
        assert await one.owned()
        await one.release()

    run(main())


def test_a_task_that_waits_for_one_that_has_ended_waits_no_longer_than_others(
    lock: MakeLock, state: State
) -> None:
    async def main() -> None:
        one = lock(timeout=1)
        async with lock():
            [waits] = await as_another(lambda: [asyncio.ensure_future(one.acquire())])
            await until(lambda: state().waiting)
            await asyncio.sleep(1.5)  # longer than its place would live
        assert await waits

    run(main())


def test_a_lock_that_is_dropped_while_held_is_told_and_not_renewed(
    lock: MakeLock, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        one = lock(timeout=3)
        await one.acquire()
        del one
        gc.collect()
        async with lock(blocking_timeout=30):
            pass

    run(main())
    wait_for(lambda: "it was dropped without being released" in caplog.text)


def test_who_is_told_of_a_lock_finds_the_context_of_its_coroutine(lock: MakeLock) -> None:
    request: ContextVar[int] = ContextVar("request")
    found: list[tuple[str, int]] = []

    async def main() -> None:
        request.set(42)
        async with lock():
            pass

    end = subscribe(lambda event: found.append((event.kind, request.get())))
    try:
        run(main())
    finally:
        end()
    assert found == [("acquired", 42), ("released", 42)]


def test_a_forced_release_is_told_at_once(lock: MakeLock, redis_url: str, namespace: str) -> None:
    async def main() -> None:
        one = lock(timeout=60)
        await one.acquire()
        # A hold that is a second old listens.
        await until(lambda: one._engine.inbox.listening.hears)
        one._engine.backend.force_release("a")
        await until(lambda: one.lost)

    run(main())


def test_what_was_forced_before_the_loop_listens_is_told_as_soon_as_it_does(lock: MakeLock) -> None:
    async def main() -> None:
        one = lock(timeout=600)  # the first renewal is 200 s away
        await one.acquire()
        one._engine.backend.force_release("a")
        assert not one._engine.inbox.listening.hears, "nobody told the holder"
        await until(lambda: one.lost)

    run(main())


def test_a_body_of_a_task_re_enters_with_its_coroutines(redis_url: str, namespace: str) -> None:
    app = Celery("shop", set_as_current=False)
    app.conf.update(relock_url=redis_url, relock_namespace=namespace)

    @app.task(shared=False, base=LockedTask, bind=True, lock_key="a")
    def book(self: Any) -> tuple[int, int]:
        async def inner() -> int:
            async with Lock(redis_url, "a", namespace=namespace) as one:
                return one.fence

        return self.lock.fence, asyncio.run(inner())

    @app.task(shared=False, base=LockedTask, bind=True, lock_key="a")
    def tell(self: Any) -> int:
        return int(self.lock.fence)

    async def main() -> tuple[int, int]:
        async with tell.async_lock_for() as one:
            return one.fence, tell()  # on the holder's call stack

    for outer, inner in (book(), run(main())):
        assert outer == inner


def test_clients_and_places(lock: MakeLock, redis_url: str, namespace: str) -> None:
    async def main() -> None:
        client = redis.asyncio.Redis.from_url(redis_url)
        async with lock(redis=client), client.lock("b", timeout=5, lock_class=Lock) as other:
            assert isinstance(other, Lock)
            assert await lock(redis=redis.Redis.from_url(redis_url)).locked()
        await getattr(client, "aclose", client.close)()  # redis-py 5.0.0 has no aclose
        with pytest.raises(LockConfigError, match=r"use celery_relock\.asyncio\.Lock"):
            celery_relock.Lock(client, "a")

    run(main())


def test_a_lock_of_threads_is_not_shared_by_coroutines(redis_url: str, namespace: str) -> None:
    one = celery_relock.Lock(redis_url, "a", namespace=namespace)

    async def second() -> bool:
        with pytest.raises(LockNeverFree, match=r"another coroutine.*celery_relock\.asyncio"):
            one.acquire()
        return one.acquire(blocking=False)

    async def main() -> None:
        with one, one:
            assert await asyncio.create_task(second()) is False

    run(main())
    with one:  # held around the loop, so by all in it
        run(asyncio.sleep(0))
        assert one.owned()


def test_a_coroutine_cannot_use_what_another_holds_through_a_lock_of_threads(
    redis_url: str, namespace: str
) -> None:
    one = celery_relock.Lock(redis_url, "a", namespace=namespace)

    async def second() -> None:
        assert not one.owned()
        assert (one.fence, one.remaining, one.lost) == (0, 0.0, False)
        for use in (one.release, one.reacquire, lambda: one.extend(5), one.downgrade, one.check):
            with pytest.raises(LockNotTaken, match=r"another coroutine.*celery_relock\.asyncio"):
                use()

    async def main() -> None:
        with one:
            await asyncio.create_task(second())
            assert one.owned()

    async def ended(lock: celery_relock.Lock) -> None:
        lock.release()

    run(main())
    one.acquire()  # around the loop, so all in it hold the lock
    run(ended(one))

    async def hand_over() -> None:
        anybody = celery_relock.Lock(redis_url, "b", thread_local=False, namespace=namespace)
        anybody.acquire()
        await asyncio.create_task(asyncio.to_thread(anybody.check))
        await asyncio.create_task(ended(anybody))

    run(hand_over())


@pytest.mark.parametrize("is_lost", [True, False])
def test_what_a_coroutine_lost_or_could_not_release_is_still_in_the_way_of_the_others(
    redis_server: RedisServer, namespace: str, is_lost: bool
) -> None:
    async def second() -> None:
        assert one.acquire(blocking=False) is False
        with pytest.raises(LockNeverFree, match=r"another coroutine.*celery_relock\.asyncio"):
            one.acquire()

    async def main() -> None:
        one.acquire()
        if is_lost:
            keepalive.found(one._lease, held=False)
        else:
            proxy.refuse()
            with pytest.raises(LockUnavailable):
                one.release()
        await asyncio.create_task(second())
        proxy.accept()
        with pytest.raises(LockNotOwned) if is_lost else nullcontext():
            one.release()
        assert one.acquire(blocking=False)
        one.release()

    with Proxy(redis_server.port) as proxy:
        one = celery_relock.Lock(proxy.url, "a", namespace=namespace)
        run(main())


def test_another_thread_waits_for_what_a_coroutine_holds_for_any_thread(
    redis_url: str, namespace: str
) -> None:
    one = celery_relock.Lock(redis_url, "a", thread_local=False, namespace=namespace)

    async def main() -> None:
        one.acquire()
        waits = asyncio.create_task(asyncio.to_thread(one.acquire, blocking_timeout=30))
        await until(lambda: one._engine.inspect("a").waiting)
        one.release()
        assert await waits
        one.release()

    run(main())


@contextmanager
def _two_threads(each_drives_a_loop: bool) -> Iterator[Callable[[int, Callable[[], Any]], Any]]:
    """Two threads outside of asyncio: what one of them, by its number, gets of a coroutine. Each
    has a loop of its own, or both hand theirs to one that another thread runs."""
    loops = [asyncio.new_event_loop() for _ in "12"]
    threads = [ThreadPoolExecutor(1) for _ in "123"]
    if not each_drives_a_loop:
        threads[2].submit(loops[0].run_forever)

    def ask(number: int, call: Callable[[], Any]) -> Any:
        if each_drives_a_loop:
            return loops[number].run_until_complete(call())
        return asyncio.run_coroutine_threadsafe(call(), loops[0]).result(30)

    yield lambda number, call: threads[number].submit(ask, number, call).result(30)
    loops[0].call_soon_threadsafe(loops[0].stop)
    for thread in threads:
        thread.shutdown()
    for loop in loops:
        loop.close()


@pytest.mark.parametrize("each_drives_a_loop", [True, False])
@pytest.mark.parametrize("thread_local", [True, False])
def test_threads_outside_of_asyncio_exclude_each_other(
    lock: MakeLock, each_drives_a_loop: bool, thread_local: bool
) -> None:
    one = lock(thread_local=thread_local)
    take = partial(one.acquire, blocking=False)
    with _two_threads(each_drives_a_loop) as by:
        assert by(0, take)
        assert not by(1, take)
        if thread_local:
            assert by(0, take), "it re-enters"
            by(0, one.release)
        else:
            assert not by(0, take), "the other one may be about to release it"
        assert not by(1, take)
        by(0, one.release)
        assert by(1, take)
        by(1, one.release)


def test_callbacks_of_a_loop_exclude_each_other(lock: MakeLock) -> None:
    async def main() -> None:
        one, loop, begun = lock(), asyncio.get_running_loop(), []
        take = partial(one.acquire, blocking=False)
        for _ in "12":
            loop.call_soon(lambda: begun.append(loop.create_task(take())))
        await until(lambda: len(begun) == 2 and all(each.done() for each in begun))
        assert sorted(each.result() for each in begun) == [False, True]
        seen = []
        loop.call_soon(lambda: seen.append(one.fence))
        await until(lambda: seen)
        assert seen == [0]

    run(main())


def test_what_a_task_that_has_ended_held_for_any_task_is_not_re_entered(lock: MakeLock) -> None:
    one, loop = lock(thread_local=False), asyncio.new_event_loop()
    two = lock("b", thread_local=False, limit=2)

    async def take(lock: Lock) -> bool:
        return await lock.acquire(blocking=False)

    assert loop.run_until_complete(take(one))
    gc.collect()
    assert not loop.run_until_complete(one.acquire(blocking=False))
    assert not loop.run_until_complete(take(one))
    loop.run_until_complete(one.release())
    for _ in "12":
        assert loop.run_until_complete(take(two))
        gc.collect()
    assert len(two._engine.inspect("b").holds) == 2
    loop.close()


@pytest.mark.parametrize("kind", ["threads", "coroutines"])
def test_a_lock_that_is_found_to_be_gone_is_lost(
    redis_url: str, namespace: str, lock: MakeLock, kind: str
) -> None:
    async def main() -> None:
        if kind == "coroutines":
            one: Any = lock()
            await one.acquire()
        else:
            one = celery_relock.Lock(redis_url, "a", namespace=namespace)
            one.acquire()
        one._engine.backend.force_release("a")
        owned = one.owned()
        assert not (await owned if kind == "coroutines" else owned)
        assert one.lost
        assert one.remaining == 0.0
        with pytest.raises(LockNotOwned):
            one.check()

    run(main())


async def as_another(call: Callable[[], Any]) -> Any:
    """What a call returns in a task of its own."""

    async def other() -> Any:
        answer = call()
        return await answer if inspect.isawaitable(answer) else answer

    return await asyncio.create_task(other())


def test_a_task_that_has_lost_the_lock_is_told_so_and_not_of_the_next_tasks(
    lock: MakeLock,
) -> None:
    async def main() -> None:
        one = lock(thread_local=False)
        await one.acquire()
        fence = one.fence
        one._engine.backend.force_release("a")
        await until(lambda: one.lost)
        await as_another(one.acquire)
        assert await as_another(lambda: one.fence) > fence
        assert (one.lost, one.fence, one.remaining) == (True, fence, 0.0)
        assert not await one.owned()
        for use in (one.reacquire, lambda: one.extend(5), one.downgrade, one.acquire):
            with pytest.raises(LockNotOwned):
                await use()
        with pytest.raises(LockNotOwned):
            one.check()
        with pytest.raises(LockNotOwned):
            await one.release()
        assert await one.owned()
        await one.release()  # of this hold any task may release, once
        assert not await one.locked()

    run(main())


def test_a_release_that_failed_is_tried_again_though_another_task_has_acquired_the_lock_since(
    lock: MakeLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        one = lock(thread_local=False)
        await one.acquire()
        backend, loop = one._engine.backend, asyncio.get_running_loop()

        def unanswered(*_: Any, **__: Any) -> None:
            backend.force_release("a")
            asyncio.run_coroutine_threadsafe(as_another(one.acquire), loop).result(30)
            raise LockUnavailable("no answer")

        with monkeypatch.context() as away:
            away.setattr(backend, "release", unanswered)
            with pytest.raises(LockUnavailable):
                await one.release()
        await one.release()
        assert await one.locked(), "it is the other task's"
        await as_another(one.release)
        assert not await one.locked()

    run(main())


@pytest.mark.parametrize("error", [LockUnavailable("no answer"), LockConfigError("not allowed")])
def test_a_release_that_failed_can_be_tried_again(
    lock: MakeLock, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def main() -> None:
        one = lock()
        await one.acquire()

        def fails(*_: Any, **__: Any) -> None:
            raise error

        with monkeypatch.context() as away:
            away.setattr(one._engine.backend, "release", fails)
            with pytest.raises(type(error)):
                await one.release()
        await one.release()
        assert not await one.locked()

    run(main())


def test_what_might_be_released_already_is_not_extended(
    lock: MakeLock, monkeypatch: pytest.MonkeyPatch, state: State
) -> None:
    async def main() -> None:
        one = lock(timeout=20)
        await one.acquire()
        await one.extend(10, replace_ttl=True)

        def fails(*_: Any, **__: Any) -> None:
            raise LockUnavailable("no answer")

        with monkeypatch.context() as away:
            away.setattr(one._engine.backend, "release", fails)
            with pytest.raises(LockUnavailable):
                await one.release()
        for use in (one.reacquire, lambda: one.extend(3600, replace_ttl=True)):
            with pytest.raises(LockNotOwned, match="might be released already"):
                await use()
        (hold,) = state().holds
        assert hold.remaining <= 10, "nobody would know of it"
        await one.release()
        assert not await one.locked()

    run(main())


def test_a_task_that_has_passed_a_lock_on_waits_until_another_has_released_it(
    lock: MakeLock, state: State
) -> None:
    async def main() -> None:
        one = lock(thread_local=False)
        assert await one.acquire()
        assert not await one.acquire(blocking=False)

        async def release() -> None:
            await until(lambda: state().waiting)
            await one.release()

        another = asyncio.create_task(release())
        assert await one.acquire(blocking_timeout=30)
        await another
        await one.release()
        async with one, one:
            assert await one.owned()
        assert not await one.locked()

    run(main())


def test_a_block_in_a_task_that_has_passed_a_lock_on_waits_too(lock: MakeLock) -> None:
    async def main() -> None:
        one = lock(thread_local=False, blocking_timeout=0)
        await one.acquire()
        with pytest.raises(LockNotAcquired):
            async with one:
                pass
        await as_another(one.release)
        assert not await one.locked(), "nobody had it a second time"

    run(main())


@pytest.mark.parametrize("end", [asyncio.CancelledError, LockNotAcquired])
def test_a_task_that_gives_up_a_block_releases_nothing_of_one_that_was_before_it(
    lock: MakeLock, state: State, end: type[BaseException]
) -> None:
    async def main() -> None:
        other, one = lock(), lock(thread_local=False, blocking_timeout=0.5)
        await other.acquire()

        async def wait_in_a_block() -> None:
            async with one:
                pass

        first = asyncio.create_task(one.acquire(blocking_timeout=30))
        await until(lambda: state().waiting == 1)
        behind = asyncio.create_task(wait_in_a_block())
        await until(lambda: state().waiting == 2)
        await other.release()
        assert await first
        if end is asyncio.CancelledError:
            behind.cancel()
        with pytest.raises(end):
            await behind
        assert await one.owned()
        await one.release()

    run(main())


def test_tasks_share_a_lock_with_several_permits(lock: MakeLock) -> None:
    one, fences = lock(thread_local=False, limit=2), set()
    holds: list[Lock] = []

    async def work() -> None:
        async with one:
            holds.append(one)
            await until(lambda: len(holds) >= 2)
            fences.add(one.fence)
            await one.extend(60)

    async def main() -> None:
        await asyncio.gather(work(), work())
        assert not await one.locked()

    run(main())
    assert len(fences) == 2


def test_without_a_server_it_says_so_and_goes_on_when_one_is_there(
    own_redis: Callable[..., RedisServer], lock: MakeLock
) -> None:
    server = own_redis()

    async def main() -> None:
        one = lock(redis=server.url, timeout=5)
        await one.acquire()
        server.kill()
        with pytest.raises(LockUnavailable):
            await one.release()
        server.restart(keep_data=False)
        async with lock(redis=server.url, blocking_timeout=30):
            pass

    run(main())


def test_it_runs_on_uvloop(lock: MakeLock) -> None:
    uvloop = pytest.importorskip("uvloop")

    async def work() -> None:
        async with lock():
            await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(*(work() for _ in range(20)))

    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(asyncio.wait_for(main(), 20))
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.01))
    finally:
        loop.close()


def test_it_shares_a_lock_and_downgrades_it(lock: MakeLock) -> None:
    async def main() -> None:
        one, two, alone = lock(mode="shared"), lock(mode="shared"), lock()
        async with one:
            assert await asyncio.create_task(two.acquire(blocking=False))
            assert not await asyncio.create_task(alone.acquire(blocking=False))
            with pytest.raises(LockNeverFree):
                await lock().acquire()

    run(main())

    async def downgrade() -> None:
        one, two = lock("b"), lock("b", mode="shared")
        async with one:
            waits = asyncio.create_task(two.acquire())
            await until(lambda: one._engine.inspect("b").waiting)
            with pytest.raises(LockConfigError, match="an outer block relies on it"):
                async with one:
                    await one.downgrade()
            await one.downgrade()
            assert await asyncio.wait_for(waits, 20)

    run(downgrade())


def test_a_server_that_does_not_answer_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"

        async def main() -> None:
            await Lock(f"redis://{where}/0?socket_timeout=0.3", "a").acquire()

        # redis-py 5.0 names it itself.
        named = rf"\((Timeout reading from {where}\)|{where}: )"
        with pytest.raises(LockUnavailable, match=named):
            run(main())


def test_who_waits_first_waits_for_the_subscription_and_no_longer(
    lock: MakeLock, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coroutines, "OPENING", 3600.0)

    async def main() -> None:
        async with lock():
            waits = asyncio.create_task(lock().acquire())
            await until(lambda: state().waiting)
        assert await waits

    run(main())


@pytest.mark.parametrize("again", ["acquire", "release"])
def test_a_loss_is_told_also_after_a_release_that_failed(
    lock: Callable[..., Lock], redis_server: RedisServer, again: str
) -> None:
    async def main() -> None:
        one = lock(redis=proxy.url, timeout=0.3)
        await one.acquire()
        proxy.refuse()
        await until(lambda: one.lost)
        with pytest.raises(LockUnavailable):
            await one.release()
        proxy.accept()
        with pytest.raises(LockNotOwned):
            await getattr(one, again)()
        assert await one.acquire()
        await one.release()

    with Proxy(redis_server.port) as proxy:
        run(main())


def test_the_first_subscription_takes_no_longer_than_the_wait_itself(
    lock: Callable[..., Lock], redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coroutines, "OPENING", 3600.0)

    async def main() -> None:
        async with lock():
            proxy.hold("SUBSCRIBE")
            waiters = [lock(redis=proxy.url) for _ in range(MOST_CALLS + 1)]
            waiting = [asyncio.create_task(one.acquire(blocking_timeout=20)) for one in waiters]
            async with lock("another", redis=proxy.url):
                assert not any(each.done() for each in waiting), "threads wait for the subscription"
            assert not await lock(redis=proxy.url).acquire(blocking_timeout=0.2)
            inbox = waiters[0]._engine.inbox
            assert not inbox.listening.tried, "the subscription was given up first"
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            assert not inbox.listening.rings

    with Proxy(redis_server.port) as proxy:
        run(main())


def test_a_server_that_is_gone_when_a_wait_is_over_is_told_of_the_acquire(
    lock: Callable[..., Lock], state: Callable[[], LockState], redis_server: RedisServer
) -> None:
    async def main() -> None:
        async with lock():
            waiting = asyncio.create_task(lock(redis=proxy.url).acquire(blocking_timeout=1.0))
            await until(lambda: state().waiting)
            proxy.refuse()
            with pytest.raises(LockUnavailable, match="Cannot acquire lock 'a': Redis cannot be"):
                await waiting

    with Proxy(redis_server.port) as proxy:
        run(main())


def test_who_was_refused_is_told_so_though_its_first_command_cannot_be_made_up_for(
    lock: Callable[..., Lock], redis_server: RedisServer
) -> None:
    async def main() -> None:
        async with lock():
            proxy.lose_reply("acquire")
            for _ in range(100):
                proxy.lose_command("release")
            assert not await lock(redis=proxy.url).acquire(blocking=False)

    with Proxy(redis_server.port) as proxy:
        run(main())
