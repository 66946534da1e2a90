"""`lock_dedup` where a call is sent: one that is queued already is not sent a second time.

Only what a program calls by itself can be a duplicate. What Celery sends for a canvas, a link, a
retry or a replaced task is always sent: somebody waits for its very id.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, NamedTuple

from celery import states
from celery.result import EagerResult
from celery.signals import before_task_publish
from celery.utils import uuid

from ..core import ids
from ..core.answers import KEPT
from ..core.engine import Engine
from ..core.options import LockOptions, checked
from ..errors import DuplicateTask, LockUnavailable, RelockError
from . import headers as run_headers
from . import marker
from .binding import bind
from .declaration import Declaration, declaration
from .marker import Found, Marker
from .outcomes import Dropped

logger = logging.getLogger("celery_relock")

# With any of these Celery has made the call, or goes on from its result.
_CELERYS_OWN = (
    *("task_id", "chain", "chord", "group_id", "link", "link_error"),
    *("retries", "replaced_task_nesting", "parent_id", "root_id"),
)


class _Planned(NamedTuple):
    """What the message of a call that is being sent is to say; `run` is "" if any will do."""

    task_id: str
    marker: Marker
    run: str = ""


_planned: ContextVar[_Planned | None] = ContextVar("relock_planned", default=None)


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
    celerys_own = any(options.get(name) for name in _CELERYS_OWN)
    options["task_id"] = task_id = options.get("task_id") or uuid()
    if mode is False or celerys_own:
        planned = _Planned(task_id, Marker("", marker.OWN if mode else marker.OFF))
        with _as_planned(planned):
            return publish(args, kwargs, **options)
    call = call_of(task, declared, mode, args or (), kwargs or {})
    if call is None:
        return publish(args, kwargs, **options)  # it does not fit the body, and that is said there
    keep = mode if call.marker.until == marker.TIME else marker.keep_for(task, options)
    return _send_once(call, keep, lambda: publish(args, kwargs, **options), task_id)


def _mode(task: Any, declared: Declaration, options: dict[str, Any]) -> Any:
    """What holds for this call: the option's value, False if it is called off for this one."""
    if declared.rule.off:
        options.pop("lock_dedup", None)
        return None
    asked = options.pop("lock_dedup", None)
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
    run = ids.new_id()
    try:
        there = claim(call, run, task_id, keep)
    except LockUnavailable as error:
        if call.options.on_unavailable == "raise":
            raise
        logger.error("%s is sent without looking for duplicates: %s", call.task.name, error)
        return publish()
    if there is not None:
        return _answer(call, there)
    try:
        with _as_planned(_Planned(task_id, call.marker, run)):
            return publish()
    except BaseException:
        with suppress(RelockError):
            marker.drop(call.engine, call.marker.name, run)
        raise


def claim(call: Call, run: str, task_id: str, keep: float) -> Found | None:
    """Get the marker for a call. Returns whose it is if this one is a duplicate."""
    replaced = ""
    while True:
        there = marker.put(call.engine, call.marker.name, run, task_id, keep)
        if there is None or call.options.on_duplicate != "replace" or there.run == replaced:
            return there
        # One that has begun meanwhile is not replaced: asked again, the marker is still its.
        replaced = there.run
        if marker.take_away(call.engine, call.marker, there):
            _revoke(call, there, task_id)


def _revoke(call: Call, old: Found, task_id: str) -> None:
    """The message of a call that was replaced stays where it is, and comes to nothing there."""
    engine, task = call.engine, call.task
    remember = max(old.remaining, marker.REMEMBER)
    back = engine.store.release(
        call.names, old.run, KEPT, ended="run", remember=remember, home=engine.parking.home
    )
    engine.parking.forward(back.messages)
    if task.ignore_result:
        return
    try:
        if task.AsyncResult(old.task_id).state not in states.READY_STATES:
            task.backend.mark_as_revoked(old.task_id, f"replaced by {task_id}")
    except Exception:
        logger.warning("the state REVOKED of %s could not be stored", old.task_id, exc_info=True)


def stay_revoked(task: Any, message: Any) -> None:
    """The message of a replaced call has arrived: under `task_track_started` Celery has just
    written STARTED over its state, and nobody would ever write another one."""
    if not task.track_started or task.ignore_result:
        return
    try:
        if task.AsyncResult(message.id).state == states.STARTED:
            task.backend.mark_as_revoked(message.id, "replaced by a later call")
    except Exception:
        logger.warning("the state REVOKED of %s could not be stored", message.id, exc_info=True)


def marked(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """See `LockedTask.marked`."""
    call = call_of(task, declaration(type(task)), marker.DONE, args, kwargs)
    there = None if call is None else marker.look(call.engine, call.marker.name)
    return None if there is None else task.AsyncResult(there.task_id)


def unmark(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """See `LockedTask.unmark`."""
    call = call_of(task, declaration(type(task)), marker.DONE, args, kwargs)
    return call is not None and bool(call.engine.store.force_release(call.marker.name))


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


@contextmanager
def _as_planned(planned: _Planned) -> Iterator[None]:
    token = _planned.set(planned)
    try:
        yield
    finally:
        _planned.reset(token)


def _write(headers: Any = None, body: Any = None, **_: Any) -> None:
    planned = _planned.get()
    if planned is None or not isinstance(headers, dict):
        return
    fields = headers if "id" in headers else body if isinstance(body, dict) else {}
    header = headers.get(run_headers.NAME)
    # A message that is sent once more keeps what it says; another handler may send one of its own.
    if fields.get("id") != planned.task_id or not header or header.get("attempts"):
        return
    header["dedup"] = list(planned.marker)
    header["run"] = planned.run or header["run"]


# After the header itself, which `headers` writes.
before_task_publish.connect(_write, weak=False, dispatch_uid="celery_relock.dedup")
