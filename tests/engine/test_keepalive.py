"""Leases are renewed while the process lives, with few calls, through what heals in time."""

from __future__ import annotations

import ctypes
import itertools
import logging
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import redis

from celery_relock.engine import lease as lease_module
from celery_relock.engine.events import LockEvent
from celery_relock.engine.lease import Lease
from celery_relock.engine.platform import clock
from celery_relock.engine.protocol import Conflict, Held
from celery_relock.engine.renewal import KeepAlive, keepalive
from celery_relock.errors import LockUnavailable
from tests.engine.gate import gated
from tests.support import RedisServer, programs, wait_for
from tests.support.listening import subscribe
from tests.support.long import LONG
from tests.support.proxy import Proxy
from tests.support.redis_server import calls_of


def losses(told: list[LockEvent]) -> list[LockEvent]:
    return [event for event in told if event.kind == "lost"]


def all_renewed(leases: list[Lease], since: float) -> bool:
    return all(lease.renewed > since for lease in leases)


def renewed_now(process: Any, *leases: Lease) -> None:
    """Let the keep-alive thread look after all of an engine. Returns when it has renewed these."""
    start = clock()
    keepalive.look_now(process.engine.backend)
    wait_for(lambda: all_renewed([*leases], start), what="a renewal")


def know_the_script(process: Any) -> None:
    """The first renewal at a new server is sent twice: its script is not there yet."""
    first = process.held("first")
    renewed_now(process, first)
    process.release(first)


@pytest.mark.slow
def test_a_body_of_three_leases_keeps_its_lock_and_its_waiter_keeps_its_place(
    runs: Callable[..., Any], told: list[LockEvent]
) -> None:
    one, two, late = runs(), runs(), runs()
    holder = one.held("a", lease=2.0)
    waiter = two.lease("a", lease=2.0)
    thread = two.waiting(waiter)
    until = time.monotonic() + 6
    while time.monotonic() < until:
        assert isinstance(late.engine.acquire(late.lease("a"), 0.0), Conflict)
        assert not holder.lost
        time.sleep(0.2)
    assert one.engine.inspect("a").holds[0].attempt_id == holder.claim.attempt_id
    assert one.release(holder)
    assert two.release(thread.entered())
    assert not losses(told)


def test_250_holds_are_renewed_by_three_calls(
    runs: Callable[..., Any], own_redis: Callable[..., RedisServer]
) -> None:
    server = own_redis()
    process, client = runs(server.url), server.client()
    know_the_script(process)
    leases = [process.held(f"lock {n}", lease=60.0) for n in range(250)]
    before = calls_of(client, "evalsha", "eval")
    renewed_now(process, *leases)  # as if they had been acquired close together, 20 s ago
    # By four, if the thread has looked while they became due.
    assert 3 <= calls_of(client, "evalsha", "eval") - before <= 4
    assert not any(lease.lost for lease in leases)


