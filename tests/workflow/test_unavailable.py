"""A step that cannot reach the Redis of its workflow's lock does what `on_unavailable` says."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from celery_relock.errors import LockUnavailable
from tests.support import RedisServer, Worker
from tests.support.tcp import TcpProxy

LONG = 30.0


@pytest.fixture(scope="module")
def way(redis_server: RedisServer) -> Iterator[TcpProxy]:
    with TcpProxy(redis_server.port) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def running(module_worker: Callable[..., Worker], way: TcpProxy) -> Worker:
    """A worker with `relock_on_unavailable="retry"`, and a way of its own to the locks."""
    env = {"RELOCK_TEST_LOCKS": f"redis://127.0.0.1:{way.port}"}
    return module_worker("tests.workflow.apps.unavailable", concurrency=1, env=env)


def _cut_after_the_first_step(running: Worker, way: TcpProxy, key: str) -> None:
    running.journal.wait_for(lambda events: any(e.name == f"first {key}" for e in events), LONG)
    way.refuse()
    running.journal.add(f"go on {key}")


def test_it_is_sent_again_and_goes_on_under_the_same_permit(running: Worker, way: TcpProxy) -> None:
    result = running.module.workflow("retry").delay()
    _cut_after_the_first_step(running, way, "retry")
    running.wait_for_log(r"second\[.*again in", LONG)
    assert not running.journal.events("second")
    way.accept()
    assert result.get(timeout=LONG) == "done"
    (told,) = running.journal.events("second")
    assert told["unbroken"]


def test_it_does_what_its_canvas_says_instead(running: Worker, way: TcpProxy) -> None:
    before = running.journal.events("second")
    result = running.module.workflow("raise", on_unavailable="raise").delay()
    _cut_after_the_first_step(running, way, "raise")
    try:
        with pytest.raises(LockUnavailable):
            result.get(timeout=LONG)
    finally:
        way.accept()
    assert running.journal.events("second") == before
