"""The state STARTED of `task_track_started`: stored when the body begins, with its lock.

Celery stores it as soon as a message comes, so a copy of a run would write it over the state of the
one that lives, or has failed, or was revoked; and nobody would ever write another one.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from celery.states import STARTED

from ..engine import events
from .sending import ignores_result

logger = logging.getLogger("celery_relock")


class _Later:
    """What `track_started` becomes instead of True: Celery takes it for a no."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "<when the task has its lock>"


_LATER = _Later()


def defer(cls: Any) -> None:
    """Let the tasks of a class be STARTED when `tell` says so, if they are at all."""
    if cls.track_started:
        cls.track_started = _LATER


def tell(task: Any, message: Any | None) -> None:
    """The body of a message begins; None for a direct or eager call."""
    if message is None or task.track_started is not _LATER or ignores_result(task, message):
        return
    meta = {"pid": os.getpid(), "hostname": message.hostname}
    try:
        task.backend.store_result(message.id, meta, STARTED, request=message)
    except Exception as error:
        if events.is_thrown_in(error):
            raise
        logger.warning("the state STARTED of %s could not be stored", message.id, exc_info=True)
