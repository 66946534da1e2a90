"""`Lock` as a citizen of redis-py, and what it does beyond."""

from __future__ import annotations

import gc
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from redis.exceptions import LockError, LockNotOwnedError

from celery_relock.compose import engine_for_client
from celery_relock.core import callstack
from celery_relock.core.keepalive import keepalive
from celery_relock.errors import LockConfigError, LockConflict, LockLost, LockUnavailable
from celery_relock.lock import Lock, LockNotAcquired, LockNotOwned, LockNotTaken
from tests.support import RedisServer, leftovers, wait_for
from tests.support.companion import running
from tests.support.proxy import Proxy

MakeLock = Callable[..., Lock]


@pytest.fixture
def lock(client: redis.Redis, namespace: str) -> MakeLock:
    """Make a lock: `lock()`, `lock(timeout=5)`, `lock(name="b")`."""

    def make(redis: Any = client, name: str | bytes = "a", **options: Any) -> Lock:
        return Lock(redis, name, namespace=namespace, **options)

    return make


@pytest.fixture
def in_thread() -> Callable[[Callable[[], Any]], Any]:
    """Call something in another thread and return what it returns, or raise what it raises."""

    def run(call: Callable[[], Any]) -> Any:
        result: list[Any] = []
        failure: list[BaseException] = []

        def work() -> None:
            try:
                result.append(call())
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(20)
        if failure:
            raise failure[0]
        return result[0]

    return run


# --- the interface of redis-py's Lock


def test_a_client_makes_it_with_all_of_redis_pys_own_parameters(client: redis.Redis) -> None:
    lock = client.lock(
        f"test-{os.getpid()}-made",
        timeout=5,
        sleep=0.2,
        blocking=False,
        blocking_timeout=3,
        lock_class=Lock,
        thread_local=False,
        raise_on_release_error=False,
    )
    assert isinstance(lock, Lock)
    assert lock.acquire(sleep=0.1, blocking=True, blocking_timeout=1, token="token-1") is True
    assert 4 < lock.remaining <= 5
    assert lock.locked()
    assert lock.owned()
    assert lock.extend(5) is True
    assert lock.reacquire() is True
    assert lock.release() is None
    assert not lock.locked()


def test_it_is_taken_and_given_back(lock: MakeLock, client: redis.Redis, namespace: str) -> None:
    one = lock()
    assert (one.locked(), one.owned(), one.fence, one.remaining) == (False, False, 0, 0.0)
    assert one.acquire()
    assert (one.locked(), one.owned(), one.lost) == (True, True, False)
    assert one.fence > 0
    assert lock().locked()
    assert not lock().owned()
    one.release()
    assert not one.locked()
    assert leftovers(client, namespace) == [f"{namespace}:{{0}}:meta"]


def test_two_objects_exclude_each_other_in_one_thread_and_in_two(
    lock: MakeLock, in_thread: Callable[..., Any]
) -> None:
    one, two = lock(), lock()
    with one:
        assert two.acquire(blocking=False) is False
        assert in_thread(lambda: two.acquire(blocking=False)) is False
        assert in_thread(lambda: one.acquire(blocking=False)) is False
    assert two.acquire(blocking=False) is True
    two.release()


def test_blocking_false_does_not_wait_whatever_the_timeout_says(lock: MakeLock) -> None:
    with lock():
        started = time.monotonic()
        assert lock(blocking=False, blocking_timeout=5).acquire() is False
        assert lock(blocking_timeout=5).acquire(blocking=False) is False
        assert lock(blocking_timeout=0).acquire() is False
        assert lock().acquire(blocking_timeout=-1) is False
        assert time.monotonic() - started < 0.5


def test_blocking_timeout_bounds_the_wait(lock: MakeLock) -> None:
    with lock():
        started = time.monotonic()
        assert lock(blocking_timeout=0.2).acquire() is False
        assert 0.2 <= time.monotonic() - started < 1
        started = time.monotonic()
        assert lock(blocking_timeout=9).acquire(blocking_timeout=0.1) is False
        assert 0.1 <= time.monotonic() - started < 1


def test_without_a_timeout_it_waits_until_it_gets_in(lock: MakeLock) -> None:
    one, two = lock(), lock()
    one.acquire()
    taken: list[bool] = []

    def take() -> None:
        taken.append(two.acquire())
        two.release()

    thread = threading.Thread(target=take)
    thread.start()
    wait_for(lambda: one._engine.inspect("a").waiting == 1)
    one.release()
    thread.join(5)
    assert taken == [True]


