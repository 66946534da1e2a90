"""A signal handler that uses a lock runs in the middle of a command of its own thread: the mutex of
the backend in memory lets it in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from celery_relock import Lock
from celery_relock.backends.memory import MemoryBackend


def run_with_a_handler_at(line: int, run: Callable[[], Any], handler: Callable[[], Any]) -> bool:
    """Whether the handler came: at this line of the backend, counted from the first that runs."""

    came = False

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal line, came
        if Path(frame.f_code.co_filename).name != "memory.py":
            return None
        if event == "line" and (line := line - 1) == 0:
            came = True
            handler()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return came


@pytest.fixture
def backend() -> MemoryBackend:
    backend = Lock("memory://", "a")._engine.backend
    assert isinstance(backend, MemoryBackend)
    backend.clear()
    return backend


def leftovers(backend: MemoryBackend) -> object:
    """The next command has removed what a handler left on the last lines of one."""
    backend.inspect("another")
    return backend.state.locks


@pytest.mark.parametrize("names", ["aa", "ab"])
@pytest.mark.parametrize("verb", ["acquire", "release"])
def test_a_handler_that_acquires_and_releases_costs_the_thread_no_lock(
    verb: str, names: str, backend: MemoryBackend
) -> None:
    mine, of_handler = (Lock("memory://", name) for name in names)
    another, free = Lock("memory://", "a"), []

    def handler() -> None:
        if of_handler.acquire(blocking=False):
            free.append(line)
            of_handler.release()

    def acquire() -> None:
        assert mine.acquire(blocking=False)

    line, came = 1, True
    while came:
        came = run_with_a_handler_at(line if verb == "acquire" else 0, acquire, handler)
        assert mine.owned(), line
        assert not another.acquire(blocking=False), line
        if verb == "release":
            came = run_with_a_handler_at(line, mine.release, handler)
        else:
            mine.release()
        assert not leftovers(backend), line
        line += 1
    assert len(free) > 20


def test_a_lock_that_a_handler_acquires_while_it_is_released_stays_its_lock(
    backend: MemoryBackend,
) -> None:
    mine, of_handler, another = (Lock("memory://", "a") for _ in "123")
    got: list[bool] = []

    line, came = 1, True
    while came:
        mine.acquire(blocking=False)
        came = run_with_a_handler_at(
            line, mine.release, lambda: got.append(of_handler.acquire(blocking=False))
        )
        if came and got[-1]:
            assert not another.acquire(blocking=False), line
            of_handler.release()
        assert not leftovers(backend), line
        line += 1
    assert True in got
    assert False in got
