"""The clients that a `Lock` takes, and what it does when their server is away."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from celery_relock.engine.renewal import keepalive
from celery_relock.engines import engine_for
from celery_relock.errors import LockConfigError, LockUnavailable
from celery_relock.lock import Lock
from tests.support import RedisServer, wait_for
from tests.support.proxy import Proxy

MakeLock = Callable[..., Lock]


@pytest.mark.parametrize(
    "options", [{"decode_responses": True}, {"protocol": 3}, {"encoding": "utf-16"}]
)
def test_any_client_of_one_server_will_do(
    redis_url: str, lock: MakeLock, options: dict[str, Any]
) -> None:
    with redis.Redis.from_url(redis_url, **options) as client:
        one, two = lock(client), lock()
        with one:
            assert one.owned()
            assert two.acquire(blocking_timeout=0.1) is False
            waiter = threading.Thread(target=lambda: one.acquire() and one.release())
            waiter.start()
            wait_for(lambda: two._engine.inspect("a").waiting == 1)
        waiter.join(30)
        assert not two.locked()


def test_a_clients_own_pool_stays_as_it_is(redis_url: str, lock: MakeLock) -> None:
    with redis.Redis.from_url(redis_url, max_connections=2) as client:
        client.ping()
        one, two = lock(client), lock(client)
        with one:
            two.acquire(blocking_timeout=0.5)
            now = time.monotonic()
            keepalive.look_now(one._engine.backend)
            wait_for(lambda: one._lease.renewed > now, what="a renewal")
        pool = client.connection_pool
        assert pool._created_connections == 1
        assert pool.max_connections == 2


def test_clients_of_one_server_share_one_engine(redis_url: str, namespace: str) -> None:
    engines = set()
    for _ in range(5):
        with redis.Redis.from_url(redis_url) as client:
            engines.add(engine_for(client, namespace))
        del client
        gc.collect()
    assert len(engines) == 1
    with redis.Redis.from_url(redis_url.replace("/0", "/1")) as other:
        assert engine_for(other, namespace) not in engines


@pytest.mark.parametrize(
    ("options", "url"),
    [
        ({"unix_socket_path": b"/no/such/redis.sock"}, "unix:///no/such/redis.sock"),
        ({"host": b"127.0.0.1", "port": 1}, "redis://127.0.0.1:1"),
    ],
)
def test_an_address_in_bytes_is_that_in_letters(
    options: dict[str, Any], url: str, namespace: str
) -> None:
    with redis.Redis(**options) as client:
        backend = engine_for(client, namespace).backend
    assert backend == engine_for(url, namespace).backend
    with pytest.raises(LockUnavailable, match=url.partition("//")[2]):
        backend.inspect("a")


def test_a_client_without_a_server_does_not_go_through_its_own_retries(
    own_redis: Callable[..., RedisServer], lock: MakeLock
) -> None:
    server = own_redis()
    # Made like this, a client of redis-py 8 connects ten times before it gives up.
    client = redis.Redis(host="127.0.0.1", port=server.port)
    one = lock(client)
    server.kill()
    started = time.monotonic()
    with pytest.raises(LockUnavailable):
        one.acquire()
    assert time.monotonic() - started < 20
    client.close()


def test_asynchronous_clients_and_clusters_are_refused_with_a_reason(namespace: str) -> None:
    import redis.asyncio

    for wrong in (redis.asyncio.Redis(), redis.RedisCluster, 42, None):
        with pytest.raises(LockConfigError, match=r"needs the URL of a Redis, a redis.Redis"):
            Lock(wrong, "a", namespace=namespace)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"name": ""},
        {"name": "  "},
        {"name": b"\xff"},
        {"name": "half \ud800"},
        {"name": 42},
        {"timeout": 0},
        {"timeout": -1},
        {"limit": 0},
    ],
)
def test_values_that_cannot_be_used_are_refused(lock: MakeLock, options: dict[str, Any]) -> None:
    with pytest.raises(LockConfigError):
        lock(**options)


@pytest.mark.parametrize("timeout", ["5", 0, -1, float("nan")])
def test_a_client_whose_timeout_is_none_is_refused(lock: MakeLock, timeout: Any) -> None:
    with pytest.raises(LockConfigError, match=r"socket_timeout=.* cannot be used"):
        lock(redis.Redis(socket_timeout=timeout))


def test_a_name_may_be_bytes_and_hold_braces_colons_and_spaces(lock: MakeLock) -> None:
    with lock(name="a {b}:c ü".encode()) as one:
        assert one.name == "a {b}:c ü"
        assert lock(name="a {b}:c ü").locked()


def test_what_could_not_be_released_can_be_released_again(proxy: Proxy, lock: MakeLock) -> None:
    one, two = lock(proxy.url), lock()
    one.acquire()
    proxy.refuse()
    with pytest.raises(LockUnavailable):
        one.release()
    assert not one.lost
    assert one.remaining == 0
    proxy.accept()
    one.release()
    assert two.acquire(blocking=False)
    two.release()


def test_what_could_not_be_released_does_not_stand_in_its_own_way(
    proxy: Proxy, lock: MakeLock
) -> None:
    one = lock(proxy.url)
    one.acquire()
    fence = one.fence
    proxy.refuse()
    with pytest.raises(LockUnavailable):
        one.__exit__(None, None, None)
    proxy.accept()
    assert one.acquire(blocking=False)
    assert one.fence > fence
    one.release()
    assert not one.locked()


def test_what_the_block_raises_stands_though_redis_was_away(proxy: Proxy, lock: MakeLock) -> None:
    def block() -> None:
        with lock(proxy.url):
            proxy.refuse()
            raise KeyError

    with pytest.raises(KeyError):
        block()
