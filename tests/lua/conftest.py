"""Every test of the scripts runs on this machine's server and on the oldest one; in the long form
on Valkey, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import RedisServer
from tests.support.desk import Desk
from tests.support.long import LONG
from tests.support.missing import binary_of

SERVERS = ["this machine's Redis", "Redis 6.2", *(["Valkey"] if LONG else [])]


@pytest.fixture(scope="session", params=SERVERS)
def script_server(request, redis_binary) -> Iterator[RedisServer]:
    server = RedisServer(binary=binary_of(request.param, redis_binary))
    yield server
    server.stop()


@pytest.fixture
def desk(script_server, namespace) -> Iterator[Desk]:
    opened = Desk(script_server.url, namespace)
    yield opened
    opened.close()


@pytest.fixture
def bare(desk) -> Desk:
    """A desk that has made its one key already: `meta`."""
    desk.fence("first")
    desk.release("first")
    return desk
