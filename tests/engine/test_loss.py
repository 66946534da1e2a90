"""A hold that ends before its execution does: known by its deadline, told once, never undone."""

from __future__ import annotations

import logging
import math
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from celery_relock.engine.events import LockEvent
from celery_relock.engine.hold import Hold, Share
from celery_relock.engine.lease import Lease
from celery_relock.engine.platform import clock
from celery_relock.engine.protocol import Conflict, Held
from celery_relock.engine.renewal import keepalive
from celery_relock.errors import LockLost, LockUnavailable
from celery_relock.lock import LockNotOwned
from tests.support import RedisServer, programs, wait_for
from tests.support.proxy import Proxy


def kinds(told: list[LockEvent]) -> list[str]:
    return [event.kind for event in told]


def hold_of(lease: Lease) -> Hold:
    names = zip(lease.claim.names, lease.fences, strict=True)
    return Hold(lease.claim.owner, [Share(name, lease, fence, False) for name, fence in names])


def subscribers(client: redis.Redis, namespace: str) -> int:
    return len(client.pubsub_channels(f"{namespace}:*"))


def test_a_hold_that_the_server_does_not_have_any_more_is_lost_and_told_once(
    runs: Callable[..., Any],
    client: redis.Redis,
    namespace: str,
    told: list[LockEvent],
    caplog: pytest.LogCaptureFixture,
) -> None:
    process = runs()
    lease = process.held("a", owner="workflow-7")
    hold = hold_of(lease)
    hold.check()
    client.delete(f"{namespace}:{{0}}:l:a")
    with caplog.at_level(logging.WARNING, "celery_relock"):
        keepalive.look_now(process.engine.backend)
        wait_for(lambda: hold.lost, 20, what="the loss")
        wait_for(lambda: "lost" in kinds(told), what="the news")
    assert clock() < lease.deadline, "the deadline, not the server, ended it"
    with pytest.raises(LockLost, match=rf"'a' \(fence {lease.fences[0]}\) was lost") as raised:
        hold.check()
    assert (raised.value.name, raised.value.owner) == ("a", "workflow-7")
    assert pickle.loads(pickle.dumps(raised.value)).name == "a"
    assert hold.remaining == 0
    assert not hold.continuous
    [event] = [event for event in told if event.kind == "lost"]
    assert event.names == ("a",)
    assert (event.owner, event.fence) == ("workflow-7", lease.fences[0])
    [line] = [r.getMessage() for r in caplog.records if "lost" in r.getMessage()]
    for part in ("'a'", "workflow-7", str(lease.fences[0]), "last renewal at", "s ago"):
        assert part in line
    assert not process.release(lease)
    assert process.release(lease), "a second release has nothing to say"
    assert kinds(told) == ["acquired", "lost"]


def test_a_lost_hold_is_not_acquired_again_in_silence_when_the_lock_is_free(
    runs: Callable[..., Any], client: redis.Redis, namespace: str
) -> None:
    process, other = runs(), runs()
    lease = process.held("a", lease=1.0)
    record = client.hgetall(f"{namespace}:{{0}}:l:a")
    client.delete(f"{namespace}:{{0}}:l:a")
    wait_for(lambda: lease.lost, what="the loss")
    client.hset(f"{namespace}:{{0}}:l:a", mapping=record)  # as a backup that is played back
    for _ in range(20):
        assert lease.lost
        time.sleep(0.05)
    wait_for(
        lambda: isinstance(other.engine.acquire(other.lease("a")), Held),
        what="the lock to be free: nobody renews what is lost",
    )


