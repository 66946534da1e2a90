"""The master goes while locks are held, waited for, parked, renewed and released.

Real servers under real Sentinels: the master is killed, frozen, or told to hand over.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from celery_relock.backends.redis import sentinel
from celery_relock.backends.redis.sentinel import Finder
from celery_relock.backends.redis.subscription import Subscription
from celery_relock.backends.redis.urls import transport_for_url
from celery_relock.engine.events import LockEvent
from celery_relock.engine.protocol import Held, Parked, ParkRequest, Queued
from celery_relock.engines import engine_for
from celery_relock.errors import LockUnavailable
from tests.support import RedisServer, programs, wait_for
from tests.support.backends import close
from tests.support.long import LONG
from tests.support.programs import GEVENT
from tests.support.runs import Runs
from tests.support.sentinel import Watched, in_step

pytestmark = pytest.mark.slow

_numbers = itertools.count()
WAYS = ("killed", "frozen", "told")


@pytest.fixture(autouse=True)
def everybody_looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A master that was told to hand over stays one for seconds, and what is sent to it is lost. A
    kept connection looks each two seconds for where it is, and not while another thread looks; a
    failover can be over sooner."""
    find, one_after_the_other = Finder.find, threading.RLock()

    def find_alone(finder: Finder, within: float = sentinel.BUDGET) -> tuple[str, int]:
        with one_after_the_other:
            return find(finder, within)

    monkeypatch.setattr(Finder, "find", find_alone)
    monkeypatch.setattr(sentinel, "LOOK_EVERY", 0.0)
    monkeypatch.setattr(sentinel, "_LOOK_LATER", 0.0)
    monkeypatch.setattr(sentinel, "_LOOK_WITHIN", 3.0)


@pytest.fixture
def service(watched: Callable[..., Watched]) -> Watched:
    return watched()


def runs_of(service: Watched, namespace: str, client: bool = True) -> Runs:
    """An engine with connections of its own, by a URL or by a client of redis-py."""
    # Those of one name would share an engine.
    own = f"c{next(_numbers)}"
    if not client:
        transport = {**service.transport, "client_name": own}
        return Runs(engine_for(service.url, namespace, None, transport))
    hosts = [("127.0.0.1", each.port) for each in service.sentinels]
    sentinels = redis.sentinel.Sentinel(hosts, socket_timeout=2.0)
    return Runs(engine_for(sentinels.master_for(service.service, client_name=own), namespace))


@pytest.mark.parametrize("how", WAYS)
def test_a_failover_is_waited_for_and_what_is_held_renewed_and_waited_for_outlives_it(
    service: Watched, namespace: str, lost: list[LockEvent], how: str
) -> None:
    one, two = runs_of(service, namespace), runs_of(service, namespace, client=False)
    held = one.held("a", lease=20.0)
    given_back = one.held("b", lease=60.0)
    waiter = two.lease("a", lease=20.0)
    thread = two.waiting(waiter)
    old = service.take_away(how)
    # All at once: a new acquire, a release, and a renewal by hand.
    started = time.monotonic()
    fresh = two.held("c")
    print(f"{how}: a take works again after {time.monotonic() - started:.2f} s")
    assert one.release(given_back)
    assert one.engine.extend(held, 20.0)
    assert service.moved_from(old).port != old.port
    assert [hold.execution_id for hold in two.engine.inspect("a").holds] == [
        held.claim.execution_id
    ]
    assert two.engine.inspect("b").holds == ()
    assert one.release(held)
    thread.entered()
    assert fresh.fences[0] > given_back.fences[0]
    assert waiter.fences[0] > fresh.fences[0]
    assert two.release(waiter)
    assert two.release(fresh)
    assert lost == []


# The short form leaves "killed" to the greenlets below, who hold through that.
@pytest.mark.parametrize("how", WAYS if LONG else WAYS[1:])
def test_a_hold_is_renewed_through_a_failover_by_itself(
    service: Watched, namespace: str, lost: list[LockEvent], how: str
) -> None:
    runs = runs_of(service, namespace)
    # Renewed each four seconds; a frozen master is found out by a renewal that nobody answers.
    held = runs.held("a", lease=12.0)
    old = service.take_away(how)
    new = service.moved_from(old)
    deadline = held.deadline
    wait_for(lambda: held.deadline > deadline or held.lost, timeout=40, what="a renewal")
    assert not held.lost
    assert lost == []
    ours = lambda: new.client().hexists(f"{namespace}:{{0}}:l:a", held.claim.execution_id)  # noqa: E731
    assert wait_for(ours, what="the hold on the new master")
    assert runs.release(held)


