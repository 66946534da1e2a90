"""Locks in a Redis Cluster: each goes to its node, also while its slot goes to another one."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_relock import errors
from celery_relock.backends.redis import cluster as cluster_module
from celery_relock.backends.redis import connections
from celery_relock.backends.redis.backend import RedisBackend
from celery_relock.backends.redis.cluster import Cluster
from celery_relock.backends.redis.keys import CLUSTER_BUCKETS as BUCKETS
from celery_relock.backends.redis.keys import Keys
from celery_relock.backends.redis.urls import transport_for_url
from celery_relock.dedup import marker
from celery_relock.engine import ids
from celery_relock.engine.diagnosis import serious
from celery_relock.engine.engine import Engine
from celery_relock.engine.lease import Lease
from celery_relock.engine.platform import clock
from celery_relock.engine.protocol import (
    LINE,
    Burst,
    Claim,
    Conflict,
    Debounce,
    Ended,
    Held,
    Listener,
    Parked,
    ParkRequest,
    Queued,
    Release,
    Renewal,
)
from celery_relock.engine.renewal import keepalive
from celery_relock.engines import engine_for
from celery_relock.lock import Lock
from tests.support import RedisServer, wait_for
from tests.support.backends import backend_of
from tests.support.cluster import ClusterServers, is_sharded
from tests.support.permissions import least
from tests.support.runs import Outbox, Runs
from tests.support.tls import Authority, speaks_tls

pytestmark = pytest.mark.slow


@pytest.fixture
def runs(cluster: ClusterServers, namespace: str) -> Callable[..., Runs]:
    return lambda: Runs(Engine(cluster.backend(namespace)))


def keys_at(node: RedisServer, namespace: str) -> list[str]:
    with redis.Redis(port=node.port) as client:
        found = [key.decode() for key in client.scan_iter(match=f"{namespace}:*", count=1000)]
    return [key for key in found if not key.endswith("}:meta")]


def other_than(cluster: ClusterServers, node: RedisServer) -> RedisServer:
    return next(each for each in cluster.nodes if each is not node)


def test_line_and_markers_lie_in_the_bucket_of_the_lock_where_an_end_is_known() -> None:
    keys = Keys("ns", BUCKETS)
    for name in [*map(str, range(20)), "{tag}:a", "x" * 200]:
        assert keys.bucket(LINE + name) == keys.bucket(name)
        assert keys.bucket(marker.name_for("app.task", [name])) == keys.bucket(name)


def test_locks_are_spread_over_all_nodes_and_leave_nothing_behind(
    cluster: ClusterServers, runs: Callable[..., Runs], namespace: str
) -> None:
    one = runs()
    leases = [one.held(f"name-{number}") for number in range(100)]
    assert all(len(keys_at(node, namespace)) > 10 for node in cluster.nodes)
    assert all(one.release(lease) for lease in leases)
    assert [keys_at(node, namespace) for node in cluster.nodes] == [[], [], []]


def test_who_comes_back_for_a_lock_of_another_bucket_leaves_the_queue_where_it_was_parked(
    cluster: ClusterServers, namespace: str
) -> None:
    """A deploy, or a callable, gives its lock another name."""
    backend, wish = cluster.backend(namespace), ParkRequest("text", "home", "task")
    assert backend.keys.bucket("a") != backend.keys.bucket("b")

    def claim(execution: str, name: str, parked_at: str = "") -> Claim:
        attempt = ids.new_attempt_id()
        return Claim(execution, attempt, "owner", (name,), (1,), 30.0, parked_at=parked_at)

    def waiting() -> list[int]:
        return [backend.inspect(name).waiting for name in ("a", "b")]

    for name in ("a", "b"):
        assert isinstance(backend.acquire(claim(f"holds-{name}", name)), Held)
    for execution in ("parks", "ends"):
        assert isinstance(backend.park(claim(execution, "a"), wish), Parked)

    answer = backend.acquire(claim("parks", "b", parked_at="a"))
    assert isinstance(answer, Conflict)
    assert answer.parked
    assert waiting() == [2, 0], "it stays until it has another place"
    assert isinstance(backend.park(claim("parks", "b", parked_at="a"), wish), Parked)
    assert waiting() == [1, 1]
    backend.release(Release(("b",), "ends", "-", "execution", 60.0))
    assert isinstance(backend.acquire(claim("ends", "b", parked_at="a")), Ended)
    assert waiting() == [0, 1]


def test_a_node_that_has_no_scripts_is_given_them(
    cluster: ClusterServers, runs: Callable[..., Runs]
) -> None:
    one = runs()
    for _ in range(2):
        leases = [one.held(f"name-{number}") for number in range(12)]
        for node in cluster.nodes:
            cluster.admin(node).script_flush()
        assert one.engine.backend.renew([beat for lease in leases for beat in lease.renewals()])
        assert all(one.release(lease) for lease in leases)


def test_a_client_of_another_layout_refuses_to_start(
    cluster: ClusterServers, runs: Callable[..., Runs], namespace: str
) -> None:
    one = runs()
    one.release(one.held("a"))
    other = Runs(Engine(cluster.backend(namespace, buckets=16)))
    with pytest.raises(errors.LockConfigError, match=r"64 buckets; this is schema 2, 16 buckets"):
        other.held("a")


def test_a_plain_url_to_a_node_says_how_to_spell_it(
    cluster: ClusterServers, namespace: str
) -> None:
    for node in cluster.nodes:  # one of them has the slot of a namespace of one bucket
        with pytest.raises(errors.LockConfigError, match=r"redis\+cluster://host:port"):
            Lock(f"redis://127.0.0.1:{node.port}/0", "a", namespace=namespace).acquire()
    Lock(cluster.url, "a", namespace=namespace).acquire()  # nothing was written


def test_a_plain_url_to_a_node_says_so_in_a_namespace_that_is_used(
    cluster: ClusterServers, namespace: str
) -> None:
    with Lock(cluster.url, "a", namespace=namespace):
        for node in cluster.nodes:
            with pytest.raises(errors.LockConfigError, match=r"redis\+cluster://host:port"):
                Lock(f"redis://127.0.0.1:{node.port}/0", "a", namespace=namespace).acquire()


def test_the_url_of_a_cluster_needs_one(redis_server: RedisServer) -> None:
    with pytest.raises(
        errors.LockConfigError, match="not a node of a Redis Cluster: set relock_url"
    ):
        Lock(f"redis+cluster://127.0.0.1:{redis_server.port}", "a").acquire()


def test_the_inbox_listens_for_each_bucket_at_its_master(
    cluster: ClusterServers, runs: Callable[..., Runs], namespace: str
) -> None:
    backend, ready, heard = cluster.backend(namespace), [], []

    def listen() -> None:
        with suppress(errors.LockUnavailable):  # the servers are stopped in the end
            backend.listen("me", Listener(lambda: ready.append("at a master"), heard.append))

    threading.Thread(target=listen, daemon=True).start()
    wait_for(lambda: len(ready) == len(cluster.masters()), what="it to listen at each master")
    names = [f"name-{number}" for number in range(40)]
    for name in names:
        assert isinstance(backend.acquire(claim(name), 0.0, "me"), Held)
        assert backend.force_release(name)
    wait_for(lambda: sorted(notice.execution_id for notice in heard) == sorted(names))
    assert {notice.kind for notice in heard} == {"lost"}


def claim(name: str, run: str = "") -> Claim:
    return Claim(run or name, "n", run or name, (name,), (1,), 30.0)


def test_a_bucket_where_nothing_was_parked_is_looked_at_again(
    cluster: ClusterServers, namespace: str
) -> None:
    looks, parks = cluster.backend(namespace), cluster.backend(namespace)
    assert looks.resume("h", "by").recheck is None
    assert isinstance(parks.acquire(claim("a")), Held)
    park_request = ParkRequest("text", "h", "t", patience=0.0)
    assert isinstance(parks.park(claim("a", "waits"), park_request), Parked)
    found = wait_for(lambda: looks.resume("h", ids.new_attempt_id()).messages, timeout=20)
    assert [message.execution_id for message in found] == ["waits"]
    assert looks.resume("h", "by").recheck is not None
    assert looks.withdraw("waits", 60.0)
    assert parks.release(Release(["a"], "a", "n")).had


def test_a_url_that_cannot_be_used_says_why() -> None:
    with pytest.raises(errors.LockConfigError, match="has only database 0"):
        engine_for("redis+cluster://h1:7000,h2:7000/3")
    with pytest.raises(errors.LockConfigError, match="not the URL of a cluster"):
        engine_for("redis+cluster://")
    with pytest.raises(errors.LockConfigError) as problem:
        engine_for("redis+cluster://:s3cret@h1:70000,h2")
    assert "s3cret" not in str(problem.value)


def test_the_names_of_one_claim_share_a_hash_tag_or_are_refused(
    cluster: ClusterServers, runs: Callable[..., Runs]
) -> None:
    one = runs()
    with pytest.raises(
        errors.LockConfigError, match=r'shared hash tag, as in "order:\{\{\{id\}\}\}:'
    ):
        one.held("order:1:stock", "order:1:invoice")
    names = "order:{1}:invoice", "order:{1}:stock"
    both = one.held(*names)
    other = one.lease(*names)
    assert not isinstance(one.engine.acquire(other), Held)
    assert one.release(both)
    assert [one.engine.inspect(name).holds for name in names] == [(), ()]


CLUSTER_RIGHTS = ("+cluster|slots", "+asking", "+ssubscribe", "+spublish")


def test_the_rights_that_the_page_lists_are_enough(
    cluster: ClusterServers, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "redis.md").read_text()
    assert f"`{' '.join(CLUSTER_RIGHTS)}`" in page
    rules = [rule.replace("relock", namespace) for rule in least()]
    sharded = is_sharded(cluster.admin(cluster.nodes[0]))
    rights = [
        each for each in CLUSTER_RIGHTS if sharded or ("pub" not in each and "ssub" not in each)
    ]
    for node in cluster.nodes:
        rules_here = ["on", ">few", *rules, *rights]
        cluster.admin(node).execute_command("ACL", "SETUSER", "few", *rules_here)
    url = cluster.url.replace("://", "://few:few@")
    one, two = (Runs(Engine(backend_of(url, namespace))) for _ in "12")
    holder, waiter = one.held("a", "{a}b"), two.lease("a", "{a}b")
    thread = two.waiting(waiter)
    slot, source = cluster.slot_of("a", namespace), cluster.master_of_lock("a", namespace)
    cluster.begin_move(slot, other_than(cluster, source))
    assert one.engine.backend.renew(holder.renewals()) == [True, True]
    cluster.end_move(slot, source, other_than(cluster, source))
    assert one.release(holder)
    thread.join(20)
    assert two.release(waiter)
    assert "hears of" not in caplog.text


def test_without_the_right_to_ask_who_has_a_slot_it_says_so(
    cluster: ClusterServers, namespace: str
) -> None:
    rules = [rule.replace("relock", namespace) for rule in least()]
    for node in cluster.nodes:
        cluster.admin(node).execute_command("ACL", "SETUSER", "blind", "on", ">few", *rules)
    with pytest.raises(errors.LockConfigError, match="lacks permissions that locks need"):
        Lock(cluster.url.replace("://", "://blind:few@"), "a", namespace=namespace).acquire()


def test_without_the_right_to_follow_a_slot_that_moves_it_says_so(
    cluster: ClusterServers, namespace: str
) -> None:
    rules = [rule.replace("relock", namespace) for rule in least()]
    for node in cluster.nodes:
        rules_here = ["on", ">few", *rules, "+cluster|slots", "+ttl"]
        cluster.admin(node).execute_command("ACL", "SETUSER", "still", *rules_here)
    backend = backend_of(cluster.url.replace("://", "://still:few@"), namespace)
    key = backend.keys.lock("a")
    assert backend.inspect("a").holds == ()
    slot, source = cluster.slot_of("a", namespace), cluster.master_of_lock("a", namespace)
    cluster.begin_move(slot, other_than(cluster, source))
    try:
        with pytest.raises(errors.LockConfigError, match="'asking' command"):
            backend.inspect("b{a}")
        (said,) = backend.transport.at(key).answers(("TTL", key))
        assert "'asking' command" in str(said)
    finally:
        cluster.end_move(slot, source, other_than(cluster, source))


def test_nodes_are_reached_by_tls(redis_binary: str, tmp_path: Path, namespace: str) -> None:
    if not speaks_tls(redis_binary):
        pytest.skip("this Redis was built without TLS")
    authority = Authority(tmp_path)
    certificate, key = authority.certificate("worker")
    options = {
        "ssl_ca_certs": authority.ca,
        "ssl_certfile": certificate,
        "ssl_keyfile": key,
        "ssl_check_hostname": False,  # the nodes are called localhost, and tell their addresses
    }
    servers = ClusterServers(redis_binary, replicas=False, authority=authority)
    try:
        one, two = (Runs(engine_for(servers.url + q, namespace, options)) for q in ("", "?a=1"))
        holders = [one.held(f"name-{number}") for number in range(10)]
        waiter = two.lease("name-1")
        thread = two.waiting(waiter)
        assert all(one.release(holder) for holder in holders)
        thread.join(20)
        assert two.release(waiter)
        with pytest.raises(errors.LockConfigError, match="the TLS connection failed"):
            engine_for(servers.url, namespace, {**options, "ssl_check_hostname": True}).inspect("a")
    finally:
        servers.stop()


def test_what_was_idle_for_long_is_closed_at_every_node(
    cluster: ClusterServers, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that serves no bucket any more is never used again."""
    backend = cluster.backend(namespace)
    first, second = (cluster.name_at(node, namespace) for node in cluster.nodes[:2])
    backend.inspect(first)
    for module in (connections, cluster_module):
        monkeypatch.setattr(module, "IDLE_FOR", 0.0)
    backend.inspect(second)
    [of_first, *_] = [
        links
        for (node, _), links in backend.transport._nodes.items()
        if node.port == cluster.nodes[0].port
    ]
    assert not of_first._idle


