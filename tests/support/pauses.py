"""When this process could not run. A failed test tells that, so that one sees whether it gave a
busy machine too little time."""

from __future__ import annotations

import threading
import time
from collections import deque

_EVERY = 0.05
_LONG = 0.3  # seconds; what is shorter should disturb no test

_seen: deque[tuple[float, float]] = deque(maxlen=100)


def watch() -> None:
    """Begin to watch, in a thread that ends with the process."""
    threading.Thread(target=_watch, name="pauses", daemon=True).start()


def _watch() -> None:
    before = time.monotonic()
    while True:
        time.sleep(_EVERY)
        now = time.monotonic()
        if now - before > _LONG:
            _seen.append((time.time(), now - before))
        before = now


def since(start: float) -> list[str]:
    """What was seen since a time (of `time.time()`), a line each."""
    return [
        f"could not run for {length:.2f} s until {time.strftime('%H:%M:%S', time.localtime(end))}"
        for end, length in list(_seen)
        if end >= start
    ]
