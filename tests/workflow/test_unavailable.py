"""A step that cannot reach the Redis of its workflow's lock does what `on_unavailable` says. If it
fails, nothing that was kept for it is left when Redis is back."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, chain
from celery.contrib.testing.worker import start_worker
from celery.result import AsyncResult

from celery_relock import Lock, LockedTask, locked
from celery_relock.declaration import engine_of
from celery_relock.engine.protocol import Answer, Claim
from celery_relock.errors import LockUnavailable
from tests.support import RedisServer, Worker, wait_for
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
    running.journal.wait_for(f"first {key}", LONG)
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


def _is_free(running: Worker, server: RedisServer, key: str) -> None:
    """Wait for that: long before a hold ends that is kept for what comes next."""
    namespace = running.namespace
    lock = Lock(server.url, f"workflow:{key}", namespace=namespace)
    wait_for(lambda: not lock.locked(), 15, f"the lock of {key} to be free")


@pytest.mark.parametrize("countdown", [0.0, 1.5])
def test_a_workflow_that_fails_so_has_no_lock_when_redis_is_back(
    running: Worker, way: TcpProxy, redis_server: RedisServer, countdown: float
) -> None:
    """It went away before the first step ended, or between the steps."""
    key = f"fails {countdown}"
    result = running.module.workflow(key, countdown, on_unavailable="raise").delay()
    if countdown:
        running.journal.add(f"go on {key}")
        result.parent.get(timeout=LONG)
        way.refuse()
    else:
        _cut_after_the_first_step(running, way, key)
    try:
        with pytest.raises(LockUnavailable):
            result.get(timeout=LONG)
    finally:
        way.accept()
    _is_free(running, redis_server, key)


def _retried(running: Worker, way: TcpProxy, name: str) -> AsyncResult:
    """A task whose retry is on its way when Redis goes away."""
    result = getattr(running.module, name).delay(name)
    running.journal.wait_for(f"first {name}", LONG)
    wait_for(lambda: result.state == "RETRY", LONG, "the retry")
    way.refuse()
    return result


@pytest.mark.parametrize("name", ["keeps", "runs_unprotected"])
def test_a_retry_without_its_lock_leaves_none_that_was_kept_for_it(
    running: Worker, way: TcpProxy, redis_server: RedisServer, name: str
) -> None:
    result = _retried(running, way, name)
    try:
        wait_for(result.ready, LONG, "its end")
    finally:
        way.accept()
    assert result.state == ("FAILURE" if name == "keeps" else "SUCCESS")
    _is_free(running, redis_server, name)


def test_a_retry_that_is_tried_again_is_not_lost_and_hears_of_the_gap(
    running: Worker, way: TcpProxy, redis_server: RedisServer
) -> None:
    result = _retried(running, way, "tries_again")
    try:
        running.wait_for_log(r"tries_again\[.*\] retry: Retry in 1s: LockUnavailable", LONG)
    finally:
        way.accept()
    _is_free(running, redis_server, "tries_again")
    assert result.get(timeout=LONG) is False


def test_a_call_that_fails_so_is_sent_anew_the_next_time(running: Worker, way: TcpProxy) -> None:
    task = running.module.sent_once
    call = task.apply_async(("once",), countdown=1.5)
    assert task.marked("once")
    way.refuse()
    try:
        running.wait_for_log(rf"sent_once\[{call.id}\] raised unexpected: LockUnavailable", LONG)
    finally:
        way.accept()
    wait_for(lambda: not task.marked("once"), 15, "the end of its marker")


@pytest.mark.parametrize("heard", [False, True], ids=["its answer is lost", "it is lost"])
def test_a_step_without_its_workflow_s_lock_waits_for_its_own_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, heard: bool
) -> None:
    """With `on_unavailable="run"`, as one command, or its answer, did not come through."""
    app = Celery(uuid.uuid4().hex, broker="memory://", backend="cache+memory://")
    app.conf.update(
        relock_url="memory://",
        task_default_queue=uuid.uuid4().hex,
        broker_transport_options={"polling_interval": 0.01},  # instead of a second
    )

    @app.task(base=LockedTask, shared=False, lock_key="own")
    def has_its_own() -> None: ...

    @app.task(shared=False)
    def last() -> None: ...

    engine, asked = engine_of(app), []
    acquire = engine.backend.acquire

    def unheard(claim: Claim, *more: Any) -> Answer:
        asked.extend(name for name in claim.names if name == "workflow")
        is_second = claim.names == ("workflow",) and len(asked) == 2  # the first one was `enter`
        answer = None if is_second and heard else acquire(claim, *more)
        if is_second or answer is None:
            raise LockUnavailable("away")
        return answer

    monkeypatch.setattr(engine.backend, "acquire", unheard)
    lock = has_its_own.lock_for()
    assert lock.acquire()
    canvas = chain(has_its_own.si(), last.si())
    result = locked(canvas, key="workflow", on_unavailable="run").delay()
    with start_worker(app, pool="threads", concurrency=1, perform_ping_check=False):
        wait_for(lambda: engine.inspect("own").waiting, LONG, "the step to be parked")
        wait_for(lambda: not engine.later._calls, LONG, "what is made up for")
        lock.release()
        wait_for(lambda: result.state == "SUCCESS", LONG, "the last step")
        wait_for(lambda: not engine.inspect("workflow").holds, 15, "the workflow's lock to be free")