def test_a_cluster_that_serves_no_slot_is_told_as_that(namespace: str) -> None:
    server = RedisServer("--cluster-enabled", "yes", bus=True)
    try:
        backend = backend_of(f"redis+cluster://127.0.0.1:{server.port}?patience=0.5", namespace)
        for asks in (
            lambda: backend.listen("inbox", Listener(lambda: None, print)),
            lambda: backend.examination().refused(),
            lambda: list(backend.inspection().keys("*")),
        ):
            with pytest.raises(errors.LockUnavailable, match="no node of the Redis Cluster serves"):
                asks()
    finally:
        server.stop()


def test_a_url_and_a_client_are_one_place(cluster: ClusterServers, namespace: str) -> None:
    with cluster.client() as client:
        assert engine_for(client, namespace).backend == engine_for(cluster.url, namespace).backend
        assert engine_for(client, namespace).backend != engine_for(cluster.url, "other").backend
        with client.lock("a", lock_class=Lock) as locked:
            assert locked.fence


def test_more_than_a_hundred_leases_of_one_bucket_are_each_told_their_own_answer(
    cluster: ClusterServers, namespace: str
) -> None:
    one = Runs(Engine(cluster.backend(namespace, buckets=1)))
    leases = [one.held(f"n{number}") for number in range(250)]
    renewals = [beat for lease in leases for beat in lease.renewals()]
    for number in (99, 100, 170):
        one.engine.backend.force_release(f"n{number}")
    kept = one.engine.backend.renew(renewals)
    assert [number for number, alive in enumerate(kept) if not alive] == [99, 100, 170]
    for lease in leases:
        one.release(lease)


