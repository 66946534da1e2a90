"""What several files look at beside their workers."""

from __future__ import annotations

import pytest

from tests.support import RedisServer


@pytest.fixture(scope="module")
def locks(redis_binary):
    """A Redis for the locks alone."""
    server = RedisServer(binary=redis_binary)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def on_broker(request):
    """What a worker's environment says of its broker: `env=on_broker("amqp")`, or "redis"."""

    def env(broker):
        if broker == "redis":
            return {}
        return {"RELOCK_TEST_BROKER": request.getfixturevalue("rabbitmq").url}

    return env
