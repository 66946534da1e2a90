"""What becomes of the members of a locked group when the message that enters for them has run.

They are in the message's chain, where Celery looks for what is not to be run either if it fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery.app.task import Context
from celery.canvas import maybe_signature

from ..worker.states import results_of


def send(app: Any, message: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Send the members that came with the message that has entered."""
    with app.producer_or_acquire() as producer:
        while message.chain:
            step = maybe_signature(message.chain[-1], app=app)
            step.apply_async(args, dict(kwargs), producer=producer, add_to_parent=False)
            message.chain.pop()


def fail(task: Any, message: Any, error: Exception) -> None:
    """None of the members that have not been sent will run: each of them has failed."""
    for each in _results(message):
        stores = not each.ignore_result
        task.backend.mark_as_failure(each.id, error, request=each, store_result=stores)
    message.chain = None


def revoke(task: Any, message: Any) -> None:
    """The message that was to enter is revoked, or has expired: so have its members."""
    for each in _results(message):
        stores, reason = not each.ignore_result, f"{task.name} was revoked, or has expired"
        task.backend.mark_as_revoked(each.id, reason, request=each, store_result=stores)


def _results(message: Any) -> list[Context]:
    found = []
    for step in message.chain or ():
        for each in results_of(step):
            errbacks = each.get("link_error") or (step.get("options") or {}).get("link_error")
            each.update(errbacks=errbacks, delivery_info={})
            found.append(each)
    return found
