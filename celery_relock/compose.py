"""The composition root: joins the engine to a store. Nothing else imports both.

Engines are kept, one for each way to reach a server and namespace, so that every lock of a process
shares its connections and its inbox.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import redis
from redis.cluster import RedisCluster

from .engine.engine import Engine
from .errors import LockConfigError
from .store.clients import options_of, own_pool
from .store.cluster import BUCKETS, ClusterBackend
from .store.keyspace import Keyspace
from .store.pools import pool_from_url
from .store.redis import RedisBackend
from .store.replicas import NONE, checked
from .store.seeds import Seeds, is_cluster_url, seeds_of_client, seeds_of_url

NAMESPACE = "relock"

_engines: dict[tuple[str, ...], Engine] = {}
_by_pool: WeakKeyDictionary[Any, dict[tuple[Any, ...], Engine]] = WeakKeyDictionary()
_by_factory: WeakKeyDictionary[Any, dict[tuple[Any, ...], Engine]] = WeakKeyDictionary()


def engine_for(
    place: object,
    namespace: str = NAMESPACE,
    ssl: Mapping[str, Any] | bool | None = None,
    transport: Mapping[str, Any] | None = None,
    replicas: tuple[int, float] = NONE,
) -> Engine:
    """The engine for a URL, for a client of redis-py, or for a function that makes such a client.

    Args:
        ssl, transport: TLS and Sentinel options, for a URL alone: a client has its own.
        replicas: how many have to have a hold before it counts, and the seconds they have for it.

    Raises:
        LockConfigError: it is none of these, or its parts or the namespace cannot be used.
    """
    if isinstance(place, str):
        return engine_for_url(place, namespace, ssl, transport, replicas)
    if callable(place) and not isinstance(place, type):
        return engine_for_factory(place, namespace, replicas)
    return engine_for_client(place, namespace, replicas)


def engine_for_url(
    url: str,
    namespace: str = NAMESPACE,
    ssl: Mapping[str, Any] | bool | None = None,
    transport: Mapping[str, Any] | None = None,
    replicas: tuple[int, float] = NONE,
) -> Engine:
    """The engine for a Redis URL.

    Raises:
        LockConfigError: the URL or the namespace cannot be used.
    """
    key = (url, namespace, repr(ssl), repr(transport), repr(replicas))
    found = _engines.get(key)
    if found is None and is_cluster_url(url):
        return _made_of_cluster(key, seeds_of_url(url, ssl, transport), namespace, replicas)
    return found or _made(key, pool_from_url(url, ssl, transport), namespace, replicas)


def engine_for_factory(
    make: Callable[[], object], namespace: str = NAMESPACE, replicas: tuple[int, float] = NONE
) -> Engine:
    """The engine for a function without arguments that returns a redis-py client. It is called once
    in a process, when its first lock is asked for; the client itself is not used.

    Raises:
        LockConfigError: it fails, or what it returns is no synchronous client of redis-py.
    """
    try:
        found = _by_factory.setdefault(make, {})
    except TypeError:  # an object that has no hash
        found = {}
    if (namespace, replicas) not in found:
        try:
            client = make()
        except Exception as error:
            name = getattr(make, "__qualname__", repr(make))
            raise LockConfigError(f"{name}() makes no Redis client: {error!r}") from error
        found[namespace, replicas] = engine_for_client(client, namespace, replicas)
    return found[namespace, replicas]


def engine_for_client(
    client: object, namespace: str = NAMESPACE, replicas: tuple[int, float] = NONE
) -> Engine:
    """The engine for a redis-py client: same address, credentials and options, own connections.

    Raises:
        LockConfigError: it is no synchronous client of redis-py.
    """
    if isinstance(client, RedisCluster):
        return _engine_for_cluster(client, namespace, replicas)
    if not isinstance(client, redis.Redis):
        kind = f"{type(client).__module__}.{type(client).__qualname__}"
        raise LockConfigError(
            "a lock needs a redis.Redis client or the URL of a Redis, or a function that makes a "
            f"client, not {kind}: clients of redis.asyncio cannot be used in this release"
        )
    pool = client.connection_pool
    found = _by_pool.setdefault(pool, {})
    if (namespace, replicas) not in found:
        # Clients come and go, and so do their pools; those that reach a server in one way share
        # one engine, or a process that makes a client per request would pile up engines.
        options = options_of(pool)
        reached = sorted(f"{name}={value!r}" for name, value in options.items())
        key = (namespace, repr(replicas), *reached)
        found[namespace, replicas] = _engines.get(key) or _made(
            key, own_pool(options), namespace, replicas
        )
    return found[namespace, replicas]


def _engine_for_cluster(
    client: RedisCluster, namespace: str, replicas: tuple[int, float]
) -> Engine:
    found = _by_pool.setdefault(client.nodes_manager, {})
    if (namespace, replicas) not in found:
        seeds = seeds_of_client(client)
        options = sorted(f"{name}={value!r}" for name, value in seeds.options.items())
        key = (namespace, repr(seeds.nodes), repr(seeds.remap), repr(replicas), *options)
        found[namespace, replicas] = _engines.get(key) or _made_of_cluster(
            key, seeds, namespace, replicas
        )
    return found[namespace, replicas]


def _made_of_cluster(
    key: tuple[str, ...], seeds: Seeds, namespace: str, replicas: tuple[int, float]
) -> Engine:
    keyspace = Keyspace(namespace, BUCKETS)
    backend = ClusterBackend(
        seeds.nodes, seeds.options, keyspace, seeds.remap, seeds.failover, checked(*replicas)
    )
    return _engines.setdefault(key, Engine(backend))


def _made(
    key: tuple[str, ...], pool: redis.ConnectionPool, namespace: str, replicas: tuple[int, float]
) -> Engine:
    # Nothing connects yet, so when two threads make one at the same time, the later is dropped.
    backend = RedisBackend(pool, Keyspace(namespace), checked(*replicas))
    return _engines.setdefault(key, Engine(backend))
