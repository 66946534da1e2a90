"""Interrupt the body of a run whose lock is lost (`lock_on_lost="raise"`).

The keep-alive thread finds the loss; the body runs elsewhere. How to get at it depends on where:

- main thread (prefork, solo): a signal whose handler raises, the one way that also ends a blocking
  call (PEP 475). SIGURG, because one that comes too late is ignored by default;
- another thread: an asynchronous exception, which lands at the next bytecode;
- a greenlet: a watching greenlet throws it in, when the body lets another greenlet run.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from ..errors import LockLost
from .lease import Lease
from .threads import native_lock

_SIGNAL = getattr(signal, "SIGURG", None)
_WATCH_EVERY = 0.2


class _Interrupted(BaseException):
    """What an asynchronous exception can be: a class without a message."""


class Interruption:
    """Around a body: raises `error()` in it when the lease is lost, at most once."""

    def __init__(self, lease: Lease, error: Callable[[], LockLost]) -> None:
        self._lease = lease
        self._error = error
        self._guard = native_lock()
        self._inside = False
        self._fired = False
        self._thread = 0
        self._reach: Callable[[], None] = self._by_exception

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._inside = True
        if (greenlet := _running_greenlet()) is not None:
            self._reach = _nothing
            threading.Thread(target=self._watch, args=(greenlet,), daemon=True).start()
        elif _SIGNAL is not None and threading.current_thread() is threading.main_thread():
            _install()
            _in_main.append(self)
            self._reach = self._by_signal
        self._lease.on_lost = self.fire

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._leave()
        except _Interrupted:
            # It landed here, after the body: the body's outcome stands.
            self._leave()
        if kind is _Interrupted:
            raise self._error() from None

    def _leave(self) -> None:
        with self._guard:
            self._inside = False
            if self._fired and self._reach == self._by_exception:
                _set_async_exception(self._thread, None)
        if self in _in_main:
            _in_main.remove(self)

    def fire(self, reason: str) -> None:
        """The lease is lost. Called by the thread that found out."""
        with self._guard:
            if self._inside and not self._fired:
                self._fired = True
                self._reach()

    def _by_exception(self) -> None:
        _set_async_exception(self._thread, _Interrupted)

    def _by_signal(self) -> None:
        assert _SIGNAL is not None
        signal.pthread_kill(self._thread, _SIGNAL)

    def raise_here(self) -> None:
        """In the signal handler, so in the main thread itself: nothing can have ended meanwhile."""
        if self._fired:
            _in_main.remove(self)
            raise self._error()

    def _watch(self, greenlet: Any) -> None:
        pause = threading.Event()
        while self._inside:
            if self._fired or self._lease.lost:
                self._inside = False
                _throw(greenlet, self._error())
                return
            pause.wait(_WATCH_EVERY)


_in_main: list[Interruption] = []
_before: Any = None
_installed = False


def _install() -> None:
    global _before, _installed
    if not _installed:
        assert _SIGNAL is not None
        _before = signal.signal(_SIGNAL, _on_signal)
        _installed = True


def _on_signal(number: int, frame: FrameType | None) -> None:
    for interruption in reversed(_in_main):
        interruption.raise_here()
    if callable(_before):
        _before(number, frame)


def _set_async_exception(thread: int, kind: type[BaseException] | None) -> None:
    target = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), target)


def _running_greenlet() -> Any | None:
    """The current greenlet where gevent or eventlet runs the threads, else None."""
    gevent = sys.modules.get("gevent.monkey")
    eventlet = sys.modules.get("eventlet.patcher")
    if gevent is not None and gevent.is_module_patched("threading"):
        return sys.modules["greenlet"].getcurrent()
    if eventlet is not None and eventlet.is_monkey_patched("thread"):
        return sys.modules["greenlet"].getcurrent()
    return None


def _throw(greenlet: Any, error: BaseException) -> None:
    if "gevent" in sys.modules and sys.modules["gevent.monkey"].is_module_patched("threading"):
        sys.modules["gevent"].kill(greenlet, error, block=False)
    else:
        sys.modules["eventlet.hubs"].get_hub().schedule_call_global(0, greenlet.throw, error)


def _nothing() -> None:
    """The watching greenlet finds out by itself."""
