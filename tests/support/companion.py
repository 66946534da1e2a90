"""A program beside the test, to talk to, freeze and kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support import programs, reaper
from tests.support.waiting import freeze


class Companion:
    """A running program of `programs.start`: it says lines, and reads lines to go on."""

    def __init__(self, program: str, url: str, namespace: str):
        self._process = programs.start(program, url, namespace)

    def line(self) -> str:
        """The next line that it says; "" after its end."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")

    def tell(self, text: str = "") -> None:
        """Send it a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def freeze(self) -> None:
        freeze(self._process.pid)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        with self._process:  # closes its pipes
            reaper.end(self._process)


@contextmanager
def running(program: str, url: str, namespace: str) -> Iterator[Companion]:
    """Run a program for the time of a block."""
    companion = Companion(program, url, namespace)
    try:
        yield companion
    finally:
        companion.close()
