"""The receiver of `before_task_publish` and `after_task_publish`: what every message that this
process sends is given, in this order. Each feature's `on_publish` adds what it has to say to our
header in the message, for a retry by the delivery that is retried.

What is resumed does not come by here: it is what was received (`parking`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery.signals import after_task_publish, before_task_publish

from ..dedup import client as dedup
from ..order import client as order
from ..workflow import steps
from . import company, retry
from .delivery import Retried
from .message import HEADER, retried_by, write_header, write_seconds


def _before(
    sender: Any = None,
    headers: Any = None,
    body: Any = None,
    properties: Any = None,
    declare: Any = None,
    **_: Any,
) -> None:
    if not isinstance(headers, dict):
        return
    company.on_publish(sender)
    write_seconds(body)
    fields = _fields(headers, body)
    header = write_header(headers, fields, {} if properties is None else properties, declare or ())
    # These two come first, as they may choose the execution id, which the others read. A retry with
    # a place in a line has the id of that place, and its dedup marker is left to that id.
    retried = retried_by(fields)
    order.on_publish(header, retried)
    dedup.on_publish(fields, header, retried)
    retry.on_publish(fields, body, header, retried)
    steps.on_publish(headers, body, header)


def _after(headers: Any = None, body: Any = None, **_: Any) -> None:
    # Only now: what is left to a message that could not be sent would wait for it.
    header = headers.get(HEADER) if isinstance(headers, dict) else None
    if header:
        fields = _fields(headers, body)
        if (retried := retried_by(fields)) is not None:
            retried.retry = Retried(header, fields)
        steps.on_published(headers, header)


def _fields(headers: dict[str, Any], body: Any) -> Mapping[str, Any]:
    """Where a message has its id, its ETA and so on: protocol 1 has all in the body."""
    return headers if "id" in headers else body if isinstance(body, dict) else {}


before_task_publish.connect(_before, weak=False, dispatch_uid="celery_relock")
after_task_publish.connect(_after, weak=False, dispatch_uid="celery_relock")
