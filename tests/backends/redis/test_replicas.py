"""A hold that replicas have to have: it counts when they do, and never before."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from celery_relock.engine.events import LockEvent
from celery_relock.engine.lease import Lease
from celery_relock.engine.protocol import (
    DEBOUNCE,
    LINE,
    Backend,
    Claim,
    Debounce,
    Held,
    Parked,
    ParkRequest,
    PlaceRequest,
    Queued,
    Renewal,
)
from celery_relock.engines import engine_for
from celery_relock.errors import LockConfigError, LockUnavailable
from celery_relock.lock import Lock
from tests.support import RedisServer, programs, wait_for
from tests.support.clock import server_with_a_clock
from tests.support.missing import binary_of
from tests.support.redis_server import calls_of
from tests.support.runs import Runs
from tests.support.sentinel import Watched, in_step

pytestmark = pytest.mark.slow

_numbers = itertools.count()
Start = Callable[..., RedisServer]


@pytest.fixture
def pair(own_redis: Start) -> tuple[RedisServer, RedisServer]:
    """A master and its replica, without Sentinels."""
    return pair_of(own_redis)


@pytest.fixture
def valkeys(own_redis: Start, redis_binary: str) -> tuple[RedisServer, RedisServer]:
    """The same, of Valkey."""
    return pair_of(partial(own_redis, binary=binary_of("Valkey", redis_binary)))


def pair_of(start: Start) -> tuple[RedisServer, RedisServer]:
    master, replica = start("--repl-diskless-sync-delay", "0"), start()
    replica.client().replicaof("127.0.0.1", master.port)
    wait_for(lambda: online(master) == 1, what="the replica")
    return master, replica


def online(master: RedisServer) -> int:
    info = master.client().info("replication")
    every = [info[f"slave{i}"] for i in range(info["connected_slaves"])]
    return sum(each["state"] == "online" for each in every)


def runs_of(place: str, namespace: str, needed: int = 1, seconds: float = 0.3) -> Runs:
    # Two of one name would share an engine.
    own = f"{place}{'&' if '?' in place else '?'}client_name=c{next(_numbers)}"
    return Runs(engine_for(own, namespace, None, None, (needed, seconds)))


def test_it_costs_nothing_where_it_is_off_and_one_command_where_it_is_on(
    pair: tuple[RedisServer, RedisServer], namespace: str
) -> None:
    master, replica = pair
    plain = Runs(engine_for(master.url, namespace))
    assert plain.release(plain.held("a"))
    assert calls_of(master.client(), "wait") == 0
    runs = runs_of(master.url, namespace, seconds=5.0)
    assert runs.release(runs.held("a"))  # a replica that has just come may need more than one
    before = calls_of(master.client(), "wait")
    for _ in range(3):
        lease = runs.held("a")
        assert replica.client().hexists(f"{namespace}:{{0}}:l:a", lease.claim.execution_id)
        assert runs.release(lease)
    assert calls_of(master.client(), "wait") - before == 3


def test_an_acquire_that_too_few_replicas_have_is_refused_and_leaves_nothing(
    pair: tuple[RedisServer, RedisServer], namespace: str
) -> None:
    master, replica = pair
    runs = runs_of(master.url, namespace)
    replica.pause()
    try:
        lease = runs.lease("a")
        with pytest.raises(LockUnavailable, match=r"relock_min_replicas.*0 of 1 replicas"):
            runs.engine.acquire(lease, 0.0)
        runs.release(lease)
        assert runs.engine.inspect("a").holds == ()
    finally:
        replica.resume()

    def held_again() -> Lease | None:
        lease = runs.lease("a")
        with suppress(LockUnavailable):
            if isinstance(runs.engine.acquire(lease, 0.0), Held):
                return lease
        runs.release(lease)
        return None

    assert runs.release(wait_for(held_again, 20))


def test_a_replica_that_is_back_in_time_is_not_missed(
    pair: tuple[RedisServer, RedisServer], namespace: str
) -> None:
    master, replica = pair
    runs = runs_of(master.url, namespace)
    replica.pause()
    timer = threading.Timer(0.8, replica.resume)
    timer.start()
    lease = runs.held("a")
    timer.join()
    assert runs.release(lease)


def test_a_message_is_not_parked_unless_replicas_have_it(
    pair: tuple[RedisServer, RedisServer], namespace: str
) -> None:
    master, replica = pair
    runs = runs_of(master.url, namespace)
    holder, lease = runs.held("a"), runs.lease("a")
    park_request = ParkRequest("text", "home", lease.claim.execution_id, None, 10)
    replica.pause()
    try:
        with pytest.raises(LockUnavailable, match="relock_min_replicas"):
            runs.engine.park(lease, park_request)
        runs.release(lease)
        assert runs.engine.inspect("a").waiting == 0
    finally:
        replica.resume()
    # A replica that was just woken may take longer.
    patient = runs_of(master.url, namespace, seconds=5.0)
    assert isinstance(patient.engine.park(patient.lease("a"), park_request), Parked)
    assert replica.client().exists(f"{namespace}:{{0}}:q:a")
    assert runs.release(holder)


def test_a_place_and_its_dedup_marker_are_not_taken_unless_replicas_have_them(
    pair: tuple[RedisServer, RedisServer], namespace: str
) -> None:
    master, replica = pair
    backend = runs_of(master.url, namespace).engine.backend
    place = PlaceRequest(f"{LINE}a", "r1", "t1", "call", 60.0, 0.0, 0.0, 600.0)
    replica.pause()
    try:
        with pytest.raises(LockUnavailable, match="relock_min_replicas"):
            backend.place(place)
    finally:
        replica.resume()
    # A replica that was just woken may take longer.
    assert runs_of(master.url, namespace, seconds=5.0).engine.backend.place(place)
    assert replica.client().exists(f"{namespace}:{{0}}:q:{LINE}a")


PLACE = PlaceRequest(f"{LINE}a", "r1", "t1", "call", 60.0, 0.0, 0.0, 600.0)
CALL = Debounce("r1", None, False, 60.0, 600.0, "t1", "call")
MESSAGE = ParkRequest("text", "home", "t1", None, 10)
CLAIM = Claim("r1", "n1", "r1", ("a",), (1,), 30.0)
LONGER = Renewal("a", "r1", "n1", 600.0)


def _is_held_for_longer(backend: Backend) -> None:
    assert isinstance(backend.acquire(CLAIM), Held)
    assert backend.renew([LONGER]) == [True]


def _waits_for_a_short_lease(backend: Backend) -> None:
    assert isinstance(backend.acquire(Claim("r2", "n2", "r2", ("a",), (1,), 5.0)), Held)
    assert isinstance(backend.park(CLAIM, MESSAGE), Parked)


@pytest.mark.parametrize(
    ("before", "again"),
    [
        (_is_held_for_longer, lambda backend: backend.acquire(CLAIM)),
        (_is_held_for_longer, lambda backend: backend.heartbeat([LONGER._replace(lease=30.0)])),
        (_waits_for_a_short_lease, lambda backend: backend.park(CLAIM, MESSAGE)),
        *[
            (call, call)
            for call in (
                lambda backend: backend.place(PLACE),
                lambda backend: backend.debounce(f"{DEBOUNCE}t\ta", CALL, MESSAGE),
            )
        ],
    ],
    ids=["acquire", "heartbeat", "park", "place", "debounce"],
)
def test_a_promise_that_is_repeated_over_another_connection_waits_for_the_replicas_too(
    valkeys: tuple[RedisServer, RedisServer],
    namespace: str,
    before: Callable[[Backend], object],
    again: Callable[[Backend], object],
) -> None:
    """WAIT counts what its own connection has written: with Redis 7.2 and Valkey, nothing else."""
    master, replica = valkeys
    plain, other = (runs_of(master.url, namespace, needed) for needed in (0, 1))
    lease = other.held("b")  # the replica has all that this connection has written
    replica.pause()
    try:
        before(plain.engine.backend)
        with pytest.raises(LockUnavailable, match="relock_min_replicas"):
            again(other.engine.backend)
    finally:
        replica.resume()
    assert other.release(lease)


def test_who_is_told_that_it_has_to_wait_needs_no_replicas(
    pair: tuple[RedisServer, RedisServer], namespace: str
) -> None:
    master, replica = pair
    runs = runs_of(master.url, namespace)
    holder = runs.held("a")
    replica.pause()
    try:
        claim = runs.lease("a").claim
        assert isinstance(runs.engine.backend.acquire(claim, 5.0, "inbox"), Queued)
        assert runs.release(holder), "nor does a release"
    finally:
        replica.resume()


def test_a_renewal_that_replicas_do_not_have_is_none_and_the_loss_is_told(
    pair: tuple[RedisServer, RedisServer], namespace: str, lost: list[LockEvent]
) -> None:
    """Else a master that was cut off would renew for ever what the new one gave to another."""
    master, replica = pair
    runs = runs_of(master.url, namespace)
    lease = runs.held("a", lease=3.0)
    replica.pause()
    try:
        wait_for(lambda: lost, timeout=30, what="the loss")
        assert lease.lost
        assert [event.execution_id for event in lost] == [lease.claim.execution_id]
    finally:
        replica.resume()
    runs.release(lease)


def test_a_turn_that_came_by_message_counts_when_replicas_have_it(
    pair: tuple[RedisServer, RedisServer], namespace: str
) -> None:
    """The releaser's command wrote the grant, on a connection that waits for nobody."""
    master, replica = pair
    one, two = runs_of(master.url, namespace), runs_of(master.url, namespace)
    holder, waiter = one.held("a", lease=60.0), two.lease("a", lease=60.0)
    thread = two.waiting(waiter)
    replica.pause()
    try:
        assert one.release(holder)
        thread.join(20)
        assert isinstance(thread.answer, LockUnavailable), thread.answer
        two.release(waiter)
        assert two.engine.inspect("a").holds == ()
    finally:
        replica.resume()


