"""A signal's exception, such as a time limit's, that strikes where some call of ours begins."""

from __future__ import annotations

import sys
from contextlib import suppress
from contextvars import Context
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from celery import Celery

import celery_relock
from celery_relock import Lock, LockedTask
from celery_relock.engine import reentrancy
from celery_relock.engine.renewal import keepalive

PACKAGE = Path(celery_relock.__file__).parent


class Stop(Exception):
    """What somebody's signal handler raises."""


@pytest.fixture
def task(redis_url: str, namespace: str) -> Any:
    app = Celery(set_as_current=False)
    app.conf.update(relock_url=redis_url, relock_namespace=namespace)

    @app.task(base=LockedTask, lock_key="a")
    def body() -> None: ...

    yield body
    app.close()


def test_wherever_it_strikes_no_lock_is_left_that_somebody_renews(
    task: Any, redis_url: str, namespace: str
) -> None:
    other = Lock(redis_url, "a", namespace=namespace)
    before = keepalive.leases()  # of tests before this one
    call = struck = 0

    def run_it() -> None:
        try:
            sys.settrace(trace)
            task()
        finally:
            sys.settrace(None)
            assert reentrancy.innermost() is None, at

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal call, struck
        if PACKAGE in Path(frame.f_code.co_filename).parents and (call := call - 1) == 0:
            struck += 1
            raise Stop

    Context().run(task)
    at = 0
    while struck == at:  # until a call comes to its end
        call = at = at + 1
        with suppress(Stop):
            Context().run(run_it)
        assert set(keepalive.leases()) <= set(before), at
        assert not other.locked(), at
    assert struck > 50
