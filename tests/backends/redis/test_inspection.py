"""What people ask of a Redis Cluster is asked of each node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from redis.crc import key_slot

from celery_relock import Lock
from celery_relock.admin import Locks
from celery_relock.admin.look import Look
from celery_relock.backends.redis import cluster as cluster_module
from celery_relock.backends.redis.keys import CLUSTER_BUCKETS as BUCKETS
from celery_relock.backends.redis.keys import Keys
from celery_relock.engine.protocol import LINE, Claim, Held, Parked, ParkRequest, PlaceRequest
from celery_relock.errors import LockUnavailable
from tests.support.backends import backend_of
from tests.support.cluster import ClusterServers
from tests.support.ports import free_port
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_for


def test_locks_are_found_shown_and_freed_on_every_node(
    cluster: ClusterServers, namespace: str
) -> None:
    names = [f"account:{number}" for number in range(40)]
    locks = Locks(cluster.url, namespace)
    assert list(locks.find()) == []
    held = [Lock(cluster.url, name, namespace=namespace) for name in names]
    for lock in held:
        assert lock.acquire(blocking=False)
    backend = backend_of(cluster.url, namespace)
    backend.park(
        Claim("e1", "a", "o", (names[7],), (1,), 30.0, "shop.charge[t1] web-1:42"),
        ParkRequest("text", "home", "t1"),
    )
    assert sorted(lock.name for lock in locks.find()) == sorted(names)
    assert [lock.name for lock in locks.find("account:3?")] != []
    assert locks.stats().held == 40
    assert locks.get(names[7]).waiters[0].task_id == "t1"
    why = locks.why("t1")
    assert (why.state, why.lock) == ("parked", names[7])
    line = f"{LINE}{names[8]}"
    backend.place(PlaceRequest(line, "e2", "t2", "shop.charge[t2] ", 60.0, 0.0, 0.0, 600.0))
    awaited = locks._look.inspection.parked("t2")
    assert (awaited.name, awaited.waiter.state, awaited.text) == (line, "awaited", "")
    assert [holder.task for holder in locks.release(names[3])] == ["Lock"]
    assert locks.get(names[3]).idle
    assert locks.why("nobody").state == "unknown"
    for lock in held[:3] + held[4:]:
        lock.release()


@pytest.mark.parametrize("name", ["a", "a" * 200], ids=["a", "a name that Redis has shortened"])
def test_why_tells_for_which_lock_a_holder_waits_whatever_their_buckets(
    cluster: ClusterServers, namespace: str, name: str
) -> None:
    backend, locks = cluster.backend(namespace), Locks(cluster.url, namespace)
    for held in (name, *"bcd"):
        assert isinstance(backend.acquire(claim(held, held[:20])), Held)
    request = ParkRequest('{"queue": "q", "home": "h", "headers": {}}', "h", "t1")
    backend.park(claim(name, "behind"), request)
    for inner in "bcd":  # not all are where the outer lock is
        holder = claim(inner, "inner")._replace(stuck=(name[:20],), label="pay[t2] web-1:42")
        assert isinstance(backend.park(holder, request._replace(task="t2")), Parked)
        assert locks.why("t1").sentence.endswith(f", and waits for the lock {inner!r} meanwhile")
        assert backend.withdraw("inner", 60.0)


@pytest.mark.parametrize(
    "ask",
    [
        lambda asks: list(asks.messages()),
        lambda asks: asks.has_layout(),
        lambda asks: list(asks.keys("*")),
        lambda asks: asks.parked("t1"),
    ],
    ids=["messages", "has_layout", "keys", "parked"],
)
def test_a_cluster_of_which_no_node_answers_is_unavailable(namespace: str, ask: Any) -> None:
    nobody = backend_of(f"redis+cluster://127.0.0.1:{free_port()}/0", namespace)
    with pytest.raises(LockUnavailable):
        ask(nobody.inspection())


def claim(name: str, run: str = "") -> Claim:
    return Claim(run or name, "n", run or name, (name,), (1,), 30.0)


def other_than(cluster: ClusterServers, node: RedisServer) -> RedisServer:
    return next(each for each in cluster.nodes if each is not node)


def give(cluster: ClusterServers, key: str, to: RedisServer) -> None:
    """Move the slot of a key."""
    slot = int(key_slot(key.encode()))
    cluster.end_move(slot, cluster.begin_move(slot, to), to)


@contextmanager
def on_its_way(cluster: ClusterServers, key: str, *, moved: bool) -> Iterator[None]:
    """The slot of a key is on its way to another node, with the keys that it had or without."""
    slot, source = int(key_slot(key.encode())), cluster.master_of(key)
    to = other_than(cluster, source)
    cluster.begin_move(slot, to)
    while moved and cluster.move_keys(slot, source, to):
        pass
    try:
        yield
    finally:
        cluster.end_move(slot, source, to)


@pytest.mark.parametrize("heard", [True, False], ids=["", "of which it has not heard"])
def test_who_has_looked_before_finds_what_is_at_a_new_master(
    cluster: ClusterServers, namespace: str, monkeypatch: pytest.MonkeyPatch, heard: bool
) -> None:
    """An exporter lives longer than the nodes that it knows. What it asked a moment ago it does not
    ask again; and the node that it asks can have heard nothing yet."""
    monkeypatch.setattr(cluster_module, "_NEWS", 0.0 if heard else 60.0)
    keys, new = Keys(namespace, BUCKETS), cluster.nodes[-1]
    firsts = list(map(keys.meta, range(BUCKETS)))
    was_there = [first for first in firsts if cluster.master_of(first) is new]
    for first in was_there:
        give(cluster, first, cluster.nodes[0])
    assert isinstance(cluster.backend(namespace).acquire(claim("a")), Held)
    look = Look(backend := cluster.backend(namespace))
    assert [lock.name for lock in look.find("*")] == ["a"]

    for first in {*was_there, keys.meta(keys.bucket("a"))}:
        give(cluster, first, new)

    assert [lock.name for lock in look.find("*")] == ["a"]
    assert Look(backend).inspection.has_layout()


def test_locks_are_found_while_a_slot_of_another_is_served_by_no_node(
    cluster: ClusterServers, namespace: str
) -> None:
    backend = cluster.backend(namespace)
    assert isinstance(backend.acquire(claim("a")), Held)
    keys = Keys(namespace, BUCKETS)
    slot = int(key_slot(keys.meta((keys.bucket("a") + 1) % BUCKETS).encode()))
    owner = cluster.master_of(keys.meta((keys.bucket("a") + 1) % BUCKETS))
    cluster.set_coverage(full=False)
    for node in cluster.masters():
        cluster.ask(node, "DELSLOTS", slot)
    try:
        assert [lock.name for lock in Look(cluster.backend(namespace)).find("*")] == ["a"]
    finally:
        cluster.ask(owner, "ADDSLOTS", slot)
        wait_for(cluster.is_well)
        cluster.set_coverage(full=True)


def test_of_a_lock_that_is_on_its_way_nothing_wrong_is_told(
    cluster: ClusterServers, namespace: str
) -> None:
    keys, backend = Keys(namespace, BUCKETS), cluster.backend(namespace, patience=0.5)
    assert isinstance(backend.acquire(claim("a")), Held)
    parked = backend.park(claim("a", "e1"), ParkRequest("text", "home", "t1"))
    assert isinstance(parked, Parked)
    look = Look(backend)
    with on_its_way(cluster, keys.lock("a"), moved=False):
        for names in (["a"], ["a", "b"]):
            with pytest.raises(LockUnavailable, match="the Redis Cluster is moving this slot"):
                look.get_all(names, 1, 1)
        with pytest.raises(LockUnavailable, match="the Redis Cluster is moving this slot"):
            look.parked("t1")
    assert (look.get("a", 1, 1)[1].held, look.get("a", 1, 1)[1].waiting) == (1, 1)
    assert look.parked("t1") is not None


@pytest.mark.parametrize("moved", [False, True])
def test_what_needs_no_script_is_told_while_its_slot_is_on_its_way(
    cluster: ClusterServers, namespace: str, moved: bool
) -> None:
    keys, backend = Keys(namespace, BUCKETS), cluster.backend(namespace)
    assert isinstance(backend.acquire(claim("a")), Held)
    text = '{"home": "shop", "queue": "q", "headers": {"task": "charge", "id": "t1"}}'
    assert isinstance(backend.park(claim("a", "e1"), ParkRequest(text, "shop", "t1")), Parked)
    for bucket in (0, keys.bucket("a")):
        with on_its_way(cluster, keys.meta(bucket), moved=moved):
            looks, asks = backend.inspection(), backend.examination()
            assert looks.has_layout()
            assert [each for some in looks.messages() for each in some] == [text]
            assert asks.refused() == []
            assert [each.lock for each in asks.parked_tasks(10)] == ["a"]
            assert asks.owed({"shop"}) == []