def test_a_turn_in_good_times_is_had(pair: tuple[RedisServer, RedisServer], namespace: str) -> None:
    master, replica = pair
    one, two = runs_of(master.url, namespace), runs_of(master.url, namespace)
    holder, waiter = one.held("a"), two.lease("a")
    thread = two.waiting(waiter)
    assert one.release(holder)
    thread.entered()
    assert replica.client().hexists(f"{namespace}:{{0}}:l:a", waiter.claim.execution_id)
    assert two.release(waiter)


SPLIT = """
import logging
logging.disable()
from celery_relock.engines import engine_for
from celery_relock.engine.protocol import Held
from celery_relock.errors import LockConfigError, LockUnavailable
from celery_relock.lock import Lock
mine = engine_for(URL, NAMESPACE, None, None, (NEEDED, 0.3))
first = held(mine, "a", seconds=3.0)
say(first.fences[0])
sys.stdin.readline()
while not first.lost:
    time.sleep(0.05)
try:
    second = lease(mine, "a", seconds=3.0)
    answer = mine.acquire(second, 0.0)
    say("held" if isinstance(answer, Held) else type(answer).__name__)
except LockUnavailable as error:
    say("refused")
"""


@pytest.mark.parametrize(("needed", "then"), [(0, "held"), (1, "refused")])
def test_a_master_that_was_cut_off_gives_nobody_a_lock_that_another_has(
    watched: Callable[..., Watched], namespace: str, needed: int, then: str
) -> None:
    """It lives on with one of its clients, and all others have gone over to the new master."""
    service = watched()
    url = f"{service.url}?master_name={service.service}"
    program = programs.start(SPLIT.replace("NEEDED", str(needed)), url, namespace)
    assert program.stdin is not None
    assert program.stdout is not None
    before = int(program.stdout.readline())
    old = service.master()
    service.freeze(old)
    program.send_signal(signal.SIGSTOP)
    service.moved_from(old)
    two = runs_of(url, namespace, needed)
    held = two.held("a", wait=30.0)
    assert held.fences[0] > before
    # Nobody is left to tell the old master, or its client.
    for sentinel in service.sentinels:
        sentinel.kill()
    service.unfreeze()
    program.send_signal(signal.SIGCONT)
    (said,) = programs.finish(_told(program))
    assert said == then
    assert two.engine.backend.renew(held.renewals()) == [True]
    assert not held.lost
    two.release(held)


