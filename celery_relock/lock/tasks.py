"""Which Celery task runs here, if any. Celery is not loaded just to say that none does."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..engine.events import Work


def in_task() -> bool:
    """Whether a task runs here, called directly or by a worker."""
    celery = sys.modules.get("celery._state")
    if celery is None:
        return False
    try:
        local = celery._task_stack._local
        found = local.__storage__.get(local.__ident_func__())
    except AttributeError:
        return bool(celery._task_stack.stack)
    # The same without the exception inside, which takes longer than all else before a lock is asked
    # for.
    return bool(found and found.get("stack"))


def workflow() -> str | None:
    """The workflow of the task that runs here, None under a direct call."""
    from ..worker import owner

    return owner.workflow()


def work() -> Work | None:
    """The task that runs here, as events tell of it."""
    from ..worker import events as telling

    return telling.work_for(sys.modules["celery._state"]._task_stack.top, None)
