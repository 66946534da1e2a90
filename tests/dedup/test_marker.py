"""The marker's lease is kept as any other."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from celery_relock.dedup.marker import DONE, Marker, lease_of
from celery_relock.engine import ids
from celery_relock.engine.protocol import MARKER, Held
from celery_relock.engines import engine_for
from tests.support import RedisServer


def test_a_marker_that_cannot_be_renewed_is_tried_now_and_then(
    own_redis: Callable[..., RedisServer], namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = own_redis()
    engine, tried = engine_for(server.url, namespace), list[float]()
    made = Marker(f"{MARKER}task\ta", DONE)
    assert isinstance(engine.acquire(lease_of(engine, made, ids.new_attempt_id(), "t", 3.0)), Held)
    renew = engine.backend.renew

    def counted(*args: Any, **named: Any) -> Any:
        tried.append(time.monotonic())
        return renew(*args, **named)

    monkeypatch.setattr(engine.backend, "renew", counted)
    server.stop()
    time.sleep(2.0)  # it is due after one second, and again after some fifth of a second
    assert 1 <= len(tried) <= 20