def _told(program: Any) -> Any:
    program.stdin.write("go\n")
    program.stdin.flush()
    return program


WORK = """
import logging, redis
logging.disable()
from celery_relock.engines import engine_for
from celery_relock.engine.protocol import Held
from celery_relock.errors import LockUnavailable
register = redis.Redis(port=PORT)
mine = engine_for(URL, NAMESPACE, None, None, (1, 0.3))
while not register.exists("end"):
    if not register.exists("go"):
        time.sleep(0.05)
        continue
    own = lease(mine, "a", seconds=15.0)
    try:
        if isinstance(mine.acquire(own, 5.0), Held):
            until = time.monotonic() + 6.0
            while time.monotonic() < until and not own.lost and register.exists("go"):
                register.rpush("touched", own.fences[0])
                time.sleep(0.01)
        mine.release(own)
    except LockUnavailable:
        pass
"""


def test_through_a_failover_no_two_clients_use_the_lock_at_once(
    watched: Callable[..., Watched], own_redis: Start, namespace: str
) -> None:
    """Whoever touches the register has the lock as far as it can know; a fence below one that was
    there before is that of somebody who should not have had it any more. (Where no replica must
    have the hold, there is such a one each time.)"""
    service, register = watched(), own_redis()
    source = WORK.replace("PORT", str(register.port))
    url = f"{service.url}?master_name={service.service}"
    clients = [programs.start(source, url, namespace) for _ in range(3)]
    client = register.client()

    def touches(more: int, seconds: float = 60.0) -> None:
        seen = client.llen("touched")
        wait_for(lambda: client.llen("touched") > seen + more, seconds, what="work")

    client.set("go", 1)
    touches(100)
    client.delete("go")
    old = service.master()
    free = lambda: not old.client().exists(f"{namespace}:{{0}}:l:a")  # noqa: E731
    wait_for(free, what="a free lock")
    in_step(old)
    # What the master gives out from now on, it takes along.
    service.cut_off(old)
    client.set("go", 1)
    with suppress(AssertionError):
        touches(20, 3.0)
    old.kill()
    service.unfreeze()
    service.moved_from(old)
    touches(300)
    client.set("end", 1)
    for one in clients:
        programs.finish(one)
    touched = [int(fence) for fence in client.lrange("touched", 0, -1)]
    assert len(set(touched)) > 1
    assert touched == sorted(touched)


