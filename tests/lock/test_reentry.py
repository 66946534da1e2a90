"""Who enters a `Lock` that is held."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from celery_relock import LockedTask
from celery_relock.asyncio import Lock as CoroutineLock
from celery_relock.engine import reentrancy
from celery_relock.errors import LockConfigError, LockConflict, LockLost, LockUnavailable
from celery_relock.lock import Lock, LockNotAcquired, LockNotOwned, LockNotTaken
from tests.support import wait_for
from tests.support.companion import running
from tests.support.coroutines import until

MakeLock = Callable[..., Lock]


def test_the_same_object_re_enters_in_the_same_thread(lock: MakeLock) -> None:
    one = lock()
    with one:
        fence = one.fence
        with one:
            assert one.fence == fence
        assert one.owned()
    assert not one.locked()


def test_every_lock_with_the_same_owner_re_enters(
    lock: MakeLock, in_thread: Callable[..., Any]
) -> None:
    one, two = lock(owner="order 42"), lock(owner="order 42")
    other = lock(owner="order 43")
    with one:
        assert in_thread(lambda: two.acquire(blocking=False))
        assert other.acquire(blocking=False) is False
        with two:
            assert two.fence == one.fence
    assert other.acquire(blocking=False) is False  # the other thread's hold, not released
    other._engine.backend.force_release("a")


def test_the_first_to_leave_does_not_free_what_another_of_its_owner_holds(lock: MakeLock) -> None:
    one, two, stranger = lock(owner="flow"), lock(owner="flow"), lock()
    one.acquire()
    two.acquire()
    one.release()
    assert stranger.acquire(blocking=False) is False
    assert two.owned()
    two.release()
    assert stranger.acquire(blocking=False)
    stranger.release()


def test_another_thread_does_not_re_enter_a_shared_lock(
    lock: MakeLock, in_thread: Callable[..., Any]
) -> None:
    one = lock(thread_local=False)
    one.acquire()
    assert in_thread(lambda: one.acquire(blocking=False)) is False
    assert one.owned()
    in_thread(one.release)
    assert not one.locked()


def test_another_thread_releases_a_shared_lock_and_none_that_is_not(
    lock: MakeLock, in_thread: Callable[..., Any]
) -> None:
    shared, private = lock(thread_local=False), lock(name="b")
    shared.acquire()
    in_thread(shared.release)
    assert not shared.locked()
    private.acquire()
    with pytest.raises(LockNotTaken):
        in_thread(private.release)
    assert private.owned()
    private.release()


def test_a_shared_lock_goes_from_thread_to_thread_without_being_dropped(lock: MakeLock) -> None:
    one = lock(thread_local=False, timeout=5)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(40):
                one.acquire()
                one.release()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert failures == []
    assert not any(thread.is_alive() for thread in threads)
    assert not one.locked()


def test_a_thread_that_has_passed_a_lock_on_waits_until_another_has_released_it(
    lock: MakeLock,
) -> None:
    """As the thread of a pool does that comes back for other work (`run_in_executor`)."""
    one = lock(thread_local=False)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(one.acquire).result(30)
        assert not pool.submit(one.acquire, blocking=False).result(30)
        waits = pool.submit(one.acquire)
        wait_for(lambda: one._engine.inspect("a").waiting == 1)
        one.release()
        assert waits.result(30)
    one.release()
    assert not one.locked()


def test_what_a_thread_has_passed_on_lets_nothing_in_that_comes_by_this_thread_later(
    lock: MakeLock, task: Callable[..., Any]
) -> None:
    one = lock(thread_local=False, blocking_timeout=0)

    def body() -> str:
        return "ran"

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(one.acquire).result(30)
        with pytest.raises(LockNotAcquired):
            pool.submit(one.__enter__).result(30)
        with pytest.raises(LockConflict):
            pool.submit(task, body, lock_on_conflict="raise").result(30)
        assert pool.submit(reentrancy.executions).result(30) == (), "what it sends is no descendant"
        one.release()
        with lock() as other:
            assert other.owned(), "nobody had it a second time"
        pool.submit(one.__enter__).result(30)
        assert pool.submit(task, body, lock_on_conflict="raise").result(30) == "ran"
        pool.submit(one.release).result(30)
    assert not one.locked()


def test_in_a_task_what_any_thread_may_release_is_re_entered_without_a_block(
    task: Callable[..., Any], lock: MakeLock
) -> None:
    def body() -> None:
        one, two = lock(name="b", thread_local=False), lock(name="b")
        for each in (one, one, two):
            assert each.acquire(blocking=False)
        for each in (two, one, one):
            assert each.locked()
            each.release()

    task(body)
    assert not lock(name="b").locked()


def test_a_block_that_another_thread_ends_is_re_entered_in_its_context_alone(
    lock: MakeLock, in_thread: Callable[..., Any]
) -> None:
    """A dependency of FastAPI begins and ends in a thread of a pool, in its request's context."""
    one = lock(thread_local=False, blocking_timeout=0)
    request, another = contextvars.Context(), contextvars.Context()
    request.run(one.__enter__)
    with pytest.raises(LockNotAcquired):
        another.run(one.__enter__)
    request.run(one.__enter__)
    in_thread(one.release)
    assert one.owned()
    in_thread(one.release)
    assert not one.locked()
    another.run(one.__enter__)
    one.release()


