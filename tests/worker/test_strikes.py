"""A signal's exception, such as a time limit's, that strikes where some call of ours begins."""

from __future__ import annotations

import sys
import uuid
from contextlib import suppress
from contextvars import Context
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from celery import Celery
from celery.app.trace import build_tracer

import celery_relock
from celery_relock import LockedTask
from celery_relock.declaration import declaration
from celery_relock.dedup import marker
from celery_relock.engine import reentrancy
from celery_relock.engine.protocol import KEPT, LINE
from celery_relock.engine.renewal import keepalive
from celery_relock.worker.message import finish

PACKAGE = Path(celery_relock.__file__).parent


class Stop(Exception):
    """What somebody's signal handler raises."""


PLAIN: dict[str, Any] = {}
OPTIONS: list[dict[str, Any]] = [
    PLAIN,
    {"lock_hold": "workflow"},
    {"lock_dedup": "until_start", "lock_on_duplicate": "replace"},
    {"lock_dedup": "until_done", "lock_order": "sent"},
    {"lock_keep_on_retry": True, "autoretry_for": (OSError,)},
    {"lock_dedup": "until_done", "lock_order": "sent", "autoretry_for": (OSError,)},
]


# Thrown into a generator that ends, an exception is told of and goes no further.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("is_message", "options"), [(False, PLAIN), *((True, each) for each in OPTIONS)], ids=str
)
def test_wherever_it_strikes_no_lock_is_left_that_somebody_renews(
    is_message: bool, options: dict[str, Any], redis_url: str, namespace: str
) -> None:
    app = Celery(broker="memory://", set_as_current=False)
    app.conf.update(
        relock_url=redis_url, relock_namespace=namespace, task_default_queue=uuid.uuid4().hex
    )

    @app.task(base=LockedTask, shared=False, lock_key="{name}", **options)
    def body(name: str) -> None:
        if "autoretry_for" in options:
            raise OSError

    @app.task(shared=False)
    def after() -> None: ...

    task = app.tasks[body.name]
    engine = declaration(type(task)).engine
    tracer = build_tracer(task.name, task, app=app)
    before = keepalive.leases()  # of tests before this one
    call = struck = at = 0

    def run_it() -> None:
        name = task_id = uuid.uuid4().hex
        request = {"id": task_id, "hostname": "here", "chain": [after.si()]}
        try:
            sys.settrace(trace)
            if is_message:
                tracer(task_id, (name,), {}, request)
            else:
                task(name)
        finally:
            sys.settrace(None)
            finish()  # as the next message does, if the end of this one was struck
            assert reentrancy.innermost() is None, at
            for each in (name, LINE + name, marker.name_for(task.name, [name])):
                # What is left to the next step, or to a retry, belongs to no attempt.
                attempts = [hold.attempt_id for hold in engine.inspect(each).holds]
                assert set(attempts) <= {KEPT}, at

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal call, struck
        if PACKAGE in Path(frame.f_code.co_filename).parents and (call := call - 1) == 0:
            struck += 1
            raise Stop

    Context().run(run_it)
    while struck == at:  # until a call comes to its end
        call = at = at + 1
        with suppress(Stop):
            Context().run(run_it)
        assert set(keepalive.leases()) <= set(before), at
    assert struck > 50
    app.close()
