"""The receiver of `before_task_publish` and `after_task_publish`: what every message that this
process sends is given, in this order. Each feature's `on_publish` adds what it has to say to our
header in the message, for a retry by the delivery that is retried.

What is resumed does not come by here: it is what was received (`parking`).
"""

from __future__ import annotations

from typing import Any

from celery.signals import after_task_publish, before_task_publish

from ..dedup import client as dedup
from ..order import client as order
from ..workflow import steps
from . import company, retry
from .delivery import Retried
from .message import HEADER, retried_by, write_header


def _before(headers: Any = None, properties: Any = None, **told: Any) -> None:
    properties = {} if properties is None else properties
    left = dict(properties)
    try:
        _write(headers, left, **told)
    except Exception:
        # The rule in `delivery`: Celery goes on whatever a receiver raises, and what was sent would
        # not know of its locks.
        left = dict(properties)
        _write(headers, left, **told)
        raise
    finally:
        for name in properties.keys() - left.keys():
            del properties[name]


def _write(
    headers: Any,
    properties: dict[str, Any],
    sender: Any = None,
    body: Any = None,
    declare: Any = None,
    **_: Any,
) -> None:
    if not _is_ours(headers):
        return
    company.on_publish(sender)
    header = write_header(headers, properties, declare or ())
    # These two come first, as they may choose the execution id, which the others read. A retry with
    # a place in a line has the id of that place, and its dedup marker is left to that id.
    retried = retried_by(headers)
    order.on_publish(header, retried)
    dedup.on_publish(headers, header, retried)
    retry.on_publish(body, header, retried)
    steps.on_publish(headers, body, header)
    if retried is not None and retried.end_cooldown is not None:
        retried.end_cooldown()  # before it is sent: it would be kept out


def _after(headers: Any = None, **_: Any) -> None:
    # Only now: what is left to a message that could not be sent would wait for it.
    try:
        _leave(headers)
    except Exception:
        _leave(headers)  # the rule in `delivery`
        raise


def _leave(headers: Any) -> None:
    if _is_ours(headers) and (header := headers.get(HEADER)):
        if (retried := retried_by(headers)) is not None:
            retried.retry = Retried(header, headers)
        steps.on_published(headers, header)


def _is_ours(headers: Any) -> bool:
    """Whether a message is one of protocol 2: in protocol 1 no header of ours says anything."""
    return isinstance(headers, dict) and "id" in headers


before_task_publish.connect(_before, weak=False, dispatch_uid="celery_relock")
after_task_publish.connect(_after, weak=False, dispatch_uid="celery_relock")
