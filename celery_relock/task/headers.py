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

from ..core import ids

NAME = "relock"
VERSION = 1


@dataclass(frozen=True, slots=True)
class RunHeader:
    """The header's content.

    Attributes:
        run: the run id.
        own: False if the id was made from the task id, as the message came without a header. Such
            an id cannot tell a copy from a task that somebody sends again on purpose.
        attempts: how often this run's message was sent again because its lock was not to be had.
        since: the sender's clock (s since the epoch) when that first happened; 0 before.
        v: version of this content; one that is not known is ignored.
    """

    run: str
    own: bool = True
    attempts: int = 0
    since: float = 0.0
    v: int = VERSION

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
    raw = getattr(message, NAME, None) or (message.headers or {}).get(NAME)
    found = _parse(raw) if isinstance(raw, Mapping) else None
    return found or RunHeader(ids.short(f"{message.id}:{message.retries}"), own=False)


def _parse(raw: Mapping[str, Any]) -> RunHeader | None:
    run, attempts, since = raw.get("run"), raw.get("attempts", 0), raw.get("since", 0.0)
    if raw.get("v") != VERSION or not isinstance(run, str) or not isinstance(attempts, int):
        return None
    if not isinstance(since, int | float):
        return None
    return RunHeader(ids.short(run), raw.get("own") is not False, attempts, float(since))


def _write(headers: Any = None, body: Any = None, **_: Any) -> None:
    if not isinstance(headers, dict):
        return
    # The predecessor's header came along with its custom headers: it is replaced, never kept.
    headers[NAME] = {"v": VERSION, "run": ids.new_id()}
    resent = _resent.get()
    if resent is None:
        return
    header, message = resent
    # Another handler of this signal may publish messages of its own meanwhile.
    task_id = headers.get("id") or (body.get("id") if isinstance(body, dict) else None)
    if task_id == message.id:
        headers[NAME] = asdict(header)
        if "parent_id" in headers:  # Celery would make a run that is sent again its own parent
            headers["parent_id"] = message.parent_id


before_task_publish.connect(_write, weak=False, dispatch_uid="celery_relock.run_header")