def test_a_block_that_cannot_get_in_raises_an_error_that_says_who_is_in_the_way(
    lock: MakeLock,
) -> None:
    with lock():
        with pytest.raises(LockError) as caught, lock(blocking_timeout=0.1):
            pass
        assert isinstance(caught.value, LockConflict)
        assert isinstance(caught.value, LockNotAcquired)
        for part in ("'a'", str(os.getpid()), "0.1 s"):
            assert part in str(caught.value)
        assert caught.value.lock_name == "a"
        assert caught.value.name == "a"


def test_giving_back_what_was_not_taken_is_a_lock_error(lock: MakeLock) -> None:
    one = lock()
    for attempt in (one.release, one.reacquire, one.check, lambda: one.extend(1)):
        with pytest.raises(LockError, match="'a' is not held by this thread") as caught:
            attempt()
        assert not isinstance(caught.value, LockNotOwnedError)
    one.acquire()
    one.release()
    with pytest.raises(LockNotTaken):
        one.release()


def test_giving_back_what_was_lost_is_a_not_owned_error(lock: MakeLock) -> None:
    one = lock()
    one.acquire()
    one._engine.store.force_release("a")
    with pytest.raises(LockNotOwnedError) as caught:
        one.release()
    assert isinstance(caught.value, LockLost)
    with pytest.raises(LockNotTaken):
        one.release()
    assert one.acquire(blocking=False)
    one.release()


@pytest.mark.parametrize("attempt", ["extend", "reacquire", "acquire", "check"])
def test_nothing_can_be_done_with_what_was_lost_but_giving_it_back(
    lock: MakeLock, attempt: str
) -> None:
    one = lock()
    one.acquire()
    one._engine.store.force_release("a")
    if attempt in ("acquire", "check"):
        one._engine.extend(one._lease, 5)  # finds it out
        assert one.lost
    arguments = (5,) if attempt == "extend" else ()
    with pytest.raises(LockNotOwned):
        getattr(one, attempt)(*arguments)
    assert one.lost
    assert not one.owned()
    with pytest.raises(LockNotOwned):
        one.release()


def test_a_block_whose_lock_was_lost_raises_at_its_end(lock: MakeLock) -> None:
    one = lock()
    with pytest.raises(LockNotOwnedError), one:
        one._engine.store.force_release("a")


def test_a_block_whose_lock_was_lost_only_logs_if_asked_to(
    lock: MakeLock, caplog: pytest.LogCaptureFixture
) -> None:
    one = lock(raise_on_release_error=False)
    with one:
        one._engine.store.force_release("a")
    assert "'a' was lost before it was given back" in caplog.text


def test_what_the_block_raises_stands_though_the_lock_was_lost(lock: MakeLock) -> None:
    one = lock()
    with pytest.raises(KeyError), one:
        one._engine.store.force_release("a")
        raise KeyError


@pytest.mark.parametrize("kind", [LockNotAcquired, LockNotTaken, LockNotOwned])
def test_the_errors_pickle_with_all_they_know(kind: type[Any]) -> None:
    error = kind("text", name="a", owner="flow", remaining=1.5)
    for copy in (pickle.loads(pickle.dumps(error)), kind(*error.args)):
        assert type(copy) is kind
        assert str(copy) == "text"
        assert (copy.name, copy.owner, copy.remaining) == ("a", "flow", 1.5)
        assert copy.lock_name == "a"


def test_extend_adds_to_what_is_left_or_replaces_it(lock: MakeLock) -> None:
    one = lock(timeout=10, renew=False)
    one.acquire()
    one.extend(10)
    assert 18 < server_remaining(one) <= 20
    one.extend(5, replace_ttl=True)
    assert 4 < server_remaining(one) <= 5
    assert 4 < one.remaining <= 5
    one.reacquire()
    assert 9 < server_remaining(one) <= 10
    with pytest.raises(LockConfigError):
        one.extend(-60)
    one.release()


def test_a_renewed_lock_keeps_the_length_it_was_extended_to(lock: MakeLock) -> None:
    one = lock(timeout=1)
    one.acquire()
    one.extend(30, replace_ttl=True)
    wait_for(lambda: one.remaining > 25)
    time.sleep(0.5)
    assert server_remaining(one) > 25
    one.release()


def test_a_failed_extend_leaves_it_as_it_was(proxy: Proxy, namespace: str, lock: MakeLock) -> None:
    one = lock(proxy.url, timeout=20)
    one.acquire()
    proxy.refuse()
    with pytest.raises(LockUnavailable):
        one.extend(100, replace_ttl=True)
    assert one._lease.claim.lease == 20
    proxy.accept()
    one.release()


