"""What a signal throws in, at a line that a test chooses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any


def at_the_next_line(
    of: Callable[..., Any], seen: set[int], do: Callable[[], object]
) -> Callable[..., Any]:
    """A tracer that does something at the first line of a function that was not seen before. Once:
    Python goes back to the line of a `with`, where no signal strikes."""

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is not of.__code__:
            return None
        if event == "line" and frame.f_lineno not in seen:
            seen.add(frame.f_lineno)
            sys.settrace(None)
            do()
        return trace

    return trace


def strike() -> None:
    raise Stop


class Stop(BaseException):
    """What Ctrl-C or a time limit throws in."""


class Strike:
    """A tracer that raises `Stop` once `left` lines have begun in the files of these names, but for
    this function.

    Attributes:
        count: how often it has.
    """

    def __init__(self, *names: str, but: str = "") -> None:
        self._names, self._but = names, but
        self.left = self.count = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if Path(code.co_filename).name not in self._names or code.co_name == self._but:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.count += 1
                raise Stop
        return self
