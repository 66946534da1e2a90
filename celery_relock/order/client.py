"""`lock_order` where a call is sent: it takes a place in the line of its lock name, in one round
trip to Redis, before its message is published.

A line is a lock of its own (`lua/lib/lines.lua`), whose waiters are calls. What holds the line runs
or waits for its lock. So those that also use the lock, and have nothing to do with the order, never
stand behind calls that no worker has received yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from celery.utils import uuid

from ..declaration import Declaration, engine_of
from ..engine import ids
from ..engine.crash import journal, kept_for
from ..engine.events import label_of, logger
from ..engine.interrupt import is_thrown_in
from ..engine.protocol import LINE, MAY_COME, Claim, Conflict, PlaceRequest
from ..errors import LockConfigError, LockUnavailable, RelockError
from ..naming.names import Misfit
from ..worker.delivery import Delivery
from ..worker.ending import end_unexecuted
from ..worker.message import (
    QUEUED,
    SAYS,
    attempt_before,
    has_to_be_sent,
    keep_for,
    moment,
    refuse,
    retried_by,
)

#: The field of our header with a call's line and its ticket.
ORDER = "order"


class Placer:
    """Sends one call of a task with `publish`, in its place; see `LockedTask.apply_async`."""

    def __init__(self, task: Any, declared: Declaration, publish: Callable[..., Any]) -> None:
        self._task = task
        self._declared = declared
        self._publish = publish
        # The lock name of the place, and whose it is with which ticket, once it was tried to take
        # it.
        self._name: str | None = None
        self._execution_id = ""
        self._ticket = 0

    def mark(
        self, names: Sequence[str], options: Mapping[str, Any], execution_id: str, marker: Claim
    ) -> Conflict | None:
        """Take the call's place together with its dedup marker, or neither. Returns who has the
        marker. Raises LockUnavailable, and LockConfigError if there is not one name."""
        return self._take(self._only(names), execution_id, options, marker)

    def __call__(self, args: Any, kwargs: Any, **options: Any) -> Any:
        options["task_id"] = options.get("task_id") or uuid()
        name = self._name or self._name_of(args, kwargs, options)
        if name is None:
            return self._publish(args, kwargs, **options)
        try:
            if not self._execution_id:
                self._take_if_can(name, options)
            own, place = self._execution_id, [name, 0 if _was_here(name, options) else self._ticket]
            options[SAYS] = {**options.get(SAYS, {}), ORDER: place, "execution_id": own}
            return self._publish(args, kwargs, **options)
        except LockUnavailable:
            raise  # see `_take`
        except BaseException:
            if own := self._execution_id:
                journal.remove(own)
                # Not as one that has ended: the message may be out all the same.
                with suppress(RelockError):
                    end_unexecuted(engine_of(self._declared.app), [LINE + name], own, MAY_COME)
            raise

    def _take_if_can(self, name: str, options: dict[str, Any]) -> None:
        """Take the place of a call that may be sent without. Raises as `refuse`."""
        try:
            execution_id = options.get(SAYS, {}).get("execution_id") or ids.new_id()
            self._take(name, execution_id, options)
        except LockUnavailable as error:
            if self._is_to_fail(options):
                raise
            of = self._task.name, options["task_id"]
            logger.error("%s[%s] is sent without a place in its order: %s", *of, error)
        except LockConfigError as error:
            refuse(options, error)

    def _name_of(self, args: Any, kwargs: Any, options: dict[str, Any]) -> str | None:
        """The one lock name of the call; None if it takes no place. Raises as `refuse`."""
        try:
            name = self._only(self._declared.names_of_call(self._task, args, kwargs))
        except Misfit:
            return None  # one not sent would leave its chain hanging: it fails as it runs
        except LockConfigError as error:
            refuse(options, error)
            return None
        return None if _is_kept(options, name) else name

    def _only(self, names: Sequence[str]) -> str:
        if len(names) == 1:
            return names[0]
        raise LockConfigError(
            f"task {self._task.name}: lock_order='sent' is for calls with one lock name, and this "
            f"one has {len(names)}: {', '.join(map(repr, names))}"
        )

    def _take(
        self,
        name: str,
        execution_id: str,
        options: Mapping[str, Any],
        marker: Claim | None = None,
    ) -> Conflict | None:
        self._name, self._execution_id = name, execution_id
        request = _request(self._task, self._declared, name, execution_id, options)
        engine = engine_of(self._declared.app)
        backend = engine.backend
        # If this process is killed before the message goes out, a reaper of its host frees the
        # place.
        journal.note(execution_id, kept_for(backend, execution_id, LINE + name))
        try:
            answer = backend.place(request._replace(marker=marker))
        except BaseException as error:
            journal.remove(execution_id)
            is_unheard = isinstance(error, LockUnavailable) and self._is_to_fail(options)
            if is_unheard or is_thrown_in(error):
                # If only the answer is lost, it has its place all the same.
                engine.later.add(partial(end_unexecuted, engine, [request.line], execution_id))
            raise
        if isinstance(answer, Conflict):
            journal.remove(execution_id)
            return answer
        self._ticket = answer
        return None

    def _is_to_fail(self, options: Mapping[str, Any]) -> bool:
        """Whether a call without a place is not sent."""
        return self._declared.options.on_unavailable == "raise" and not has_to_be_sent(options)


def _request(
    task: Any, declared: Declaration, name: str, execution_id: str, options: Mapping[str, Any]
) -> PlaceRequest:
    task_id = options["task_id"]
    countdown, eta = options.get("countdown"), moment(options.get("eta"))
    delay = float(countdown) if isinstance(countdown, int | float) else 0.0
    due = max(delay, 0.0 if eta is None else eta - time.time())
    # A worker that gets it after its expiry only throws it away.
    life = max(1.0, keep_for(QUEUED, due, options.get("expires", task.expires)) - due)
    return PlaceRequest(
        LINE + name,
        execution_id,
        ids.short(task_id),
        label_of(task.name, task_id),
        declared.options.order_gap,
        delay,
        0.0 if eta is None else eta,
        life,
    )


def _is_kept(fields: Mapping[str, Any], name: str) -> bool:
    """Whether this is the retry of an execution that keeps its place for the retry."""
    retried = retried_by({"id": fields.get("task_id"), **fields})
    return retried is not None and retried.to_retry.get(ORDER, [""])[0] == name


def _was_here(name: str, options: Mapping[str, Any]) -> bool:
    """Whether this is the retry of a call that has left its place in this line: one that was behind
    it can have begun."""
    before = attempt_before({"id": options["task_id"], **options}, options.get("headers"))
    return before is not None and (before.order is None or before.order[0] == name)


def on_publish(header: dict[str, Any], retried: Delivery | None) -> None:
    """Write into our header of a new message what it says of its place, unless `Placer` has."""
    if ORDER in header:
        journal.remove(header["execution_id"])  # from now on nobody knows whether it is out
    elif retried is not None and ORDER in retried.to_retry:
        header[ORDER] = retried.to_retry[ORDER]