def server_remaining(one: Lock) -> float:
    return one._engine.inspect("a").holds[0].remaining


# --- leases and their end


def test_it_is_renewed_while_it_is_held(lock: MakeLock) -> None:
    with lock(timeout=0.6) as one:
        time.sleep(1.5)
        assert one.owned()
        one.check()


def test_without_renewal_it_ends_as_redis_pys_does(lock: MakeLock) -> None:
    one, two = lock(timeout=0.4, renew=False), lock(timeout=5)
    one.acquire()
    started = time.monotonic()
    assert two.acquire(blocking_timeout=5)
    assert 0.3 < time.monotonic() - started < 1
    assert one.lost
    with pytest.raises(LockNotOwned):
        one.release()
    assert two.owned()
    two.release()


def test_without_renewal_it_lives_its_whole_time_after_a_wait_too(lock: MakeLock) -> None:
    one, two = lock(), lock(timeout=1.0, renew=False)
    one.acquire()
    taken: list[float] = []

    def take() -> None:
        two.acquire()
        taken.append(two.remaining)
        wait_for(lambda: two.lost, timeout=3)
        taken.append(time.monotonic())

    thread = threading.Thread(target=take)
    thread.start()
    wait_for(lambda: one._engine.inspect("a").waiting == 1)
    time.sleep(0.5)  # so that a place's life would be half over, were it not kept
    one.release()
    released = time.monotonic()
    thread.join(5)
    assert taken[0] > 0.85
    assert 0.85 < taken[1] - released < 1.3


def test_a_lock_that_is_dropped_while_held_is_not_renewed_for_ever(lock: MakeLock) -> None:
    one, two = lock(timeout=0.5), lock()
    one.acquire()
    del one
    gc.collect()
    started = time.monotonic()
    assert two.acquire(blocking_timeout=5)
    assert time.monotonic() - started < 1
    two.release()


def test_a_lock_whose_thread_has_ended_is_not_renewed_for_ever(
    lock: MakeLock, in_thread: Callable[..., Any]
) -> None:
    one, two = lock(timeout=0.5), lock()
    assert in_thread(one.acquire)
    assert two.acquire(blocking_timeout=5)
    two.release()


def test_a_lock_that_is_shared_outlives_the_thread_that_took_it(
    lock: MakeLock, in_thread: Callable[..., Any]
) -> None:
    one = lock(timeout=0.5, thread_local=False)
    assert in_thread(one.acquire)
    time.sleep(0.8)
    assert one.owned()
    one.release()


def test_what_was_dropped_is_told_and_forgotten(
    lock: MakeLock, caplog: pytest.LogCaptureFixture
) -> None:
    one = lock(timeout=0.6)
    one.acquire()
    lease = one._lease
    assert lease in keepalive.leases()
    del one
    wait_for(lambda: lease not in keepalive.leases())
    assert "it was dropped without being given back" in caplog.text


class Stop(BaseException):
    """What Ctrl-C or a time limit throws in."""


def test_a_signal_may_strike_at_any_line_of_a_block(lock: MakeLock) -> None:
    """Whatever it interrupts: the lock is held and can be given back, or it is not held at all."""
    one, two = lock(), lock()
    outer = callstack.innermost()
    armed = False

    def strike(*_: object) -> None:
        if armed:
            raise Stop

    before = signal.signal(signal.SIGALRM, strike)
    gc.collect()
    gc.disable()  # what strikes in a weak reference's callback is swallowed by Python itself
    struck = 0
    try:
        for turn in range(300):
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 8e-4))
            try:
                armed = True
                try:
                    with one, one:
                        pass
                finally:
                    armed = False
            except Stop:
                struck += 1
            while one._lease or one._own_grip():
                one.release()
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert not two.locked(), turn
            assert callstack.innermost() is outer
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert struck > 20


# --- who re-enters


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
    assert other.acquire(blocking=False) is False  # the other thread's hold, not given back
    other._engine.store.force_release("a")


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


