"""The scripts as a cluster runs them: tests of one server's scripts, run once more on a node.

A namespace of one bucket, so all of it lies at one node, where these tests can look at the keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from celery_relock.backends.redis.keys import Keys, absent
from celery_relock.backends.redis.scripts import FOLDER, scripts
from tests.lua import (
    test_acquire,
    test_dead_waiters,
    test_deadlocks,
    test_force_release,
    test_heartbeat,
    test_kept,
    test_lines,
    test_parked,
    test_parked_arrivals,
    test_queue,
    test_release,
    test_several_names,
    test_shared,
    test_successors,
)
from tests.support.cluster import ClusterServers, is_sharded
from tests.support.desk import Desk, Inbox
from tests.support.missing import binary_of
from tests.support.waiting import wait_for

_MODULES = (
    test_acquire,
    test_dead_waiters,
    test_deadlocks,
    test_force_release,
    test_heartbeat,
    test_successors,
    test_kept,
    test_lines,
    test_parked,
    test_parked_arrivals,
    test_queue,
    test_release,
    test_several_names,
    test_shared,
)

line = test_lines.line
KNOWN = {"desk", "line"}
for _module in _MODULES:
    for _name, _test in vars(_module).items():
        if _name.startswith("test_") and set(inspect.signature(_test).parameters) <= KNOWN:
            globals()[_name] = _test


class Ear(Inbox):
    """A process that hears as in a cluster."""

    def __init__(self, client: Any, channel: str) -> None:
        self._sharded = is_sharded(client)
        if not self._sharded:
            super().__init__(client, channel)
            return
        self._listener = client.pubsub()
        self._listener.ssubscribe(channel)
        wait_for(lambda: self._next() == "ssubscribe", what="the subscription")

    def leave(self) -> None:
        self._listener.sunsubscribe() if self._sharded else self._listener.unsubscribe()
        wait_for(lambda: "unsubscribe" in self._next(), what="the end of the subscription")
        self.close()


class NodeDesk(Desk):
    """A desk at the node of the one bucket."""

    def __init__(self, cluster: ClusterServers, namespace: str) -> None:
        node = cluster.master_of(Keys(namespace).meta())
        super().__init__(node.url, namespace)
        self.backend: Any = cluster.backend(namespace, buckets=1)

    def raw(self, verb: str, keys: list[str], args: list[Any]) -> Any:
        script = scripts("cluster")[verb]
        keys = [*keys, absent(keys[0])] if script.finds_keys else keys
        return self.evaluated(script.source, keys, args)

    def listen(self, process: str) -> Inbox:
        self._inboxes.append(Ear(self.client, self.keys.inbox(process)))
        return self._inboxes[-1]


@pytest.fixture(scope="module", params=["this machine's Redis", "Redis 6.2"])
def cluster(redis_binary: str, request: pytest.FixtureRequest) -> Iterator[ClusterServers]:
    """Redis 6.2 has no sharded channels."""
    servers = ClusterServers(binary_of(request.param, redis_binary), replicas=False)
    yield servers
    servers.stop()


@pytest.fixture
def desk(cluster: ClusterServers, namespace: str) -> Iterator[Desk]:
    opened = NodeDesk(cluster, namespace)
    yield opened
    opened.close()


def test_each_message_is_published_in_the_way_of_its_server() -> None:
    for where in ("server", "cluster"):
        way = (FOLDER / f"lib/publish{'' if where == 'server' else f'_{where}'}.lua").read_text()
        for script in scripts(where).values():
            assert "PUBLISH'" not in script.source.replace(way, "")
            publishes = "publish(" in script.source
            assert publishes == (way in script.source)
            assert script.finds_keys == (publishes or script.name in ("place", "survey", "where"))
