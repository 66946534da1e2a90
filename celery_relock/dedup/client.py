"""`lock_dedup` where a call is sent: one that is queued already is not sent a second time.

Only what a program calls can be a duplicate. What Celery sends for a canvas, a link, a retry or a
replaced task is always sent: somebody waits for its very id.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from celery import states
from celery.result import EagerResult
from celery.utils import uuid

from .. import signals
from ..declaration import Declaration, declaration, engine_of
from ..engine import events, ids
from ..engine.crash import kept_for
from ..engine.engine import Engine
from ..engine.events import logger
from ..engine.protocol import LINE, Claim, Conflict, lock_names
from ..errors import DuplicateTask, LockConfigError, LockUnavailable, RelockError
from ..options import LockOptions
from ..worker import events as worker_events
from ..worker.delivery import Delivery
from ..worker.ending import end_unexecuted
from ..worker.message import SAYS, is_awaited, may_be_celerys, prefix_of
from ..worker.states import Dropped, show_revoked, stored, stores_no_result
from . import marker
from .marker import Found, Marker

#: The field of our header with a call's marker, and until when that is there.
DEDUP = "dedup"

Mark = Callable[[Sequence[str], Mapping[str, Any], str, Claim], Conflict | None]


class Sending(NamedTuple):
    """A call that `LockedTask.apply_async` is to send.

    Attributes:
        declared: for this call.
        publish: sends it, with arguments and options.
    """

    task: Any
    declared: Declaration
    publish: Callable[..., Any]
    args: Any
    kwargs: Any
    options: dict[str, Any]


class MarkedCall(NamedTuple):
    """A call that may be a duplicate: its locks, its marker, and the ids of its first message, ""
    where it is only asked about."""

    task: Any
    engine: Engine
    options: LockOptions
    names: tuple[str, ...]
    marker: Marker
    task_id: str = ""
    execution_id: str = ""

    @property
    def lines(self) -> list[str]:
        """Where it has a place (`lock_order`)."""
        return [LINE + name for name in self.names] if self.options.order else []


# --- LockedTask.apply_async -----------------------------------------------------------------------


def send(sending: Sending, mark: Mark | None = None) -> Any:
    """Send a call, unless it is a duplicate; see `LockedTask.apply_async`.

    Args:
        mark: acquires the marker of a call that has these lock names and is to be sent with these
            options, as this execution, where more than that is to be done in the same step.
    """
    task, declared, publish, args, kwargs, options = sending
    mode = declared.options.dedup
    if mode is None:
        return publish(args, kwargs, **options)
    awaited = is_awaited(options)
    options["task_id"] = task_id = options.get("task_id") or uuid()
    if awaited:
        options[SAYS] = {DEDUP: ["", marker.OWN]}
        return publish(args, kwargs, **options)
    call = call_of(task, declared, args, kwargs)
    call = call._replace(task_id=task_id, execution_id=ids.new_id())
    keep = mode if call.marker.until == marker.TIME else marker.counts_for(task, options)
    acquire = None if mark is None else partial(mark, call.names, options, call.execution_id)
    do_send = partial(publish, args, kwargs, **options)
    return _send_once(call, keep, do_send, acquire)


def call_of(task: Any, declared: Declaration, args: Any, kwargs: Any) -> MarkedCall:
    """The call with its marker. Raises as `names_of_call`."""
    names = declared.names_of_call(task, args, kwargs)
    made = Marker.of(task.name, names, declared.options.dedup)
    return MarkedCall(task, engine_of(declared.app), declared.options, names, made)


def _send_once(
    call: MarkedCall, keep: float, publish: Callable[..., Any], acquire: marker.Acquire | None
) -> Any:
    execution_id = call.execution_id
    try:
        there = claim(call, min(keep, marker.SENDING), acquire)
    except LockUnavailable as error:
        if call.options.on_unavailable == "raise":
            # If only the answer is lost, the call is marked all the same.
            _drop_later(call)
            raise
        logger.error("%s is sent without looking for duplicates: %s", call.task.name, error)
        return publish()
    if there is not None:
        if there.repeated and call.lines:  # it may still get a place
            call.engine.later.add(partial(end_unexecuted, call.engine, call.lines, execution_id))
        return _answer(call, there)
    try:
        says = {DEDUP: list(call.marker), "execution_id": execution_id}
        sent = publish(**{SAYS: says})
    except BaseException:
        with suppress(RelockError):
            marker.drop(call.engine, call.marker.name, execution_id)
        raise
    _lasts_in_the_queue(call, keep)
    return sent


def _lasts_in_the_queue(call: MarkedCall, keep: float) -> None:
    """The message is out: from now on the marker lasts for as long as the message may."""
    if keep <= marker.SENDING:
        return
    try:
        marker.extend(call.engine, call.marker.name, call.execution_id, keep)
    except (LockUnavailable, LockConfigError) as error:  # a LockLost is for the body that sends
        logger.warning(
            "%s[%s] is queued, but its dedup marker ends after %.0f s: %s",
            *(call.task.name, call.task_id, marker.SENDING, error),
        )


def _answer(call: MarkedCall, there: Found) -> Any:
    """What the caller gets for a duplicate."""
    tell(call, there)
    policy = call.options.on_duplicate
    if policy == "raise":
        raise error_for(call, there)
    if policy == "drop":
        return EagerResult(call.task_id, dropped(call, there).result, states.SUCCESS)
    return call.task.AsyncResult(there.task_id)


# --- the marker of a call, also for worker.py -----------------------------------------------------


def claim(call: MarkedCall, keep: float, acquire: marker.Acquire | None = None) -> Found | None:
    """Get the marker for a call, by the backend or by what does more in the same step. Returns
    whose it is if this one is a duplicate. Raises LockUnavailable."""
    acquire = acquire or call.engine.backend.acquire
    tried, repeated = "", False
    while True:
        there = marker.put(acquire, call.marker, call.execution_id, call.task_id, keep)
        if there is None:
            return None
        repeated = repeated or there.repeated
        # One that has begun meanwhile stands: asked again, the marker still belongs to it.
        if there.execution_id == tried:
            break
        tried = there.execution_id
        is_own = there.task_id == call.task_id  # its sender has not heard that it got it
        if call.options.on_duplicate == "replace" and not is_own:
            if marker.take_away(call.engine, call.marker, there):
                _revoke(call, there)
        elif is_own:
            marker.drop(call.engine, call.marker.name, there.execution_id)
        elif is_over(call, there):
            _free(call, there)
        else:
            break
    if repeated:
        _drop_later(call)
    return there._replace(repeated=repeated)


def _drop_later(call: MarkedCall) -> None:
    """The call is not sent, and may be marked all the same, now or by a copy of the command."""
    engine, name, execution_id = call.engine, call.marker.name, call.execution_id
    kept = kept_for(engine.backend, marker.hold_id(execution_id), name)
    engine.later.add(partial(marker.drop, engine, name, execution_id, ended=True), kept)


def _free(call: MarkedCall, there: Found) -> None:
    """Free the marker of a call that is over: its message went to a worker that has other locks, or
    none. Or its process was killed, and the marker would be freed in a moment."""
    engine, name = call.engine, call.marker.name
    dropped = marker.drop(engine, name, there.execution_id)
    if not dropped and is_over(call, there._replace(begun=True)):
        marker.drop_begun(engine, name, there)


def is_over(call: MarkedCall, there: Found) -> bool:
    """Whether a call that has a marker has reached a final state all the same. Of one that has
    begun, SUCCESS can be that of an earlier message with its id."""
    final = states.PROPAGATE_STATES if there.begun else states.READY_STATES
    if there.until == marker.TIME or stores_no_result(call.task):
        return False
    found = stored(call.task, there.task_id)
    return found is not None and found["status"] in final


def _revoke(call: MarkedCall, old: Found) -> None:
    """The message of a call that was replaced stays where it is, and comes to nothing there."""
    engine = call.engine
    remember = max(old.remaining, engine.remember)
    end_unexecuted(engine, [*call.names, *call.lines], old.execution_id, remember)
    show_revoked(call.task, old.task_id, f"replaced by {call.task_id}")


def tell(call: MarkedCall, there: Found) -> None:
    """A call is swallowed: a line in the log, the signal `lock_duplicate`, the event
    `lock-duplicate`."""
    names, task_id = lock_names(call.marker.name), call.task_id
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(there.since))
    facts = {"duplicate_of": there.task_id, "since": there.since}
    logger.info(
        "%s[%s] is a duplicate of %s[%s], which has the dedup marker of %s since %s",
        *(call.task.name, task_id, call.task.name, there.task_id),
        *(", ".join(map(repr, names)), since),
        extra=events.extra("duplicate", names, call.task.name, task_id, **facts),
    )
    signals.send(signals.lock_duplicate, sender=call.task, names=names, task_id=task_id, **facts)
    worker_events.send(call.task, task_id, "lock-duplicate", {"locks": list(names), **facts})


def error_for(call: MarkedCall, there: Found) -> DuplicateTask:
    """What a duplicate gets with `lock_on_duplicate="raise"`."""
    name = ", ".join(lock_names(call.marker.name))
    return DuplicateTask(
        f"{call.task.name} for {name!r} is queued already, or runs, as task {there.task_id} "
        f"(lock_on_duplicate={call.options.on_duplicate!r}); lock_dedup=False in apply_async sends "
        "it all the same",
        name=name,
        remaining=there.remaining,
        task_id=there.task_id,
    )


def dropped(call: MarkedCall, there: Found) -> Dropped:
    """What a duplicate leaves behind instead of a result; `of` is the id of the other call."""
    made = Dropped(error_for(call, there))
    made.result["of"] = there.task_id
    return made


# --- LockedTask.marked and unmark -----------------------------------------------------------------


def marked(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """See `LockedTask.marked`."""
    call = _call_asked_about(task, args, kwargs)
    there = marker.look(call.engine, call.marker.name)
    if there is None or is_over(call, there):
        return None
    return task.AsyncResult(there.task_id)


def unmark(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """See `LockedTask.unmark`."""
    call = _call_asked_about(task, args, kwargs)
    return bool(call.engine.backend.force_release(call.marker.name))


def _call_asked_about(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> MarkedCall:
    declared = declaration(type(task))
    return call_of(task, declared.of_call({}, prefix_of(declared.prefix)), args, kwargs)


# --- what a message says of its marker ------------------------------------------------------------


def on_publish(fields: Mapping[str, Any], header: dict[str, Any], retried: Delivery | None) -> None:
    """Write into our header of a new message what it says of a marker, unless `send` has said
    it."""
    if retried is not None and DEDUP in retried.to_retry:
        header[DEDUP] = retried.to_retry[DEDUP]
    elif DEDUP not in header and may_be_celerys(fields):
        header[DEDUP] = ["", marker.OWN]
