"""`Lock` has the interface of redis-py's, and its errors."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import redis
from redis.exceptions import LockError, LockNotOwnedError

from celery_relock.engine.platform import clock
from celery_relock.engine.renewal import keepalive
from celery_relock.errors import LockConfigError, LockConflict, LockLost, LockUnavailable
from celery_relock.lock import Lock, LockNeverFree, LockNotAcquired, LockNotOwned, LockNotTaken
from celery_relock.signals import lock_conflict
from tests.support import RedisServer, leftovers, wait_for
from tests.support.programs import said_by
from tests.support.proxy import Proxy

MakeLock = Callable[..., Lock]


def test_a_client_makes_it_with_all_of_redis_pys_own_parameters(client: redis.Redis) -> None:
    options = {
        "timeout": 5,
        "sleep": 0.2,
        "blocking": False,
        "blocking_timeout": 3,
        "thread_local": False,
        "raise_on_release_error": False,
    }
    known = inspect.signature(client.lock).parameters  # redis-py 5.0 lacks the last
    options = {name: value for name, value in options.items() if name in known}
    lock = client.lock(f"test-{os.getpid()}-made", lock_class=Lock, **options)
    assert isinstance(lock, Lock)
    assert lock.acquire(sleep=0.1, blocking=True, blocking_timeout=1, token="token-1") is True
    assert 4 < lock.remaining <= 5
    assert lock.locked()
    assert lock.owned()
    assert lock.extend(5) is True
    assert lock.reacquire() is True
    assert lock.release() is None
    assert not lock.locked()


def test_a_client_makes_it_in_another_namespace_only_if_its_class_has_that(
    lock: MakeLock, client: redis.Redis, namespace: str
) -> None:
    name = f"test-{os.getpid()}-there"
    with lock(name=name):
        with client.lock(name, timeout=5, blocking=False, lock_class=Lock):  # in that of `Lock`
            pass
        there = client.lock(name, timeout=5, lock_class=partial(Lock, namespace=namespace))
        assert not there.acquire(blocking=False)


def test_it_is_acquired_and_released(lock: MakeLock, client: redis.Redis, namespace: str) -> None:
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
        assert lock(blocking=False, blocking_timeout=60).acquire() is False
        assert lock(blocking_timeout=60).acquire(blocking=False) is False
        assert lock(blocking_timeout=0).acquire() is False
        assert lock().acquire(blocking_timeout=-1) is False
        assert time.monotonic() - started < 20


def test_blocking_timeout_bounds_the_wait(lock: MakeLock) -> None:
    with lock():
        started = time.monotonic()
        assert lock(blocking_timeout=0.2).acquire() is False
        assert 0.2 <= time.monotonic() - started < 20
        started = time.monotonic()
        assert lock(blocking_timeout=60).acquire(blocking_timeout=0.1) is False
        assert 0.1 <= time.monotonic() - started < 20


def test_without_a_timeout_it_waits_until_it_acquires(lock: MakeLock) -> None:
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
    thread.join(30)
    assert taken == [True]


def test_a_block_that_cannot_acquire_raises_an_error_that_says_who_holds_the_lock(
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


def test_the_error_names_the_holders_owner_and_what_is_left_of_its_lease(lock: MakeLock) -> None:
    with lock(owner="boss", timeout=30):
        with pytest.raises(LockConflict) as caught, lock(blocking=False):
            pass
        assert caught.value.owner == "boss"
        assert 0 < (caught.value.remaining or 0) <= 30


@pytest.mark.parametrize(
    ("wait", "policy"), [({"blocking_timeout": -1}, "raise"), ({"blocking_timeout": 0.1}, "block")]
)
def test_a_conflict_tells_what_is_made_of_it(
    lock: MakeLock, wait: dict[str, float], policy: str
) -> None:
    refused = pytest.raises(LockNotAcquired, match=r"within 0(\.1)? s")
    with lock(), _conflicts() as told, refused, lock(**wait):
        pass
    assert [facts["policy"] for facts in told] == [policy]


def test_a_wait_for_the_own_call_stack_is_no_wait_for_somebody_else(lock: MakeLock) -> None:
    one, two = lock(mode="shared"), lock()
    with one, _conflicts() as told, pytest.raises(LockNeverFree, match="this very call stack"):
        two.acquire()
    assert [facts["policy"] for facts in told] == ["raise"]
    assert "this very call stack" in told[0]["reason"]


@contextmanager
def _conflicts() -> Iterator[list[dict[str, Any]]]:
    """What `lock_conflict` tells meanwhile."""
    told: list[dict[str, Any]] = []
    lock_conflict.connect(hear := lambda **facts: told.append(facts), weak=False)
    try:
        yield told
    finally:
        lock_conflict.disconnect(hear)


@pytest.mark.parametrize("again", ["acquire", "release"])
def test_a_loss_is_told_also_after_a_release_that_failed(
    proxy: Proxy, lock: MakeLock, again: str
) -> None:
    one = lock(proxy.url, timeout=0.3)
    one.acquire()
    proxy.refuse()
    wait_for(lambda: one.lost, what="the loss")
    with pytest.raises(LockUnavailable):
        one.release()
    assert one.lost
    proxy.accept()
    with pytest.raises(LockNotOwned):
        getattr(one, again)()
    assert not one.lost
    assert one.acquire()
    one.release()


def test_an_acquire_that_a_frozen_server_executes_later_leaves_no_hold(
    own_redis: Callable[..., RedisServer], namespace: str
) -> None:
    server = own_redis()
    url = f"{server.url}?socket_timeout=0.3"
    with Lock(url, "other", namespace=namespace):  # connections are kept
        pass
    server.pause()
    try:
        with pytest.raises(LockUnavailable):
            Lock(url, "a", timeout=600, namespace=namespace).acquire()
    finally:
        server.resume()
    seen = server.client()
    wait_for(lambda: seen.hget(f"{namespace}:{{0}}:meta", "fence"))
    wait_for(lambda: not seen.keys(f"{namespace}:{{0}}:l:*"), 20, "the release")


def test_numbers_that_are_none_are_refused(lock: MakeLock) -> None:
    with pytest.raises(LockConfigError, match="blocking_timeout"):
        lock(blocking_timeout=10**400)
    with lock() as one, pytest.raises(LockConfigError, match="extend"):
        one.extend("5", replace_ttl=True)


def test_releasing_what_was_not_acquired_is_a_lock_error(lock: MakeLock) -> None:
    one = lock()
    for attempt in (one.release, one.reacquire, one.check, lambda: one.extend(1)):
        with pytest.raises(LockError, match="'a' is not held by this thread") as caught:
            attempt()
        assert not isinstance(caught.value, LockNotOwnedError)
    one.acquire()
    one.release()
    with pytest.raises(LockNotTaken):
        one.release()


def test_releasing_what_was_lost_is_a_not_owned_error(lock: MakeLock) -> None:
    one = lock()
    one.acquire()
    one._engine.backend.force_release("a")
    with pytest.raises(LockNotOwnedError) as caught:
        one.release()
    assert isinstance(caught.value, LockLost)
    with pytest.raises(LockNotTaken):
        one.release()
    assert one.acquire(blocking=False)
    one.release()


@pytest.mark.parametrize("attempt", ["extend", "reacquire", "acquire", "check"])
def test_nothing_can_be_done_with_what_was_lost_but_to_release_it(
    lock: MakeLock, attempt: str
) -> None:
    one = lock()
    one.acquire()
    one._engine.backend.force_release("a")
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
        one._engine.backend.force_release("a")


def test_a_block_whose_lock_was_lost_only_logs_if_asked_to(
    lock: MakeLock, caplog: pytest.LogCaptureFixture
) -> None:
    one = lock(raise_on_release_error=False)
    with one:
        one._engine.backend.force_release("a")
    assert "'a' was lost before it was released" in caplog.text


def test_what_the_block_raises_stands_though_the_lock_was_lost(lock: MakeLock) -> None:
    def block() -> None:
        with lock() as one:
            one._engine.backend.force_release("a")
            raise KeyError

    with pytest.raises(KeyError):
        block()


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_lock_is_not_copied_and_says_what_to_do_instead(lock: MakeLock, copied: Any) -> None:
    with pytest.raises(TypeError, match=r"the lock 'a' cannot be pickled or copied: .* its name"):
        copied(lock())


@pytest.mark.parametrize("kind", [LockNotAcquired, LockNotTaken, LockNotOwned])
def test_the_errors_pickle_with_all_they_know(kind: type[Any]) -> None:
    error = kind("text", name="a", owner="flow", remaining=1.5)
    for again in (pickle.loads(pickle.dumps(error)), kind(*error.args)):
        assert type(again) is kind
        assert again.reason == "text"
        assert (again.name, again.owner, again.remaining) == ("a", "flow", 1.5)
        assert again.lock_name == "a"


@pytest.mark.parametrize("renew", [False, True])
def test_a_lease_that_is_extended_often_and_by_little_is_not_shorter(
    lock: MakeLock, renew: bool
) -> None:
    one = lock(timeout=600, renew=renew)
    one.acquire()
    for _ in range(40):
        before = one.remaining
        one.extend(1)
        assert one.remaining > before
    assert one.remaining > 600
    one.release()


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
    for nothing in (-60, -server_remaining(one)):  # in whole ms
        with pytest.raises(LockConfigError, match="s to ten years"):
            one.extend(nothing)
    with pytest.raises(LockConfigError):
        one.extend(0.0004, replace_ttl=True)
    one.release()


@pytest.mark.parametrize("limit", [0, 2.5, True, "2", None])
def test_a_limit_is_a_whole_number_of_permits(lock: MakeLock, limit: Any) -> None:
    with pytest.raises(LockConfigError, match=f"limit={limit!r} cannot be used"):
        lock(limit=limit)


@pytest.mark.parametrize("timeout", [0, -1, 0.0004, float("inf"), float("nan"), 1e15, "30", True])
def test_a_timeout_that_is_no_lease_is_refused(lock: MakeLock, timeout: float) -> None:
    with pytest.raises(LockConfigError, match="s to ten years"):
        lock(timeout=timeout)


def test_a_token_that_stands_for_nobody_in_the_scripts_keeps_its_lock(lock: MakeLock) -> None:
    one = lock(timeout=0.6)
    assert one.acquire(token="-")
    [lease] = keepalive.leases()
    first = lease.deadline
    wait_for(lambda: lease.deadline > first, what="a renewal")
    one.release()
    with pytest.raises(LockConfigError, match="a token must be text, not 5"):
        one.acquire(token=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("wait", [float("nan"), "5", timedelta(seconds=5)])
def test_a_wait_that_is_no_number_is_refused(lock: MakeLock, wait: Any) -> None:
    """A wait of nan had no end, and took a whole processor."""
    with pytest.raises(LockConfigError, match=r"blocking_timeout=.* cannot be used"):
        lock(blocking_timeout=wait)
    with pytest.raises(LockConfigError, match=r"blocking_timeout=.* cannot be used"):
        lock().acquire(blocking_timeout=wait)
    assert lock(blocking_timeout=float("inf")).acquire()


@pytest.mark.parametrize("owner", [5, b"five", ("a",), "", " "])
def test_an_owner_that_is_no_text_or_blank_is_refused(lock: MakeLock, owner: Any) -> None:
    """All that had a blank one re-entered one another."""
    with pytest.raises(LockConfigError, match=r"owner=.* cannot be used"):
        lock(owner=owner)


@pytest.mark.parametrize("option", [{"renew": "no"}, {"namespace": None}, {"namespace": 5}])
def test_an_option_of_another_type_is_refused(redis_url: str, option: dict[str, Any]) -> None:
    with pytest.raises(LockConfigError, match="cannot be"):
        Lock(redis_url, "a", **option)


def test_a_renewed_lock_keeps_the_length_it_was_extended_to(lock: MakeLock) -> None:
    one = lock(timeout=5)
    one.acquire()
    one.extend(30, replace_ttl=True)
    assert one.remaining > 25, "certain as soon as the server has said yes"
    extended = clock()
    keepalive.look_now(one._engine.backend)
    wait_for(lambda: one._lease.renewed > extended, what="a renewal")
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


@pytest.mark.parametrize("attempt", ["extend", "reacquire"])
def test_what_might_be_released_already_is_not_extended(
    proxy: Proxy, lock: MakeLock, attempt: str
) -> None:
    one = lock(proxy.url, timeout=20)
    one.acquire()
    one.extend(10, replace_ttl=True)
    proxy.refuse()
    with pytest.raises(LockUnavailable):
        one.release()
    proxy.accept()
    arguments = (3600, True) if attempt == "extend" else ()
    with pytest.raises(LockNotOwned, match="might be released already"):
        getattr(one, attempt)(*arguments)
    (hold,) = lock()._engine.inspect("a").holds
    assert hold.remaining <= 10, "nobody would know of it"
    one.release()
    assert not one.locked()


def test_an_extend_without_an_answer_is_not_believed_where_it_shortens(
    proxy: Proxy, namespace: str, lock: MakeLock
) -> None:
    one = lock(proxy.url, timeout=30, renew=False)
    one.acquire()
    one.extend(29, replace_ttl=True)  # the server knows the script now
    for _ in range(20):  # executed each time, and answered never
        proxy.lose_reply("renew")
    with pytest.raises(LockUnavailable):
        one.extend(3, replace_ttl=True)
    assert server_remaining(lock()) <= 3
    assert one.remaining <= 3
    proxy.refuse()


def test_a_shortening_that_comes_late_shortens_no_newer_lease_that_is_believed_in(
    proxy: Proxy, namespace: str, lock: MakeLock
) -> None:
    url = f"{proxy.url}?socket_timeout=0.5"
    one = lock(url, timeout=60)
    one.acquire()
    late = proxy.hold("renew")
    with suppress(LockUnavailable):
        one.extend(5, replace_ttl=True)
    one.extend(60, replace_ttl=True)
    late.deliver()
    assert one.remaining <= server_remaining(lock())
    one.release()


def test_a_shortening_is_sent_once_also_where_its_connection_breaks(
    proxy: Proxy, lock: MakeLock
) -> None:
    one = lock(proxy.url, timeout=60)
    one.acquire()
    one.extend(50, replace_ttl=True)  # a connection is kept
    late = proxy.hold("renew")

    def cut() -> None:
        assert late.arrived.wait(20)
        proxy.cut()

    breaks = threading.Thread(target=cut)
    breaks.start()
    with suppress(LockUnavailable):
        one.extend(5, replace_ttl=True)
    breaks.join(20)
    one.extend(60, replace_ttl=True)
    late.deliver()
    assert one.remaining <= server_remaining(lock())
    one.release()


def test_a_server_that_is_gone_when_a_wait_is_over_is_told_of_the_acquire(
    proxy: Proxy, lock: MakeLock
) -> None:
    one, two = lock(), lock(proxy.url)
    one.acquire()
    refuse = threading.Timer(0.5, proxy.refuse)
    refuse.start()
    with pytest.raises(LockUnavailable, match="Cannot acquire lock 'a': Redis cannot be reached"):
        two.acquire(blocking_timeout=1.0)
    refuse.join()
    one.release()


def test_who_was_refused_is_told_so_though_its_first_command_cannot_be_made_up_for(
    proxy: Proxy, lock: MakeLock
) -> None:
    one, two = lock(), lock(proxy.url)
    one.acquire()
    proxy.lose_reply("acquire")
    for _ in range(100):
        proxy.lose_command("release")
    assert not two.acquire(blocking=False)
    proxy.forget()
    one.release()


def test_a_greenlet_shortens_a_lease_that_the_keep_alive_thread_has_renewed(
    redis_url: str, namespace: str
) -> None:
    """Under gevent a socket belongs to the thread that made it."""
    script = f"""
        from gevent import monkey; monkey.patch_all()
        import gevent
        from celery_relock import Lock
        lock = Lock({redis_url!r}, "a", namespace={namespace!r}, timeout=3)
        lock.acquire()
        lease = lock._grip("looked at").lease
        first = lease.renewed
        while lease.renewed == first:
            gevent.sleep(0.05)
        print(lock.extend(2.5, replace_ttl=True), lock.lost)
    """
    assert said_by(script) == "True False\n"


def server_remaining(one: Lock) -> float:
    return one._engine.inspect("a").holds[0].remaining


def test_a_stack_that_is_full_in_the_middle_of_an_acquire_leaves_no_hold(
    lock: MakeLock, client: redis.Redis, namespace: str
) -> None:
    def down(frames: int, call: Callable[[], object]) -> None:
        if frames:
            down(frames - 1, call)
        else:
            call()

    def use(one: Lock) -> None:
        with one:
            pass

    use(lock())
    room, failed = sys.getrecursionlimit() - len(inspect.stack(0)), 0
    for left in range(100, 10, -1):  # the connection is kept until the first that fails
        one = lock(name=f"n{left}", timeout=300)
        try:
            down(room - left, partial(use, one))
        except RecursionError:
            failed += 1
    assert failed
    wait_for(lambda: not client.keys(f"{namespace}:*:l:n*"), what="the last release")