@pytest.mark.parametrize("how", ["killed", "told"])
def test_what_was_parked_outlives_a_failover(service: Watched, namespace: str, how: str) -> None:
    one, two = runs_of(service, namespace), runs_of(service, namespace)
    holder, parked = one.held("a", lease=60.0), two.lease("a")
    park_request = ParkRequest("text", "home", parked.claim.execution_id, None, 10)
    assert isinstance(two.engine.park(parked, park_request), Parked)
    service.take_away(how)
    assert isinstance(two.engine.park(two.lease("a"), park_request), Parked), "during the failover"
    assert two.engine.inspect("a").waiting == 2
    assert one.release(holder)
    (message,) = two.engine.backend.resume("home", "by").messages
    assert message.execution_id == parked.claim.execution_id


def test_a_hold_that_the_new_master_does_not_know_is_told_as_lost(
    service: Watched, namespace: str, lost: list[LockEvent]
) -> None:
    """Replication is asynchronous: what a dying master wrote last, it may have told nobody."""
    runs = runs_of(service, namespace)
    before = runs.held("a", lease=15.0)
    master = service.master()
    in_step(master)
    service.cut_off(master)
    held = runs.held("b", lease=15.0)
    master.kill()
    service.unfreeze()
    service.moved_from(master)
    wait_for(lambda: lost, timeout=40, what="the loss")
    assert [event.execution_id for event in lost] == [held.claim.execution_id]
    assert held.lost
    assert not before.lost
    assert runs.release(held) is False
    after = runs.held("b")
    assert after.fences > held.fences
    assert runs.release(after)
    assert runs.release(before)


def test_fences_rise_from_master_to_master(service: Watched, namespace: str) -> None:
    runs, fences = runs_of(service, namespace), []

    def take() -> None:
        lease = runs.held("a")
        fences.append(lease.fences[0])
        assert runs.release(lease)

    for how in ("killed", "told"):
        for _ in range(3):
            take()
        old = service.take_away(how)
        take()
        service.moved_from(old)
        take()
    assert fences == sorted(set(fences))


# The short form leaves out "killed", which closes connections at once: a waiter gets in after that
# above.
@pytest.mark.parametrize("how", WAYS if LONG else WAYS[1:])
def test_the_inbox_follows_so_that_a_waiter_hears_of_its_turn_by_message(
    service: Watched, namespace: str, how: str
) -> None:
    one, two = runs_of(service, namespace), runs_of(service, namespace)
    holder = one.held("a", lease=60.0)
    waiter = two.lease("a", lease=60.0)
    thread = two.waiting(waiter)
    old = service.take_away(how)
    new = service.moved_from(old)
    channel = f"{namespace}:{{0}}:i:{two.engine.inbox.name}".encode()
    # Within less than the silence after which a connection is given up.
    wait_for(lambda: channel in new.client().pubsub_channels(), 30, what="the inbox's move")
    wait_for(lambda: two.engine.inspect("a").waiting == 1, what="the waiter")
    waiter.due += 100.0  # no heartbeat finds the grant
    assert one.release(holder)
    assert two.release(thread.entered(60))


def test_who_listens_at_a_replica_hears_of_no_turn_that_it_does_not_get(
    service: Watched, namespace: str
) -> None:
    """A replica repeats what its master publishes, who counts but its own listeners."""
    runs = runs_of(service, namespace)
    backend: Any = runs.engine.backend
    holder = runs.held("a")
    waiter = runs.lease("a").claim
    assert isinstance(backend.acquire(waiter, 30.0, "elsewhere"), Queued)
    (replica, *_) = service.others()
    link = transport_for_url(replica.url).at("").make
    line = Subscription(link, [f"{namespace}:{{0}}:i:elsewhere"])
    assert runs.release(holder)
    assert runs.engine.inspect("a").holds == (), "nobody was reached"
    in_step(service.master())
    service.master().client().publish(f"{namespace}:{{0}}:i:elsewhere", "the end . 0")
    heard = []
    while not heard or heard[-1].kind != "the":
        notice = line.hear(5.0)
        heard += [notice] if notice else []
    assert len(heard) == 1, heard
    line.close()


