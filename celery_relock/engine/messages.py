"""Sentences about who holds what, for errors, logs and the command line."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from functools import lru_cache

from . import process
from .protocol import Answer, Conflict, Duplicate

# With the inbox's id in front, a holder's text of this length keeps the record of its lock in
# Redis's compact encoding (hash-max-listpack-value, 64 bytes).
_ROOM = 55


def label_of(work: str, task_id: str = "") -> str:
    """`work[id] host:pid` in at most 55 bytes: the task that holds a lock, for people."""
    if not task_id:
        return _whole(work, process.pid)
    where, room = _here(process.pid)
    return f"{_last(f'{work}[{task_id[:8]}]', room)} {where}"


def describe_conflict(name: str, answer: Answer | None) -> str:
    """`the lock … is held by … since …`, from what the store answered."""
    if isinstance(answer, Conflict) and answer.fence:
        held = duration(time.time() - answer.fence / 1e6)
        return (
            f"the lock {answer.name!r} is held by {answer.label or 'an unnamed holder'} "
            f"(workflow {answer.owner}) for {held}, its lease has {answer.remaining:.0f} s left"
            + (f", {answer.waiting} wait for it" if answer.waiting else "")
        )
    if isinstance(answer, Conflict) and not answer.waiting:
        return f"the lock {answer.name!r} was acquired, but its lease ended before the answer came"
    if isinstance(answer, Conflict):
        return f"the lock {answer.name!r} is promised to {answer.waiting} that wait for it already"
    if isinstance(answer, Duplicate):
        return (
            f"another copy of this run holds or awaits the lock {name!r} ({answer.label}), "
            f"for {answer.remaining:.0f} s more if it has died"
        )
    return f"the lock {name!r} is held by somebody else"


def describe_deadlock(path: Sequence[str]) -> str:
    """`waiting for … would never end: …`, from the path of a `Deadlocked`."""
    parts = [f"the lock {path[0]!r} is held by"]
    for waiter, name in zip(path[1::2], path[2::2], strict=True):
        parts.append(f"{waiter or 'an unnamed run'}, which waits for {name!r}, which is held by")
    return f"waiting would never end: {' '.join(parts)} this very call stack"


def duration(seconds: float) -> str:
    """Seconds for people: `12.3 s`, `3m12s`, `2h05m`."""
    seconds = max(0.0, round(seconds, 1))
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


@lru_cache(maxsize=16)
def _whole(work: str, pid: int) -> str:
    where, room = _here(pid)
    return f"{_last(work, room)} {where}"


@lru_cache(maxsize=1)
def _here(pid: int) -> tuple[str, int]:
    """`host:pid`, and how many bytes are left beside it."""
    where = _last(f"{socket.gethostname()}:{pid}", 22)
    return where, _ROOM - 1 - len(where.encode())


def _last(text: str, room: int) -> str:
    """At most so many bytes. The end says most: of a dotted task name, of a host and process."""
    raw = text.encode()
    return text if len(raw) <= room else "~" + raw[-(room - 1) :].decode(errors="ignore")
