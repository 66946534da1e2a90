"""Two who wait for each other are told so, and nobody else is."""

from __future__ import annotations

import threading

import pytest

from celery_relock import Lock
from celery_relock.engine.protocol import Deadlocked, ParkRequest
from celery_relock.errors import LockConflict, LockDeadlock
from tests.support import wait_for


@pytest.fixture
def lock(redis_url, namespace):
    """A lock of this test by its name, waited for without a bound."""

    def make(name, **options):
        return Lock(redis_url, name, namespace=namespace, **options)

    return make


@pytest.fixture
def beside():
    """Run something in a thread; what it returns or raises is in `result` when it is over."""
    threads = []

    class Beside(threading.Thread):
        def __init__(self, work):
            super().__init__(daemon=True)
            self.work, self.result = work, None
            threads.append(self)
            self.start()

        def run(self):
            try:
                self.result = self.work()
            except Exception as error:
                self.result = error

    yield Beside
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def _waits(client, namespace, name, count=1):
    wait_for(
        lambda: client.zcard(f"{namespace}:{{0}}:q:{name}") == count, what=f"{count} for {name}"
    )


def test_the_second_of_two_that_wait_for_each_other_is_told(lock, beside, client, namespace):
    gate = threading.Event()

    def first():
        with lock("a"):
            gate.wait(30)
            with lock("b"):
                return "in"

    def second():
        with lock("b"):
            other.append(beside(first))
            wait_for(lambda: lock("a").locked(), what="the first to hold a")
            gate.set()
            _waits(client, namespace, "b")
            with lock("a"):
                return "in"

    other: list[threading.Thread] = []
    told = beside(second)
    told.join(30)

    assert isinstance(told.result, LockDeadlock), told.result
    text = str(told.result)
    for part in ("would never end", "'a'", "'b'"):
        assert part in text, text
    other[0].join(30)
    assert other[0].result == "in"  # the second has left b, so the first goes on


def test_a_ring_of_three_is_found_by_the_one_that_closes_it(lock, beside, client, namespace):
    holds = {name: threading.Event() for name in "abc"}
    go = {name: threading.Event() for name in "abc"}

    def one(mine, wanted):
        def work():
            with lock(mine):
                holds[mine].set()
                go[mine].wait(30)
                with lock(wanted):
                    return "in"

        return work

    parts = [beside(one(*pair)) for pair in ("ab", "bc", "ca")]
    for held in holds.values():
        assert held.wait(30)
    go["a"].set()
    _waits(client, namespace, "b")
    go["b"].set()
    _waits(client, namespace, "c")
    go["c"].set()
    for part in parts:
        part.join(30)

    assert [part.result for part in parts[:2]] == ["in", "in"]
    assert isinstance(parts[2].result, LockDeadlock)


@pytest.mark.parametrize("bound", [None, float("inf")])
def test_a_thread_that_waits_for_its_own_other_lock_object_is_told_at_once(lock, bound):
    with lock("a"), pytest.raises(LockDeadlock, match="this very call stack"):
        lock("a", blocking_timeout=bound).acquire()


def test_what_another_thread_may_release_is_no_deadlock(lock):
    held = lock("a", thread_local=False)
    held.acquire()
    threading.Timer(0.3, held.release).start()
    assert lock("a").acquire() is True


def test_a_hold_that_ends_by_itself_is_no_deadlock(lock):
    lock("a", timeout=0.5, renew=False).acquire()
    assert lock("a").acquire() is True


def test_a_wait_with_a_bound_ends_by_that(lock):
    with lock("a"):
        assert lock("a", blocking_timeout=0.2).acquire() is False


def test_a_chain_that_ends_is_no_deadlock(lock, beside, client, namespace):
    gate = threading.Event()

    def holder():
        with lock("b"):
            return gate.wait(30)

    def first():
        with lock("a"), lock("b"):
            return "in"

    beside(holder)
    wait_for(lambda: lock("b").locked(), what="the holder")
    waits = beside(first)
    _waits(client, namespace, "b")
    last = beside(lambda: lock("a").acquire())
    _waits(client, namespace, "a")
    gate.set()
    waits.join(30)
    assert waits.result == "in"
    last.join(30)
    assert last.result is True


def test_a_free_place_at_a_limit_of_two_is_no_deadlock(lock, beside, client, namespace):
    """One entry of b waits for what this thread holds, the other will end."""
    gate, holds = threading.Event(), threading.Event()

    def stuck():
        with lock("b", limit=2):
            holds.set()
            with lock("a"):
                return "in"

    def ends():
        with lock("b", limit=2):
            return gate.wait(30)

    with lock("a"):
        first = beside(stuck)
        assert holds.wait(30)
        _waits(client, namespace, "a")
        beside(ends)
        wait_for(lambda: len(lock("b")._engine.inspect("b").holds) == 2, what="both entries")
        third = lock("b", limit=2, blocking_timeout=0.3)
        assert third.acquire() is False
        gate.set()
        third.blocking_timeout = 10
        assert third.acquire() is True
        third.release()
    first.join(30)
    assert first.result == "in"


def test_a_place_that_is_given_up_no_longer_counts(lock, beside, client, namespace):
    gate = threading.Event()

    def first():
        with lock("a"):
            lock("b", blocking_timeout=0.2).acquire()  # in vain
            return gate.wait(30)

    with lock("b"):
        other = beside(first)
        wait_for(lambda: lock("a").locked(), what="the first to hold a")
        _waits(client, namespace, "b")
        _waits(client, namespace, "b", 0)
        with pytest.raises(LockConflict) as caught:
            lock("a", blocking_timeout=0.2).__enter__()
        assert not isinstance(caught.value, LockDeadlock)
        gate.set()
    other.join(30)
    assert not list(client.scan_iter(f"{namespace}:{{0}}:s:*"))


@pytest.mark.parametrize("parks", [False, True])
def test_a_late_copy_of_what_was_told_of_a_deadlock_acquires_and_parks_for_nobody(
    runs, proxy, parks, beside
):
    near, far = runs(proxy.url, socket_timeout=0.5), runs()
    near.release(near.held("warm"))
    near.ready()
    mine, theirs = near.held("a"), far.held("b")
    waiter = far.lease("a", stuck=(theirs.claim.execution_id,))
    waits = beside(lambda: far.engine.acquire(waiter, 20.0))
    wait_for(lambda: far.engine.inspect("a").waiting == 1, what="a waiter for a")
    copy = proxy.hold("acquire")
    asking = near.lease("b", stuck=(mine.claim.execution_id,))
    if parks:
        answer = near.engine.park(asking, ParkRequest("message", "home", "task"))
    else:
        answer = near.engine.acquire(asking, 10.0)
    assert isinstance(answer, Deadlocked)
    assert near.release(asking)
    near.release(mine)
    waits.join(20)
    far.release(waiter)
    far.release(theirs)
    copy.deliver()
    assert far.engine.inspect("b") == ((), 0)
