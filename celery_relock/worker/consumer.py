"""The thread in which a worker consumes, which must wait for nobody."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

# When a child is lost, Celery calls some errbacks in the thread that consumes. A wait there would
# stop the whole worker: no heartbeat, no new task. It need not be the main thread: the worker of
# `celery.contrib.testing` consumes in another one, and a test may wait in the main thread.
# And the test goes on when that has ended: then another thread can get its number.
_consumer: tuple[int, Callable[[], threading.Thread | None]] = (0, lambda: None)


def remember_consumer() -> None:
    """Remember this thread as the one in which the worker consumes."""
    global _consumer
    _consumer = os.getpid(), weakref.ref(threading.current_thread())


def consumes_here() -> bool:
    """Whether this is the thread in which the worker consumes: it must wait for nobody."""
    pid, thread = _consumer
    return pid == os.getpid() and thread() is threading.current_thread()