def test_a_kept_connection_to_a_master_that_is_none_any_more_is_dropped(
    service: Watched, namespace: str
) -> None:
    """The old one was cut off and is back; it still believes that it is the master."""
    one, two = runs_of(service, namespace), runs_of(service, namespace)
    old = service.master()
    one.release(one.held("a"))
    service.freeze(old)
    new = service.moved_from(old)
    holder = two.held("a", lease=60.0)
    service.unfreeze()
    assert old.client().info("replication")["role"] == "master", "nobody has told it yet"
    assert not isinstance(one.engine.acquire(one.lease("a"), 0.0), Held)
    fresh = one.held("b")
    assert new.client().exists(f"{namespace}:{{0}}:l:b")
    assert two.release(holder)
    assert one.release(fresh)


def test_a_worker_that_was_cut_off_with_its_master_loses_its_hold_and_nobody_else_does(
    service: Watched, namespace: str
) -> None:
    """Both are frozen and come back: the new master's holder has had the lock for a while."""
    program = programs.start(
        """
        import logging
        logging.disable()
        mine = engine()
        first = held(mine, "a", seconds=4.0)
        say(first.fences[0])
        sys.stdin.readline()
        say("lost" if first.lost else "kept")
        say("released" if mine.release(first) else "gone")
        sys.stdin.readline()
        again = held(mine, "a", wait=30.0, seconds=4.0)
        say(again.fences[0])
        mine.release(again)
        """,
        f"{service.url}?master_name={service.service}",
        namespace,
    )
    assert program.stdin is not None
    assert program.stdout is not None
    before = int(program.stdout.readline())
    old = service.master()
    in_step(old)
    program.send_signal(signal.SIGSTOP)
    service.freeze(old)
    two = runs_of(service, namespace)
    held = two.held("a", wait=30.0)
    assert held.fences[0] > before
    service.unfreeze()
    program.send_signal(signal.SIGCONT)
    program.stdin.write("go\n")
    program.stdin.flush()
    assert program.stdout.readline() == "lost\n"
    assert program.stdout.readline() == "gone\n"

    # Until the Sentinels have told it so, the old master takes itself for one. A client to whom no
    # Sentinel answers in time, as on a busy machine, believes it: `min_replicas` is against that.
    def demoted() -> bool:
        with contextlib.suppress(redis.ConnectionError):  # it closes everybody's, being told so
            return bool(old.client().info("replication")["role"] == "slave")
        return False

    wait_for(demoted, what="its demotion")
    program.stdin.write("go\n")
    program.stdin.flush()
    assert two.engine.extend(held, 30.0)
    assert not held.lost
    assert two.release(held)
    (after,) = programs.finish(program)
    assert int(after) > held.fences[0]


def test_who_waited_for_longer_than_a_place_lives_gets_in_line_again(
    watched: Callable[..., Watched], namespace: str
) -> None:
    service = watched(down_after=7.0)
    one, two = runs_of(service, namespace), runs_of(service, namespace)
    holder = one.held("a", lease=60.0)
    waiter = two.lease("a", lease=60.0)
    thread = two.waiting(waiter)
    old = service.take_away("killed")
    assert one.engine.extend(holder, 60.0), "waited for, as the Sentinels take long"
    service.moved_from(old)
    assert one.release(holder)
    assert two.release(thread.entered())


