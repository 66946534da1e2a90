"""The composition root: joins the engine to a store. Nothing else imports both.

Engines are kept, one per address and namespace (or per client), so that every lock of a process
shares its connections and its inbox.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import redis

from .core.engine import Engine
from .store.keyspace import Keyspace
from .store.pools import pool_from_url
from .store.redis import RedisStore

NAMESPACE = "relock"

_by_url: dict[tuple[Any, ...], Engine] = {}
_by_pool: WeakKeyDictionary[Any, dict[str, Engine]] = WeakKeyDictionary()
_making = threading.Lock()


def engine_for_url(
    url: str, namespace: str = NAMESPACE, ssl: Mapping[str, Any] | bool | None = None
) -> Engine:
    """The engine for a Redis URL.

    Raises:
        LockConfigError: the URL or the namespace cannot be used.
    """
    key = (url, namespace, repr(ssl))
    if (found := _by_url.get(key)) is not None:
        return found
    with _making:
        if key not in _by_url:
            _by_url[key] = Engine(RedisStore(pool_from_url(url, ssl), Keyspace(namespace)))
        return _by_url[key]


def engine_for_client(client: redis.Redis, namespace: str = NAMESPACE) -> Engine:
    """The engine for a redis-py client: same address, credentials and options, own connections."""
    pool = client.connection_pool
    with _making:
        engines = _by_pool.setdefault(pool, {})
        if namespace not in engines:
            engines[namespace] = Engine(RedisStore(pool, Keyspace(namespace)))
        return engines[namespace]
