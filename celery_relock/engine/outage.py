"""Something that is tried again and again, while it fails."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TypeAlias

from ..errors import RelockError
from .events import logger

Say: TypeAlias = Callable[[Callable[[], None]], None]

# How often one that goes on is told again, in seconds.
_EVERY = 60.0
# After so many seconds without a try nobody knows whether it went on: what fails then is another.
_APART = 10.0


class Outage:
    """`with outage:` around each try. That it fails is logged at first and once a minute, and that
    it works again; every other failure is for debugging. No `Exception` gets out.

    Args:
        what: what is the matter, in a sentence.
        say: makes the calls that log, which may take long.
    """

    __slots__ = ("_failed_at", "_said_at", "_say", "_since", "_tried_at", "_what")

    def __init__(self, what: str, say: Say = lambda call: call()) -> None:
        self._what = what
        self._say = say
        self._since: float | None = None
        self._failed_at = self._said_at = -math.inf
        self._tried_at = 0.0

    def __enter__(self) -> None:
        self._tried_at = time.monotonic()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if isinstance(error, Exception):
            self._goes_on(error)
            return True
        if error is None and self._since is not None:
            took = self._failed_at - self._since
            self._say(partial(logger.info, "over, it lasted %.1f s: %s", took, self._what))
            self._since = None
        return False

    def _goes_on(self, error: Exception) -> None:
        now = time.monotonic()
        if self._since is None or self._tried_at - self._failed_at > _APART:
            self._since, self._said_at = self._tried_at, -math.inf
        self._failed_at = now
        level = logging.DEBUG
        if now - self._said_at >= _EVERY:
            level, self._said_at = logging.WARNING, now
        # What a server does needs no traceback, and what nobody has thought of does.
        trace = None if isinstance(error, RelockError) else error
        text = "%s, trying again: %s"
        self._say(partial(logger.log, level, text, self._what, error, exc_info=trace))


def outages(what: str, say: Say) -> defaultdict[object, Outage]:
    """One for each of several that may fail apart from each other."""
    return defaultdict(lambda: Outage(what, say))