def test_greenlets_hold_and_wait_through_a_failover(service: Watched, namespace: str) -> None:
    program = programs.start(
        """
        first, got = engine(), []
        own = held(first, "a", seconds=8.0)
        waiter = spawn(lambda: got.append(held(first, "a", wait=60.0, seconds=8.0)))
        time.sleep(0.5)
        say("waiting", first.inspect("a").waiting)
        until = time.monotonic() + 11.0
        while time.monotonic() < until:
            assert not own.lost
            time.sleep(0.05)
        assert first.release(own)
        join(waiter)
        say("in turn" if got[0].fences > own.fences else got)
        assert first.release(got[0])
        """,
        f"{service.url}?master_name={service.service}",
        namespace,
        first=GEVENT,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "waiting 1\n"
    service.take_away("killed")
    assert programs.finish(program) == ["in turn"]


def test_without_a_failover_to_wait_for_the_patience_is_that_of_any_server(
    service: Watched, namespace: str
) -> None:
    runs = runs_of(service, namespace)
    runs.release(runs.held("a"))
    for each in service.sentinels:
        each.kill()
    for server in service.servers:
        server.kill()
    started = time.monotonic()
    with pytest.raises(LockUnavailable, match="no Sentinel answers"):
        runs.engine.acquire(runs.lease("a"), 0.0)
    assert time.monotonic() - started < 8


def test_a_failover_is_not_waited_for_longer_than_asked(
    watched: Callable[..., Watched], namespace: str
) -> None:
    service = watched(replicas=0)
    transport = {**service.transport, "patience": 0.5}
    runs = Runs(engine_for(service.url, namespace, None, transport))
    runs.release(runs.held("a"))
    service.servers[0].kill()
    started = time.monotonic()
    with pytest.raises(LockUnavailable, match=r"is down: a failover is going on|refused"):
        runs.engine.acquire(runs.lease("a"), 0.0)
    assert time.monotonic() - started < 5


def test_sentinels_that_are_gone_or_silent_cost_a_moment_once(
    service: Watched, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.sentinels[0].kill()
    service.freeze(service.sentinels[1])
    runs = runs_of(service, namespace, client=False)
    runs.release(runs.held("a"))
    backend: Any = runs.engine.backend
    close(backend.transport)
    # Of this one alone: a thread of an earlier test may still look for Sentinels that have ended.
    finder, asked = backend.transport.finder, []
    ask = finder._said_by
    monkeypatch.setattr(finder, "_said_by", lambda *of: (asked.append(of[0]), ask(*of))[1])
    runs.release(runs.held("a"))
    assert {port for _, port in asked} == {service.sentinels[2].port}


def test_a_look_in_vain_is_soon_made_up_for(
    service: Watched, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Sentinels are slow while they have a failover, just when somebody has to hear of it."""
    monkeypatch.undo()
    runs = runs_of(service, namespace)
    runs.release(runs.held("a"))
    backend: Any = runs.engine.backend
    for each in service.sentinels:
        service.freeze(each)
    finder = backend.transport.finder
    wait_for(lambda: finder.look() or finder._failed, what="a look in vain")
    in_vain = finder._looked
    finder.look()
    assert finder._looked == in_vain
    service.unfreeze()
    due = "the next look, after two seconds, not ten"
    wait_for(lambda: finder.look() or finder._looked > in_vain, 7, what=due)


def test_each_look_asks_over_the_connections_of_the_look_before(
    service: Watched, namespace: str
) -> None:
    runs = runs_of(service, namespace)
    runs.release(runs.held("a"))
    backend: Any = runs.engine.backend
    finder = backend.transport.finder

    def made() -> list[int]:
        clients = [each.client() for each in service.sentinels]
        return [each.info("stats")["total_connections_received"] for each in clients]

    before = made()
    for _ in range(20):
        finder.look()
    others = 4  # the Sentinels' own, and this test's
    assert all(now - then <= 1 + others for then, now in zip(before, made(), strict=True))
    finder.find()
    assert finder.address == ("127.0.0.1", service.servers[0].port)


def test_the_latest_word_counts_where_sentinels_do_not_agree(
    service: Watched, own_redis: Callable[..., RedisServer], namespace: str
) -> None:
    """One that was cut off together with an old master believes in that for ever."""
    service.fail_over()
    new = service.moved_from(service.servers[0])
    alone = service.watcher(own_redis().port)
    hosts = [alone, *service.sentinels[:2]]
    url = ";".join(f"sentinel://127.0.0.1:{each.port}" for each in hosts)
    runs = Runs(engine_for(url, namespace, None, service.transport))
    held = runs.held("a")
    assert new.client().exists(f"{namespace}:{{0}}:l:a")
    assert runs.release(held)
