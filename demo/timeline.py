"""What happened, in the order in which Redis saw it: tasks write to it, the demo follows it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import redis

_KEY = "demo:timeline"


@dataclass(frozen=True)
class Event:
    """One event.

    Attributes:
        at: the Redis server's clock, seconds.
        what: "ready", "asks", "waits", "in", "out", "fails" or "killed".
        who: the lane it belongs to.
        lock: the lock name.
        fence, again: of "in": the fence, and whether the lock was re-entered.
        pid, node: the process that wrote it, and its worker.
        note: a word to show with it.
    """

    at: float
    what: str
    who: str = ""
    lock: str = ""
    fence: int = 0
    again: bool = False
    pid: int = 0
    node: str = ""
    note: str = ""


class Timeline:
    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url)
        self._last = "0"

    def tell(self, what: str, who: str = "", **more: Any) -> None:
        self._client.xadd(_KEY, {"event": json.dumps({"what": what, "who": who, **more})})

    def skip(self) -> None:
        """Pass over all that has been told so far."""
        for stamp, _ in self._client.xrevrange(_KEY, count=1):
            self._last = stamp

    def follow(self, timeout: float) -> Iterator[Event]:
        """Yield the events that are new to this object, as they come.

        Raises:
            TimeoutError: whoever asks has not had enough after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            # In slices, so that the client's own time limit never ends a long wait.
            block = max(1, int(min(left, 1.0) * 1000))
            found: Any = self._client.xread({_KEY: self._last}, count=1, block=block)
            for _, entries in found or []:
                for stamp, fields in entries:
                    self._last = stamp
                    at = int(stamp.split(b"-")[0]) / 1000
                    yield Event(at=at, **json.loads(fields[b"event"]))
        raise TimeoutError(f"what should happen did not, within {timeout:g} s")
