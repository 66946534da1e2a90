"""The receiver of `task_revoked`: it clears away what a message leaves that was revoked, or has
expired, before it was executed. A task that is terminated releases by itself."""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from typing import Any

from celery.signals import task_revoked
from celery.states import REVOKED

from ..declaration import engine_of
from ..dedup import worker as dedup
from ..errors import LockConfigError, RelockError
from ..order import worker as order
from ..workflow import steps
from . import events, retry
from .message import header_of

logger = logging.getLogger("celery_relock")

# Who clears away what, and what becomes of that if Redis cannot be reached.
_ROOMS = (
    (retry.on_revoked, "the lock kept for %s, its lease ends it"),
    (order.on_revoked, "the place of %s in its order, it will be passed over"),
    (dedup.on_revoked, "the dedup marker of %s, it ends by itself"),
    (steps.on_revoked, "the hold left to %s, it ends after its gap"),
)


def _revoked(sender: Any = None, request: Any = None, terminated: Any = None, **_: Any) -> None:
    if not (hasattr(sender, "_relock_declares") or header_of(request).workflow_locks):
        return
    was_running = bool(terminated)
    if header_of(request).attempts and not was_running:
        events.show(sender, request.id, REVOKED)
    with suppress(LockConfigError):  # told when the worker began
        engine = engine_of(sender.app)
        # It may be parked. Not here, in the worker's loop.
        engine.later.add(partial(engine.parking.withdraw, header_of(request).execution_id))
    clear_away(sender, request, was_running)


def clear_away(task: Any, request: Any, was_running: bool = False) -> None:
    """Free what a message leaves that is not executed."""
    for on_revoked, what in _ROOMS:
        try:
            on_revoked(task, request, was_running)
        except RelockError as error:
            logger.warning("Cannot release " + what + ": %s", request.id, error)


task_revoked.connect(_revoked, weak=False, dispatch_uid="celery_relock")
