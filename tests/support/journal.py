"""An ordered record of what happened in many processes, and a way to wait for it.

Tasks in worker processes and the test share one Redis stream: whoever waits, blocks in the server
until the next event comes. A test lets a task go on with an event of its own:

    journal.add("inside")                 # in the task, holding the lock
    journal.wait_for("go on")
    …
    worker.module.task.delay()            # in the test
    journal.wait_for("inside")
    journal.add("go on")
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import redis

from tests.support.keys import BENCH_PREFIX


@dataclass(frozen=True)
class Event:
    """One event: its name, the process that wrote it, the server's time in seconds, its data."""

    name: str
    pid: int
    at: float
    data: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def says(self, facts: dict[str, Any]) -> bool:
        """Whether these are among its data."""
        return facts.items() <= self.data.items()


class Journal:
    def __init__(self, url: str, namespace: str):
        self._url = url
        self._key = f"{BENCH_PREFIX}journal:{namespace}"
        self._client = redis.Redis.from_url(url)
        # The id of the last entry, and all events up to it: one pair, as threads read side by side
        # and a signal may come at any line.
        self._read: tuple[str, list[Event]] = "0", []

    @classmethod
    def from_env(cls) -> Journal:
        """The journal of the test that started this worker."""
        return cls(os.environ["RELOCK_TEST_URL"], os.environ["RELOCK_TEST_NAMESPACE"])

    def add(self, name: str, /, **data: Any) -> None:
        # All of them text: hiredis may crash where a signal strikes while it packs a number.
        fields = {"name": name, "pid": str(os.getpid()), "data": json.dumps(data, default=str)}
        self._client.xadd(self._key, fields)  # type: ignore[arg-type]

    def events(self, name: str | None = None, /, **facts: Any) -> list[Event]:
        """All events in the order in which the server saw them, or those of one name, or those that
        say this: `events("began", account=account)`."""
        return _chosen(self._all()[1], name, facts)

    def names(self) -> list[str]:
        return [event.name for event in self.events()]

    def wait_for(
        self,
        wanted: str | Callable[[list[Event]], Any],
        timeout: float = 30.0,
        count: int = 1,
        **facts: Any,
    ) -> list[Event]:
        """Wait until `count` events of a name that say this, or a predicate over all events, are
        there: `wait_for("began", account=account)`.

        Returns those events, or all of them for a predicate. AssertionError with the journal as it
        stands after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            last, events = self._all()
            if callable(wanted):
                if wanted(events):
                    return events
            elif len(found := _chosen(events, wanted, facts)) >= count:
                return found
            left = deadline - time.monotonic()
            if left <= 0:
                lines = "\n".join(f"  {event}" for event in events) or "  (empty)"
                missed = f"{wanted} {facts or ''}"
                raise AssertionError(f"not in the journal within {timeout} s: {missed}\n{lines}")
            # In slices, so that a client timeout never cuts a long wait.
            self._client.xread({self._key: last}, count=1, block=max(1, int(min(left, 1) * 1000)))

    def _all(self) -> tuple[str, list[Event]]:
        last, events = self._read
        if entries := self._client.xrange(self._key, f"({last}"):
            self._read = entries[-1][0].decode(), [*events, *map(_event, entries)]
        return self._read

    def close(self) -> None:
        self._client.close()


def _chosen(events: list[Event], name: str | None, facts: dict[str, Any]) -> list[Event]:
    return [event for event in events if name in (None, event.name) and event.says(facts)]


def _event(entry: tuple[bytes, dict[bytes, bytes]]) -> Event:
    stamp, fields = entry
    return Event(
        name=fields[b"name"].decode(),
        pid=int(fields[b"pid"]),
        at=int(stamp.split(b"-")[0]) / 1000,
        data=json.loads(fields[b"data"]),
    )