def test_without_a_server_the_hold_is_lost_at_its_deadline_and_before_the_server_ends_it(
    runs: Callable[..., Any], own_redis: Callable[..., RedisServer], told: list[LockEvent]
) -> None:
    server = own_redis()
    process = runs(server.url)
    lease = process.held("a", lease=1.0)
    last = lease.renewed
    server.pause()
    try:
        wait_for(lambda: lease.lost, what="the loss")
        lost_at = clock()
        wait_for(lambda: "lost" in kinds(told), what="the news")
    finally:
        server.resume()
    assert 0.9 < lease.deadline - max(last, lease.renewed) < 1.0
    assert lost_at >= lease.deadline
    for _ in range(20):
        assert lease.lost, "a server that comes back does not undo it"
        time.sleep(0.02)
    assert not process.release(lease)
    assert [each for each in kinds(told) if each != "unrenewed"] == ["acquired", "lost"]
    assert not process.engine.inspect("a").holds, "what the server still had was released"


def test_the_holder_never_believes_in_more_time_than_the_server_gives(
    runs: Callable[..., Any],
) -> None:
    process, other = runs(), runs()
    lease = process.held("a", lease=4.0)
    until = time.monotonic() + 4.5
    while time.monotonic() < until:
        renewed = lease.renewed
        [hold] = other.engine.inspect("a").holds
        assert not lease.lost
        believed = lease.deadline - clock()
        if lease.renewed != renewed:
            continue  # a renewal came between the two looks
        assert believed < hold.remaining
    process.release(lease)


@pytest.mark.parametrize("renews", [True, False])
def test_a_process_that_begins_to_listen_learns_of_what_was_forced_before(
    renews: bool, runs: Callable[..., Any], told: list[LockEvent]
) -> None:
    process, other = runs(), runs()
    lease = process.held("a", lease=60.0)  # the first renewal is 20 s away
    untouched = process.held("b", lease=60.0)
    untouched.renews = renews
    untouched.due = lease.due if renews else math.inf
    other.engine.backend.force_release("a")
    assert not process.engine.inbox.thread.on, "nobody told the holder"
    acquired = untouched.renewed
    wait_for(lambda: lease.lost, what="the news, as soon as the process listens")
    wait_for(lambda: "lost" in kinds(told), what="the news")
    assert (untouched.renewed > acquired) is renews
    assert process.release(untouched)


def test_force_release_reaches_a_hold_that_is_a_second_old_at_once(
    runs: Callable[..., Any], client: redis.Redis, namespace: str, told: list[LockEvent]
) -> None:
    process, other = runs(), runs()
    lease = process.held("a", lease=60.0)
    acquired = lease.renewed
    wait_for(lambda: subscribers(client, namespace) == 1, what="the process to listen")
    assert time.monotonic() - acquired >= 1.0
    wait_for(
        lambda: lease.renewed > acquired, what="the look that follows, which may find it first"
    )
    other.engine.backend.force_release("a")
    wait_for(lambda: lease.lost, 15, what="the loss")  # the first renewal is 20 s away
    assert lease.state.value == "lost"
    wait_for(lambda: "lost" in kinds(told), what="the news")
    assert "by force" in told[-1].reason
    assert isinstance(other.engine.acquire(other.lease("a")), Held)
    assert not process.release(lease)
    assert isinstance(other.engine.acquire(other.lease("a")), Conflict), (
        "nobody else's was given back"
    )


def test_force_release_of_one_execution_is_told_to_no_other(
    runs: Callable[..., Any], client: redis.Redis, namespace: str
) -> None:
    process = runs()
    first = process.held("a", lease=60.0, limits=(2,))
    second = process.held("a", lease=60.0, limits=(2,))
    wait_for(lambda: subscribers(client, namespace) == 1, what="the process to listen")
    process.engine.backend.force_release("a", first.claim.execution_id)
    wait_for(lambda: first.lost, 15, what="the loss")
    assert not second.lost
    assert process.release(second)


def test_a_process_with_short_holds_alone_never_listens(
    runs: Callable[..., Any], client: redis.Redis, namespace: str
) -> None:
    process = runs()
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        lease = process.held("a", lease=30.0)
        time.sleep(0.02)
        process.release(lease)
        assert subscribers(client, namespace) == 0


