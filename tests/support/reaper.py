"""No process outlives the tests, even when pytest itself is killed.

A small process of its own reads the process groups that the tests start from a pipe. When the pipe
closes, because pytest ended in whatever way, it kills the groups that were not struck off.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
from typing import Any, Protocol, TypeVar

import psutil

from tests.support.waiting import wait_for

_WATCH = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    sign, number = line[0], int(line[1:])
    groups.add(number) if sign == "+" else groups.discard(number)
for number in groups:
    try:
        os.killpg(number, signal.SIGKILL)
    except OSError:
        pass
"""

_lock = threading.Lock()
_watch: subprocess.Popen[str] | None = None
_groups: set[int] = set()


def _tell(line: str) -> None:
    global _watch
    with _lock:
        if _watch is None:
            _watch = subprocess.Popen(
                [sys.executable, "-S", "-c", _WATCH],
                stdin=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            atexit.register(_close, _watch)
        assert _watch.stdin is not None
        _watch.stdin.write(line + "\n")
        _watch.stdin.flush()


def _close(watch: subprocess.Popen[str]) -> None:
    with watch:  # closes the pipe and waits
        pass


class Process(Protocol):
    pid: int

    def wait(self, timeout: float | None = None) -> int: ...


P = TypeVar("P", bound=Process)


def start(command: list[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a command as the leader of a process group that ends with the tests at the latest."""
    return adopt(subprocess.Popen(command, start_new_session=True, **options))


def adopt(process: P) -> P:
    """The same for a leader of a process group that was started by somebody else."""
    _groups.add(process.pid)
    _tell(f"+{process.pid}")
    return process


def end(process: Process) -> None:
    """Kill the whole group of a process from `start` and wait until it is gone; may be repeated."""
    if process.pid not in _groups:  # ended before: the number may be somebody else's by now
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: not _members(process.pid), what=f"the end of process group {process.pid}")
    _groups.discard(process.pid)
    _tell(f"-{process.pid}")


def _members(group: int) -> list[int]:
    """The living processes of a group; a killed one may take a moment to go."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found
