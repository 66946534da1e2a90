"""An `acquire` never comes home with a lease that has run out already (B1)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_relock.engine.events import LockEvent
from celery_relock.engine.lease import Lease, State
from celery_relock.engine.platform import clock
from celery_relock.engine.protocol import Conflict, Held
from celery_relock.engine.renewal import keepalive
from celery_relock.errors import LockUnavailable
from tests.support import RedisServer, wait_for
from tests.support.proxy import Proxy
from tests.support.runs import Runs


@pytest.fixture
def frozen(own_redis: Callable[..., RedisServer]) -> Iterator[Callable[[float], str]]:
    """A server, and a way to freeze it for some seconds from now on."""
    server = own_redis()

    def freeze(seconds: float) -> None:
        os.kill(server.pid, signal.SIGSTOP)
        thaw = threading.Timer(seconds, os.kill, (server.pid, signal.SIGCONT))
        thaw.start()

    freeze.url = server.url  # type: ignore[attr-defined]
    yield freeze
    os.kill(server.pid, signal.SIGCONT)


def test_a_server_frozen_for_longer_than_the_lease_is_asked_again(
    runs: Callable[..., Runs], frozen: Any, told: list[LockEvent]
) -> None:
    one = runs(frozen.url)
    one.release(one.held("warm"))
    frozen(1.5)
    lease = one.lease("a", lease=1.0)
    answer = one.engine.acquire(lease, 30.0)
    assert isinstance(answer, Held), answer
    assert not lease.lost
    assert [event.kind for event in told if "a" in event.names] == ["acquired"]
    assert one.release(lease)


def test_a_lapsed_lease_is_a_conflict_where_no_time_is_left_and_leaves_nothing(
    runs: Callable[..., Runs], frozen: Any, told: list[LockEvent]
) -> None:
    one, two = runs(frozen.url), runs(frozen.url)
    one.release(one.held("warm"))
    frozen(1.5)
    lease = one.lease("a", lease=1.0)
    answer = one.engine.acquire(lease)
    assert isinstance(answer, Conflict), answer
    assert not [event.kind for event in told if "a" in event.names]
    two.release(two.held("a"))
    assert one.release(lease), "nothing was held, so nothing was lost"


def force_released_on_arrival(
    one: Runs, two: Runs, lease: Lease, told: list[LockEvent], monkeypatch: pytest.MonkeyPatch
) -> list[float]:
    """Who asks with this lease has the lock, and has lost it at once, and that was told. Returns
    when it was asked for since."""
    asked = list[float]()
    add, acquire = keepalive.add, one.engine.backend.acquire

    def ask(*args: Any) -> Any:
        asked.append(clock())
        return acquire(*args)

    def add_when_it_was_released(of: Lease) -> None:
        add(of)
        if of is lease and of.state is State.HELD and len(asked) == 1:
            assert two.engine.backend.force_release("a")
            wait_for(lambda: told, what="the loss")

    with one.engine.inbox.opening(lambda: None) as tried:
        wait_for(tried)
    monkeypatch.setattr(one.engine.backend, "acquire", ask)
    monkeypatch.setattr(keepalive, "add", add_when_it_was_released)
    return asked


def test_a_lock_that_is_released_by_force_when_it_has_just_been_acquired_is_asked_for_anew(
    runs: Callable[..., Runs], told: list[LockEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = runs(), runs()
    lease = one.lease("a")
    asked = force_released_on_arrival(one, two, lease, told, monkeypatch)
    assert isinstance(one.engine.acquire(lease, 2.0), Held)
    assert len(asked) == 2
    assert not lease.lost
    assert one.release(lease)
    assert [event.kind for event in told] == ["lost", "acquired", "released"]


def test_what_was_lost_on_arrival_counts_as_not_held(
    runs: Callable[..., Runs], told: list[LockEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = runs(), runs()
    lease = one.lease("a")
    force_released_on_arrival(one, two, lease, told, monkeypatch)
    assert isinstance(one.engine.acquire(lease), Conflict)
    lease.tell("conflict")
    assert [(event.kind, event.held > 0) for event in told] == [("lost", True), ("conflict", False)]


def test_a_lease_counts_from_the_try_that_was_answered(
    runs: Callable[..., Runs], proxy: Proxy
) -> None:
    one = runs(proxy.url, socket_timeout=0.6)
    one.release(one.held("warm"))
    proxy.hold("acquire")  # the first try gets no answer
    began = clock()
    lease = one.held("a", lease=60.0)
    took = clock() - began
    assert took > 0.5, "the first try was to be in vain"
    assert lease.renewed > began + 0.5
    assert lease.remaining > 40
    one.release(lease)


def test_slow_answers_never_give_a_lock_that_is_lost(
    runs: Callable[..., Runs], proxy: Proxy
) -> None:
    """Each answer takes longer than the lease: whoever asks is told of a conflict, not of a
    lock."""
    one, two = runs(proxy.url), runs()
    one.release(one.held("warm"))
    proxy.delay = 0.4
    lease = one.lease("a", lease=0.3)
    assert isinstance(one.engine.acquire(lease, 1.0), Conflict)
    proxy.delay = 0.0
    one.release(lease)
    wait_for(lambda: not two.engine.inspect("a").holds, what="the end of what came too late")


def test_who_waited_and_was_frozen_through_its_lease_does_not_hold(
    runs: Callable[..., Runs], redis_url: str
) -> None:
    one, two = runs(), runs()
    first = one.held("a")
    waiter = two.lease("a", lease=1.0)
    thread = two.waiting(waiter)
    one.release(first)
    thread.entered()
    assert not waiter.lost
    two.release(waiter)


def test_who_waits_without_bound_is_told_when_each_answer_takes_longer_than_the_lease(
    runs: Callable[..., Runs], proxy: Proxy
) -> None:
    one = runs(proxy.url)
    one.release(one.held("warm"))
    proxy.delay = 0.4
    lease = one.lease("a", lease=0.3)
    with pytest.raises(LockUnavailable, match="took longer than the lease of 0"):
        one.engine.acquire(lease, None)
    proxy.delay = 0.0
    assert one.release(lease), "nothing was held, so nothing was lost"
