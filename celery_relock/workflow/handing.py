"""What goes on from a step: the messages that its sections are left to."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from datetime import timezone
from typing import Any

from celery.signals import after_task_publish, before_task_publish, task_revoked
from celery.utils.time import maybe_iso8601

from ..declaration import engine_of
from ..engine.protocol import KEPT
from ..errors import RelockError
from ..worker import headers as run_headers
from ..worker.owner import running_request
from . import marks
from . import steps as sections
from .carried import carried_in

# For how long a step that was revoked is known to be over, in seconds.
_REMEMBER = 3600.0

logger = logging.getLogger("celery_relock")


def replacing(message: Any, canvas: Any) -> None:
    """The running task is replaced by a canvas: that belongs to its sections, and what was to come
    after the task stays what it was."""
    rest = [step for each in message.chain or () for step in marks.steps(each)]
    ids_of_rest = {(step.get("options") or {}).get("task_id") for step in rest} - {None}
    links = [step for each in message.callbacks or () for step in marks.steps(each)]

    def is_new(step: marks.Step) -> bool:
        return step.get("options", {}).get("task_id") not in ids_of_rest and step not in links

    for section in sections.active():
        if section.message.id == message.id:
            marks.mark(canvas, section.carried.id, is_new)


def _write(headers: Any = None, body: Any = None, **_: Any) -> None:
    active = sections.active()
    if not active or not _is_new(headers):
        return
    message = active[0].message
    running = running_request()
    if running is None or running.id != message.id:
        return
    if _goes_on(headers, body, message):
        stamps = headers["stamps"] = dict(headers.get("stamps") or {})
        marks.stamp(headers, [section.carried.id for section in active], stamps)
    marked = marks.marked(headers.get("stamps"))
    told = [section.carried._asdict() for section in active if section.carried.id in marked]
    if told:
        headers[run_headers.NAME]["sections"] = told


def _is_new(headers: Any) -> bool:
    """Not a message that is sent once more, which is as it was before. The first protocol has no
    stamps, and so no sections."""
    if not isinstance(headers, dict) or "id" not in headers:
        return False
    header = headers.get(run_headers.NAME)
    return isinstance(header, dict) and not header.get("attempts")


def _goes_on(headers: Mapping[str, Any], body: Any, message: Any) -> bool:
    """Whether a message without a stamp belongs to the sections of the one that sends it: its own
    next try, a member that it adds to its chord, and the task that waits for a chord's members
    where the result backend cannot."""
    if run_headers.is_retry(headers, message):
        return True
    if headers.get("task") == "celery.chord_unlock":
        return any(_has_mark(each) for each in body[0] if isinstance(each, Mapping))
    joins = bool(message.group and message.chord and headers.get("group") == message.group)
    # The body of the chord names its group as well, but is no member.
    return joins and bool(body[2].get("chord"))


def _has_mark(signature: Mapping[str, Any]) -> bool:
    every = marks.steps(dict(signature))
    return any(marks.marked(step.get("options")) for step in every)


def _published(headers: Any = None, **_: Any) -> None:
    """It is out: what the step has is left to it. (One that could not be sent gets nothing.)"""
    active = sections.active()
    if not active or not _is_new(headers):
        return
    header = headers[run_headers.NAME]
    going = {told["id"] for told in header.get("sections") or ()}
    due = _due(headers.get("eta")) if going else 0.0
    for section in active:
        if section.carried.id in going:
            section.leave_to(sections.hold_id(header["execution_id"], section.carried.id), due)


def _due(eta: Any) -> float:
    when = maybe_iso8601(eta)
    if when is None:
        return time.time()
    return float((when if when.tzinfo else when.replace(tzinfo=timezone.utc)).timestamp())


def _free(sender: Any = None, request: Any = None, terminated: Any = None, **_: Any) -> None:
    """A step was revoked, or has expired, before it began: nobody comes for what was left to it."""
    if terminated:
        return  # it has begun, and gives back what it has
    for carried in carried_in(request):
        end_before_it_began(sender, request, carried.names, carried.id)


def end_before_it_began(task: Any, message: Any, names: Sequence[str], section: str) -> None:
    """Free what a message has of a section, or was left of it, or its place in the queue."""
    try:
        engine = engine_of(task.app)
        own = sections.hold_id(run_headers.read(message).execution_id, section)
        # Ended: the step before may not have left its hold yet, and shall not leave it to this.
        told = ("run", _REMEMBER, engine.parking.home)
        back = engine.backend.release(names, own, KEPT, *told)
        engine.parking.forward(back.messages)
    except RelockError as error:
        logger.warning("what was left to %s stays until it ends: %s", message.id, error)


# After the header itself, which `headers` writes.
before_task_publish.connect(_write, weak=False, dispatch_uid="celery_relock.sections")
after_task_publish.connect(_published, weak=False, dispatch_uid="celery_relock.sections")
task_revoked.connect(_free, weak=False, dispatch_uid="celery_relock.sections")
