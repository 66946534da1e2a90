"""Messages of locked tasks that are published again: at once with a delay, or parked until their
turn has come."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from celery.backends.base import DisabledBackend
from kombu.exceptions import EncodeError

from ..engine import events, ids
from ..engine.protocol import ParkRequest
from . import headers, parking
from .headers import RunHeader

logger = logging.getLogger("celery_relock")


def sent_again(task: Any, message: Any, pause: float) -> bool:
    """Send a message again, to come back after a pause in seconds. False if that failed."""
    try:
        kept = parking.kept(message) or parking.rebuilt(task, message)
        header = asdict(headers.read(message).again())
        text = parking.parked_text(task.app, kept, header, largest=None)
        if text is None:
            return False
        parking.publish(task.app, text, delay=pause)
    except Exception as error:
        if events.is_thrown_in(error):
            raise
        logger.warning("%s was not sent again, it stays in its slot", task.name, exc_info=True)
        return False
    return True


def park_request(task: Any, message: Any, header: RunHeader, **bounds: Any) -> ParkRequest | None:
    """A message as it is parked, with its next header; None, and a warning, if it has to stay with
    the broker. `bounds` as for `ParkRequest`."""
    try:
        kept = parking.kept(message) or parking.rebuilt(task, message)
    except EncodeError as error:
        logger.warning(
            "a message of %s cannot be written (%s), so it is not parked", task.name, error
        )
        return None
    text = parking.parked_text(task.app, kept, asdict(header))
    if text is None:
        return None
    return ParkRequest(text, parking.home(task.app), ids.short(message.id), **bounds)


def ignores_result(task: Any, message: Any) -> bool:
    """Whether a run stores no result, by its message or else by its task."""
    told = vars(message).get("ignore_result")
    return bool(task.ignore_result if told is None else told)


def stores_no_result(task: Any, message: Any = None) -> bool:
    """Whether nobody can ask the result backend what became of a run; without a message, of one of
    the task's."""
    ignored = task.ignore_result if message is None else ignores_result(task, message)
    return bool(ignored) or isinstance(task.backend, DisabledBackend)
