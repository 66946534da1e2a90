"""What the log says of something that is tried again and again, and fails for a while."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from ..errors import LockConfigError, RelockError
from .events import logger

Say: TypeAlias = Callable[[Callable[[], None]], None]

# How often an outage that goes on is told again, in seconds.
_EVERY = 60.0
# After so many seconds without a try nobody knows whether an outage went on: the next failure is
# another outage.
_APART = 10.0


class Outage:
    """Something that is tried again and again, while it fails: `with outage:` around each try.

    The log tells the first failure, one more each minute, and the end; every other failure is for
    debugging. No `Exception` gets out.

    Args:
        what: what is tried, such as "renewing leases".
        say: makes the calls that log, which may take long.

    Attributes:
        error: of the last try that failed.
        failures: how many tries in a row have failed.
    """

    def __init__(self, what: str, say: Say = lambda call: call()) -> None:
        self._what = what
        self._say = say
        self._since: float | None = None
        self._failed_at = self._said_at = -math.inf
        self._tried_at = 0.0
        self.error: Exception | None = None
        self.failures = 0

    def __enter__(self) -> None:
        self._tried_at = time.monotonic()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if isinstance(error, Exception):
            self.failures += 1
            self._goes_on(error)
            return True
        if error is None:
            self.failures = 0
            if self._since is not None:
                took = self._failed_at - self._since
                self._say(partial(logger.info, "%s works again after %.1f s", self._what, took))
                self._since = None
        return False

    def _goes_on(self, error: Exception) -> None:
        now, self.error = time.monotonic(), error.with_traceback(None)
        if self._since is None or self._tried_at - self._failed_at > _APART:
            self._since, self._said_at = self._tried_at, -math.inf
        self._failed_at = now
        level = logging.DEBUG
        if now - self._said_at >= _EVERY:
            # What is set up wrong does not pass.
            wrong = isinstance(error, LockConfigError)
            level, self._said_at = logging.ERROR if wrong else logging.WARNING, now
        # What a server does needs no traceback, and what nobody has thought of does.
        trace = None if isinstance(error, RelockError) else error
        text = "%s failed, trying again: %s"
        self._say(partial(logger.log, level, text, self._what, error, exc_info=trace))
