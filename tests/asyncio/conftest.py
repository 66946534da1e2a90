"""Locks for coroutines, and what the server has of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_relock.asyncio import Lock
from celery_relock.engine.protocol import LockState
from tests.engine.conftest import nothing_left_behind
from tests.support.backends import backend_of

__all__ = ["nothing_left_behind"]


@pytest.fixture
def lock(redis_url: str, namespace: str) -> Callable[..., Lock]:
    """Make a lock: `lock()`, `lock("b", timeout=5)`."""

    def make(name: str = "a", redis: Any = redis_url, **options: Any) -> Lock:
        return Lock(redis, name, namespace=namespace, **options)

    return make


@pytest.fixture
def state(redis_url: str, namespace: str) -> Callable[[], LockState]:
    """Who holds and who awaits the lock "a", as the server has it."""
    backend = backend_of(redis_url, namespace)
    return lambda: backend.inspect("a")
