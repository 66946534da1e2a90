"""What every process saw, written down so that a SIGKILL in the next instant loses none of it.

Times are CLOCK_MONOTONIC seconds: one clock for all processes of a machine. A line is written with
one `write` to a file opened for appending, so it is in the kernel before the process goes on.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Visit:
    """One call of `acquire` and what came of it.

    Attributes:
        asked, entered, left: when `acquire` was called, when it returned with the lock, when
            `release` was called; inf if that never happened.
        trusted: the last moment at which the process looked and its lock said "not lost".
        shared: whether it asked to share the lock.
        queued: when `acquire` was told that it waits; inf if that never happened.
        told, until: when `acquire` called the lock acquired, and when its lease ended.
        outcome: "unknown" (died, or nobody knows whether the server acted), "refused", "in" (died
            inside), "released", "lost" (told so), "unreleased" (the server could not be told).
    """

    id: str
    lock: str
    owner: str
    limit: int
    asked: float
    shared: bool = False
    fence: int = 0
    queued: float = math.inf
    entered: float = math.inf
    told: float = math.inf
    until: float = math.inf
    trusted: float = -math.inf
    left: float = math.inf
    answered: float = math.inf
    outcome: str = "unknown"


@dataclass(frozen=True)
class Fault:
    """Something that was done to the system, from `began` to `ended`."""

    kind: str
    began: float
    ended: float


@dataclass
class History:
    visits: list[Visit] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


class Recorder:
    """Writes one process's lines; threads may share it."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, event: str, at: float | None = None, **facts: Any) -> None:
        line = {"event": event, "at": time.monotonic() if at is None else at, **facts}
        os.write(self._file, json.dumps(line).encode() + b"\n")


def load(folder: Path) -> History:
    """Read the files of all processes."""
    lines = [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_bytes().splitlines()
    ]
    faults = [
        Fault(line["kind"], line["at"], line["ended"]) for line in lines if line["event"] == "fault"
    ]
    return History(visits_of(lines), sorted(faults, key=lambda fault: fault.began))


def visits_of(lines: Iterable[dict[str, Any]]) -> list[Visit]:
    """Put the events of each visit together."""
    visits: dict[str, Visit] = {}
    for line in lines:
        event, at = line["event"], line["at"]
        if event == "ask":
            name = line["id"]
            shared = line.get("shared", False)
            visits[name] = Visit(name, line["lock"], line["owner"], line["limit"], at, shared)
        elif event != "fault":
            _add(visits[line["id"]], event, at, line)
    return list(visits.values())


def _add(visit: Visit, event: str, at: float, line: dict[str, Any]) -> None:
    if event == "in":
        visit.entered, visit.fence, visit.outcome = at, line["fence"], "in"
        visit.told, visit.until = line.get("told", math.inf), line.get("until") or math.inf
        visit.queued = line.get("queued") or math.inf
    elif event == "trusted":
        visit.trusted = at
    elif event == "leave":
        visit.left = at
    else:
        visit.answered, visit.outcome = at, event
