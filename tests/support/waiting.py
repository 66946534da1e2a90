"""Waiting with a deadline for what has no event of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(predicate: Callable[[], T], timeout: float = 10.0, what: str = "") -> T:
    """Return the first true answer of `predicate`; AssertionError after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        answer = predicate()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise AssertionError(f"not seen within {timeout} s: {what or predicate}")
        time.sleep(0.01)
