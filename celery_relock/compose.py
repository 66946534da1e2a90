"""The composition root: joins the engine to a store. Nothing else imports both.

Engines are kept, one for each way to reach a server and namespace, so that every lock of a process
shares its connections and its inbox.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import redis

from .core.engine import Engine
from .errors import LockConfigError
from .store.clients import options_of, own_pool
from .store.keyspace import Keyspace
from .store.pools import pool_from_url
from .store.redis import RedisStore

NAMESPACE = "relock"

_engines: dict[tuple[str, ...], Engine] = {}
_by_pool: WeakKeyDictionary[Any, dict[str, Engine]] = WeakKeyDictionary()
_by_factory: WeakKeyDictionary[Any, dict[str, Engine]] = WeakKeyDictionary()


def engine_for(
    place: object, namespace: str = NAMESPACE, ssl: Mapping[str, Any] | bool | None = None
) -> Engine:
    """The engine for a URL, for a client of redis-py, or for a function that makes such a client.

    Args:
        ssl: TLS options, for a URL alone: a client has its own.

    Raises:
        LockConfigError: it is none of these, or its parts or the namespace cannot be used.
    """
    if isinstance(place, str):
        return engine_for_url(place, namespace, ssl)
    if callable(place) and not isinstance(place, type):
        return engine_for_factory(place, namespace)
    return engine_for_client(place, namespace)


def engine_for_url(
    url: str, namespace: str = NAMESPACE, ssl: Mapping[str, Any] | bool | None = None
) -> Engine:
    """The engine for a Redis URL.

    Raises:
        LockConfigError: the URL or the namespace cannot be used.
    """
    key = (url, namespace, repr(ssl))
    found = _engines.get(key)
    return found or _made(key, pool_from_url(url, ssl), namespace)


def engine_for_factory(make: Callable[[], object], namespace: str = NAMESPACE) -> Engine:
    """The engine for a function without arguments that returns a redis-py client. It is called once
    in a process, when its first lock is asked for; the client itself is not used.

    Raises:
        LockConfigError: it fails, or what it returns is not the client of a single server.
    """
    try:
        by_namespace = _by_factory.setdefault(make, {})
    except TypeError:  # an object that has no hash
        by_namespace = {}
    if namespace not in by_namespace:
        try:
            client = make()
        except Exception as error:
            name = getattr(make, "__qualname__", repr(make))
            raise LockConfigError(f"{name}() makes no Redis client: {error!r}") from error
        by_namespace[namespace] = engine_for_client(client, namespace)
    return by_namespace[namespace]


def engine_for_client(client: object, namespace: str = NAMESPACE) -> Engine:
    """The engine for a redis-py client: same address, credentials and options, own connections.

    Raises:
        LockConfigError: the client is not one of a single server, or not a synchronous one.
    """
    if not isinstance(client, redis.Redis):
        kind = f"{type(client).__module__}.{type(client).__qualname__}"
        raise LockConfigError(
            "a lock needs a redis.Redis client or the URL of a Redis, or a function that makes a "
            f"client, not {kind}: clients of redis.asyncio and clusters cannot be used in this "
            "release"
        )
    pool = client.connection_pool
    by_namespace = _by_pool.setdefault(pool, {})
    if namespace not in by_namespace:
        # Clients come and go, and so do their pools; those that reach a server in one way share
        # one engine, or a process that makes a client per request would pile up engines.
        options = options_of(pool)
        key = (namespace, *sorted(f"{name}={value!r}" for name, value in options.items()))
        by_namespace[namespace] = _engines.get(key) or _made(key, own_pool(options), namespace)
    return by_namespace[namespace]


def _made(key: tuple[str, ...], pool: redis.ConnectionPool, namespace: str) -> Engine:
    # Nothing connects yet, so when two threads make one at the same time, the later is dropped.
    return _engines.setdefault(key, Engine(RedisStore(pool, Keyspace(namespace))))
