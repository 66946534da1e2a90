"""Which Celery task runs here, if any. Celery is not loaded just to say that none does."""

from __future__ import annotations

import sys


def in_task() -> bool:
    """Whether a task runs here, called directly or by a worker."""
    celery = sys.modules.get("celery._state")
    return celery is not None and celery._task_stack.top is not None


def workflow() -> str | None:
    """The workflow of the task that runs here, None without one and under a direct call."""
    if not in_task():
        return None
    from ..task import owner

    return owner.workflow()
