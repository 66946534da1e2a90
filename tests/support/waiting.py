"""Waiting with a deadline for what has no event of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(predicate: Callable[[], T], timeout: float = 30.0, what: str = "") -> T:
    """Return the first true answer of `predicate`; AssertionError after `timeout` seconds."""
    deadline, pause = time.monotonic() + timeout, 0.01
    while True:
        answer = predicate()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise AssertionError(f"not seen within {timeout} s: {what or predicate}")
        time.sleep(pause)
        pause = min(pause * 1.1, 0.05)  # most of these ask a server


def freeze(pid: int) -> None:
    """SIGSTOP, until the process has really stopped: it goes on for a moment."""
    os.kill(pid, signal.SIGSTOP)
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WSTOPPED)
