"""What several files look at beside their workers."""

from __future__ import annotations

import pytest

from tests.support import RedisServer
from tests.support.monitor import Monitor


@pytest.fixture(scope="module")
def locks(redis_binary):
    """A Redis for the locks alone."""
    server = RedisServer(binary=redis_binary)
    yield server
    server.stop()


@pytest.fixture
def monitor(worker):
    """Hears the events of the worker."""
    watching = Monitor(worker.module.app)
    yield watching
    watching.close()