def test_the_dangers_of_all_nodes_are_told(
    cluster: ClusterServers, runs: Callable[..., Runs]
) -> None:
    node = cluster.admin(cluster.nodes[1])
    node.config_set("maxmemory-policy", "allkeys-lru")
    try:
        servers = runs().engine.backend.examination().servers(0)
    finally:
        node.config_set("maxmemory-policy", "noeviction")
    found = set(serious(servers))
    assert any("allkeys-lru" in each.what for each in found)
    assert sum("appendonly" in each.do for each in found) == 1


def test_a_hold_and_a_waiter_live_through_every_phase_of_a_move(
    cluster: ClusterServers, runs: Callable[..., Runs], namespace: str
) -> None:
    one, two = runs(), runs()
    bucket = Keys(namespace, BUCKETS).bucket
    beside = next(name for name in map(str, range(1000)) if bucket(name) == bucket("moves"))
    holder, other = one.held("moves"), one.held(beside)
    waiter = two.lease("moves", lease=30.0)
    thread = two.waiting(waiter)
    slot = cluster.slot_of("moves", namespace)
    source = cluster.master_of_lock("moves", namespace)
    to = other_than(cluster, source)

    def renewed() -> None:
        since = clock()
        keepalive.look_now(one.engine.backend)
        wait_for(lambda: min(holder.renewed, other.renewed) > since, what="a renewal")
        assert not holder.lost
        assert not other.lost

    cluster.begin_move(slot, to)
    renewed()
    cluster.move_keys(slot, source, to, most=1)
    renewed()
    while cluster.move_keys(slot, source, to):
        pass
    renewed()
    cluster.end_move(slot, source, to)
    renewed()
    assert one.release(other)
    assert one.release(holder)
    thread.entered()
    assert waiter.fences > holder.fences
    assert two.release(waiter)


