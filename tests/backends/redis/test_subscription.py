"""The connection of an inbox, which may be silent for hours."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from celery_relock.backends.redis import subscription
from celery_relock.backends.redis.subscription import Subscription
from celery_relock.backends.redis.urls import transport_for_url
from celery_relock.errors import LockUnavailable
from tests.support import RedisServer


@pytest.fixture
def server(own_redis: Callable[..., RedisServer]) -> RedisServer:
    return own_redis()


@pytest.fixture
def line(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Subscription:
    monkeypatch.setattr(subscription, "ASK", 0.2)
    monkeypatch.setattr(subscription, "GIVE_UP", 2.0)
    return Subscription(transport_for_url(server.url).at("").make, ["inbox"])


def listen(line: Subscription, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert line.hear(0.1) is None


def test_a_line_on_which_nothing_comes_is_kept_while_its_server_answers(line: Subscription) -> None:
    listen(line, 3.0)
    line.close()


def test_a_line_whose_other_end_is_gone_in_silence_is_given_up(
    line: Subscription, server: RedisServer
) -> None:
    server.pause()
    try:
        with pytest.raises(LockUnavailable, match="no longer answers"):
            listen(line, 10.0)
    finally:
        server.resume()
        line.close()
