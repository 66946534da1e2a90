"""From a client of redis-py to connections of our own to the same server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import SentinelConnectionPool

from .sentinel import to_master

# What stands among a pool's options and is its own affair: handlers of redis-py 8, repeating.
_OF_ITS_POOL = ("orig_", "maint_notifications_pool_handler", "himport_registry", "retry")


def options_of(pool: redis.ConnectionPool) -> dict[str, Any]:
    """How a client's pool reaches its server: class, address, credentials, options."""
    options = {
        name: value
        for name, value in pool.connection_kwargs.items()
        if not name.startswith(_OF_ITS_POOL)
    }
    options.update(connection_class=pool.connection_class, encoding="utf-8", decode_responses=False)
    if isinstance(pool, SentinelConnectionPool):
        del options["connection_pool"]
        options |= to_master(pool)
    for name, seconds in (("socket_timeout", 5.0), ("socket_connect_timeout", 2.0)):
        if options.get(name) is None:
            options[name] = seconds  # a client may wait for ever, a lock must not
    return options


def address_of(pool: redis.ConnectionPool) -> tuple[Any, ...]:
    """The server and database of a pool: equal if two of them surely lead to one place."""
    options = pool.connection_kwargs
    if "finder" in options:
        return (*options["finder"].place, options.get("db") or 0)
    host = options.get("host") or "localhost"
    where = options.get("path") or ("127.0.0.1" if host == "localhost" else host)
    return (where, options.get("port") or 6379, options.get("db") or 0)


def own_pool(options: Mapping[str, Any]) -> redis.ConnectionPool:
    """A pool of our own from a client's options: its own limit, and nothing below us repeats."""
    return redis.ConnectionPool(max_connections=2**31, retry=Retry(NoBackoff(), 0), **options)
