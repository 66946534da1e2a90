"""As for the engine: most of what a backend promises shows in what an engine does with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.conftest import in_thread, lock, lost, nothing_left_behind, proxy, runs
from tests.support import RedisServer
from tests.support.cluster import ClusterServers
from tests.support.missing import binary_of

__all__ = ["in_thread", "lock", "lost", "nothing_left_behind", "proxy", "runs"]


@pytest.fixture(scope="module")
def cluster(redis_binary: str) -> Iterator[ClusterServers]:
    servers = ClusterServers(redis_binary, replicas=False)
    yield servers
    servers.stop()


@pytest.fixture(scope="module", params=["path", "bundled"])
def server(request: pytest.FixtureRequest, redis_binary: str) -> Iterator[RedisServer]:
    """This machine's, and the oldest one."""
    names = {"path": "this machine's Redis", "bundled": "Redis 6.2"}
    started = RedisServer(binary=binary_of(names[request.param], redis_binary))
    yield started
    started.stop()