@pytest.mark.parametrize("options", [{"owner": "me"}, {"mode": "shared"}])
def test_an_owner_and_who_shares_re_enter_what_any_thread_may_release(
    lock: MakeLock, in_thread: Callable[..., Any], options: dict[str, Any]
) -> None:
    one = lock(thread_local=False, **options)
    for _ in range(2):
        assert one.acquire(blocking=False)
    in_thread(one.release)
    assert one.owned()
    in_thread(one.release)
    assert not one.locked()


def test_so_many_as_the_limit_allows_hold_it(lock: MakeLock) -> None:
    first, second, third = lock(limit=2), lock(limit=2), lock(limit=2)
    assert first.acquire(blocking=False)
    assert second.acquire(blocking=False)
    assert third.acquire(blocking=False) is False
    first.release()
    assert third.acquire(blocking=False)
    second.release()
    third.release()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_holds_nothing_of_its_parents(lock: MakeLock) -> None:
    one = lock(timeout=20)
    one.acquire()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        try:
            said.append(str(one.owned()))
            said.append(str(one.acquire(blocking=False)))
            try:
                one.release()
            except LockNotTaken:
                said.append("not taken")
            mine = lock(name="b")
            said.append(str(mine.acquire()))
            mine.release()
        finally:
            os.write(write, " ".join(said).encode())
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read, "rb") as answers:
        assert answers.read() == b"False False not taken True"
    assert one.owned()
    one.release()


@pytest.fixture
def task(redis_url: str, namespace: str) -> Iterator[Callable[..., Any]]:
    """Run a function as the body of a LockedTask that holds the lock "a"."""
    from celery import Celery

    from celery_relock import LockedTask

    app = Celery("locks", set_as_current=False)
    app.conf.update(relock_url=redis_url, relock_namespace=namespace)

    def run(body: Callable[[], Any], **options: Any) -> Any:
        made = app.task(body, base=LockedTask, lock_key="a", shared=False, **options)
        return made.apply().get()

    yield run
    app.close()


@pytest.mark.parametrize("options", [{}, {"lock_owner": "task"}])
def test_a_lock_in_a_task_re_enters_what_the_task_holds_by_whatever_client(
    task: Callable[..., Any], lock: MakeLock, redis_url: str, options: dict[str, Any]
) -> None:
    def body() -> list[tuple[bool, int, bool]]:
        seen = []
        for place in (redis_url, None):
            one = lock(place) if place else lock()
            taken = one.acquire(blocking=False)
            seen.append((taken, one.fence, one.owned()))
            one.release()
        return [*seen, (lock().locked(), 0, False)]

    by_url, by_client, after = task(body, **options)
    assert by_url[0] is by_client[0] is True
    assert by_url[1] == by_client[1] > 0
    assert by_url[2] is by_client[2] is True
    assert after[0] is True  # its leaving did not free the task's
    assert not lock().locked()


def test_a_lock_of_that_name_in_another_namespace_is_another_lock_and_hides_nothing(
    task: Callable[..., Any], lock: MakeLock, redis_url: str, namespace: str
) -> None:
    def body() -> bool:
        with Lock(redis_url, "a", namespace=f"{namespace}-2") as another, lock() as one:
            return one.fence != another.fence and one.owned()

    assert task(body)
    assert not lock().locked()


def test_it_re_enters_wherever_the_body_goes_on_with_the_context_of_the_task(
    task: Callable[..., Any], lock: MakeLock, redis_url: str, namespace: str
) -> None:
    def acquired() -> bool:
        with lock() as one:
            return one.owned()

    async def in_another_loop() -> bool:
        async with CoroutineLock(redis_url, "a", namespace=namespace, blocking_timeout=5) as one:
            return await one.owned()

    def body() -> list[bool]:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            sent = asyncio.run_coroutine_threadsafe(in_another_loop(), loop)
            return [asyncio.run(asyncio.to_thread(acquired)), sent.result(20)]
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    assert task(body) == [True, True]
    assert not lock().locked()


