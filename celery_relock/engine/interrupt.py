"""Interrupt the body of a run whose lock is lost (`lock_on_lost="raise"`).

The keep-alive thread finds the loss; the body runs elsewhere. How to get at it depends on where:

- main thread (prefork, solo): a signal whose handler raises, the one way that also ends a blocking
  call (PEP 475). SIGURG, because one that comes too late is ignored by default;
- another thread: an asynchronous exception, which lands at the next bytecode;
- a greenlet: its hub throws it in, when the body lets another greenlet run.

All of them arrive some time later. So what arrives asks in the body's own thread (`claim`) whether
the body still runs and has not heard of it yet.
"""

from __future__ import annotations

import ctypes
import enum
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from ..errors import LockLost
from .lease import Lease
from .platform import Guard, wakes_across_threads

_SIGNAL = getattr(signal, "SIGURG", None)
# eventlet's hub cannot be woken by another thread, so it has a look now and then, in seconds.
_LOOK_EVERY = 0.2


class _Stage(enum.Enum):
    OUTSIDE = 0  #: before the body, or after it
    INSIDE = 1
    FIRED = 2  #: the lock is lost and the news is on its way
    RAISED = 3  #: the body has heard of it


class Interruption:
    """Around a body: raises `error()` in it when the lease is lost, at most once and only inside.

    A loss that was found before the body begins is raised at once.
    """

    def __init__(self, lease: Lease, error: Callable[[], LockLost]) -> None:
        self._lease = lease
        self._error = error
        self._stage = _Stage.OUTSIDE
        self._thread = 0
        self._told: LockLost | None = None
        self._way = _Way()

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._way = _way_to(self)
        self._stage = _Stage.INSIDE
        _bodies.setdefault(self._thread, []).append(self)
        self._lease.on_lost = self.fire
        if self._lease.lost:  # found before there was anybody to tell
            self.__exit__(None, None, None)
            raise self._error()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._leave()
        except LockLost as late:
            self._leave()
            # It was on its way when the body ended, whose outcome stands; unless it is for an outer
            # body, which this one is a part of.
            if late is not self._told and not isinstance(late, _Arrival):
                raise

    def _leave(self) -> None:
        with _guard.lock:
            self._stage = _Stage.OUTSIDE
        # What is on its way lands in the calls that follow, and is caught in `__exit__`.
        self._way.close()
        self._forget()
        for outer in _bodies.get(self._thread, ()):
            # Signals and exceptions do not queue: what was meant for an outer body may have been
            # taken for the news to this one.
            outer._send()

    def _forget(self) -> None:
        bodies = _bodies.get(self._thread, [])
        if self in bodies:
            bodies.remove(self)
        if not bodies:
            _bodies.pop(self._thread, None)

    def fire(self, reason: str) -> None:
        """The lease is lost. Called by the thread that found out."""
        with _guard.lock:
            if self._stage is _Stage.INSIDE:
                self._stage = _Stage.FIRED
        self._send()

    def _send(self) -> None:
        with _guard.lock:
            if self._stage is _Stage.FIRED:
                self._way.send()

    def claim(self) -> LockLost | None:
        """In the body's own thread: what is to be raised there now, if anything is."""
        if self._stage is not _Stage.FIRED:
            return None
        self._stage = _Stage.RAISED
        self._told = self._error()
        self._forget()
        return self._told

    @property
    def thread(self) -> int:
        return self._thread


# The bodies of each thread, the innermost last.
_bodies: dict[int, list[Interruption]] = {}
_guard = Guard()


def _claim_here() -> LockLost | None:
    """For the innermost body of this thread that has been fired at."""
    for body in reversed(_bodies.get(threading.get_ident(), [])):
        if (error := body.claim()) is not None:
            return error
    return None


class _Way:
    """How the news gets into a body's thread. Neither call switches threads or greenlets."""

    def send(self) -> None:
        """On the way with it. Called by any thread."""

    def close(self) -> None:
        """The body has ended."""


def _way_to(body: Interruption) -> _Way:
    if not wakes_across_threads():
        return _EventletHub(body)
    gevent = sys.modules.get("gevent.monkey")
    if gevent is not None and gevent.is_module_patched("threading"):
        return _GeventHub(body)
    if _SIGNAL is not None and threading.current_thread() is threading.main_thread():
        return _Signal()
    return _AsyncException(body.thread)


class _Signal(_Way):
    def __init__(self) -> None:
        global _others
        assert _SIGNAL is not None
        if signal.getsignal(_SIGNAL) is not _on_signal:
            # For good: taken away again, a signal that is late would be an error of its own.
            _others = signal.signal(_SIGNAL, _on_signal)
        self._thread = threading.get_ident()

    def send(self) -> None:
        assert _SIGNAL is not None
        signal.pthread_kill(self._thread, _SIGNAL)


_others: Any = None


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _others
    if (error := _claim_here()) is not None:
        raise error
    before, _others = _others, None  # should that handler call this one, which it replaced
    try:
        if callable(before):
            before(number, frame)
    finally:
        _others = before


class _AsyncException(_Way):
    def __init__(self, thread: int) -> None:
        self._thread = thread

    def send(self) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self._thread), ctypes.py_object(_Arrival)
        )


class _Arrival(LockLost):
    """An asynchronous exception is sent as a class. Where it arrives and is made, it becomes the
    error of the body there; one that still is of this class came too late for any body."""

    def __new__(cls, made: LockLost | None = None) -> Any:
        # Up to Python 3.11 an exception whose class is not the one that was sent is made once more.
        return made or _claim_here() or super().__new__(cls)

    def __init__(self) -> None:
        super().__init__("a lock was lost when the work under it had just ended")


class _GeventHub(_Way):
    def __init__(self, body: Interruption) -> None:
        self._body = body
        self._greenlet = sys.modules["greenlet"].getcurrent()
        self._hub = sys.modules["gevent"].get_hub()

    def send(self) -> None:
        self._hub.loop.run_callback_threadsafe(_throw, self._body, self._greenlet)


class _EventletHub(_Way):
    def __init__(self, body: Interruption) -> None:
        self._body = body
        self._greenlet = sys.modules["greenlet"].getcurrent()
        self._hub = sys.modules["eventlet.hubs"].get_hub()
        self._timer: Any = None
        self._look()

    def _look(self) -> None:
        self._timer = self._hub.schedule_call_global(_LOOK_EVERY, self._look)
        _throw(self._body, self._greenlet)

    def close(self) -> None:
        self._timer.cancel()


def _throw(body: Interruption, greenlet: Any) -> None:
    # In the hub, so that no greenlet runs between the question and the throw.
    if (error := body.claim()) is not None:
        greenlet.throw(error)
