"""Engines for the tests: each with connections of its own, as if it were a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from celery_relock.engine import renewal
from celery_relock.engine.engine import Engine
from celery_relock.engine.events import LockEvent
from celery_relock.engine.lease import State
from celery_relock.engine.renewal import keepalive
from celery_relock.lock import Lock
from tests.support import RedisServer, wait_for
from tests.support.backends import backend_of
from tests.support.listening import subscribe
from tests.support.proxy import Proxy
from tests.support.runs import Runs


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """What a test still holds must not be looked after, and told as lost, during the next one. What
    it has released must not be looked after anyway."""
    yield
    wait_for(
        lambda: all(lease.state is not State.RELEASED for lease in keepalive.leases()),
        what="what was released to be forgotten",
    )
    for lease in keepalive.leases():
        keepalive.discard(lease)
    wait_for(lambda: keepalive._wake_at or not keepalive._thread.on, what="the end of its pass")
    all_told = threading.Event()
    renewal._aside(all_told.set)  # behind what it has found in that
    assert all_told.wait(30)


@pytest.fixture
def told() -> Iterator[list[LockEvent]]:
    """Every event about a lock, as it is told."""
    heard: list[LockEvent] = []
    end = subscribe(heard.append)
    yield heard
    end()


@pytest.fixture
def lost() -> Iterator[list[LockEvent]]:
    """The losses of locks, as they are told."""
    heard: list[LockEvent] = []
    end = subscribe(heard.append, {"lost"})
    yield heard
    end()


@pytest.fixture
def runs(redis_url: str, namespace: str) -> Callable[..., Runs]:
    """Make an engine: `runs()`, or `runs(proxy.url, socket_timeout=0.3)`."""

    def make(url: str = redis_url, **options: Any) -> Runs:
        return Runs(Engine(backend_of(url, namespace, **options)))

    return make


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    with Proxy(redis_server.port) as opened:
        yield opened


@pytest.fixture
def lock(client: redis.Redis, namespace: str) -> Callable[..., Lock]:
    """Make a lock: `lock()`, `lock(timeout=5)`, `lock(name="b")`."""

    def make(redis: Any = client, name: Any = "a", **options: Any) -> Lock:
        return Lock(redis, name, namespace=namespace, **options)

    return make


@pytest.fixture
def in_thread() -> Callable[[Callable[[], Any]], Any]:
    """Call something in another thread and return what it returns, or raise what it raises."""

    def run(call: Callable[[], Any]) -> Any:
        result: list[Any] = []
        failure: list[BaseException] = []

        def work() -> None:
            try:
                result.append(call())
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(20)
        if failure:
            raise failure[0]
        return result[0]

    return run