def test_another_thread_gives_back_a_shared_lock_and_none_that_is_not(
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
    assert not one.locked()


def test_so_many_as_the_limit_allows_are_in(lock: MakeLock) -> None:
    first, second, third = lock(limit=2), lock(limit=2), lock(limit=2)
    assert first.acquire(blocking=False)
    assert second.acquire(blocking=False)
    assert third.acquire(blocking=False) is False
    first.release()
    assert third.acquire(blocking=False)
    second.release()
    third.release()


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


# --- clients


@pytest.mark.parametrize(
    "options", [{"decode_responses": True}, {"protocol": 3}, {"encoding": "utf-16"}]
)
def test_any_client_of_one_server_will_do(
    redis_url: str, lock: MakeLock, options: dict[str, Any]
) -> None:
    with redis.Redis.from_url(redis_url, **options) as client:
        one, two = lock(client), lock()
        with one:
            assert one.owned()
            assert two.acquire(blocking_timeout=0.1) is False
            waiter = threading.Thread(target=lambda: one.acquire() and one.release())
            waiter.start()
            wait_for(lambda: two._engine.inspect("a").waiting == 1)
        waiter.join(5)
        assert not two.locked()


def test_a_clients_own_pool_stays_as_it_is(redis_url: str, lock: MakeLock) -> None:
    with redis.Redis.from_url(redis_url, max_connections=2) as client:
        client.ping()
        one, two = lock(client, timeout=0.6), lock(client, timeout=0.6)
        with one:
            two.acquire(blocking_timeout=0.5)
        pool = client.connection_pool
        assert pool._created_connections == 1
        assert pool.max_connections == 2


def test_clients_of_one_server_share_one_engine(redis_url: str, namespace: str) -> None:
    engines = set()
    for _ in range(5):
        with redis.Redis.from_url(redis_url) as client:
            engines.add(engine_for_client(client, namespace))
        del client
        gc.collect()
    assert len(engines) == 1
    with redis.Redis.from_url(redis_url.replace("/0", "/1")) as other:
        assert engine_for_client(other, namespace) not in engines


def test_a_client_without_a_server_does_not_go_through_its_own_retries(
    own_redis: Callable[..., RedisServer], lock: MakeLock
) -> None:
    server = own_redis()
    # Made like this, a client of redis-py 8 connects ten times before it gives up.
    client = redis.Redis(host="127.0.0.1", port=server.port)
    one = lock(client)
    server.kill()
    started = time.monotonic()
    with pytest.raises(LockUnavailable):
        one.acquire()
    assert time.monotonic() - started < 4
    client.close()


def test_asynchronous_clients_and_clusters_are_refused_with_a_reason(namespace: str) -> None:
    import redis.asyncio

    for wrong in (redis.asyncio.Redis(), redis.RedisCluster, 42, None):
        with pytest.raises(LockConfigError, match=r"needs a redis\.Redis client or the URL"):
            Lock(wrong, "a", namespace=namespace)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"name": ""},
        {"name": "  "},
        {"name": b"\xff"},
        {"name": "half \ud800"},
        {"name": 42},
        {"timeout": 0},
        {"timeout": -1},
        {"limit": 0},
    ],
)
def test_values_that_cannot_be_used_are_refused(lock: MakeLock, options: dict[str, Any]) -> None:
    with pytest.raises(LockConfigError):
        lock(**options)


def test_a_name_may_be_bytes_and_hold_braces_colons_and_spaces(lock: MakeLock) -> None:
    with lock(name="a {b}:c ü".encode()) as one:
        assert one.name == "a {b}:c ü"
        assert lock(name="a {b}:c ü").locked()


# --- when Redis is away


def test_what_could_not_be_given_back_can_be_given_back_again(proxy: Proxy, lock: MakeLock) -> None:
    one, two = lock(proxy.url), lock()
    one.acquire()
    proxy.refuse()
    with pytest.raises(LockUnavailable):
        one.release()
    assert not one.lost
    assert one.remaining == 0
    proxy.accept()
    one.release()
    assert two.acquire(blocking=False)
    two.release()


def test_what_could_not_be_given_back_does_not_stand_in_its_own_way(
    proxy: Proxy, lock: MakeLock
) -> None:
    one = lock(proxy.url)
    with pytest.raises(LockUnavailable), one:
        fence = one.fence
        proxy.refuse()
    proxy.accept()
    assert one.acquire(blocking=False)
    assert one.fence > fence
    one.release()
    assert not one.locked()


def test_what_the_block_raises_stands_though_redis_was_away(proxy: Proxy, lock: MakeLock) -> None:
    with pytest.raises(KeyError), lock(proxy.url):
        proxy.refuse()
        raise KeyError


# --- inside a task


@pytest.fixture
def task(redis_url: str, namespace: str) -> Iterator[Callable[..., Any]]:
    """Run a function as the body of a LockedTask that holds the lock "a"."""
    from celery import Celery

    from celery_relock import LockedTask

    app = Celery("locks", set_as_current=False)
    app.conf.update(relock_url=redis_url, relock_namespace=namespace)

    def run(body: Callable[[], Any], **options: Any) -> Any:
        made = app.task(body, base=LockedTask, lock_key="a", name="body", **options)
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
