"""Backends for the tests: each with connections of its own, as if it were a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis

from celery_relock.backends.redis.backend import RedisBackend
from celery_relock.backends.redis.connections import NONE, Replicas
from celery_relock.backends.redis.urls import transport_for_url


def backend_of(
    url: str,
    namespace: str,
    ssl: Any = None,
    transport: Mapping[str, Any] | None = None,
    replicas: Replicas = NONE,
    **query: Any,
) -> RedisBackend:
    """A backend of its own; `query` is put behind the URL, as `socket_timeout=1`."""
    for name, value in query.items():
        url += f"{'&' if '?' in url else '?'}{name}={value}"
    return RedisBackend(transport_for_url(url, ssl, transport, replicas), namespace)


def close(transport: Any) -> None:
    """Close its idle connections: it is used no more, or is to begin anew."""
    for links, _ in transport.masters():
        links.close()


def options_of(url: str, ssl: Any = None, transport: Mapping[str, Any] | None = None) -> Any:
    """redis-py's class of connection, and its keywords, to which a URL leads."""
    made: Any = transport_for_url(url, ssl, transport)
    return made.at("")._kind, made.at("")._options


def client_of(url: str, ssl: Any = None, **options: Any) -> redis.Redis:
    """A client of redis-py on connections like those of a backend: what that sees, a test sees."""
    kind, found = options_of(url, ssl)
    pool = redis.ConnectionPool(connection_class=kind, **{**found, **options}, max_connections=1000)
    return redis.Redis(connection_pool=pool)
