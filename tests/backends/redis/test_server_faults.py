"""The server goes, comes back, forgets: what a holder, a waiter and a newcomer see of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_relock.engine.events import LockEvent
from celery_relock.engine.lease import State
from celery_relock.engine.platform import clock
from celery_relock.engine.protocol import Conflict, Held
from celery_relock.engine.renewal import keepalive
from celery_relock.errors import LockUnavailable
from tests.support import RedisServer, wait_for
from tests.support.desk import Desk
from tests.support.proxy import Proxy
from tests.support.runs import Runs


@pytest.fixture
def server(own_redis: Callable[..., RedisServer]) -> RedisServer:
    return own_redis()


def test_scripts_may_be_flushed_at_any_time(runs: Callable[..., Runs], server: RedisServer) -> None:
    one, two = runs(server.url), runs(server.url)
    client = server.client()
    stop = threading.Event()

    def flush() -> None:
        while not stop.wait(0.002):
            client.script_flush()

    flusher = threading.Thread(target=flush)
    flusher.start()
    holder, waiter = one.held("a"), two.lease("a")
    thread = two.waiting(waiter)
    for _ in range(5):
        now = clock()
        for each in (one, two):
            keepalive.look_now(each.engine.backend)
        wait_for(lambda since=now: min(holder.renewed, waiter.renewed) > since)
    assert one.release(holder)
    assert two.release(thread.entered())
    for _ in range(200):
        assert one.release(one.held("a"))
    stop.set()
    flusher.join()


def test_a_restart_with_empty_data_is_told_by_the_next_renewal(
    runs: Callable[..., Runs], server: RedisServer, lost: list[LockEvent]
) -> None:
    one = runs(server.url)
    lease = one.held("a", lease=2.0)
    server.restart(keep_data=False)
    wait_for(lambda: lost, timeout=30)
    assert lost[0].names == ("a",)
    assert lost[0].execution_id == lease.claim.execution_id
    assert lease.lost
    assert one.release(lease) is False
    assert len(lost) == 1


def test_a_restart_with_empty_data_is_told_at_release_if_no_renewal_came_before(
    runs: Callable[..., Runs], server: RedisServer, lost: list[LockEvent]
) -> None:
    one, two = runs(server.url), runs(server.url)
    lease = one.held("a", lease=60.0)
    time.sleep(1.1)  # from then on a kept connection is looked at before it is used
    server.restart(keep_data=False)
    other = two.held("a")
    assert one.release(lease) is False
    assert [event.execution_id for event in lost] == [lease.claim.execution_id]
    assert [hold.execution_id for hold in two.engine.inspect("a").holds] == [
        other.claim.execution_id
    ]
    assert two.release(other)


def test_a_hold_that_a_server_lost_is_told_at_release_also_if_the_server_loads_its_data_first(
    runs: Callable[..., Runs], server: RedisServer, lost: list[LockEvent]
) -> None:
    one = runs(server.url)
    client = server.client()
    # It answers once in every 2 MB that it loads.
    client.config_set("rdbcompression", "no")
    for number in range(20):
        client.set(f"k{number}", "v" * 1_000_000)
    client.save()
    lease = one.held("a", lease=60.0)
    time.sleep(1.1)  # from then on a kept connection is looked at before it is used
    server.kill()
    slowly = ("--key-load-delay", "40000")
    restart = threading.Thread(target=server.restart, args=(True, *slowly))
    restart.start()
    try:
        wait_for(partial(_still_loads, server.url), what="LOADING")
        assert one.release(lease) is False
    finally:
        restart.join(20)
    assert [event.execution_id for event in lost] == [lease.claim.execution_id]


def _still_loads(url: str) -> bool:
    with redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0)) as client:
        try:
            client.get("k")
        except redis.BusyLoadingError:
            return True
        except redis.ConnectionError:
            pass  # not up yet
    return False


def test_a_restart_with_its_data_loses_nothing(
    runs: Callable[..., Runs], server: RedisServer, lost: list[LockEvent]
) -> None:
    one, two = runs(server.url), runs(server.url)
    lease = one.held("a", lease=30.0)
    waiter = two.lease("a")
    thread = two.waiting(waiter)
    server.restart(keep_data=True)
    assert one.engine.extend(lease, 30.0)
    assert one.release(lease)
    assert two.release(thread.entered())
    assert lost == []


def _as_it_was(server: RedisServer) -> None:
    """Kill it and start it again with what was saved last; so does a failover to a late replica."""
    server.kill()
    server.restart(keep_data=True)


def test_older_data_has_no_hold_acquired_since_and_its_holder_is_told(
    runs: Callable[..., Runs], server: RedisServer, lost: list[LockEvent]
) -> None:
    one, two = runs(server.url), runs(server.url)
    one.release(one.held("a"))
    server.client().save()
    holder = one.held("a", lease=2.0)
    _as_it_was(server)
    newcomer = two.held("a", lease=60.0)
    assert newcomer.fences > holder.fences
    wait_for(lambda: lost)
    assert [event.execution_id for event in lost] == [holder.claim.execution_id]
    assert two.release(newcomer)


def test_older_data_has_a_hold_that_was_released_since_until_its_lease_ends(
    runs: Callable[..., Runs], server: RedisServer
) -> None:
    one, two = runs(server.url), runs(server.url)
    holder = one.held("a", lease=3.0)
    server.client().save()
    assert one.release(holder)
    _as_it_was(server)
    waiter = two.lease("a")
    assert isinstance(two.engine.acquire(waiter), Conflict)
    assert isinstance(two.engine.acquire(waiter, 60.0), Held)
    assert waiter.fences > holder.fences
    assert two.release(waiter)


def test_older_data_has_what_has_run_since_parked_again_and_not_what_was_parked_since(
    server: RedisServer, namespace: str
) -> None:
    desk = Desk(server.url, namespace)
    desk.fence("holder", lease=1.0)
    desk.park("before")
    server.client().save()
    desk.park("since")
    desk.release("holder")
    assert desk.out() == ["before"]
    desk.fence("before", "back")
    desk.release("before", "back", ended="execution")
    assert desk.out() == ["since"]
    _as_it_was(server)
    wait_for(lambda: desk.resume() == ["before"])
    desk.fence("before", "back")
    desk.release("before", "back", ended="execution")
    assert (desk.out(), desk.waiters()) == ([], [])
    desk.close()


def test_fences_go_on_rising_after_a_restart_with_empty_data(
    runs: Callable[..., Runs], server: RedisServer
) -> None:
    one = runs(server.url)
    before = one.held("a")
    one.release(before)
    server.restart(keep_data=False)
    after = one.held("a")
    assert after.fences > before.fences
    one.release(after)


def test_without_a_server_it_takes_a_moment_to_say_so_and_none_to_release(
    runs: Callable[..., Runs], server: RedisServer
) -> None:
    one = runs(server.url)
    one.release(one.held("a"))
    server.kill()
    lease = one.lease("a")
    started = time.monotonic()
    with pytest.raises(LockUnavailable):
        one.engine.acquire(lease, 60.0)
    assert time.monotonic() - started < 30
    started = time.monotonic()
    with pytest.raises(LockUnavailable):
        one.release(lease)
    assert time.monotonic() - started < 1.5  # and not as long again


def test_a_server_that_is_back_within_the_patience_is_not_noticed(
    runs: Callable[..., Runs], server: RedisServer
) -> None:
    one = runs(server.url)
    one.release(one.held("a"))
    server.kill()
    timer = threading.Timer(0.5, lambda: server.restart(keep_data=False))
    timer.start()
    lease = one.held("a")
    timer.join()
    assert one.release(lease)


def test_a_release_that_nobody_hears_is_an_error_and_the_lease_ends_the_hold(
    proxy: Proxy, runs: Callable[..., Runs]
) -> None:
    near, far = runs(proxy.url), runs()
    lease = near.held("a", lease=3.0)
    proxy.refuse()
    with pytest.raises(LockUnavailable):
        near.release(lease)
    assert lease.state is not State.HELD
    waiter = far.lease("a", lease=1.0)
    started = time.monotonic()
    assert isinstance(far.engine.acquire(waiter, 30.0), Held)
    assert time.monotonic() - started < 15
    assert far.release(waiter)


def test_a_release_that_failed_can_be_tried_again(proxy: Proxy, runs: Callable[..., Runs]) -> None:
    near, far = runs(proxy.url), runs()
    lease = near.held("a")
    proxy.refuse()
    with pytest.raises(LockUnavailable):
        near.release(lease)
    proxy.accept()
    assert near.release_at_last(lease)
    assert far.engine.inspect("a").holds == ()


def test_a_waiter_whose_server_restarts_empty_acquires(
    runs: Callable[..., Runs], server: RedisServer
) -> None:
    one, two = runs(server.url), runs(server.url)
    holder = one.held("a")
    waiter = two.lease("a", lease=1.2)
    thread = two.waiting(waiter)
    server.restart(keep_data=False)
    assert two.release(thread.entered())
    one.release(holder)


def test_a_waiter_without_a_server_is_told_when_its_time_is_over(
    proxy: Proxy, runs: Callable[..., Runs]
) -> None:
    near, far = runs(proxy.url), runs()
    holder = far.held("a")
    waiter = near.lease("a", lease=1.2)
    thread = near.waiting(waiter, 1.0)
    proxy.refuse()
    thread.join(30)
    assert isinstance(thread.answer, LockUnavailable)
    proxy.accept()
    near.release(waiter)
    assert far.engine.inspect("a").waiting == 0
    assert far.release(holder)


def test_clients_of_one_pool_limit_are_not_used_up(runs: Callable[..., Runs], proxy: Proxy) -> None:
    """Every reconnection takes a new link: it must not count against a pool's limit for ever."""
    near = runs(proxy.url, max_connections=3)
    for _ in range(8):
        proxy.cut()
        assert near.release(near.held("a"))
