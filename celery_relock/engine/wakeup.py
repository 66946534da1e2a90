"""The inbox of this process at a backend: where the process hears of grants and of forced releases.

A waiter looks for itself at every heartbeat, so a message that is lost or garbled delays by a
heartbeat at the most. A client that may publish here and knows the ids of a waiter can forge a
grant, which is believed until the first renewal. The same client could delete the lock.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from ..errors import LockConfigError
from . import ids
from .events import logger
from .platform import Solo, anew_in_a_child
from .protocol import Backend, Listener
from .renewal import keepalive

# How long a waiter waits for the subscription to be there, in seconds.
OPENING = 2.0


class Listening:
    """Whether an inbox hears at this moment, and in how many seconds to try again if not.

    Attributes:
        tried: whether it has heard, or a first try to has failed.
        rings: each is called when it has been tried.
    """

    def __init__(self) -> None:
        self.hears = self.tried = self._refused = False
        self.rings: set[Callable[[], None]] = set()
        self._pause = 0.1

    def _set_tried(self) -> None:
        first, self.tried = not self.tried, True
        if first:
            for ring in list(self.rings):
                ring()

    def begin(self) -> None:
        """The subscription is there, for the first time or again."""
        self.hears = True
        self._set_tried()

    def fail(self, error: Exception) -> float:
        """It is not there, or no longer. Returns in how many seconds to try again."""
        self._pause = 0.1 if self.hears else min(self._pause * 2, 5.0)
        self.hears = False
        self._set_tried()
        if isinstance(error, LockConfigError) and not self._refused:
            self._refused = True
            logger.warning("Cannot hear of grants, so waiters find out seconds later: %s", error)
        logger.debug("The inbox lost its connection and opens it again: %s", error)
        return self._pause


class Inbox:
    """Opened by the first wait or the first long hold of this process, and anew after a fork. Ends
    with its engine, a few seconds later.

    Attributes:
        name: to which messages for this process are sent.
        thread: listens, once it has begun.
        listening: whether it hears.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        anew_in_a_child(self)

    def _reset(self) -> None:
        # The parent's thread did not come along, and what is sent to the parent is not a child's.
        self.name = ids.new_attempt_id()
        self.listening = Listening()
        listen = partial(_listen, weakref.ref(self), self._backend, self.name, self.listening)
        self.thread = Solo(listen)

    def start(self) -> None:
        """Begin to listen, without waiting for the subscription."""
        self.thread.start()

    @contextmanager
    def opening(self, ring: Callable[[], None]) -> Iterator[Callable[[], bool]]:
        """Begin to listen, and ring when the subscription is there, or a first try has failed.
        Yields whether it has been tried."""
        self.start()
        listening = self.listening
        listening.rings.add(ring)
        try:
            yield lambda: listening.tried
        finally:
            listening.rings.discard(ring)


def _listen(ref: weakref.ref[Inbox], backend: Backend, name: str, listening: Listening) -> None:
    """The thread. It has no inbox of its own: else a thread that never ends would keep an engine
    that nobody uses any more, and its connections."""

    def connected() -> None:
        listening.begin()
        keepalive.look_now(backend)

    def wanted() -> bool:
        return ref() is not None

    listener = Listener(connected, partial(keepalive.hear, backend), wanted)
    try:
        while wanted():
            try:
                backend.listen(name, listener)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is tried again
                time.sleep(listening.fail(error))
    finally:
        # An exception from outside ended it, perhaps: the next waiter starts another thread.
        listening.hears = False
