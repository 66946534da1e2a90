"""A waiter that hears of its turn by itself, on a connection of its own.

By way of the inbox's thread a grant wakes two threads, one after the other, which takes as long as
the server does. One waiter of a process is spared that: in a worker process there is no other.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..errors import LockConfigError, LockUnavailable
from . import ids
from .platform import Bell
from .protocol import Backend, Line, Notice
from .renewal import keepalive

# What another thread finds out of a lease that waits here, it learns so much later, in seconds.
_LOOK = 0.25


class DirectBell(Bell):
    """Rings when the server says so. For one thread at a time.

    Args:
        hear: called with each notice.

    Raises:
        LockUnavailable, LockConfigError: there is no connection for it.
    """

    __slots__ = ("_hear", "_line", "_store", "channel")

    def __init__(self, backend: Backend, hear: Callable[[Notice], None]) -> None:
        super().__init__()
        self.channel = ids.new_attempt_id()
        self._store = backend
        self._hear = hear
        self._line: Line | None = None
        self._open()

    @property
    def usable(self) -> bool:
        return self._line is not None

    def ring(self, *, from_native_thread: bool = False) -> None:
        """Nothing: whoever waits looks for itself."""

    def wait(self, seconds: float, still: Callable[[], bool]) -> None:
        if not still():
            return
        seconds = min(seconds, _LOOK)
        try:
            if self._line is None:
                self._open()
                keepalive.look_now(self._store)  # whatever was sent meanwhile is gone
            else:
                notice = self._line.hear(seconds)
                if notice is not None:  # it may be for one who waited here before
                    self._hear(notice)
        except (LockUnavailable, LockConfigError):
            if self._line is None:
                time.sleep(seconds)  # heartbeats look meanwhile
            self.close()
        except BaseException:
            # A signal in the middle of a message: whoever came next would read the rest of it.
            self.close()
            raise

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def _open(self) -> None:
        self._line = self._store.line(self.channel)
