"""What the library writes into a message: the run id, anew at each publish.

The header tells a second copy of a message (same run) from a message that was sent again (another
run), which the task id cannot: a retry, or a person who sends an old id once more, uses the same one.
It is written when any task is published by a process that has the library loaded, and costs no trip.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
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
        attempts: how often this run's message was sent again because of a conflict.
        since: the sender's clock (s since the epoch) when it first met the conflict; 0 before.
        v: version of this content; one that is not known is ignored.
    """

    run: str
    attempts: int = 0
    since: float = 0.0
    v: int = VERSION


_resending: ContextVar[RunHeader | None] = ContextVar("relock_resending", default=None)


@contextmanager
def resending(header: RunHeader) -> Iterator[None]:
    """Publish with this header instead of a fresh one."""
    token = _resending.set(header)
    try:
        yield
    finally:
        _resending.reset(token)


def read(request: Any) -> RunHeader | None:
    """The header that the request's message came with, None if it has none that can be used."""
    raw = getattr(request, NAME, None) or (request.headers or {}).get(NAME)
    if not isinstance(raw, Mapping) or raw.get("v") != VERSION:
        return None
    run, attempts, since = raw.get("run"), raw.get("attempts", 0), raw.get("since", 0.0)
    if not isinstance(run, str) or not isinstance(attempts, int):
        return None
    if isinstance(since, bool) or not isinstance(since, int | float):
        return None
    return RunHeader(ids.short(run), attempts, float(since))


def next_attempt(header: RunHeader | None) -> RunHeader:
    """The header for a message that is sent again because its lock was held."""
    run = ids.new_id()
    if header is None:
        return RunHeader(run, 1, time.time())
    return RunHeader(run, header.attempts + 1, header.since or time.time())


def _write(headers: Any = None, **_: Any) -> None:
    if not isinstance(headers, dict):
        return
    # The predecessor's header came along with its custom headers: it is replaced, never kept.
    headers[NAME] = asdict(_resending.get() or RunHeader(ids.new_id()))


before_task_publish.connect(_write, weak=False, dispatch_uid="celery_relock.run_header")