def test_no_script_begins_in_a_slot_that_is_on_its_way(
    cluster: ClusterServers, runs: Callable[..., Runs], namespace: str
) -> None:
    one = runs()
    one.release(one.held("moves"))
    slot = cluster.slot_of("moves", namespace)
    source = cluster.begin_move(
        slot, other_than(cluster, cluster.master_of_lock("moves", namespace))
    )
    to = other_than(cluster, source)
    taken: list[Lease] = []
    thread = threading.Thread(target=lambda: taken.append(one.held("moves")), daemon=True)
    thread.start()
    thread.join(1.0)
    assert taken == []
    assert keys_at(source, namespace) == keys_at(to, namespace) == []
    cluster.end_move(slot, source, to)
    thread.join(20)
    assert one.release(taken[0])


def test_holds_of_a_bucket_are_renewed_when_only_some_have_arrived(
    cluster: ClusterServers, namespace: str
) -> None:
    backend, keys = cluster.backend(namespace), Keys(namespace, BUCKETS)
    names = [n for n in map(str, range(1000)) if keys.bucket(n) == keys.bucket("0")][:3]
    for name in names:
        assert isinstance(backend.acquire(claim(name)), Held)
    renewals = [Renewal(name, name, "n", 30.0) for name in (*names, "0-free")]
    source = cluster.master_of(keys.meta(keys.bucket("0")))
    to, slot = other_than(cluster, source), cluster.slot_of("0", namespace)
    cluster.begin_move(slot, to)
    cluster.move([keys.lock(names[1])], source, to)
    assert backend.renew(renewals, within=2.0) == [True, True, True, False]
    # One that is extended outside of the keep-alive comes alone.
    assert [backend.renew([each])[0] for each in renewals] == [True, True, True, False]
    cluster.end_move(slot, source, to)
    assert backend.renew(renewals) == [True, True, True, False]


