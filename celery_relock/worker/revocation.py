"""The receiver of `task_revoked`: it clears away what a message leaves that was revoked, or has
expired, before it was executed. A task that is terminated releases by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery.signals import task_revoked
from celery.states import REVOKED

from ..dedup import worker as dedup
from ..order import worker as order
from ..workflow import steps
from . import events, retry
from .message import header_of

#: Called with the execution that is over, in a worker's main process.
discard: list[Callable[[str], None]] = []


def _revoked(sender: Any = None, request: Any = None, terminated: Any = None, **_: Any) -> None:
    was_running = bool(terminated)
    if header_of(request).attempts and not was_running:
        events.show(sender, request.id, REVOKED)
    for each in discard:
        each(header_of(request).execution_id)
    retry.on_revoked(sender, request, was_running)
    order.on_revoked(sender, request, was_running)
    dedup.on_revoked(sender, request, was_running)
    steps.on_revoked(sender, request, was_running)


task_revoked.connect(_revoked, weak=False, dispatch_uid="celery_relock")
