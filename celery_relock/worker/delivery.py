"""What a process knows of a message while it executes it: what goes on to the retry, and what is
released when Celery is done with the message.

All of it hangs on Celery's request, and on stacks of the thread or greenlet, as Celery's own are.
Not on a context: a task may run its body in a context of its own, and Celery publishes the next
step, and tells the end, outside of that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from celery._state import _task_stack
from celery.utils.threads import LocalStack

#: An attribute of a request: its `Delivery`. A request that gets an attribute of ours gets headers,
#: too: when Celery copies a request that has none, it makes headers of all attributes that it does
#: not know, and a retry of the copy would send them.
DELIVERY = "relock_delivery"


class Retried(NamedTuple):
    """The retry that an execution has sent: our header in it, and where its ETA and expiry are."""

    header: Mapping[str, Any]
    fields: Mapping[str, Any]

    @property
    def execution_id(self) -> str:
        return str(self.header["execution_id"])


@dataclass(slots=True, eq=False)
class Delivery:
    """One delivery of a message, or one call of `apply()`.

    Attributes:
        begun: whether the body of its task was reached by way of its lock.
        over: with `acks_late`, whether the end was remembered, because what the body ended with
            acknowledges the message.
        aside: what tells that it is set aside: it waits, or is a copy.
        was_blocked: whether BLOCKED was stored in it, or RETRY because of its lock. Its message
            need not be parked, or sent again: its lock may have come free just then, or the broker
            be away.
        stored_by: of a late copy, until when, by the monotonic clock, to wait for the result of
            the execution that it is a copy of; 0 before.
        retry: that was sent. One that no broker took was not.
        ended: with `acks_late`, the attempt whose end is remembered, if no retry had been sent by
            then; else None.
        to_retry: fields of the header of a retry that is sent now: what goes on to it beside the
            locks (`beside`).
        left_to_retry: what goes on to it of the locks (`retry.LeftToRetry`).
        end_cooldown: ends the cooldown of its locks; None before one has begun.
        holds: of the workflow locks (`workflow.steps.StepHold`), the outermost first.
        ended_for_good: called for a message whose execution has ended: True if it must not run
            again, whatever its stored state says. `dedup` sets it for a call that a later call may
            replace.
    """

    begun: bool = False
    over: bool = False
    aside: Exception | None = None
    was_blocked: bool = False
    stored_by: float = 0.0
    retry: Retried | None = None
    ended: Any = None
    to_retry: dict[str, list[Any]] = field(default_factory=dict)
    left_to_retry: Any = None
    end_cooldown: Callable[[], None] | None = None
    holds: tuple[Any, ...] = ()
    ended_for_good: Callable[[], bool] | None = None


def delivery_of(message: Any) -> Delivery:
    """The delivery of a message that is executed here: one for all copies of its request that are
    on Celery's stacks."""
    found = known_delivery(message)
    if found is None:
        stacks = (task.request_stack.stack for task in _task_stack.stack)
        copies = [each for stack in stacks for each in stack if each.id == message.id]
        found = next(filter(None, map(known_delivery, copies)), None) or Delivery()
        for each in (message, *copies):
            each.headers = each.headers or {}
            setattr(each, DELIVERY, found)
    return found


def known_delivery(request: Any) -> Delivery | None:
    """The delivery of a request, of which something may be known."""
    found: Delivery | None = getattr(request, DELIVERY, None)
    return found


# -- When a message is over ----------------------------------------------------------------------
#
# A signal's exception (of a time limit, or of a lock that is lost) is raised where a call begins,
# and once. So what must be done, here and where a comment names this rule, is tried a second time,
# and then the exception goes on.

#: What to call when the message that this thread or greenlet executes is over: when Celery has
#: published what comes after it, and stored its result, or that it is retried.
to_finish = LocalStack()


def afterwards(call: Callable[[], None]) -> None:
    """Call a function when `task_retry` or `task_postrun` says that the message is over."""
    to_finish.push(call)


def finish() -> None:
    """The messages that have begun here are over: make the calls that were left for then."""
    try:
        _make_calls()
    except BaseException:  # a signal's
        with suppress(Exception):
            _make_calls()
        raise


def _make_calls() -> None:
    struck = None
    for call in [*to_finish.stack]:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - a signal's
            struck = error
            with suppress(Exception):
                call()
    # Only now: what was taken off could not be made a second time.
    while to_finish.stack:
        to_finish.pop()
    if struck is not None:
        raise struck