def test_no_script_finds_half_of_what_it_needs(cluster: ClusterServers, namespace: str) -> None:
    backend, keys = cluster.backend(namespace, patience=0.5), Keys(namespace, BUCKETS)
    assert isinstance(backend.acquire(claim("a")), Held)
    assert isinstance(backend.acquire(claim("a", "waits"), 30.0), Queued)
    source = cluster.master_of(keys.lock("a"))
    to, slot = other_than(cluster, source), cluster.slot_of("a", namespace)
    cluster.begin_move(slot, to)
    cluster.move([keys.of_lock("q", "a"), keys.of_lock("w", "a")], source, to)
    for verb in (
        lambda: backend.heartbeat([Renewal("a", "waits", "n", 30.0, 30.0)]),
        lambda: backend.force_release("a"),
        lambda: backend.release(Release(["a"], "a", "n", "attempt", 60.0)),
        lambda: backend.acquire(claim("a", "waits"), 30.0),
    ):
        with pytest.raises(errors.LockUnavailable, match="is moving this slot"):
            verb()
    cluster.end_move(slot, source, to)
    assert [hold.execution_id for hold in backend.inspect("a").holds] == ["a"]
    assert backend.inspect("a").waiting == 1
    assert backend.release(Release(["a"], "a", "n")).had


