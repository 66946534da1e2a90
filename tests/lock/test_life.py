"""The lease of a `Lock`: how long it lives, and that it ends with its holder."""

from __future__ import annotations

import gc
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import redis

from celery_relock.backends.redis import connections as connections_of_redis
from celery_relock.engine import lease as lease_module
from celery_relock.engine import reentrancy
from celery_relock.engine.lease import State
from celery_relock.engine.platform import clock
from celery_relock.engine.renewal import keepalive
from celery_relock.lock import Lock, LockNotOwned
from tests.support import wait_for
from tests.support.strikes import Stop, Strike

MakeLock = Callable[..., Lock]


def test_it_is_renewed_while_it_is_held(lock: MakeLock) -> None:
    with lock(timeout=2.0) as one:
        time.sleep(2.5)
        assert one.owned()
        one.check()


def test_without_renewal_it_ends_as_redis_pys_does(
    lock: MakeLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "WAITER_LEASE", 60.0)  # a heartbeat comes after 10 s
    one, two = lock(timeout=0.4, renew=False), lock(timeout=30)
    started = time.monotonic()
    one.acquire()
    assert two.acquire(blocking_timeout=30)
    assert 0.3 < time.monotonic() - started < 8
    assert one.lost
    with pytest.raises(LockNotOwned):
        one.release()
    assert two.owned()
    two.release()


def test_without_renewal_it_lives_its_whole_time_after_a_wait_too(lock: MakeLock) -> None:
    one, two = lock(), lock(timeout=60, renew=False)
    one.acquire()
    taken: list[float] = []

    def take() -> None:
        two.acquire()
        taken.append(two.remaining)

    thread = threading.Thread(target=take)
    thread.start()
    wait_for(lambda: one._engine.inspect("a").waiting == 1)
    [waits] = wait_for(lambda: [e for e in keepalive.leases() if e.state is State.WAITING])
    waits.renewed -= 40  # as if no heartbeat had been answered for so long
    one.release()
    thread.join(30)
    assert taken[0] > 40
    assert waits.due > waits.deadline, "nothing renews it"


def test_a_lock_that_is_dropped_while_held_is_not_renewed_for_ever(lock: MakeLock) -> None:
    one, two = lock(timeout=0.5), lock()
    one.acquire()
    del one
    gc.collect()
    assert two.acquire(blocking_timeout=30)
    two.release()


def test_a_lock_whose_thread_has_ended_is_not_renewed_for_ever(
    lock: MakeLock, in_thread: Callable[..., Any]
) -> None:
    one, two = lock(timeout=0.5), lock()
    assert in_thread(one.acquire)
    assert two.acquire(blocking_timeout=30)
    two.release()


def test_a_lock_that_is_shared_outlives_the_thread_that_acquired_it(
    lock: MakeLock, in_thread: Callable[..., Any]
) -> None:
    one = lock(timeout=30, thread_local=False)
    assert in_thread(one.acquire)
    ended = clock()
    keepalive.look_now(one._engine.backend)
    wait_for(lambda: one._lease.renewed > ended, what="a renewal")
    assert one.owned()
    one.release()


def test_what_was_dropped_is_told_and_forgotten(
    lock: MakeLock, caplog: pytest.LogCaptureFixture
) -> None:
    one = lock(timeout=3)
    one.acquire()
    lease = one._lease
    assert lease in keepalive.leases()
    del one
    wait_for(lambda: lease not in keepalive.leases())
    wait_for(lambda: "it was dropped without being released" in caplog.text)


# What strikes in a destructor is swallowed by Python, and a socket it was about to keep stays open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_may_strike_at_any_line_of_a_block(lock: MakeLock) -> None:
    """Whatever it interrupts: the lock is held and can be released, or it is not held at all."""
    one, two = lock(), lock()
    outer = reentrancy.innermost()
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
            assert reentrancy.innermost() is outer
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert struck > 20


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("thread_local", [True, False])
@pytest.mark.parametrize("around", [0, 1])
def test_a_signal_at_any_line_of_the_end_of_a_block_leaves_nothing_behind(
    lock: MakeLock, around: int, thread_local: bool
) -> None:
    """Nobody would come back for it, as the object lives on."""
    one, two = lock(thread_local=thread_local), lock()
    # Not where `with` guards a few lines: a tracer may strike between the last of them and the end
    # of the block, where no signal does.
    strike = Strike("lock.py", "hand.py", "engine.py")
    at = 3  # before the first of these it is as with any context manager
    while strike.count == at - 3:
        strike.left = at
        with suppress(Stop), ExitStack() as blocks:
            for _ in range(around):
                blocks.enter_context(one)
            blocks.callback(sys.settrace, None)
            with one:
                sys.settrace(strike)
        sys.settrace(None)
        assert one._own_grip() is None, at
        assert not two.locked(), at
        at += 1
    assert strike.count > 10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("around", [0, 1])
def test_a_signal_at_any_line_of_the_beginning_of_a_block_leaves_nothing_behind(
    lock: MakeLock, around: int
) -> None:
    """`with` calls no `__exit__` for a block that has not begun."""
    one, two, strike = lock(), lock(), Strike("lock.py", "named_lock.py", "engine.py")
    at, begun = 1, False
    while not begun:
        strike.left = at
        with suppress(Stop), ExitStack() as blocks:
            for _ in range(around):
                blocks.enter_context(one)
            blocks.callback(sys.settrace, None)
            sys.settrace(strike)
            with one:
                sys.settrace(None)
                begun = True
        assert one._own_grip() is None, at
        assert not two.locked(), at
        at += 1
    assert strike.count > (5 if around else 20)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_at_any_line_of_a_shortening_leaves_no_belief_in_more_than_there_is(
    lock: MakeLock,
) -> None:
    other, strike = lock(), Strike("engine.py")
    at = 1
    while strike.count == at - 1:
        one = lock(timeout=30, renew=False)
        one.acquire()
        strike.left = at
        sys.settrace(strike)
        with suppress(Stop):
            one.extend(5, replace_ttl=True)
        sys.settrace(None)
        assert one.remaining <= other._engine.inspect("a").holds[0].remaining, at
        one.release()
        at += 1
    assert strike.count > 5


def test_an_engine_ends_with_its_client_and_so_do_its_inbox_and_its_connections(
    redis_url: str, client: redis.Redis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections_of_redis, "STILL_WANTED", 0.2)
    mark = f"mark-{namespace}"

    def connections() -> int:
        return sum(each["name"] == mark for each in client.client_list())

    def use() -> weakref.ref[object]:
        own = redis.Redis.from_url(redis_url, client_name=mark)
        one, two = (Lock(own, "a", namespace=namespace) for _ in "12")
        one.acquire()
        assert not two.acquire(blocking_timeout=0.3)  # so that somebody listens
        one.release()
        assert connections() >= 2
        return weakref.ref(one._engine.backend)

    backend = use()
    gc.collect()
    wait_for(lambda: backend() is None, what="the end of the inbox's thread")
    gc.collect()
    wait_for(lambda: connections() == 0, what="the end of the connections")
