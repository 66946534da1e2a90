"""Connection pools from URLs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry


def pool_from_url(
    url: str, ssl: Mapping[str, Any] | bool | None = None, **options: Any
) -> redis.ConnectionPool:
    """A pool for a Redis URL."""
    return redis.ConnectionPool.from_url(
        url, socket_timeout=5, socket_connect_timeout=2, retry=Retry(NoBackoff(), 0), **options
    )