def test_waiters_ride_along_so_a_sweep_is_two_calls_however_many_they_are(
    runs: Callable[..., Any],
    own_redis: Callable[..., RedisServer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lease_module, "WAITER_LEASE", 60.0)
    server = own_redis()
    process, client = runs(server.url), server.client()
    process.ready()
    holds = [process.held(f"lock {n}", lease=60.0) for n in range(20)]
    waiting = [process.lease(f"lock {n}", lease=60.0) for n in range(20)]
    threads = [process.waiting(lease) for lease in waiting]
    renewed_now(process, *holds, *waiting)  # the scripts are there from now on
    before = calls_of(client, "evalsha", "eval")
    renewed_now(process, *holds, *waiting)
    assert calls_of(client, "evalsha", "eval") - before <= 4  # two for each of at most two steps
    for hold in holds:
        process.release(hold)
    for thread in threads:
        thread.entered()
    assert not any(lease.lost for lease in waiting)


# Ten thousand take seconds to be taken, so their leases are longer.
MANY, LEASE = (10_000, 20.0) if LONG else (2_000, 10.0)


@pytest.mark.slow
def test_thousands_of_held_locks_all_stay_held_with_two_calls_a_sweep_for_each_hundred(
    runs: Callable[..., Any], own_redis: Callable[..., RedisServer], told: list[LockEvent]
) -> None:
    """The short form has two thousand of them."""
    server = own_redis()
    process, client = runs(server.url), server.client()
    leases = [process.held(f"lock {n}", lease=LEASE) for n in range(MANY)]
    taken = start = clock()
    wait_for(lambda: all_renewed(leases, start), what="a first sweep, to fall into step")
    start, before = clock(), calls_of(client, "evalsha", "eval")
    wait_for(lambda: all_renewed(leases, start), what="a whole sweep")
    assert calls_of(client, "evalsha", "eval") - before <= MANY // 50
    # Longer than any lease that they began with.
    time.sleep(max(0.0, taken + 1.1 * LEASE - clock()))
    assert not losses(told)
    assert not any(lease.lost for lease in leases)
    assert sum(1 for _ in client.scan_iter("*}:l:*", count=1000)) == MANY
    for lease in leases:
        assert process.release(lease)


def test_a_server_that_hangs_for_half_a_lease_costs_nothing(
    runs: Callable[..., Any], own_redis: Callable[..., RedisServer], told: list[LockEvent]
) -> None:
    server = own_redis()
    process = runs(server.url)
    lease = process.held("a", lease=4.0)
    server.pause()
    time.sleep(2.0)
    server.resume()
    back = clock()
    wait_for(lambda: lease.renewed > back, what="a renewal after the pause")
    assert process.release(lease)
    assert not losses(told)


def test_a_server_that_is_killed_and_comes_back_within_the_lease_costs_nothing(
    runs: Callable[..., Any], own_redis: Callable[..., RedisServer], told: list[LockEvent]
) -> None:
    server = own_redis()
    process = runs(server.url)
    lease = process.held("a", lease=6.0)
    server.restart(keep_data=True)
    back = clock()
    wait_for(lambda: lease.renewed > back, what="a renewal after the restart")
    assert process.release(lease)
    assert not losses(told)


def test_a_server_that_hangs_holds_up_neither_the_news_of_a_loss_nor_the_leases_of_another_server(
    runs: Callable[..., Any], own_redis: Callable[..., RedisServer], told: list[LockEvent]
) -> None:
    good, bad = own_redis(), own_redis()
    kept, hangs, goes = (runs(at.url, socket_timeout=60) for at in (good, bad, bad))
    lasting = kept.held("kept", lease=2.0)
    long_one = hangs.held("long", lease=4.0)
    short_one = goes.held("short", lease=2.0)
    bad.pause()
    try:
        # The news come sooner than the end of the socket timeout, after 60 s.
        wait_for(lambda: short_one.lost, what="the deadline of the short one")
        wait_for(lambda: losses(told), what="the news of it")
        wait_for(lambda: long_one.lost, what="the deadline of the long one")
        wait_for(lambda: len(losses(told)) == 2, 20, what="the news of that")
    finally:
        bad.resume()
    assert {event.names for event in losses(told)} == {("short",), ("long",)}
    assert kept.release(lasting)


def test_several_servers_that_hang_cost_another_server_no_lease(
    runs: Callable[..., Any], own_redis: Callable[..., RedisServer]
) -> None:
    good, *bad = own_redis(), own_redis(), own_redis(), own_redis()
    kept, *hang = (runs(at.url) for at in (good, *bad))
    lasting = kept.held("kept", lease=2.5)
    for each in hang:
        each.held("hangs", lease=60.0)
    for server in bad:
        server.pause()
    try:
        for each in hang:
            keepalive.look_now(each.engine.backend)
        until = time.monotonic() + 25
        while time.monotonic() < until:
            assert not lasting.lost
            time.sleep(0.1)
    finally:
        for server in bad:
            server.resume()
    assert kept.release(lasting)


def test_a_name_that_is_looked_up_for_long_holds_up_no_lease_of_another_server(
    runs: Callable[..., Any],
    own_redis: Callable[..., RedisServer],
    told: list[LockEvent],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A resolver is silent, and a lookup has no bound."""
    good, bad, hangs, look_up = own_redis(), own_redis(), threading.Event(), socket.getaddrinfo
    lookups: list[str] = []

    def resolver(host: str, *args: Any, **options: Any) -> Any:
        if host == "redis.shop.internal":
            host = "127.0.0.1"
            lookups.append(threading.current_thread().name)
            if hangs.is_set():
                time.sleep(12)
                raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return look_up(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    kept = runs(good.url)
    named = runs(f"redis://redis.shop.internal:{bad.port}/0")
    lasting, goes = kept.held("kept", lease=4.0), named.held("named", lease=4.0)
    renewed_now(named, goes)
    hangs.set()
    lookups.clear()
    bad.kill()
    started = time.monotonic()
    wait_for(lambda: losses(told), what="the news of the loss")
    assert time.monotonic() - started < 6
    wait_for(lambda: time.monotonic() - started > 8, what="two leases")
    assert [event.names for event in losses(told)] == [("named",)]
    assert not lasting.lost
    assert len(lookups) <= 2  # the inbox has its own; and not a thread for each try
    assert kept.release(lasting)


def test_a_slow_server_is_heard_though_the_process_always_has_a_short_lease_as_well(
    runs: Callable[..., Any], proxy: Proxy
) -> None:
    far, near = runs(proxy.url), runs()
    know_the_script(far)
    proxy.delay = 0.3
    holder = far.held("slow", lease=4.0)
    first, quick = holder.deadline, near.held("quick 0", lease=0.4)

    for number in itertools.count(1):
        if holder.deadline > first or holder.lost:
            break
        threading.Event().wait(0.15)
        following = near.held(f"quick {number}", lease=0.4)
        near.release(quick)
        quick = following

    assert not holder.lost
    near.release(quick)
    far.release(holder)


def test_a_renewal_that_is_sent_after_the_release_neither_revives_the_hold_nor_tells_a_loss(
    redis_url: str, client: redis.Redis, namespace: str, told: list[LockEvent]
) -> None:
    process, backend = gated(redis_url, namespace)
    lease = process.held("a")
    with backend.stopped(answered=False) as gate:
        assert process.release(lease)
        gate.open()
    assert not process.engine.inspect("a").holds
    assert not losses(told)
    assert isinstance(process.engine.acquire(process.lease("a")), Held)


def test_a_renewal_whose_answer_comes_after_the_release_changes_nothing(
    redis_url: str, namespace: str, told: list[LockEvent]
) -> None:
    process, backend = gated(redis_url, namespace)
    lease = process.held("a")
    with backend.stopped(answered=True) as gate:
        assert process.release(lease)
        other = process.held("a")
        gate.open()
    assert lease.state.value == "released"
    assert not other.lost
    assert process.release(other)
    assert not losses(told)


def test_a_hold_that_was_called_lost_stays_lost_when_its_renewal_is_answered_late(
    redis_url: str, namespace: str, told: list[LockEvent]
) -> None:
    process, backend = gated(redis_url, namespace)
    lease = process.held("a")
    with backend.stopped(answered=True) as gate:  # the server has extended it, we do not know yet
        lease.deadline = clock()
        assert process.engine.inspect("a").holds
        gate.open()
    assert lease.lost
    wait_for(lambda: losses(told), what="the news")
    assert lease.state.value == "lost"
    assert lease.remaining == 0
    assert not process.release(lease)
    assert len(losses(told)) == 1


@pytest.mark.parametrize("verb", ["extend", "downgrade"])
def test_a_hold_that_has_run_out_here_is_not_said_to_be_missing_on_the_server(
    verb: str, redis_url: str, namespace: str, told: list[LockEvent]
) -> None:
    process, backend = gated(redis_url, namespace)
    lease = process.held("a")
    with backend.stopped(answered=True):  # else the keep-alive's thread tells it first
        lease.deadline = clock()
        engine = process.engine
        assert not (engine.downgrade(lease) if verb == "downgrade" else engine.extend(lease, 60.0))
        assert engine.inspect("a").holds
    assert [each.reason for each in losses(told)] == [lease.lost_by]
    assert lease.lost_by == "no renewal came through before the lease ran out"
    process.release(lease)


def test_a_longer_lease_survives_a_renewal_with_the_old_length_that_crosses_it(
    redis_url: str, namespace: str, told: list[LockEvent]
) -> None:
    process, backend = gated(redis_url, namespace)
    lease = process.held("a")
    with backend.stopped(answered=False) as gate:
        assert process.engine.extend(lease, 60.0)
        assert lease.remaining > 40, "certain as soon as the server has said yes"
        gate.open()
    assert lease.remaining > 40
    assert process.engine.inspect("a").holds[0].remaining > 40
    assert process.release(lease)
    assert not losses(told)


def test_a_heartbeat_that_crosses_a_failed_extension_says_nothing_of_the_longer_lease(
    redis_url: str, namespace: str, runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (near, backend), far = gated(redis_url, namespace), runs()
    near.ready()
    holder, lease = far.held("a"), near.lease("a", lease=30.0)
    waiter = near.waiting(lease)
    with backend.stopped(heartbeat=True) as gate:
        far.release(holder)
        waiter.entered()  # the message of its grant came before the answer of its heartbeat

        def away(_: object, **__: object) -> list[bool]:
            gate.open()
            raise LockUnavailable("away", name="a")

        monkeypatch.setattr(backend, "renew", away)
        with pytest.raises(LockUnavailable):
            near.engine.extend(lease, 3600.0)
    monkeypatch.undo()
    assert 0 < lease.remaining <= 30
    assert near.release(lease)


@pytest.mark.parametrize("error", [ValueError("odd"), SystemExit(1), KeyboardInterrupt()])
def test_no_error_in_the_loop_ends_it(
    error: BaseException, redis_url: str, namespace: str, told: list[LockEvent]
) -> None:
    process, backend = gated(redis_url, namespace)
    lease = process.held("a")
    backend.fail_next(error, error)
    renewed_now(process, lease)
    assert backend.renewals >= 3
    renewed_now(process, lease)
    assert process.release(lease)
    assert not losses(told)


def keep_alive_thread() -> int | None:
    for thread, frame in sys._current_frames().items():
        each: Any = frame
        while each is not None:
            if (
                each.f_code.co_qualname.endswith("KeepAlive._live")
                if hasattr(each.f_code, "co_qualname")
                else each.f_code.co_name == "_live"
            ):
                return thread
            each = each.f_back
    return None


def test_a_keep_alive_thread_that_is_killed_from_outside_goes_on(
    runs: Callable[..., Any], told: list[LockEvent]
) -> None:
    process = runs()
    lease = process.held("a")
    for _ in range(5):
        thread = wait_for(keep_alive_thread, what="the thread")
        hit = ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread), ctypes.py_object(SystemExit)
        )
        assert hit == 1
        renewed_now(process, lease)
    assert process.release(lease)
    assert not losses(told)


def test_a_slow_listener_holds_up_no_lease(
    runs: Callable[..., Any], client: redis.Redis, namespace: str, told: list[LockEvent]
) -> None:
    process = runs()
    let_go = threading.Event()
    end = subscribe(lambda event: event.kind == "lost" and let_go.wait(60))
    try:
        gone = process.held("gone", lease=1.0)
        kept = process.held("kept")
        client.delete(f"{namespace}:{{0}}:l:gone")
        wait_for(lambda: gone.lost, what="the loss")
        for _ in range(3):
            renewed_now(process, kept)
    finally:
        let_go.set()
        end()
    assert process.release(kept)
    assert [event.names for event in losses(told)] == [("gone",)]


def test_who_sets_up_logging_holds_up_no_lease_during_an_outage(
    runs: Callable[..., Any], proxy: Proxy
) -> None:
    """As `dictConfig` does, and for ever a time limit that strikes where it has the lock."""
    near, far = runs(proxy.url), runs()
    near.held("a", lease=30.0)
    lease = far.held("b", lease=2.0)
    logger = logging.getLogger("celery_relock")
    with logging._lock:  # type: ignore[attr-defined]
        logger.setLevel(logger.level)  # who logs has to ask from now on
        proxy.refuse()
        keepalive.look_now(near.engine.backend)
        for _ in "123":
            renewed = lease.renewed
            wait_for(lambda: lease.renewed > renewed, what="a renewal")  # noqa: B023
        assert not lease.lost
    far.release(lease)


def test_there_is_no_thread_before_the_first_lock_and_one_for_all_of_them(
    redis_url: str, namespace: str
) -> None:
    said = programs.run(
        """
        import celery_relock
        from celery_relock import Lock
        say(threads())
        first = engine()
        say(threads())
        one = held(first, "a", seconds=30.0)
        two = held(engine(), "b", seconds=30.0)
        say(threads())
        first.release(one)
        """,
        redis_url,
        namespace,
    )
    assert said == ["1", "1", "2"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_no_thread_of_ours_takes_a_signal_that_is_meant_to_wake_the_main_one(
    redis_url: str, namespace: str
) -> None:
    said = programs.run(
        """
        import signal
        taken = held(engine(), "a", seconds=30.0)
        while threads() < 3:           # the keep-alive, and the inbox when the hold is 1 s old
            time.sleep(0.01)
        time.sleep(0.1)
        for thread in os.listdir("/proc/self/task"):
            status = open(f"/proc/self/task/{thread}/status").read()
            blocked = int(status.split("SigBlk:")[1].split()[0], 16)
            takes = [n for n in (signal.SIGUSR1, signal.SIGTERM) if not blocked >> (n - 1) & 1]
            if int(thread) != os.getpid():
                say(takes)
        """,
        redis_url,
        namespace,
    )
    assert set(said) == {"[]"}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_short_locks_alone_do_not_wake_the_thread_over_and_over(
    redis_url: str, namespace: str
) -> None:
    said = programs.run(
        """
        first = engine()
        first.release(held(first, "a", seconds=30.0))
        [thread] = [t for t in os.listdir("/proc/self/task") if int(t) != os.getpid()]
        def switches():
            status = open(f"/proc/self/task/{thread}/status").read()
            return int(status.split("voluntary_ctxt_switches:")[1].split()[0])
        before, start = switches(), time.monotonic()
        for n in range(500):
            first.release(held(first, f"lock {n}", seconds=30.0))
        taken = time.monotonic() - start
        say(switches() - before, taken)
        """,
        redis_url,
        namespace,
    )
    switches, seconds = said[0].split()
    assert int(switches) <= 10 + 10 * float(seconds)


def test_a_waiter_whose_place_is_gone_asks_again_and_sleeps(
    runs: Callable[..., Any], client: redis.Redis, namespace: str
) -> None:
    process, other = runs(), runs()
    holder = other.held("a", lease=30.0)
    waiter, spent = process.lease("a", lease=0.9), []

    def wait() -> None:
        process.engine.acquire(waiter, 20.0)
        spent.append(time.thread_time())

    thread = threading.Thread(target=wait)
    thread.start()
    for _ in range(2):
        wait_for(lambda: other.engine.inspect("a").waiting, what="a place in the queue")
        attempt_id = waiter.claim.attempt_id
        client.delete(*(f"{namespace}:{{0}}:{kind}:a" for kind in "qw"))
        wait_for(
            lambda before=attempt_id: waiter.claim.attempt_id != before, what="another attempt"
        )
    wait_for(lambda: other.engine.inspect("a").waiting, what="a place in the queue")
    time.sleep(1.0)
    other.release(holder)
    thread.join(30)
    assert process.release(waiter)
    assert spent[0] < 0.4, "it waited by asking over and over"


def test_who_has_released_before_the_news_of_its_grant_is_dealt_with_is_looked_after_no_more(
    runs: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, released, dealt_with = runs(), runs(), threading.Event(), threading.Event()
    holder, lease = one.held("a"), two.lease("a")
    ring, granted = Lease.ring, KeepAlive._granted

    def ring_and_wait(self: Lease) -> None:
        ring(self)
        if self is lease:
            released.wait(30)

    def deal_with(self: KeepAlive, *news: Any, **more: Any) -> None:
        granted(self, *news, **more)
        dealt_with.set()

    monkeypatch.setattr(Lease, "ring", ring_and_wait)
    monkeypatch.setattr(KeepAlive, "_granted", deal_with)
    waiting = two.waiting(lease)
    one.release(holder)
    waiting.join(30)
    two.release(lease)
    released.set()
    assert dealt_with.wait(30)
    assert lease not in keepalive.leases()


def test_an_outage_is_told_once_however_often_a_renewal_is_tried(
    runs: Callable[..., Any], proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "celery_relock")

    def told_of(text: str) -> list[str]:
        return [record.levelname for record in caplog.records if text in record.getMessage()]

    process = runs(proxy.url)
    lease = process.held("a", lease=6.0)  # a renewal in vain is tried again after 0.4 s
    proxy.refuse()
    proxy.cut()
    keepalive.look_now(process.engine.backend)
    wait_for(lambda: len(told_of("trying again")) > 3, what="some renewals in vain")
    proxy.accept()
    wait_for(lambda: told_of("works again after"), what="a renewal")
    assert Counter(told_of("trying again"))["WARNING"] == 1
    assert told_of("works again after") == ["INFO"]
    assert process.release(lease)


def test_backends_that_come_and_go_beside_one_that_stays_leave_nothing(
    runs: Callable[..., Any], redis_server: RedisServer
) -> None:
    stays = runs(redis_server.url)
    with_lock = stays.held("stays")
    for number in range(5):
        another = runs(f"{redis_server.url}?socket_timeout={5 + number}")
        renewed_now(another, lease := another.held("goes"))
        another.release(lease)
    renewed_now(stays, with_lock)
    stays.release(with_lock)
    wait_for(lambda: not keepalive._outages.get(stays.engine.backend))


# Its threads end with the process alone.
STRIKES = """
import math, sys
from contextlib import suppress
from functools import partial
from types import SimpleNamespace as Some
from celery_relock.engine import wakeup
from celery_relock.engine.lease import State
from celery_relock.engine.platform import Solo
from celery_relock.engine.renewal import KeepAlive
from tests.support.strikes import Stop, at_the_next_line, strike

class Keeper(KeepAlive):
    def __init__(self):
        super().__init__()
        self.is_at_work, claim = threading.Event(), Some(execution_id="e", attempt_id="a")
        lease = Some(claim=claim, next_look=math.inf, abandoned=False, state=State.HELD)
        self.begin = partial(self.add, lease)
    def _pass(self):
        self.is_at_work.set()
        return math.inf

class Inbox(wakeup.Inbox):
    def __init__(self):
        self.is_at_work, self.begin = threading.Event(), self.start
        super().__init__(Some(listen=self.listen))
    def listen(self, name, listener):
        self.is_at_work.set()
        time.sleep(3600)

def disturb(of, make, do):
    seen, before = set(), -1
    while len(seen) > before:
        before, made = len(seen), make()
        def begin():
            sys.settrace(at_the_next_line(of, seen, partial(do, made)))
            with suppress(Stop):
                made.begin()
        for each in begin, made.begin:
            thread = threading.Thread(target=each, daemon=True)
            thread.start()
            thread.join(3)
        if not made.is_at_work.wait(3):
            say("nobody is at work after line", max(seen))
    assert before >= 2

for make in (Keeper, Inbox):
    disturb(Solo.start, make, lambda made: strike())
    disturb(Solo.start, make, lambda made: made.begin())
say("done")
"""


def test_a_thread_is_at_work_wherever_a_signal_came_when_it_was_to_begin(namespace: str) -> None:
    assert programs.run(STRIKES, "redis://localhost", namespace) == ["done"]
