"""When this process could not run: its machine was short of time, or stood still. A failed test
tells that, and who judges by the clock what happened knows it."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque

_EVERY = 0.05
_LONG = 0.3  # seconds; what is shorter should disturb no test

_seen: deque[tuple[float, float]] = deque(maxlen=1000)  # from, to by time.monotonic()


@functools.cache
def watch() -> None:
    """Begin to watch, once, in a thread that ends with the process."""
    threading.Thread(target=_watch, name="pauses", daemon=True).start()


def _watch() -> None:
    before = time.monotonic()
    while True:
        time.sleep(_EVERY)
        now = time.monotonic()
        if now - before > _LONG:
            _seen.append((before, now))
        before = now


def seen() -> list[tuple[float, float]]:
    """From when to when, by `time.monotonic()`."""
    return list(_seen)


def since(start: float) -> list[str]:
    """What was seen since a time (of `time.time()`), a line each."""
    to_wall = time.time() - time.monotonic()
    return [
        f"could not run for {end - began:.2f} s until "
        f"{time.strftime('%H:%M:%S', time.localtime(end + to_wall))}"
        for began, end in seen()
        if end + to_wall >= start
    ]