def test_a_node_that_says_where_a_slot_is_now_is_believed(
    cluster: ClusterServers, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = cluster.backend(namespace)
    assert isinstance(backend.acquire(claim("a")), Held)
    source = cluster.master_of_lock("a", namespace)
    to, slot = other_than(cluster, source), cluster.slot_of("a", namespace)
    cluster.begin_move(slot, to)
    cluster.end_move(slot, source, to)
    monkeypatch.setattr(backend.transport.map, "look", lambda *_: pytest.fail("it asked"))
    assert backend.release(Release(["a"], "a", "n")).had
    assert backend.transport.map.known(backend.keys.bucket("a")).port == to.port


@pytest.mark.parametrize("preferred", ["hostname", "unknown-endpoint"])
def test_nodes_of_which_the_cluster_tells_no_name_are_reached(
    cluster: ClusterServers, namespace: str, preferred: str
) -> None:
    """Redis writes `?` for a name that is missing, and nothing for an endpoint that is unknown."""
    if not is_sharded(cluster.admin(cluster.nodes[0])):
        pytest.skip("before Redis 7.0 there are only addresses")
    for node in cluster.nodes:
        cluster.admin(node).config_set("cluster-preferred-endpoint-type", preferred)
    try:
        made = transport_for_url(cluster.url.replace("127.0.0.1", "localhost"))
        assert isinstance(made, Cluster)
        backend = RedisBackend(made, namespace)
        assert isinstance(backend.acquire(claim("a")), Held)
        # The name by which a node was asked is that of any, if it says nothing else.
        host = "localhost" if preferred == "unknown-endpoint" else "127.0.0.1"
        assert {node.host for node in made.map.masters()} == {host}
        assert backend.release(Release(["a"], "a", "n")).had
    finally:
        for node in cluster.nodes:
            cluster.admin(node).config_set("cluster-preferred-endpoint-type", "ip")


def test_nodes_that_send_a_command_in_a_circle_are_told_of(
    cluster: ClusterServers, namespace: str
) -> None:
    backend = cluster.backend(namespace, patience=1.0)
    source, slot = cluster.master_of_lock("a", namespace), cluster.slot_of("a", namespace)
    other = other_than(cluster, source)
    ids_of = {node: cluster.id_of(node) for node in cluster.nodes}
    # Of the tests before this one: a slot with keys is not given away.
    for key in cluster.ask(source, "GETKEYSINSLOT", slot, 1000):
        cluster.admin(source).delete(key)
    cluster.ask(source, "SETSLOT", slot, "NODE", ids_of[other])
    try:
        for within in (None, 0.5):
            with pytest.raises(
                errors.LockUnavailable, match="do not agree on which node serves this slot"
            ):
                backend.renew([Renewal("a", "a", "n", 30.0)], within=within)
    finally:
        for node in cluster.nodes:
            cluster.ask(node, "SETSLOT", slot, "NODE", ids_of[source])
        wait_for(cluster.is_well, timeout=30)
    assert isinstance(backend.acquire(claim("a")), Held)
    assert backend.release(Release(["a"], "a", "n")).had


def test_after_a_move_a_waiter_hears_of_its_turn_at_once(
    cluster: ClusterServers, runs: Callable[..., Runs], namespace: str
) -> None:
    one, two = runs(), runs()
    holder, waiter = one.held("moves"), two.lease("moves")
    thread = two.waiting(waiter)
    slot = cluster.slot_of("moves", namespace)
    source = cluster.master_of_lock("moves", namespace)
    to = other_than(cluster, source)
    cluster.begin_move(slot, to)
    cluster.end_move(slot, source, to)
    wait_for(lambda: cluster.hears(to, two.engine, "moves"), what="the line to follow the slot")
    started = time.monotonic()
    one.release(holder)
    thread.entered()
    print(f"granted {time.monotonic() - started:.4f} s after the release")
    assert two.release(waiter)


def test_while_slots_move_to_and_fro_every_lock_is_held_by_one_at_a_time(
    cluster: ClusterServers, runs: Callable[..., Runs], namespace: str
) -> None:
    names = [f"name-{number}" for number in range(3)]
    inside = dict.fromkeys(names, 0)
    fences: dict[str, list[int]] = {name: [] for name in names}
    over, done, broken = threading.Event(), dict.fromkeys(names, 0), []

    def work(name: str) -> None:
        mine = runs()
        while not over.is_set():
            try:
                lease = mine.held(name, wait=30.0)
                inside[name] += 1
                fences[name].append(lease.fences[0])
                if inside[name] != 1:
                    broken.append(f"{inside[name]} in {name}")
                done[name] += 1
                inside[name] -= 1
                assert mine.release(lease)
            except BaseException as error:
                broken.append(repr(error))
                raise

    threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in names * 3]
    for thread in threads:
        thread.start()
    for _ in range(4):
        for name in names:
            before = dict(done)
            source = cluster.master_of_lock(name, namespace)
            to = other_than(cluster, source)
            slot = cluster.slot_of(name, namespace)
            cluster.begin_move(slot, to)
            cluster.end_move(slot, source, to)
            wait_for(lambda: done[name] > before[name] + 20, timeout=30, what="work to go on")  # noqa: B023
    over.set()
    for thread in threads:
        thread.join(30)
    assert broken == []
    back = {name: [f for f in pairwise(each) if f[0] >= f[1]] for name, each in fences.items()}
    assert not any(back.values()), back
    print({name: len(each) for name, each in fences.items()})


