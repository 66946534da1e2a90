"""What failed because Redis could not be reached is made up for when it can."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from ..errors import LockUnavailable, RelockError
from .crash import Entry, journal
from .events import logger
from .platform import Solo, anew_in_a_child

# How soon a backend that could not be reached is asked again, in seconds; and how many calls are
# kept for that moment. What the others would have freed ends by itself, only later. That is told
# once in so many seconds.
_AGAIN, _MOST, _TELL_EVERY = 0.5, 10_000, 60.0
# How soon one that has refused is asked again, and for how long: a password is being changed, or a
# right was taken away by mistake. Meanwhile the other calls are made.
_REFUSED_AGAIN, _REFUSED_FOR = 2.0, 600.0


@dataclass(slots=True, eq=False)
class _Owed:
    """`due`: not before, by the monotonic clock; 0 if it was not made yet. `refused_since`: 0 if it
    was not refused yet."""

    call: Callable[[], object]
    entry: Entry | None
    due: float = 0.0
    refused_since: float = 0.0


class Later:
    """Calls of this process to one backend, each made again until the backend has answered it. What
    a call is to free is noted in the journal meanwhile: if the process ends first, a reaper does.
    """

    def __init__(self) -> None:
        anew_in_a_child(self)

    def _reset(self) -> None:
        # The parent's thread makes the calls that a forked child has copies of.
        self._calls: list[_Owed] = []
        self._thread = Solo(self._make_all, lambda: self._calls, _begin)
        self._told_at = -math.inf

    def try_now(self, call: Callable[[], object], entry: Entry | None = None) -> None:
        """Make a call, or as soon as the backend can be asked; `entry` as for `add`."""
        try:
            call()
        except LockUnavailable:
            self.add(call, entry)
        except RelockError:
            raise
        except BaseException:
            # A signal's, or the stack is full, which it is not in another thread.
            self.add(call, entry)
            raise

    def add(self, call: Callable[[], object], entry: Entry | None = None) -> None:
        """Make a call as soon as the backend can be asked again, in another thread.

        Args:
            entry: what a reaper is to free if this process ends before.
        """
        if entry is not None:
            journal.note(_key(entry), entry)
        if len(self._calls) < _MOST:
            self._calls.append(_Owed(call, entry))
        elif (now := time.monotonic()) - self._told_at >= _TELL_EVERY:
            self._told_at = now
            logger.warning("too much has failed without Redis: not all of it is made up for")
        try:
            self._thread.start()
        except RuntimeError as error:  # no thread to spare: the next call tries again
            logger.warning("what failed without Redis is not made up for yet: %s", error)

    def _make_all(self) -> None:
        while self._calls:
            # What has failed comes behind what has not, which may be for another node of a cluster.
            made = min(self._calls, key=attrgetter("due"))
            if made.due > time.monotonic():
                time.sleep(_AGAIN)
            elif not self._try(made):
                self._calls.remove(made)

    def _try(self, made: _Owed) -> bool:
        """Make a call. Returns whether it is to be made again."""
        now = made.due = time.monotonic()
        try:
            made.call()
        except LockUnavailable:
            time.sleep(_AGAIN)
            return True
        except Exception as error:  # noqa: BLE001 - whatever it is, the others are made
            made.refused_since = made.refused_since or now
            made.due = now + _REFUSED_AGAIN
            if isinstance(error, RelockError) and now - made.refused_since < _REFUSED_FOR:
                return True
            logger.exception("what failed cannot be made up for")
        if made.entry is not None:
            journal.remove(_key(made.entry))
        return False


def _begin(target: Callable[[], None]) -> None:
    threading.Thread(target=target, name="relock-later", daemon=True).start()


def _key(entry: Entry) -> str:
    return " ".join((entry.execution_id, *entry.names))