def test_the_notice_of_a_loss_that_was_missed_is_made_up_for_by_the_renewal(
    runs: Callable[..., Any], client: redis.Redis, namespace: str
) -> None:
    process = runs()
    lease = process.held("a", lease=30.0)
    process.engine.backend.force_release("a")
    keepalive.look_now(process.engine.backend)
    wait_for(lambda: lease.state.value == "lost", 20, what="the loss")


def test_a_loss_that_the_release_finds_is_told_once_and_not_as_a_release(
    runs: Callable[..., Any], client: redis.Redis, namespace: str, told: list[LockEvent]
) -> None:
    process = runs()
    lease = process.held("a", lease=30.0)
    client.delete(f"{namespace}:{{0}}:l:a")
    assert not process.release(lease)
    assert kinds(told) == ["acquired", "lost"]


def test_loss_and_release_at_the_same_moment_tell_one_thing(
    runs: Callable[..., Any], client: redis.Redis, namespace: str, told: list[LockEvent]
) -> None:
    process = runs()
    holds = [process.held(f"lock {n}", lease=60.0) for n in range(200)]
    client.delete(*(f"{namespace}:{{0}}:l:lock {n}" for n in range(0, 200, 2)))
    threads = [
        threading.Thread(target=lambda part=part: [process.release(lease) for lease in part])
        for part in (holds[:100], holds[100:])
    ]
    keepalive.look_now(process.engine.backend)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    def ended() -> list[LockEvent]:
        return [event for event in told if event.kind in ("lost", "released")]

    wait_for(lambda: len(ended()) >= 200, what="the news of all")
    time.sleep(0.3)  # and no more
    ends = ended()
    assert sorted(event.names[0] for event in ends) == sorted(f"lock {n}" for n in range(200))
    assert {event.kind for event in ends if int(event.names[0].split()[1]) % 2} == {"released"}


def test_a_handler_that_fails_takes_nothing_from_the_news(
    runs: Callable[..., Any], client: redis.Redis, namespace: str, told: list[LockEvent]
) -> None:
    def fail() -> None:
        raise RuntimeError("boom")

    process = runs()
    lease = process.held("a", lease=60.0)
    lease.on_lost = (fail,)
    other = process.held("b", lease=60.0)
    client.delete(f"{namespace}:{{0}}:l:a")
    keepalive.look_now(process.engine.backend)
    wait_for(lambda: "lost" in kinds(told), what="the news")
    since = clock()
    keepalive.look_now(process.engine.backend)
    wait_for(lambda: other.renewed > since, what="the renewal of the other")


def test_a_loss_is_told_of_the_attempt_that_was_lost_though_another_goes_on_with_the_lease(
    runs: Callable[..., Any], client: redis.Redis, namespace: str, told: list[LockEvent]
) -> None:
    process = runs()
    lease = process.held("a")
    lost = lease.fences[0]
    lease.on_lost = (lambda: lease.again("another"),)  # who waited for it was faster
    client.delete(f"{namespace}:{{0}}:l:a")
    keepalive.look_now(process.engine.backend)
    wait_for(lambda: "lost" in kinds(told), 20, what="the news")
    event = next(event for event in told if event.kind == "lost")
    assert event.fence == lost
    assert event.held > 0


