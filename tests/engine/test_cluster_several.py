"""Claims for several locks of a Redis Cluster that lie in several buckets: all or none."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import pytest

from celery_relock import errors
from celery_relock.engine import ids
from celery_relock.engine.engine import Engine
from celery_relock.engine.lease import Lease, State
from celery_relock.engine.protocol import Conflict, Held, Parked, ParkRequest, Successor
from celery_relock.store.cluster import BUCKETS
from celery_relock.store.keyspace import Keyspace
from tests.engine.conftest import Runs
from tests.engine.test_cluster import key_of, keys_at, waiting
from tests.engine.test_cluster_failover import Outbox
from tests.support import wait_for
from tests.support.cluster import ClusterServers
from tests.support.companion import running

ASKS = """
here = engine()
taken = held(here, *{names!r}, wait=None, seconds=2.0)
say("in")
"""


@pytest.fixture(scope="module")
def cluster(redis_binary: str) -> Iterator[ClusterServers]:
    servers = ClusterServers(redis_binary, replicas=False)
    yield servers
    servers.stop()


@pytest.fixture
def runs(cluster: ClusterServers, namespace: str) -> Callable[..., Runs]:
    return lambda: Runs(Engine(cluster.backend(namespace, patience=3.0)))


@pytest.fixture
def names(cluster: ClusterServers, namespace: str) -> list[str]:
    """A name at each node, in the order in which a claim for all of them is served."""
    found: list[str] = []
    for node in cluster.nodes:
        found.append(cluster.name_at(node, namespace, found))
    return sorted(found, key=Keyspace(namespace, BUCKETS).bucket)


def leftovers(cluster: ClusterServers, namespace: str) -> list[str]:
    return [key for node in cluster.nodes for key in keys_at(node, namespace)]


def holders(runs: Runs, name: str) -> list[str]:
    return [hold.execution_id for hold in runs.engine.inspect(name).holds]


def test_all_are_taken_and_given_back_together(
    cluster: ClusterServers, runs: Callable[..., Runs], namespace: str, names: list[str]
) -> None:
    one = runs()
    asked = [names[2], names[0], names[1]]
    lease = one.held(*asked)
    assert [holders(one, name) for name in names] == [[lease.claim.execution_id]] * 3
    told = {name: one.engine.inspect(name).holds[0].fence for name in names}
    assert lease.fences == tuple(told[name] for name in asked)
    assert one.release(lease)
    assert leftovers(cluster, namespace) == []


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_none_is_taken_while_one_is_held(
    runs: Callable[..., Runs], names: list[str], taken: int
) -> None:
    one, two = runs(), runs()
    holder = one.held(names[taken])
    lease = two.lease(*names)
    answer = two.engine.acquire(lease)
    assert isinstance(answer, Conflict)
    assert (answer.name, answer.owner) == (names[taken], holder.claim.owner)
    assert [holders(one, name) for name in names if name != names[taken]] == [[], []]
    two.release(lease)
    assert one.release(holder)


def test_a_waiter_gets_in_when_all_are_free_whatever_becomes_free_first(
    cluster: ClusterServers, runs: Callable[..., Runs], namespace: str, names: list[str]
) -> None:
    one, two = runs(), runs()
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        held = [one.held(name) for name in names]
        lease = two.lease(*names)
        thread, attempt_id = waiting(two, lease), lease.claim.attempt_id
        for index in order[:2]:
            assert one.release(held[index])
        assert lease.state is State.WAITING
        assert one.release(held[order[2]])
        thread.join(10)
        assert lease.state is State.HELD
        assert lease.claim.attempt_id == attempt_id, "it has begun anew, and lost its places"
        assert [holders(one, name) for name in names] == [[lease.claim.execution_id]] * 3
        assert two.release(lease)
    assert leftovers(cluster, namespace) == []


def test_a_waiter_keeps_its_places_for_longer_than_they_live(
    runs: Callable[..., Runs], names: list[str]
) -> None:
    one, two = runs(), runs()
    holder = one.held(names[1])
    lease = two.lease(*names, lease=1.0)
    thread = waiting(two, lease)
    since = lease.renewed
    wait_for(lambda: lease.renewed > since + 2.0)
    assert holders(one, names[0]) == [lease.claim.execution_id]
    assert one.release(holder)
    thread.join(10)
    assert lease.state is State.HELD
    since = lease.renewed
    wait_for(lambda: lease.renewed > since + 1.0)
    assert two.release(lease)


def test_a_waiter_that_gives_up_leaves_nothing_behind(
    cluster: ClusterServers, runs: Callable[..., Runs], namespace: str, names: list[str]
) -> None:
    one, two = runs(), runs()
    holder = one.held(names[1])
    lease = two.lease(*names)
    assert isinstance(two.engine.acquire(lease, 0.2), Conflict)
    two.release(lease)
    assert one.release(holder)
    assert leftovers(cluster, namespace) == []


def test_a_waiter_that_dies_blocks_nobody_for_longer_than_its_lease(
    cluster: ClusterServers, runs: Callable[..., Runs], namespace: str, names: list[str]
) -> None:
    one = runs()
    holder = one.held(names[1])
    with running(ASKS.format(names=names), cluster.url, namespace) as program:
        wait_for(lambda: one.engine.inspect(names[1]).waiting)
        program.kill()
    after = one.held(names[0], wait=20.0)
    assert one.release(after)
    assert one.release(holder)
    assert one.release(one.held(*names, wait=20.0))


def test_the_loss_of_one_is_told(runs: Callable[..., Runs], names: list[str]) -> None:
    one, two, told = runs(), runs(), threading.Event()
    lease = one.lease(*names, lease=3.0)
    lease.on_lost = lambda reason: told.set()
    assert isinstance(one.engine.acquire(lease), Held)
    assert two.engine.backend.force_release(names[1])
    assert told.wait(10)
    assert not one.release(lease)
    assert [holders(two, name) for name in names] == [[], [], []]


def test_a_loss_that_nobody_saw_is_found_at_the_give_back(
    runs: Callable[..., Runs], names: list[str]
) -> None:
    one, two = runs(), runs()
    lease = one.held(*names)
    assert two.engine.backend.force_release(names[1])
    assert not one.release(lease)


def test_an_inner_run_joins_what_its_ancestor_has_and_waits_for_the_rest(
    runs: Callable[..., Runs], names: list[str]
) -> None:
    one, two = runs(), runs()
    outer = one.held(*names[:2], owner="flow")
    stranger = two.held(names[2])
    inner = one.lease(*names, owner="flow", ancestors=(outer.claim.execution_id,))
    thread = waiting(one, inner)
    two.release(stranger)
    thread.join(10)
    assert inner.state is State.HELD
    assert inner.reentered == (True, True, False)
    assert inner.fences[:2] == outer.fences
    assert one.release(inner)
    assert one.release(outer)


def test_what_is_left_to_an_heir_is_kept_everywhere(
    runs: Callable[..., Runs], names: list[str]
) -> None:
    one, two = runs(), runs()
    first, successor = one.held(*names, owner="flow"), ids.new_id()
    first.successor = Successor(successor, 30.0)
    one.engine.release(first)
    stranger = two.lease(names[1])
    assert isinstance(two.engine.acquire(stranger), Conflict)
    second = two.held(*names, owner="flow", execution_id=successor)
    assert second.fences == first.fences
    assert two.release(second)
    assert two.engine.acquire(stranger)
    two.release(stranger)


def parked(runs: Runs, *names: str) -> Lease:
    lease = runs.lease(*names)
    assert isinstance(runs.engine.park(lease, ParkRequest("text", "h", "t")), Parked)
    return lease


def test_a_parked_run_comes_back_until_it_has_all(
    cluster: ClusterServers, runs: Callable[..., Runs], namespace: str, names: list[str]
) -> None:
    one, two = runs(), runs()
    one.engine.parking.sender = outbox = Outbox()
    held = [one.held(name) for name in names]
    lease = parked(two, *names)
    for index, holder in enumerate(held):
        assert one.release(holder)
        wait_for(lambda: outbox.sent)
        outbox.sent.clear()
        again = two.lease(*names, execution_id=lease.claim.execution_id)
        answer = two.engine.park(again, ParkRequest("text", "h", "t"))
        if index < 2:
            assert isinstance(answer, Parked), answer
            # What it has is kept for it.
            stranger = one.lease(names[index])
            assert isinstance(one.engine.acquire(stranger), Conflict)
            one.release(stranger)
    assert isinstance(answer, Held)
    assert two.engine.release(again, ended=True)
    assert [key for key in leftovers(cluster, namespace) if "}:d:" not in key] == []


def test_a_parked_run_that_is_withdrawn_leaves_its_place_and_what_was_kept_ends(
    runs: Callable[..., Runs], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_relock.store.spread.KEEP", 1.0)
    one, two = runs(), runs()
    holder = one.held(names[1])
    lease = parked(two, *names)
    assert two.engine.parking.withdraw(lease.claim.execution_id)
    assert one.release(holder)
    assert one.release(one.held(*names, wait=10.0))


def test_a_node_that_is_away_keeps_nobody_from_giving_back_the_rest(
    cluster: ClusterServers, runs: Callable[..., Runs], namespace: str, names: list[str]
) -> None:
    one, two = runs(), runs()
    for name in names:  # connections, and what is agreed
        two.release(two.held(name))
    cluster.set_coverage(full=False)
    lease = one.held(*names)
    away = cluster.nodes[1]
    here = [name for name in names if cluster.master_of(key_of(name, namespace)) is not away]
    away.pause()
    try:
        with pytest.raises(errors.LockUnavailable):
            one.release(lease)
        assert [holders(two, name) for name in here] == [[], []]
    finally:
        away.resume()
        cluster.set_coverage(full=True)
    wait_for(cluster.is_well, timeout=30)
    two.engine.backend.force_release(next(name for name in names if name not in here))


def test_claims_for_any_two_of_three_in_any_order_never_deadlock(
    cluster: ClusterServers, runs: Callable[..., Runs], namespace: str, names: list[str]
) -> None:
    inside, broken = dict.fromkeys(names, 0), []

    def work() -> None:
        mine = runs()
        for _ in range(25):
            chosen = random.sample(names, 2)
            try:
                lease = mine.held(*chosen, wait=30.0)
            except BaseException as error:
                broken.append(repr(error))
                raise
            for name in chosen:
                inside[name] += 1
                if inside[name] != 1:
                    broken.append(name)
            for name in chosen:
                inside[name] -= 1
            assert mine.release(lease)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert broken == []
    assert not any(thread.is_alive() for thread in threads)
    assert leftovers(cluster, namespace) == []
