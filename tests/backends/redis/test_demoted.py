"""A plain URL whose name leads to another server after a failover."""

from __future__ import annotations

from collections.abc import Callable

from celery_relock import Lock
from tests.support import RedisServer
from tests.support.proxy import Proxy


def test_a_master_that_became_a_replica_keeps_no_connection(
    own_redis: Callable[..., RedisServer], namespace: str
) -> None:
    old, new = own_redis(), own_redis()
    with Proxy(old.port) as name:
        with Lock(name.url, "a", namespace=namespace):
            pass
        old.client().replicaof("127.0.0.1", new.port)
        name._port = new.port  # for new connections, as a name server or a proxy does

        with Lock(name.url, "a", namespace=namespace):
            assert new.client().exists(f"{namespace}:{{0}}:l:a")
