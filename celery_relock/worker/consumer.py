"""The thread in which a worker consumes, which must wait for nobody."""

from __future__ import annotations

import os
import threading

# When a child is lost, Celery calls some errbacks in the thread that consumes. A wait there would
# stop the whole worker: no heartbeat, no new task. It need not be the main thread: the worker of
# `celery.contrib.testing` consumes in another one, and a test may wait in the main thread.
_here = threading.local()


def remember_consumer() -> None:
    """Remember this thread as one in which a worker consumes."""
    _here.consumes_in = os.getpid()


def consumes_here() -> bool:
    """Whether a worker consumes in this thread: it must wait for nobody."""
    # A forked child has a copy, and consumes nothing.
    return getattr(_here, "consumes_in", None) == os.getpid()