def test_a_doctor_looks_at_every_node(cluster: ClusterServers, namespace: str) -> None:
    backend = cluster.backend(namespace)
    message = '{"home": "shop", "queue": "q", "headers": {"task": "charge", "id": "7"}}'
    for number in range(6):  # on every node
        first, second = (
            Claim(f"{each}{number}", "n", each, (f"name {number}",), (1,), 30.0) for each in "xy"
        )
        assert isinstance(backend.acquire(first), Held)
        assert isinstance(backend.park(second, ParkRequest(message, "shop", "7")), Parked)
    asks = backend.examination()
    assert [server.info["role"] for server in asks.servers(0)] == ["master"] * 3
    assert asks.refused() == []
    found = asks.memory(1000)
    assert found is not None
    assert {kind.name: kind.keys for kind in found.kinds}["locks"] == 6
    assert sorted(run.lock for run in asks.parked_tasks(100)) == [f"name {n}" for n in range(6)]
    assert asks.owed({"shop"}) == []


def test_what_a_user_lacks_in_a_cluster_is_named(cluster: ClusterServers, namespace: str) -> None:
    rules = ["~*", "resetchannels", f"&{namespace}:*", "+@all", "-spublish", "-ssubscribe"]
    for node in cluster.nodes:
        cluster.admin(node).execute_command("ACL", "SETUSER", "less", "on", ">less", *rules)
    first = cluster.nodes[0]
    url = f"redis+cluster://less:less@127.0.0.1:{first.port}"
    if cluster.admin(first).info("server")["redis_version"] < "7":
        pytest.skip("before Redis 7 messages are sent to all nodes")
    assert backend_of(url, namespace).examination().refused() == ["+spublish", "+ssubscribe"]


