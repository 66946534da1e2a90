"""`lock_dedup` where a call is sent: one that is queued already is not sent a second time.

Only what a program calls by itself can be a duplicate. What Celery sends for a canvas, a link, a
retry or a replaced task is always sent: somebody waits for its very id.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from celery import states
from celery.result import EagerResult
from celery.utils import uuid

from ..declaration import Declaration, declaration
from ..engine import ids
from ..engine.engine import Engine
from ..engine.protocol import KEPT
from ..errors import DuplicateTask, LockConfigError, LockUnavailable, RelockError
from ..naming.arguments import bind, signature_of
from ..options import LockOptions, checked
from ..worker import sending
from ..worker.states import Dropped
from . import canvas, marker, planned
from .marker import Found, Marker
from .planned import Planned

logger = logging.getLogger("celery_relock")


class Call(NamedTuple):
    """A call that may be a duplicate: its locks, and its marker."""

    task: Any
    engine: Engine
    options: LockOptions
    names: tuple[str, ...]
    marker: Marker


def send(
    task: Any,
    publish: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    options: dict[str, Any],
) -> Any:
    """Send a task with `publish`, unless its call is a duplicate; see `LockedTask.apply_async`."""
    declared = declaration(type(task))
    mode = _mode(task, declared, options)
    if mode is None or task.app.conf.task_always_eager:
        return publish(args, kwargs, **options)
    celerys_own = canvas.asks_for(options)
    options["task_id"] = task_id = options.get("task_id") or uuid()
    if mode is False or celerys_own:
        own = Planned(task_id, Marker("", marker.OWN if mode else marker.OFF))
        with planned.sending(own):
            return publish(args, kwargs, **options)
    call = call_of(task, declared, mode, args or (), kwargs or {})
    if call is None:
        return publish(args, kwargs, **options)  # it does not fit the body, and that is said there
    keep = mode if call.marker.until == marker.TIME else marker.keep_for(task, options)
    return _send_once(call, keep, lambda: publish(args, kwargs, **options), task_id)


def _mode(task: Any, declared: Declaration, options: dict[str, Any]) -> Any:
    """What holds for this call: the option's value, False if it is called off for this one."""
    asked = options.pop("lock_dedup", None)
    for name in options:
        if name.startswith("lock_"):
            raise LockConfigError(
                f"a call of {task.name}: of its options, a single call takes lock_dedup alone, not "
                f"{name}. Give that to the task."
            )
    if declared.rule.off:
        if asked:
            raise LockConfigError(
                f"a call of {task.name}: lock_key=False gives lock_dedup={asked!r} no name to tell "
                "duplicates by. Give the task a lock_key."
            )
        return None
    if asked is None:
        return declared.options.dedup
    return False if asked is False else checked("dedup", asked, f"a call of {task.name}")


def call_of(
    task: Any, declared: Declaration, mode: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Call | None:
    """The call with its marker; None if it does not fit the body."""
    arguments = bind(task, args, kwargs)
    if arguments is None:
        return None
    names = declared.rule.names(arguments)
    made = Marker(marker.name_for(task.name, names), marker.until(mode))
    return Call(task, declared.engine, declared.options, names, made)


def _send_once(call: Call, keep: float, publish: Callable[[], Any], task_id: str) -> Any:
    execution_id = ids.new_id()
    try:
        there = claim(call, execution_id, task_id, min(keep, marker.SENDING))
    except LockUnavailable as error:
        if call.options.on_unavailable == "raise":
            raise
        logger.error("%s is sent without looking for duplicates: %s", call.task.name, error)
        return publish()
    if there is not None:
        return _answer(call, there)
    try:
        with planned.sending(Planned(task_id, call.marker, execution_id)):
            sent = publish()
    except BaseException:
        with suppress(RelockError):
            marker.drop(call.engine, call.marker.name, execution_id)
        raise
    _it_is_queued(call, execution_id, task_id, keep)
    return sent


def _it_is_queued(call: Call, execution_id: str, task_id: str, keep: float) -> None:
    """From now on the marker lasts for as long as the message may."""
    if keep <= marker.SENDING:
        return
    try:
        marker.extend(call.engine, call.marker.name, execution_id, keep)
    except RelockError as error:
        told = (call.task.name, task_id, marker.SENDING, error)
        logger.warning("%s[%s] is queued, and counts for no more than %.0f s: %s", *told)


def claim(call: Call, execution_id: str, task_id: str, keep: float) -> Found | None:
    """Get the marker for a call. Returns whose it is if this one is a duplicate."""
    replaced = ""
    while True:
        there = marker.put(call.engine, call.marker.name, execution_id, task_id, keep)
        if (
            there is None
            or call.options.on_duplicate != "replace"
            or there.execution_id == replaced
        ):
            return there
        # One that has begun meanwhile is not replaced: asked again, the marker is still its.
        replaced = there.execution_id
        if marker.take_away(call.engine, call.marker, there):
            _revoke(call, there, task_id)


def _revoke(call: Call, old: Found, task_id: str) -> None:
    """The message of a call that was replaced stays where it is, and comes to nothing there."""
    engine, task = call.engine, call.task
    remember = max(old.remaining, marker.REMEMBER)
    back = engine.backend.release(
        call.names, old.execution_id, KEPT, ended="run", remember=remember, home=engine.parking.home
    )
    engine.parking.forward(back.messages)
    if sending.stores_no_result(task):
        return
    try:
        if task.AsyncResult(old.task_id).state not in states.READY_STATES:
            task.backend.mark_as_revoked(old.task_id, f"replaced by {task_id}")
    except Exception:
        logger.warning("the state REVOKED of %s could not be stored", old.task_id, exc_info=True)


def marked(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """See `LockedTask.marked`."""
    call = _call_asked_about(task, args, kwargs)
    there = marker.look(call.engine, call.marker.name)
    return None if there is None else task.AsyncResult(there.task_id)


def unmark(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """See `LockedTask.unmark`."""
    call = _call_asked_about(task, args, kwargs)
    return bool(call.engine.backend.force_release(call.marker.name))


def _call_asked_about(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    call = call_of(task, declaration(type(task)), marker.DONE, args, kwargs)
    if call is None:
        raise TypeError(f"{task.name}{signature_of(task)} cannot be called with {args}, {kwargs}")
    return call


def _answer(call: Call, there: Found) -> Any:
    """What the caller gets for a duplicate."""
    policy = call.options.on_duplicate
    if policy == "raise":
        raise error_for(call, there)
    if policy == "drop":
        return EagerResult(uuid(), dropped(call, there).marker, states.SUCCESS)
    return call.task.AsyncResult(there.task_id)


def error_for(call: Call, there: Found) -> DuplicateTask:
    name = marker.readable(call.marker.name)
    return DuplicateTask(
        f"{call.task.name} for {name!r} is queued already, or runs, as task {there.task_id} "
        f"(lock_on_duplicate={call.options.on_duplicate!r}); lock_dedup=False in apply_async sends "
        "it all the same",
        name=name,
        remaining=there.remaining,
        task_id=there.task_id,
    )


def dropped(call: Call, there: Found) -> Dropped:
    """What a duplicate leaves behind instead of a result; `of` is the id of the other call."""
    made = Dropped(error_for(call, there))
    made.marker["of"] = there.task_id
    return made
