"""The connection of an inbox, which may be silent for hours."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from celery_relock.errors import LockUnavailable
from celery_relock.store import line as line_module
from celery_relock.store.connection import Connections
from celery_relock.store.line import Line
from celery_relock.store.pools import pool_from_url
from tests.support import RedisServer


@pytest.fixture
def server(own_redis: Callable[..., RedisServer]) -> RedisServer:
    return own_redis()


@pytest.fixture
def line(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Line:
    monkeypatch.setattr(line_module, "_ASK", 0.2)
    monkeypatch.setattr(line_module, "_GIVE_UP", 2.0)
    return Line(Connections(pool_from_url(server.url)).make(), "inbox")


def listen(line: Line, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert line.hear(0.1) is None


def test_a_line_on_which_nothing_comes_is_kept_while_its_server_answers(line: Line) -> None:
    listen(line, 3.0)
    line.close()


def test_a_line_whose_other_end_is_gone_in_silence_is_given_up(
    line: Line, server: RedisServer
) -> None:
    server.pause()
    try:
        with pytest.raises(LockUnavailable, match="no longer answers"):
            listen(line, 10.0)
    finally:
        server.resume()
        line.close()