def test_a_lock_outside_of_tasks_says_how_many_by_itself(
    pair: tuple[RedisServer, RedisServer], namespace: str
) -> None:
    master, replica = pair
    with Lock(master.url, "a", namespace=namespace, min_replicas=1) as lock:
        before = calls_of(master.client(), "wait")
        assert before >= 1
        assert lock.extend(10.0)
        assert calls_of(master.client(), "wait") > before
    replica.pause()
    try:
        with pytest.raises(LockUnavailable, match="relock_min_replicas"):
            Lock(master.url, "a", namespace=namespace, min_replicas=1).acquire(blocking=False)
    finally:
        replica.resume()


@pytest.mark.parametrize("number", [-1, True, "1", 0.5])
def test_a_number_that_is_none_is_refused(redis_url: str, number: Any) -> None:
    with pytest.raises(LockConfigError, match="min_replicas="):
        Lock(redis_url, "a", min_replicas=number)


@pytest.mark.parametrize("needed", [0, 1])
def test_fences_after_a_failover_to_a_replica_that_lacks_writes_and_whose_clock_is_behind(
    own_redis: Start, namespace: str, needed: int, request: pytest.FixtureRequest
) -> None:
    """What `docs/redis.md` promises: they rise as long as one of the two holds, what was written or
    the clock. Where both are lost they begin above what the replica has seen, and repeat; a hold
    that had to be on the replica (`min_replicas`) is never the one that was lost."""
    replica = server_with_a_clock()
    master = own_redis("--repl-diskless-sync-delay", "0", binary=replica.binary)
    request.addfinalizer(replica.stop)
    replica.set_clock(-3600)
    replica.client().replicaof("127.0.0.1", master.port)
    wait_for(lambda: online(master) == 1, what="the replica")
    before = runs_of(master.url, namespace, needed, 5.0)
    seen = before.held("a").fences[0]
    in_step(master)
    replica.client().replicaof("NO", "ONE")  # what comes now it lacks
    wait_for(lambda: online(master) == 0, what="the end of the replication")
    granted = []
    for name in "bcd":
        lease = before.lease(name)
        with suppress(LockUnavailable):
            before.engine.acquire(lease, 0.0)
            granted.append(lease.fences[0])
        if needed:
            break
    master.kill()

    after = runs_of(replica.url, namespace, 0)
    first = after.held("b").fences[0]
    assert first == seen + 1, "above all that the replica has seen, and an hour behind"
    if needed:
        assert granted == [], "what the replica lacks was granted to nobody"
    else:
        assert len(granted) == 3
        assert first < min(granted), "so a fence is not higher than those that were lost"
    replica.set_clock(+60)
    assert after.held("c").fences[0] > max([seen, *granted]), "until its clock has passed them"