def test_a_process_that_was_stopped_for_longer_than_its_lease_knows_it_at_its_first_look(
    redis_url: str, namespace: str, runs: Callable[..., Any]
) -> None:
    program = programs.start(
        """
        import logging
        logging.disable()  # it says that the lock is lost
        taken = held(engine(), "a", seconds=1.0)
        say("held")
        last = time.monotonic()
        while True:
            lost, now = taken.lost, time.monotonic()
            if now - last > 1.8:
                # Stopped since the last look. The answer may have been worked out before the stop.
                say("at once" if lost or taken.lost else "too late")
                sys.exit()
            last = now
        """,
        redis_url,
        namespace,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "held\n"
    time.sleep(1.5)  # some renewals later
    os.kill(program.pid, signal.SIGSTOP)
    until = time.monotonic() + 2.5
    other = runs()
    assert isinstance(other.engine.acquire(other.lease("a", lease=30.0), 30.0), Held)
    time.sleep(max(0.0, until - time.monotonic()))
    os.kill(program.pid, signal.SIGCONT)
    assert programs.finish(program) == ["at once"]


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="no clock to set")
def test_a_machine_that_was_suspended_for_longer_than_a_lease_knows_it_at_its_first_look(
    redis_url: str, namespace: str
) -> None:
    """As of a virtual machine that is suspended, and a laptop: the monotonic clock stands still."""
    said = programs.run(
        """
        asleep, real = 0.0, time.clock_gettime
        def clock_gettime(which):
            return real(which) + asleep * (which == time.CLOCK_BOOTTIME)
        time.clock_gettime = clock_gettime
        import logging
        logging.disable()  # it says that the lock is lost
        taken = held(engine(), "a", seconds=30.0)
        say(taken.lost)
        asleep = 29.0
        say(taken.lost, taken.remaining)
        """,
        redis_url,
        namespace,
    )
    assert said == ["False", "True 0.0"]


def test_a_lost_hold_stays_lost_though_its_release_fails(
    lock: Callable[..., Any], proxy: Proxy
) -> None:
    near = lock(redis=proxy.url, timeout=30.0)
    near.acquire()
    near._lease.deadline = clock()  # as if no renewal had come through
    proxy.refuse()
    with pytest.raises(LockUnavailable):
        near.release()
    with pytest.raises(LockNotOwned, match="was lost"):
        near.check()
    proxy.accept()
    with pytest.raises(LockNotOwned, match="was lost before it was released"):
        near.release()


def test_a_hold_whose_release_was_not_answered_is_not_relied_upon(
    lock: Callable[..., Any], proxy: Proxy
) -> None:
    near = lock(redis=proxy.url, timeout=30.0)
    near.acquire()
    proxy.refuse()
    with pytest.raises(LockUnavailable):
        near.release()
    with pytest.raises(LockNotOwned, match="might be released already"):
        near.check()
    proxy.accept()
    near.release()


def test_a_release_that_succeeds_at_its_second_try_is_told_once(
    runs: Callable[..., Any], proxy: Proxy, told: list[LockEvent]
) -> None:
    process = runs(proxy.url)
    lease = process.held("a", lease=30.0)
    proxy.refuse()
    with pytest.raises(LockUnavailable):
        process.release(lease)
    proxy.accept()
    assert process.release(lease)
    assert process.release(lease)
    assert kinds(told) == ["acquired", "released"]


def test_a_release_that_was_done_unheard_is_no_loss_when_it_is_tried_again(
    runs: Callable[..., Any], proxy: Proxy, told: list[LockEvent]
) -> None:
    process, other = runs(proxy.url), runs()
    lease = process.held("a", lease=30.0)
    proxy.refuse()
    with pytest.raises(LockUnavailable):
        process.release(lease)
    other.engine.backend.force_release("a")  # as if the first command had come through
    proxy.accept()
    assert process.release(lease)
    assert kinds(told) == ["acquired", "released"]


def test_each_client_renews_its_own_leases(runs: Callable[..., Any], proxy: Proxy) -> None:
    """Two ways to one Redis are equal, and may have other credentials, or want replicas."""
    near, far = runs(), runs(proxy.url)
    far.engine.backend.addresses = near.engine.backend.addresses
    assert near.engine.backend == far.engine.backend
    leases = far.held("a", lease=300.0), near.held("b", lease=300.0)
    proxy.refuse()
    start = clock()
    for lease in leases:
        lease.due = 0.0
    keepalive._ring()
    wait_for(lambda: leases[1].renewed > start, what="the renewal by the way that is open")
    assert leases[0].renewed < start
