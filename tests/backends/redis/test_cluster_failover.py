"""A replica takes over in a Redis Cluster, while locks are held, waited for and parked for."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import pytest
from redis.exceptions import ResponseError

from celery_relock import errors
from celery_relock.admin.look import Look
from celery_relock.backends.redis.errors import passes
from celery_relock.backends.redis.keys import CLUSTER_BUCKETS as BUCKETS
from celery_relock.backends.redis.keys import Keys
from celery_relock.engine import crash
from celery_relock.engine.crash import Reaper
from celery_relock.engine.engine import Engine
from celery_relock.engine.lease import Lease, State
from celery_relock.engine.protocol import Claim, Held, Parked, ParkRequest, Queued, Release
from celery_relock.engines import engine_for
from celery_relock.errors import LockUnavailable
from celery_relock.worker.resuming import Resumer
from tests.support import wait_for
from tests.support.cluster import ClusterServers, is_sharded
from tests.support.redis_server import RedisServer
from tests.support.runs import Outbox, Runs

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(cluster_with_replicas: ClusterServers) -> Iterator[ClusterServers]:
    """All nodes are there when a test begins."""
    yield cluster_with_replicas
    cluster_with_replicas.mend()


@pytest.fixture
def runs(cluster: ClusterServers, namespace: str) -> Callable[..., Runs]:
    return lambda: Runs(Engine(cluster.backend(namespace)))


def test_a_hold_that_a_replica_has_lives_through_the_death_of_its_master(
    cluster: ClusterServers, runs: Callable[..., Runs], namespace: str
) -> None:
    one, two = runs(), runs()
    holder = one.held("a", lease=12.0)
    master = cluster.master_of_lock("a", namespace)
    cluster.copied(master)
    cluster.fail_over(master)
    since = holder.renewed
    wait_for(lambda: holder.renewed > since, timeout=20, what="a renewal")
    assert not holder.lost
    assert [hold.execution_id for hold in two.engine.inspect("a").holds] == [
        holder.claim.execution_id
    ]
    assert one.release(holder)
    after = two.held("a")
    assert after.fences > holder.fences
    assert two.release(after)


def test_acquire_and_release_wait_for_the_replica(
    cluster: ClusterServers, runs: Callable[..., Runs], namespace: str
) -> None:
    one = runs()
    holder = one.held("a")
    master = cluster.master_of_lock("a", namespace)
    cluster.copied(master)
    free = cluster.name_at(master, namespace, ["a"])
    started = time.monotonic()
    master.kill()
    taken = one.held(free)
    print(f"a take works {time.monotonic() - started:.1f} s after the master was killed")
    assert one.release(holder)
    assert one.release(taken)


def test_waiters_acquire_after_their_master_has_died(
    cluster: ClusterServers, runs: Callable[..., Runs], namespace: str
) -> None:
    one, two, three = runs(), runs(), runs()
    holder, first, second = one.held("a"), two.lease("a"), three.lease("a")
    waiters = {first: two, second: three}
    threads = {lease: its.waiting(lease) for lease, its in waiters.items()}
    master = cluster.master_of_lock("a", namespace)
    cluster.copied(master)
    cluster.fail_over(master)
    assert one.release(holder)
    # Not always the first one first: an outage may outlast a place, and then it asks anew.
    fences = [holder.fences]
    while waiters:
        lease = wait_for(lambda: next((w for w in waiters if not threads[w].is_alive()), None), 30)
        assert lease.state is State.HELD
        fences.append(lease.fences)
        assert waiters.pop(lease).release(lease)
    assert fences == sorted(set(fences))


def test_who_waits_hears_of_its_turn_from_the_new_master(
    cluster: ClusterServers, runs: Callable[..., Runs], namespace: str
) -> None:
    one, two = runs(), runs()
    holder, waiter = one.held("a"), two.lease("a")
    thread = two.waiting(waiter)
    replica = cluster.hand_over(cluster.master_of_lock("a", namespace))
    assert cluster.master_of_lock("a", namespace) is replica
    wait_for(lambda: cluster.hears(replica, two.engine, "a"), what="the line to follow the master")
    started = time.monotonic()
    assert one.release(holder)
    thread.entered()
    print(f"granted {time.monotonic() - started:.3f} s after the release")
    assert two.release(waiter)


def test_who_listens_at_another_node_hears_of_no_grant_that_is_none(
    cluster: ClusterServers, namespace: str
) -> None:
    """A line that has not followed its bucket yet: what it hears is published all the same."""
    backend, keys = cluster.backend(namespace), Keys(namespace, BUCKETS)
    channel = keys.inbox("p", keys.bucket("a"))
    master = cluster.master_of_lock("a", namespace)
    sharded = is_sharded(cluster.admin(master))
    ear = cluster.admin(cluster.replicas_of(master)[0]).pubsub()
    (ear.ssubscribe if sharded else ear.subscribe)(channel)
    wait_for(lambda: ear.get_message(timeout=1.0))
    first, second = (Claim(run, "n", run, ("a",), (1,), 30.0) for run in ("holds", "waits"))
    assert isinstance(backend.acquire(first), Held)
    assert isinstance(backend.acquire(second, 30.0, "p"), Queued)
    assert backend.release(Release(["a"], first.execution_id, "n")).had
    assert backend.inspect("a").holds == ()
    cluster.admin(master).execute_command("SPUBLISH" if sharded else "PUBLISH", channel, "the end")
    heard: list[str] = []
    while not heard or heard[-1] != "the end":
        if (message := ear.get_message(timeout=5.0)) is not None:
            heard.append(message["data"].decode())
    assert [text for text in heard if text] == ["the end"]
    ear.close()
    backend.release(Release(["a"], second.execution_id, "n"))


def test_a_hold_counts_when_a_replica_has_it(cluster: ClusterServers, namespace: str) -> None:
    needing = Runs(engine_for(f"{cluster.url}?patience=3", namespace, None, None, (1, 0.3)))
    lease = needing.held("a", "{a}b")
    waiter = needing.lease("a")
    thread = needing.waiting(waiter)
    assert needing.release(lease)
    thread.entered()
    master = cluster.master_of_lock("a", namespace)
    (replica,) = cluster.replicas_of(master)
    # What a master says that has become a replica since the command before.
    with pytest.raises(ResponseError, match="WAIT") as demoted:
        cluster.admin(replica).execute_command("WAIT", 1, 10)
    assert passes(demoted.value)
    replica.pause()
    try:
        for within in (None, 1.0):
            with pytest.raises(errors.LockUnavailable, match="0 of 1 replicas"):
                needing.engine.backend.renew(waiter.renewals(), within=within)
        assert needing.release(waiter)
        refused = needing.lease("a")
        with pytest.raises(errors.LockUnavailable, match="0 of 1 replicas"):
            needing.engine.acquire(refused)
        needing.release(refused)
        assert needing.engine.inspect("a").holds == ()
    finally:
        replica.resume()
    assert needing.release(needing.held("a"))


def test_what_is_parked_is_resumed_by_the_new_master(
    cluster: ClusterServers, runs: Callable[..., Runs], namespace: str
) -> None:
    one, two = runs(), runs()
    two.engine.parking.sender = outbox = Outbox()
    holder, parked = one.held("a"), two.lease("a")
    assert isinstance(two.engine.park(parked, ParkRequest("text", "h", "t")), Parked)
    master = cluster.master_of_lock("a", namespace)
    cluster.copied(master)
    cluster.fail_over(master)
    assert one.release(holder)

    def sent() -> bool:
        with suppress(LockUnavailable):  # as whoever looks each second
            two.engine.parking.resume()
        return outbox.sent == [parked.claim.execution_id]

    wait_for(sent, timeout=20, what="the message")
    again = two.held("a", execution_id=parked.claim.execution_id)
    assert two.engine.release(again, ended="execution")

    def nothing_is_left() -> bool:
        # In a second it would look again where a node has not learned of the new master yet.
        return two.engine.parking.resume() is None

    wait_for(nothing_is_left, what="nothing to be parked any more")
    assert len(outbox.sent) == 1


def test_a_master_that_hangs_keeps_no_renewal_of_the_others(
    cluster: ClusterServers, runs: Callable[..., Runs], namespace: str
) -> None:
    one = runs()
    masters = {cluster.master_of_lock(f"n{i}", namespace): f"n{i}" for i in range(40)}
    hung, *others = masters
    length = dict.fromkeys(others, 3.0) | {hung: 30.0}
    leases = {node: one.held(name, lease=length[node]) for node, name in masters.items()}
    leases[hung].due = 0.0  # it is to be renewed together with the others
    asleep = [hung, *cluster.replicas_of(hung)]
    cluster.set_coverage(full=False)
    for node in asleep:
        node.pause()
    try:
        since = max(lease.renewed for lease in leases.values())
        wait_for(lambda: min(leases[node].renewed for node in others) > since + 6.0, timeout=20)
        assert not any(leases[node].lost for node in others)
    finally:
        for node in asleep:
            node.resume()
    wait_for(cluster.is_well, timeout=30)
    cluster.set_coverage(full=True)
    assert all(one.release(leases[node]) for node in others)
    one.release(leases[hung])


def test_a_master_that_hangs_keeps_up_what_is_asked_of_all_but_once(
    cluster: ClusterServers, runs: Callable[..., Runs], namespace: str
) -> None:
    backend, hung = runs().engine.backend, cluster.masters()[0]
    backend.arrived(["none"], 5.0)  # each node is known, and has the script
    asleep = [hung, *cluster.replicas_of(hung)]
    cluster.set_coverage(full=False)
    for node in asleep:
        node.pause()
    try:
        backend.arrived(["none"], 5.0)
        began = time.monotonic()
        for _ in range(3):  # as a worker that looks, and has messages without a slot
            with suppress(LockUnavailable):  # where only this master's are looked at again
                backend.resume("h", "by")
            backend.arrived(["none"], 5.0)
        assert time.monotonic() - began < 12  # and not 30
    finally:
        for node in asleep:
            node.resume()
    wait_for(cluster.is_well, timeout=30)
    cluster.set_coverage(full=True)


def test_a_master_that_is_gone_for_good_takes_no_patience_from_the_others(
    cluster: ClusterServers, namespace: str
) -> None:
    one = Runs(Engine(cluster.backend(namespace, patience=1.0)))
    gone = cluster.master_of_lock("a", namespace)
    other, name = next(
        (master, f"n{i}")
        for i in range(40)
        if (master := cluster.master_of_lock(f"n{i}", namespace)) is not gone
    )
    assert one.release(one.held(name))
    replicas = cluster.replicas_of(gone)
    cluster.set_coverage(full=False)
    for node in (*replicas, gone):
        node.kill()
    with pytest.raises(errors.LockUnavailable):
        one.held("a")
    with cluster.node_timeout(20_000):  # else the one that pauses may find the cluster down
        other.pause()
        back = threading.Timer(2.0, other.resume)
        back.start()
        try:
            assert one.release(one.held(name))
        finally:
            back.join()
    for node in (gone, *replicas):
        node.restart(keep_data=True)
    wait_for(cluster.is_well, timeout=30)
    cluster.set_coverage(full=True)


@contextmanager
def gone(cluster: ClusterServers, master: RedisServer) -> Iterator[None]:
    """A master and its replicas are gone, and come back."""
    nodes = (*cluster.replicas_of(master), master)
    cluster.set_coverage(full=False)
    for node in nodes:
        node.kill()
    try:
        yield
    finally:
        for node in reversed(nodes):
            node.restart(keep_data=True)
        wait_for(cluster.is_well, timeout=30)
        cluster.set_coverage(full=True)


def shared_and_other(cluster: ClusterServers, namespace: str) -> tuple[RedisServer, str]:
    """The master with what all locks share: who consumes which resume queue, and the layout that
    each process checks. And the name of a lock at another one."""
    keys = Keys(namespace, BUCKETS)
    first = next(f"n{i}" for i in range(1000) if keys.bucket(f"n{i}") == 0)
    shared = cluster.master_of_lock(first, namespace)
    names = (f"n{i}" for i in range(40))
    return shared, next(n for n in names if cluster.master_of_lock(n, namespace) is not shared)


def test_a_master_with_what_all_locks_share_keeps_up_none_of_the_others(
    cluster: ClusterServers, namespace: str
) -> None:
    shared, name = shared_and_other(cluster, namespace)
    with gone(cluster, shared):
        new = Runs(Engine(cluster.backend(namespace, patience=60.0)))
        started = time.monotonic()
        assert new.release(new.held(name))
        with pytest.raises(errors.LockUnavailable):
            new.engine.backend.consumed("a channel")
        assert Look(new.engine.backend).get(name, 1, 1)
        assert time.monotonic() - started < 30.0
    assert not new.engine.backend.consumed("a channel")


def test_workers_go_on_looking_while_the_master_is_gone_that_they_tell_what_they_consume(
    cluster: ClusterServers, runs: Callable[..., Runs], namespace: str
) -> None:
    shared, name = shared_and_other(cluster, namespace)
    one, two = runs(), runs()
    two.engine.parking.sender = outbox = Outbox()
    holder, parked = one.held(name, lease=60.0), two.lease(name)
    assert isinstance(two.engine.park(parked, ParkRequest("text", "h", "t")), Parked)
    resumer = Resumer(two.engine, tuple, tuple, bool)

    def is_sent() -> bool:
        resumer.consumes(["a channel"])  # as the worker's main loop says again and again
        return outbox.sent == [parked.claim.execution_id]

    with gone(cluster, shared):
        resumer.start()
        try:
            assert one.release(holder)  # in a process that cannot publish it
            wait_for(is_sent, timeout=30)
        finally:
            resumer.stop()


def test_a_hold_whose_master_is_gone_for_good_is_lost_and_told(
    cluster: ClusterServers, namespace: str
) -> None:
    one, told = Runs(Engine(cluster.backend(namespace, patience=3.0))), threading.Event()
    lease = one.lease("a", lease=2.0)
    lease.on_lost = (told.set,)
    one.engine.acquire(lease)
    master = cluster.master_of_lock("a", namespace)
    replicas = cluster.replicas_of(master)
    for node in (*replicas, master):
        node.kill()
    assert told.wait(30)
    assert lease.lost
    started = time.monotonic()
    with pytest.raises(errors.LockUnavailable):
        one.held("a")
    assert time.monotonic() - started > 3.0
    started = time.monotonic()
    with pytest.raises(errors.LockUnavailable):
        one.release(lease)
    # The acquire has waited in vain: the release does not wait as long again.
    assert time.monotonic() - started < 2.5
    for node in (master, *replicas):
        node.restart(keep_data=True)


def test_under_load_no_write_gets_through_with_an_old_fence(
    cluster: ClusterServers, runs: Callable[..., Runs], namespace: str
) -> None:
    """Replication is asynchronous: what a master had not passed on when it died is free again. The
    register refuses whoever comes with a lower fence than one it has seen."""
    master = cluster.master_of_lock("a", namespace)
    over, passed, refused, failed = threading.Event(), [], [], []
    guard = threading.Lock()

    def write(fence: int) -> None:
        with guard:
            if passed and fence < passed[-1][0]:
                refused.append(fence)
            else:
                passed.append((fence, time.monotonic()))

    def work() -> None:
        mine = runs()
        while not over.is_set():
            try:
                lease: Lease = mine.held("a", wait=30.0, lease=5.0)
                write(lease.fences[0])
                time.sleep(0.001)
                write(lease.fences[0])
                mine.release(lease)
            except errors.LockUnavailable as error:
                failed.append(error)
            except AssertionError as answer:  # not in time
                failed.append(answer)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(passed) > 200, timeout=30)
    killed = time.monotonic()
    cluster.fail_over(master)
    wait_for(lambda: passed[-1][1] > killed + 0.5 and len(passed) > 400, timeout=40)
    last = len(passed)
    wait_for(lambda: len(passed) > last + 200, timeout=30, what="the work to go on")
    over.set()
    for thread in threads:
        thread.join(40)
    fences = [fence for fence, _ in passed]
    assert fences == sorted(fences)
    gap = max(after - before for (_, before), (_, after) in pairwise(passed))
    print(f"{len(passed)} writes, none for {gap:.1f} s; {len(refused)} refused, {failed}")
    assert len(failed) == 0


def test_who_has_looked_before_looks_at_the_new_master(
    cluster: ClusterServers, runs: Callable[..., Runs], namespace: str
) -> None:
    shared = cluster.master_of(Keys(namespace, BUCKETS).meta())
    name = cluster.name_at(shared, namespace)
    assert runs().held(name, lease=60.0)
    asks, look = cluster.backend(namespace).inspection(), Look(cluster.backend(namespace))

    def is_told() -> bool:
        with suppress(LockUnavailable):  # the nodes do not all know of it yet
            return asks.has_layout() and [lock.name for lock in look.find("*")] == [name]
        return False

    assert is_told()
    cluster.copied(shared)
    cluster.fail_over(shared)
    wait_for(is_told, timeout=20, what="the lock to be told of")


def test_a_reaper_that_waits_for_a_master_frees_what_the_dead_held_at_another(
    cluster: ClusterServers, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crash.tempfile, "gettempdir", lambda: str(tmp_path))
    one = Runs(Engine(cluster.backend(namespace, patience=10.0)))
    away = cluster.master_of_lock("a", namespace)
    there = next(each for each in cluster.masters() if each is not away)
    name = cluster.name_at(there, namespace)

    def die(lease: Lease, process: str) -> None:
        noted = crash.Journal()
        noted.note(lease.claim.attempt_id, lease.entry())
        folder = crash.folder()
        (folder / crash.process_name(os.getpid())).rename(folder / process)

    held = one.held("a", lease=300.0), one.held(name, lease=300.0)
    reaper = Reaper(one.engine.parking)
    with gone(cluster, away):
        die(held[0], "1-1")
        reaper.start()
        wait_for(lambda: reaper._outage.failures, timeout=30)
        time.sleep(1.5)  # it tries again
        die(held[1], "1-2")
        wait_for(lambda: not one.engine.inspect(name).holds, timeout=5)
    wait_for(lambda: not list(crash.folder().iterdir()), timeout=30)
    reaper.stop()
