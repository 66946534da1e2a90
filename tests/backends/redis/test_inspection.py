"""What people ask of a Redis Cluster is asked of each node."""

from __future__ import annotations

from typing import Any

import pytest

from celery_relock import Lock
from celery_relock.admin import Locks
from celery_relock.engine.protocol import LINE, Claim, ParkRequest, PlaceRequest
from celery_relock.errors import LockUnavailable
from tests.support.backends import backend_of
from tests.support.cluster import ClusterServers
from tests.support.ports import free_port


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