def test_bursts_of_calls_wait_in_any_bucket(
    cluster: ClusterServers, runs: Callable[..., Runs], namespace: str
) -> None:
    backend, names = runs().engine.backend, [f"debounce\tapp.index\tshop:{n}" for n in range(6)]
    names = sorted([*names, names[0] + "x" * 100])
    for name in names:
        call = Debounce(ids.new_id(), None, False, 600.0, 6000.0, f"task {name}")
        request = ParkRequest("first", "home", ids.new_id())
        assert backend.debounce(name, call, request) == Parked(0)
        known = backend.burst(name, True)
        assert known == Burst(call.call_id, call.call_id, f"task {name}", "first")
        later = call._replace(call_id=ids.new_id(), burst=known)
        assert backend.debounce(name, later, request._replace(message=name)) == Parked(0)
        backend.force_release(name)
    parking, outbox = runs().engine.parking, Outbox()
    outbox.homes, parking.sender = "home", outbox
    parking.resume()
    assert sorted(outbox.texts) == names
    assert [each.waiting for each in map(backend.inspect, names)] == [0] * 7


def test_a_node_that_was_removed_and_still_runs_is_not_believed(
    cluster: ClusterServers, own_redis: Callable[..., RedisServer], namespace: str
) -> None:
    """`redis-cli --cluster del-node` leaves it running, and nobody changes the URL."""
    gone = own_redis("--cluster-enabled", "yes", bus=True)
    url = cluster.url.replace("://", f"://127.0.0.1:{gone.port},")

    with Lock(f"{url}?patience=2", "a", namespace=namespace):
        pass


def test_a_node_whose_name_is_looked_up_for_long_keeps_no_renewal_of_the_others(
    cluster: ClusterServers,
    runs: Callable[..., Runs],
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No lookup of any node is answered any more, and the connections to one of them are gone."""
    one, over, look_up = runs(), threading.Event(), socket.getaddrinfo
    masters = {cluster.master_of_lock(f"n{i}", namespace): f"n{i}" for i in range(40)}
    gone, *others = masters
    leases = {node: one.held(name, lease=4.0) for node, name in masters.items()}
    before = clock()
    keepalive.look_now(one.engine.backend)
    wait_for(lambda: min(each.renewed for each in leases.values()) > before, what="renewals")

    def hang(*where: Any, **options: Any) -> Any:
        over.wait(30)
        return look_up(*where, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    cluster.admin(gone).client_kill_filter(_type="normal", skipme=True)
    try:
        since = clock()
        wait_for(lambda: min(leases[node].renewed for node in others) > since + 6.0, timeout=20)
        assert not any(leases[node].lost for node in others)
        assert leases[gone].lost
    finally:
        over.set()
    assert all(one.release(leases[node]) for node in others)
    one.release(leases[gone])


def test_a_cluster_of_silent_nodes_is_given_up_after_a_few(
    own_redis: Callable[..., RedisServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [own_redis("--cluster-enabled", "yes", bus=True) for _ in range(4)]
    monkeypatch.setattr(cluster_module, "_SILENT", 2)
    url = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
    for node in nodes:
        node.pause()
    try:
        nodes_map = backend_of(f"redis+cluster://{url}", "ns").transport.map
        asked, ask = [], nodes_map._ranges_of
        monkeypatch.setattr(nodes_map, "_ranges_of", lambda *of: (asked.append(of[0]), ask(*of))[1])
        with pytest.raises(redis.TimeoutError):
            nodes_map.look()
        assert len(asked) <= 2
    finally:
        for node in nodes:
            node.resume()


def test_a_silent_cluster_is_asked_once_and_not_once_for_each_bucket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        backend = backend_of(f"redis+cluster://127.0.0.1:{silent.getsockname()[1]}", "ns")
        started = time.monotonic()
        with pytest.raises(errors.LockUnavailable):
            backend.withdraw("execution", 60.0)
        assert time.monotonic() - started < 5
