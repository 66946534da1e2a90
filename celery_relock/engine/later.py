"""What failed because Redis could not be reached is made up for when it can."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ..errors import LockUnavailable
from . import platform

logger = logging.getLogger("celery_relock")

# How soon a backend that could not be reached is asked again, in seconds; and how many calls are
# kept for that moment. What they would have freed ends by itself, only later.
_AGAIN, _MOST = 0.5, 10_000


class Later:
    """Calls of this process to one backend, each made again until the backend has answered it."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._calls: list[Callable[[], object]] = []
        self._is_running = False
        self._guard = threading.Lock()
        self._pid = platform.pid

    def add(self, call: Callable[[], object]) -> None:
        """Make a call as soon as the backend can be asked again, in another thread."""
        if self._pid != platform.pid:
            self._reset()  # the parent's thread makes the calls that a forked child has copies of
        with self._guard:
            if len(self._calls) < _MOST:
                self._calls.append(call)
            else:
                logger.warning("too much has failed without Redis: not all of it is made up for")
            if self._is_running:
                return
            self._is_running = True
        try:
            threading.Thread(target=self._run, name="relock-later", daemon=True).start()
        except RuntimeError as error:
            self._is_running = False  # no thread to spare: the next call tries again
            logger.warning("what failed without Redis is not made up for yet: %s", error)

    def _run(self) -> None:
        while True:
            try:
                self._calls[0]()
            except LockUnavailable:
                time.sleep(_AGAIN)
                continue
            except Exception:
                logger.exception("what failed cannot be made up for")
            with self._guard:
                del self._calls[0]
                if not self._calls:
                    self._is_running = False
                    return
