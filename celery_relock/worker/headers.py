"""What the library writes into a message: the run id, anew at each publish.

The header tells a second copy of a message (same run) from a message that was sent again (another
run), which the task id cannot: a retry, or a person who sends an old id once more, uses the same.
It is written when any task is published by a process that has the library loaded: no extra trip.

A run whose lock is held is sent again as the *same* run: nothing of it was executed yet, so a copy
of its first message that turns up later is recognised as a copy of what was sent instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from typing import Any

from celery.signals import before_task_publish

from ..engine import ids
from ..options import LockOptions
from . import company
from .ancestors import extended
from .ancestors import parse as parse_ancestors
from .owner import running_request

NAME = "relock"
VERSION = 2
# Where a request has its header, once that was read.
_PARSED = "relock_header"


@dataclass(frozen=True, slots=True)
class RunHeader:
    """The header's content.

    Attributes:
        run: the run id.
        own: False if the id was made from the task id, as the message came without a header. Such
            an id cannot tell a copy from a task that somebody sends again on purpose.
        attempts: how often this run's message was sent again because its lock was not to be had.
        since: the sender's clock (s since the epoch) when that first happened; 0 before.
        ancestors: execution ids of the holds that the run's ancestors have (see `ancestors`).
        kept: lock names and fences of what the run before this one left to it (see `retries`).
        sections: what the run is told of the sections that it belongs to (see `sections`).
        dedup: the name of the call's marker and when it goes (see `marker`).
        first: the id made from the task id, if the run was given one of its own since.
        v: version of this content; one that is not known is ignored.
    """

    execution_id: str
    own: bool = True
    attempts: int = 0
    since: float = 0.0
    ancestors: tuple[str, ...] = ()
    kept: tuple[tuple[str, int], ...] = ()
    sections: tuple[Mapping[str, Any], ...] = ()
    dedup: tuple[str, str] | None = None
    first: str = ""
    v: int = VERSION

    @property
    def call(self) -> str:
        """The run id that the first message of this run had."""
        return self.first or self.execution_id

    def made_own(self) -> RunHeader:
        """The header for a message that may be sent on twice: from now on its copies are known."""
        if self.own:
            return self
        return replace(self, execution_id=ids.new_id(), own=True, first=self.execution_id)

    def again(self) -> RunHeader:
        """The header for the same run's next message."""
        return replace(self, attempts=self.attempts + 1, since=self.since or time.time())


_resent: ContextVar[tuple[RunHeader, Any] | None] = ContextVar("relock_resent", default=None)


@contextmanager
def resending(message: Any, header: RunHeader) -> Iterator[None]:
    """While the message is published once more: with this header, and with the parent it has."""
    token = _resent.set((header, message))
    try:
        yield
    finally:
        _resent.reset(token)


def read(message: Any) -> RunHeader:
    """The header that a message came with, or one made from its id if it has none of use."""
    known: RunHeader | None = getattr(message, _PARSED, None)
    if known is None:
        known = _parsed(message)
        setattr(message, _PARSED, known)
    return known


def _parsed(message: Any) -> RunHeader:
    raw = _raw(message)
    found = parse(raw) if isinstance(raw, Mapping) else None
    return found or RunHeader(ids.short(f"{message.id}:{message.retries}"), own=False)


def ancestors_for(options: LockOptions) -> tuple[str, ...]:
    """The holds that a task with these options may re-enter, though it does not run inside them."""
    return ancestors_here() if options.reentrant == "descendants" else ()


def ancestors_here() -> tuple[str, ...]:
    """The ancestors of the message that this call stack runs for; empty outside of tasks."""
    request = running_request()
    return () if request is None else _ancestors_in(_raw(request))


def _raw(message: Any) -> Any:
    return getattr(message, NAME, None) or (message.headers or {}).get(NAME)


def _ancestors_in(raw: Any) -> tuple[str, ...]:
    known = isinstance(raw, Mapping) and raw.get("v") == VERSION
    return parse_ancestors(raw.get("ancestors")) if known else ()


def parse(raw: Mapping[str, Any]) -> RunHeader | None:
    """The header in a message; None if it is not one of this version."""
    execution_id, attempts, since = (
        raw.get("execution_id"),
        raw.get("attempts", 0),
        raw.get("since", 0.0),
    )
    if (
        raw.get("v") != VERSION
        or not isinstance(execution_id, str)
        or not isinstance(attempts, int)
    ):
        return None
    if not isinstance(since, int | float):
        return None
    own, ancestors = raw.get("own") is not False, parse_ancestors(raw.get("ancestors"))
    kept, told = _kept(raw.get("kept")), raw.get("sections")
    listed = isinstance(told, list | tuple) and all(isinstance(each, Mapping) for each in told)
    told, dedup = tuple(told or ()) if listed else (), _pair(raw.get("dedup"))
    first = raw.get("first")
    first = ids.short(first) if isinstance(first, str) and first else ""
    waited = attempts, float(since)
    return RunHeader(ids.short(execution_id), own, *waited, ancestors, kept, told, dedup, first)


def _pair(raw: Any) -> tuple[str, str] | None:
    fits = isinstance(raw, list | tuple) and [type(part) for part in raw] == [str, str]
    return (raw[0], raw[1]) if fits else None


def _kept(raw: Any) -> tuple[tuple[str, int], ...]:
    pairs = raw if isinstance(raw, list | tuple) else ()
    every = [tuple(each) for each in pairs if isinstance(each, list | tuple)]
    fits = all([type(part) for part in each] == [str, int] for each in every)
    return tuple(every) if fits else ()


def _write(sender: Any = None, headers: Any = None, body: Any = None, **_: Any) -> None:
    if not isinstance(headers, dict):
        return
    company.on_publish(sender)
    fields = headers if "id" in headers else body if isinstance(body, dict) else {}
    resent = _resent.get()
    # Another handler of this signal may publish messages of its own meanwhile.
    if resent is not None and fields.get("id") == resent[1].id:
        header, message = resent
        headers[NAME] = asdict(header)
        if "parent_id" in headers:  # Celery would make a run that is sent again its own parent
            headers["parent_id"] = message.parent_id
        return
    # A predecessor's header came along with its custom headers: it is replaced, never kept.
    predecessor = headers.get(NAME)
    ancestors = _ancestors(fields, predecessor)
    headers[NAME] = {"v": VERSION, "execution_id": ids.new_id()}
    if ancestors:
        headers[NAME]["ancestors"] = list(ancestors)
    if isinstance(predecessor, Mapping) and predecessor.get("sections") and not running_request():
        # Sent by a worker's main process, in the place of a run that died.
        headers[NAME]["sections"] = predecessor["sections"]


def _ancestors(fields: Mapping[str, Any], predecessor: Any) -> tuple[str, ...]:
    """The lineage for a message that is published here."""
    request = running_request()
    # A retry has that of the message before it, also where the worker's main process sends it.
    raw = predecessor if predecessor or request is None else _raw(request)
    inherited = _ancestors_in(raw)
    if request is not None and is_retry(fields, request):
        # Not by its own holds: it would be in while the body before it is still on its way out.
        return inherited
    return extended(inherited)


def is_retry(fields: Mapping[str, Any], request: Any) -> bool:
    """Whether a message is the running one's own next try, and not what the task is replaced by,
    nor a copy of it that was parked and is sent on by it."""
    if _resent.get() is not None:
        return False
    nesting = fields.get("replaced_task_nesting") or 0
    same: bool = fields.get("id") == request.id
    return same and nesting == (request.replaced_task_nesting or 0)


before_task_publish.connect(_write, weak=False, dispatch_uid="celery_relock.run_header")
