"""As for the engine: most of what a backend promises shows in what an engine does with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.conftest import in_thread, lock, lost, nothing_left_behind, proxy, runs
from tests.support.cluster import ClusterServers

__all__ = ["in_thread", "lock", "lost", "nothing_left_behind", "proxy", "runs"]


@pytest.fixture(scope="module")
def cluster(redis_binary: str) -> Iterator[ClusterServers]:
    servers = ClusterServers(redis_binary, replicas=False)
    yield servers
    servers.stop()
