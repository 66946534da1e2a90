"""Steps of a section that are no locked tasks: a worker's tasks learn to keep the entry.

What Celery runs is a task's `run`, and only from inside of that a body can be refused. So each task
of a worker that is none of ours gets one of its own, as Celery's autoretry does it: it looks at the
message and, where that belongs to no section, is out of the way.
"""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

from celery.signals import celeryd_after_setup

from ..declaration import is_locked, locked_tasks
from ..worker.owner import request_of
from . import handing
from . import steps as sections

_KEEPS = "_relock_keeps_sections"


def keep_sections(task: Any) -> None:
    """Let a task hold the sections that its messages belong to."""
    if _KEEPS in vars(task):
        return
    body, on_replace = task.run, task.on_replace

    @wraps(body)
    def run(*args: Any, **kwargs: Any) -> Any:
        return sections.around(task, request_of(task), partial(body, *args, **kwargs))

    @wraps(on_replace)
    def replaced(sig: Any) -> Any:
        handing.replacing(task.request, sig)
        return on_replace(sig)

    task.run, task.on_replace = run, replaced
    setattr(task, _KEEPS, True)


def _teach(instance: Any = None, **_: Any) -> None:
    if not locked_tasks(instance.app):
        return  # nothing of ours is in use here
    for task in instance.app.tasks.values():
        if not is_locked(type(task)):
            keep_sections(task)


# All tasks are known by now, and the pool has not begun.
celeryd_after_setup.connect(_teach, weak=False, dispatch_uid="celery_relock.stepping")
