"""Steps of a section that are no locked tasks: a worker's tasks learn to keep the entry.

What Celery runs is a task's `run`, and only from inside of that a body can be refused. So each task
of a worker that is none of ours gets one of its own, as Celery's autoretry does it: it looks at the
message and, where that belongs to no section, is out of the way.
"""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

from ..declaration import is_locked
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


def teach(app: Any) -> None:
    """All tasks of a worker's app, which are known by now, before its pool has begun."""
    for task in app.tasks.values():
        if not is_locked(type(task)):
            keep_sections(task)
