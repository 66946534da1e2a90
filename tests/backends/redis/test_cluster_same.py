"""A Redis Cluster changes nothing: tests of one server's locks, run once more on a cluster.

Every test of these modules that asks for nothing but engines, locks or a URL. The names that they
use lie in several buckets, on several nodes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis.cluster import RedisCluster

from celery_relock.engine.engine import Engine
from celery_relock.lock import Lock
from tests.backends.redis import test_fork, test_green
from tests.engine import (
    test_deadlock,
    test_duplicates,
    test_keepalive,
    test_loss,
    test_waiters,
)
from tests.lock import test_life, test_lock, test_reentry
from tests.support.cluster import ClusterServers
from tests.support.long import LONG
from tests.support.runs import Runs

_PLACES = {"runs", "lock", "client", "redis_url"}
_FIXTURES = {*_PLACES, "in_thread", "namespace"}
_MODULES = (
    test_deadlock,
    test_duplicates,
    test_fork,
    *([test_green] if LONG else []),
    test_keepalive,
    test_life,
    test_lock,
    test_loss,
    test_reentry,
    test_waiters,
)

for _module in _MODULES:
    for _name, _test in vars(_module).items():
        if not _name.startswith("test_"):
            continue
        asks = set(inspect.signature(_test).parameters)
        # With both it looks at the keys of one server.
        may = asks <= _FIXTURES - vars(_module).keys() and not asks >= {"client", "namespace"}
        if may and asks & _PLACES:
            globals()[_name] = _test


@pytest.fixture(scope="module")
def redis_url(cluster: ClusterServers) -> str:
    return cluster.url


@pytest.fixture
def runs(cluster: ClusterServers, namespace: str) -> Callable[..., Runs]:
    def make() -> Runs:
        return Runs(Engine(cluster.backend(namespace)))

    return make


@pytest.fixture(scope="module")
def client(cluster: ClusterServers) -> Iterator[RedisCluster]:
    with cluster.client() as connected:
        yield connected


@pytest.fixture
def lock(client: RedisCluster, namespace: str) -> Callable[..., Lock]:
    def make(redis: Any = client, name: Any = "a", **options: Any) -> Lock:
        return Lock(redis, name, namespace=namespace, **options)

    return make