def test_who_re_entered_and_is_gone_without_a_release_relies_on_nothing_any_more(
    task: Callable[..., Any], lock: MakeLock, redis_url: str, namespace: str
) -> None:
    async def acquire() -> None:
        await CoroutineLock(redis_url, "a", namespace=namespace).acquire()

    def body(self: Any) -> bool:
        one = lock(redis_url)
        one.acquire()
        asyncio.run(acquire())
        with pytest.raises(LockConfigError, match="a call inside of its holder has re-entered it"):
            self.lock.downgrade()
        del one
        gc.collect()
        self.lock.downgrade()
        return lock(mode="shared").acquire(blocking=False)

    assert task(body, bind=True)


def test_what_goes_on_there_when_the_body_has_ended_is_told_that_the_lock_is_gone(
    task: Callable[..., Any], lock: MakeLock
) -> None:
    ended, told = threading.Event(), list[Any]()

    def inner(self: Any) -> None:
        told.append(self.lock.lost)
        assert ended.wait(20)
        told.append(self.lock.lost)
        with pytest.raises(LockLost):
            self.lock.check()

    def body(self: Any) -> threading.Thread:
        made = self.app.task(inner, base=LockedTask, lock_key="a", shared=False, bind=True)
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(made,))
        thread.start()
        wait_for(lambda: told, what="the inner call")
        return thread

    thread = task(body, bind=True)
    assert not lock().locked()
    ended.set()
    thread.join(20)
    assert told == [False, True]


def test_a_thread_that_goes_on_when_the_body_has_ended_has_no_lock_any_more(
    task: Callable[..., Any], lock: MakeLock, redis_url: str
) -> None:
    ended, ready, checked = (threading.Event() for _ in range(3))

    def goes_on(hold: Any) -> None:
        inner = lock(redis_url)
        inner.acquire()
        assert not hold.lost
        assert hold.continuous
        ready.set()
        assert ended.wait(20)
        assert inner.lost
        for use in (inner.check, inner.release):
            with pytest.raises(LockNotOwned, match="by its outer holder"):
                use()
        for use in (hold.check, hold.downgrade):
            with pytest.raises(LockLost, match="when the body of its task ended"):
                use()
        assert hold.lost
        assert not hold.continuous
        assert hold.remaining == 0
        checked.set()

    def body(self: Any) -> threading.Thread:
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(goes_on, self.lock))
        thread.start()
        assert ready.wait(20)
        return thread

    thread = task(body, bind=True)
    ended.set()
    thread.join(20)
    assert checked.is_set()


def test_a_block_inside_a_task_whose_lock_is_lost_does_not_end_as_if_it_were_not(
    task: Callable[..., Any], lock: MakeLock, redis_url: str, namespace: str
) -> None:
    async def in_a_coroutine() -> None:
        async with CoroutineLock(redis_url, "a", namespace=namespace) as one:
            await until(lambda: one.lost)

    def body() -> bool:
        lock()._engine.backend.force_release("a")
        with pytest.raises(LockNotOwned, match="was lost"), lock(redis_url) as one:
            wait_for(lambda: one.lost)
        return True

    def body_of_coroutines() -> bool:
        lock()._engine.backend.force_release("a")
        with pytest.raises(LockNotOwned, match="was lost"):
            asyncio.run(in_a_coroutine())
        return True

    assert task(body)
    assert task(body_of_coroutines)


@pytest.mark.parametrize("extend", [(2,), (2, True), (500,), (500, True)])
def test_a_lock_in_a_task_never_changes_the_tasks_lease(
    task: Callable[..., Any], lock: MakeLock, extend: tuple[Any, ...]
) -> None:
    def lease() -> tuple[float, float]:
        outer = reentrancy.innermost()
        (hold,) = lock()._engine.inspect("a").holds
        return outer.claim.lease, round(hold.remaining / 5)

    def body() -> Any:
        before = lease()
        with lock() as inner:
            assert inner.extend(*extend)
            assert inner.reacquire()
            assert inner.remaining > 25
        return before, lease()

    before, after = task(body)
    assert before == after == (30.0, 6)


def test_a_lock_inside_one_that_is_not_renewed_says_who_can_be_extended(
    task: Callable[..., Any], lock: MakeLock
) -> None:
    def body() -> None:
        with lock(name="b", timeout=5, renew=False), lock(name="b") as inner:
            assert inner.extend(1, replace_ttl=True)
            with pytest.raises(LockConfigError, match="extend the outer Lock"):
                inner.extend(60)

    task(body)


