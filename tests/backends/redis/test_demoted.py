"""A plain URL whose name leads to another server after a failover."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from celery_relock import Lock
from tests.support import RedisServer, wait_for
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


def test_a_waiter_whose_inbox_is_at_the_old_master_hears_of_no_grant_that_is_none(
    own_redis: Callable[..., RedisServer], namespace: str
) -> None:
    old, new = own_redis(), own_redis()
    new.client().replicaof("127.0.0.1", old.port)
    wait_for(lambda: new.client().info("replication")["master_link_status"] == "up")
    with Proxy(old.port) as name:
        holder, waiter, other = (
            Lock(f"{name.url}?client_name={each}", "a", namespace=namespace) for each in "hwo"
        )
        got: list[bool] = []
        holder.acquire()
        thread = threading.Thread(target=lambda: got.append(waiter.acquire(blocking_timeout=60)))
        thread.start()
        wait_for(lambda: old.client().pubsub_channels(f"{namespace}:*"), what="the inbox")
        queue = f"{namespace}:{{0}}:q:a"
        wait_for(lambda: new.client().exists(queue), what="the waiter, at the new master")
        new.client().execute_command("REPLICAOF", "NO", "ONE")
        old.client().replicaof("127.0.0.1", new.port)
        name._port = new.port  # connections that are open stay where they are
        wait_for(lambda: old.client().info("replication")["master_link_status"] == "up")
        holder.release()
        time.sleep(0.3)
        taken = other.acquire(blocking=False)

        assert not (got and taken), "two have the lock"
        if taken:
            other.release()
        wait_for(lambda: got, 20, what="the waiter")
        assert got == [True]
        thread.join()
