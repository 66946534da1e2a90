"""What is thrown in from outside, and interrupting the body of an execution whose lock is lost
(`lock_on_lost="raise"`).

The keep-alive thread finds the loss; the body runs elsewhere. How to reach the body depends on
where:

- in the main thread (prefork, solo): a signal whose handler raises. Only a signal also ends a call
  that blocks (PEP 475). SIGURG, because a signal that comes too late is ignored by default;
- in a greenlet: the hub throws the error in, when the body lets another greenlet run.

Any other thread has no such way, and asking for one there is an error (`LockConfigError`).

Both ways take some time. So whatever arrives asks in the body's own thread (`claim`) whether the
body still runs and has not heard of the loss yet.
"""

from __future__ import annotations

import enum
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..errors import LockConfigError, LockLost
from .platform import Guard, green

if TYPE_CHECKING:
    from .lease import Lease

#: What to do where a body cannot be interrupted.
INSTEAD = 'use a prefork, solo or gevent pool, or lock_on_lost="flag" and `self.lock.check()`'

_thrown_in: tuple[type[Exception], ...] = (LockLost,)


def let_through(kind: type[Exception]) -> None:
    """Name an exception that arrives from outside wherever a thread is, as a time limit's does.
    Such an exception is meant for the work, so what is hit by chance does not keep it."""
    global _thrown_in
    _thrown_in = (*_thrown_in, kind)


def is_thrown_in(error: BaseException) -> bool:
    """Whether an exception arrived from outside (`let_through`), or ends the process or
    greenlet."""
    return isinstance(error, _thrown_in) or not isinstance(error, Exception)


class _Stage(enum.Enum):
    OUTSIDE = 0  #: before the body or after it, or the body has heard that the lock is lost
    INSIDE = 1
    FIRED = 2  #: the lock is lost and the news is on its way


class Interruption(ContextDecorator):
    """Around a body: raises `error()` in the body when the lease is lost, at most once and only
    inside. A loss that was found before the body begins is raised at once.

    Raises:
        LockConfigError: nothing can interrupt a body in this thread.
    """

    def __init__(self, lease: Lease, error: Callable[[], LockLost]) -> None:
        self._lease = lease
        self._error = error
        self._stage = _Stage.OUTSIDE
        self._thread = 0
        self._told: LockLost | None = None
        self._send_news: Callable[[], object]

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._send_news = _way_to(self)
        self._stage = _Stage.INSIDE
        _bodies.setdefault(self._thread, []).append(self)
        # Not alone, if this body has re-entered the lock of another one.
        self._lease.on_lost = (*self._lease.on_lost, self.fire)
        if self._lease.lost:  # found before there was anybody to tell
            self.__exit__(None, None, None)
            raise self._error()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            self._leave()
        except LockLost as late:
            self._leave()
            # The error was on its way when the body ended, and the outcome of the body stands;
            # unless the error is for an outer body, which this body is a part of.
            if late is not self._told:
                raise

    def _leave(self) -> None:
        with _guard.lock:
            self._stage = _Stage.OUTSIDE
        self._lease.on_lost = tuple([each for each in self._lease.on_lost if each != self.fire])
        # What is on its way lands in the calls that follow, and is caught in `__exit__`.
        self._forget()
        for outer in _bodies.get(self._thread, ()):
            # Signals do not queue: what was meant for an outer body may have been taken for the
            # news to this body.
            outer._send()

    def _forget(self) -> None:
        bodies = _bodies.get(self._thread, [])
        if self in bodies:
            bodies.remove(self)
        if not bodies:
            _bodies.pop(self._thread, None)

    def fire(self) -> None:
        """The lease is lost. Called by the thread that found out."""
        with _guard.lock:
            if self._stage is _Stage.INSIDE:
                self._stage = _Stage.FIRED
        self._send()

    def _send(self) -> None:
        with _guard.lock:
            if self._stage is _Stage.FIRED:
                self._send_news()

    def claim(self) -> LockLost | None:
        """In the body's own thread: the error that is to be raised there now, if any."""
        if self._stage is not _Stage.FIRED:
            return None
        self._stage = _Stage.OUTSIDE
        self._told = self._error()
        self._forget()
        return self._told


# The bodies of each thread, the innermost last.
_bodies: dict[int, list[Interruption]] = {}
_guard = Guard()


def _way_to(body: Interruption) -> Callable[[], object]:
    """What sends the news on its way to a body that begins here. Any thread calls it, and it
    switches neither threads nor greenlets."""
    global _replaced
    if green():
        greenlet, hub = sys.modules["greenlet"].getcurrent(), sys.modules["gevent"].get_hub()
        return lambda: hub.loop.run_callback_threadsafe(_throw, body, greenlet)
    if threading.current_thread() is not threading.main_thread():
        raise LockConfigError(
            'lock_on_lost="raise" cannot interrupt a body in a thread that is not the main thread '
            f"of its process: {INSTEAD}"
        )
    if signal.getsignal(signal.SIGURG) is not _on_signal:
        # For good: without the handler a signal that is late would be an error of its own.
        _replaced = signal.signal(signal.SIGURG, _on_signal)
    return partial(signal.pthread_kill, threading.get_ident(), signal.SIGURG)


# The handler that was there before.
_replaced: Any = None


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _replaced
    # For the innermost body of this thread that has been fired at.
    for body in reversed(_bodies.get(threading.get_ident(), [])):
        if (error := body.claim()) is not None:
            raise error
    before, _replaced = _replaced, None  # should that handler call this one in turn
    try:
        if callable(before):
            before(number, frame)
    finally:
        _replaced = before


def _throw(body: Interruption, greenlet: Any) -> None:
    # In the hub, so that no greenlet runs between the question and the throw.
    if (error := body.claim()) is not None:
        greenlet.throw(error)
