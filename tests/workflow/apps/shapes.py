"""Steps that tell what they were given, so that a result shows the shape of its canvas."""

from __future__ import annotations

import os
from typing import Any

from celery import Task

from celery_relock import LockedTask
from celery_relock.workflow import steps
from tests.support import Journal, make_app

app = make_app(__name__)
app.task_cls = LockedTask if os.environ.get("RELOCK_TEST_TASK_CLS") else Task
journal = Journal.from_env()


def tell(run: str, name: str) -> None:
    held = [fence for hold in steps.holds_here() for fence in hold.lock.fences]
    journal.add("step", run=run, name=name, fences=held)


@app.task
def step(*previous: Any, run: str, name: str) -> list[Any]:
    tell(run, name)
    return [*(each for each in previous if each is not None), name]


@app.task
def passes(*previous: Any) -> Any:
    """Stands ahead of a canvas, as the task that acquires a lock does."""
    return previous[0] if previous else None


@app.task
def join(results: Any, *, run: str, name: str) -> dict[str, Any]:
    tell(run, name)
    return {name: results}


@app.task
def pair(x: Any, y: Any) -> list[Any]:
    return [x, y]