def test_a_task_that_is_called_inside_a_block_re_enters_its_lock_by_whatever_client(
    task: Callable[..., Any], lock: MakeLock, client: redis.Redis, redis_url: str
) -> None:
    def body() -> Any:
        return lock()._engine.inspect("a")

    for place in (client, redis_url):
        with lock(place) as outer:
            state = task(body, lock_on_conflict="raise")
            assert [hold.fence for hold in state.holds] == [outer.fence]
        assert not lock().locked()


def test_a_lock_in_a_task_excludes_other_workflows(
    task: Callable[..., Any], lock: MakeLock, redis_url: str, namespace: str
) -> None:
    program = """
    from celery_relock.lock import Lock
    say(Lock(URL, "b", namespace=NAMESPACE).acquire(blocking=False))
    """

    def body() -> str:
        with lock(name="b"), running(program, redis_url, namespace) as other:
            return other.line()

    assert task(body) == "False"


def test_a_thread_that_has_lost_the_lock_is_told_so_and_not_of_the_next_threads(
    lock: MakeLock, in_thread: Callable[..., Any]
) -> None:
    one = lock(thread_local=False)
    one.acquire()
    fence = one.fence
    one._engine.backend.force_release("a")
    wait_for(lambda: one.lost, what="the news of it")
    assert in_thread(one.acquire)
    assert in_thread(lambda: one.fence) > fence, "any other thread has what the next one has"
    assert (one.lost, one.fence, one.remaining, one.owned()) == (True, fence, 0.0, False)
    for use in (one.check, one.reacquire, lambda: one.extend(5), one.downgrade, one.acquire):
        with pytest.raises(LockNotOwned):
            use()
    with pytest.raises(LockNotOwned):
        one.release()
    assert one.owned()
    one.release()  # of this hold any thread may release, once
    assert not one.locked()


def test_a_release_that_failed_is_tried_again_though_another_thread_has_acquired_the_lock_since(
    lock: MakeLock, in_thread: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = lock(thread_local=False)
    one.acquire()
    backend = one._engine.backend

    def unanswered(*_: Any, **__: Any) -> None:
        backend.force_release("a")
        in_thread(one.acquire)
        raise LockUnavailable("no answer")

    with monkeypatch.context() as away:
        away.setattr(backend, "release", unanswered)
        with pytest.raises(LockUnavailable):
            one.release()
    one.release()
    assert one.locked(), "it is the other thread's"
    in_thread(one.release)
    assert not one.locked()


def test_a_thread_that_gives_up_a_block_releases_nothing_of_one_that_was_before_it(
    lock: MakeLock,
) -> None:
    other, one = lock(), lock(thread_local=False, blocking_timeout=0.5)
    other.acquire()

    def wait_in_a_block() -> None:
        with pytest.raises(LockNotAcquired), one:
            pass

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(one.acquire, blocking_timeout=30)
        wait_for(lambda: one._engine.inspect("a").waiting == 1)
        behind = pool.submit(wait_in_a_block)
        wait_for(lambda: one._engine.inspect("a").waiting == 2)
        other.release()
        assert first.result(30)
        behind.result(30)
    assert one.owned()
    one.release()


def test_threads_share_a_lock_with_several_permits(
    lock: MakeLock, in_thread: Callable[..., Any]
) -> None:
    one = lock(thread_local=False, limit=2)
    with one:
        fence = one.fence
        with ThreadPoolExecutor(1) as pool:
            pool.submit(one.acquire).result()
            assert pool.submit(lambda: one.fence).result() > one.fence == fence
            pool.submit(one.release).result()
        assert one.owned()
    assert not one.locked()


def test_what_replaced_threads_had_goes_with_them(lock: MakeLock) -> None:
    one, gone = lock(thread_local=False), []

    def lose() -> None:
        one.acquire()
        gone.extend((weakref.ref(one._own_grip()), weakref.ref(threading.current_thread())))
        one._engine.backend.force_release("a")

    for _ in range(3):
        thread = threading.Thread(target=lose)
        thread.start()
        thread.join(20)
    del thread
    one.acquire()

    def are_gone() -> bool:
        gc.collect()
        return not any(each() for each in gone)

    wait_for(are_gone)
    one.release()


def test_in_a_task_a_shared_lock_is_re_entered_as_often_as_it_is_released(
    task: Callable[..., Any], lock: MakeLock, redis_url: str
) -> None:
    def body() -> None:
        with lock(redis_url, thread_local=False) as one, one:
            assert one.acquire(blocking=False)
            assert one.owned()
            one.release()

    task(body)
    assert not lock().locked()
