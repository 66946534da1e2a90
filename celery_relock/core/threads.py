"""Native threads and locks, also where gevent or eventlet has replaced the usual ones.

A greenlet that computes without pause starves every other greenlet of its thread. A lease must be
renewed all the same, so the keep-alive needs a thread of the operating system.
"""

from __future__ import annotations

import _thread
import sys
from collections.abc import Callable
from typing import Any


def _original(name: str) -> Any:
    """`_thread`'s own attribute, from before any monkey-patching."""
    if "gevent.monkey" in sys.modules:
        return sys.modules["gevent.monkey"].get_original("_thread", name)
    if "eventlet.patcher" in sys.modules:
        return getattr(sys.modules["eventlet.patcher"].original("_thread"), name)
    return getattr(_thread, name)


def start_native_thread(target: Callable[[], None]) -> None:
    """Run `target` in an OS thread that never keeps the process from ending.

    Raises:
        RuntimeError: the process is ending or has no thread to spare.
    """
    _original("start_new_thread")(target, ())


def native_lock() -> Any:
    """A lock that blocks the OS thread and never switches greenlets: for a few instructions only."""
    return _original("allocate_lock")()


def wakes_across_threads() -> bool:
    """Whether an Event may be set by another OS thread. eventlet's may not: its hub is per thread."""
    patcher = sys.modules.get("eventlet.patcher")
    return not (patcher is not None and patcher.is_monkey_patched("thread"))
