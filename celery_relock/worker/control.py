"""Remote control of what is parked, which no worker has: `inspect query_task` tells where it is,
and `revoke_by_stamped_headers` reaches it as `revoke` does. For a task that a worker has,
`query_task` also tells what the call says of its locks; and it tells of a task that waits in the
worker for its rate limit, of which Celery's does not know, or for its ETA: of a retry Celery's
does not know either, as the attempt before it has the same id, and ends when that has come.

Loaded by a worker's main process.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from celery.utils.functional import maybe_list
from celery.worker import control
from celery.worker.request import Request
from celery.worker.state import active_requests, requests, revoked, revoked_stamps

from ..declaration import engine_of
from ..engine.events import logger
from ..engine.ids import short
from ..errors import LockUnavailable, RelockError
from .message import HEADER, parse

if TYPE_CHECKING:
    from ..engine.inspection import Holder, Inspection


inspect_command: Any = control.inspect_command  # has no types
_celerys = control.query_task

# The most holders to tell of.
_MOST = 100


@inspect_command(variadic="ids", signature="[id1 [id2 [... [idN]]]]")  # type: ignore[untyped-decorator]
def query_task(state: Any, ids: Any, **_: Any) -> dict[str, Any]:
    """Query for task information by id."""
    found: dict[str, Any] = _celerys(state, ids)
    for task_id, (_, info) in found.items():
        info["relock"] = _told_by_the_call(task_id)
    missing = set(maybe_list(ids)) - found.keys()
    found |= _rate_limited(state, missing) | _scheduled(state, missing)
    try:
        if (ask := _inspection(engine_of(state.app).backend)) is not None:
            for task_id in maybe_list(ids):
                if task_id not in found and (told := _where(ask, task_id)):
                    found[task_id] = told
    except RelockError as error:
        logger.debug("Cannot look for parked tasks: %s", error)
    return found


def _rate_limited(state: Any, ids: set[str]) -> dict[str, Any]:
    """Which of these tasks wait in this worker for their rate limit, as Celery tells of others."""
    buckets = getattr(getattr(state, "consumer", None), "task_buckets", {})
    waiting = [each for bucket in [*buckets.values()] if bucket for each, _ in [*bucket.contents]]
    return {each.id: ("limited", each.info()) for each in waiting if each.id in ids}


def _scheduled(state: Any, ids: set[str]) -> dict[str, Any]:
    """Which of these tasks wait in this worker for their ETA, as Celery tells of others."""
    timer = getattr(getattr(state, "consumer", None), "timer", None)
    entries = [each.entry for each in [*timer.schedule.queue]] if timer else []
    waiting = [arg for entry in entries for arg in entry.args[:1] if isinstance(arg, Request)]
    return {each.id: ("scheduled", each.info()) for each in waiting if each.id in ids}


def _told_by_the_call(task_id: str) -> dict[str, Any]:
    """The prefix and the options of a call, on which its locks depend besides its arguments."""
    header = parse(getattr(requests.get(task_id), "request_dict", {}).get(HEADER))
    return {} if header is None else {"prefix": header.prefix, "options": dict(header.options)}


def _inspection(backend: Any) -> Inspection | None:
    from ..engine.inspection import Inspectable  # when it is asked for, not in every worker

    return backend.inspection() if isinstance(backend, Inspectable) else None


def _where(ask: Inspection, task_id: str) -> tuple[str, dict[str, Any]] | None:
    """Where a task is, as Celery tells it of a request; None if it is not parked.

    The state is that of a `Waiter`. The rest says which lock the task waits for, and how many are
    ahead there: of several the first; and who holds any of them.
    """
    found = ask.parked(short(task_id))
    if found is None or not found.text:
        return None
    keys = [key for name in found.waiter.names for key in ask.keys_of(name)]
    locks = ask.survey(keys, _MOST, 0)
    return found.waiter.state, {
        "id": task_id,
        "lock": found.name,
        "holders": [_with_process(holder) for lock in locks for holder in lock.holders],
        "ahead": found.waiter.position - 1,
        "since": found.waiter.since,
    }


def _with_process(holder: Holder) -> str:
    return f"{holder} {holder.host}:{holder.pid}" if holder.host else str(holder)


class Revoked:
    """The ids of the tasks that are revoked at the moment, by their id or by a stamp. Of those with
    a stamp the parked ones: the others are found as they come.

    None of a task that is in a slot of this worker: it may be about to park, and is told of then.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._stamps: dict[str, list[Any]] = {}
        self._stamped: set[str] = set()
        self._found: set[str] = set()

    def __call__(self) -> set[str]:
        stamps = {name: maybe_list(values) for name, values in dict(revoked_stamps).items()}
        if stamps != self._stamps:
            self._look_for(stamps)
        with suppress(RuntimeError):  # the main thread has just begun one; the next look is soon
            self._found = {*revoked, *self._stamped} - {request.id for request in active_requests}
        return self._found

    def _look_for(self, stamps: dict[str, list[Any]]) -> None:
        ask = _inspection(self._backend)
        every = () if ask is None else (text for some in ask.messages() for text in some)
        try:
            self._stamped = set(_with_a_stamp(every, stamps))
        except LockUnavailable as error:
            logger.debug("Looking through parked tasks for stamps again: %s", error)
            return
        except RelockError as error:
            logger.warning("A revoked stamp does not reach parked tasks: %s", error)
        self._stamps = stamps


def _with_a_stamp(texts: Iterable[str], stamps: Mapping[str, list[Any]]) -> Iterable[str]:
    """The task ids of those messages that have one of these stamps."""
    for text in texts:
        headers = json.loads(text)["headers"]
        found = headers.get("stamps") or {}
        if any(
            each in stamps[name] for name in stamps for each in maybe_list(found.get(name)) or ()
        ):
            yield headers["id"]
