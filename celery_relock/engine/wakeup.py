"""The inbox of this process at a store: where it hears of grants, and of holds taken by force."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ..errors import LockConfigError
from . import ids, process
from .events import logger
from .platform import native_lock, start_native_thread, wakes_across_threads
from .protocol import Backend, Notice
from .renewal import granted, keepalive, lose


class Inbox:
    """One inbox: opened by the first wait or the first long hold, and anew after a fork."""

    def __init__(self, backend: Backend) -> None:
        self._store = backend
        self._pid = 0
        self._reset()

    def _reset(self) -> None:
        self._name = ids.new_attempt_id()
        self._started = self._listening = self._refused = False
        self._tried = threading.Event()
        self._starting = native_lock()
        self._pid = process.pid

    @property
    def name(self) -> str:
        if self._pid != process.pid:
            self._reset()
        return self._name

    @property
    def listening(self) -> bool:
        return self._listening and self._pid == process.pid

    @property
    def started(self) -> bool:
        return self._started and self._pid == process.pid

    def start(self) -> None:
        """Begin to listen, without waiting for it; called by the keep-alive thread."""
        if wakes_across_threads():
            self._begin(start_native_thread)

    def listen(self, timeout: float = 2.0) -> None:
        """Be reachable for all that wait."""
        self._begin(start_native_thread if wakes_across_threads() else _start_thread)
        self._tried.wait(timeout)

    def _begin(self, start: Callable[[Callable[[], None]], None]) -> None:
        name = self.name
        with self._starting:
            first, self._started = not self._started, True
        if not first:
            return
        try:
            # Without the lock: under eventlet this switches greenlets, and the next one to want a
            # native lock would stop the whole thread.
            start(lambda: self._listen(name))
        except BaseException:
            self._started = False
            raise

    def _listen(self, name: str) -> None:
        pause = 0.1
        try:
            while True:
                try:
                    self._store.listen(name, self._connected, self._hear)
                except Exception as error:  # noqa: BLE001  # whatever it is, it is tried again
                    pause = 0.1 if self._listening else min(pause * 2, 5.0)
                    self._listening = False
                    self._tried.set()
                    if isinstance(error, LockConfigError) and not self._refused:
                        self._refused = True
                        logger.warning("this process hears of its turn late: %s", error)
                    logger.debug("the inbox lost its connection and opens it again: %s", error)
                    time.sleep(pause)
        finally:
            # An exception from outside ended the thread: the next one who waits starts another.
            self._started = self._listening = False

    def _connected(self) -> None:
        self._listening = True
        self._tried.set()
        keepalive.look_now(self._store)

    def _hear(self, notice: Notice) -> None:
        lease = keepalive.find(notice.execution_id, notice.attempt_id)
        if lease is None or lease.backend is not self._store:
            return
        if notice.kind == "granted":
            granted(lease, notice.attempt_id, (notice.fence,))
        elif notice.kind == "lost":
            lose(lease, "it was taken away by force")
            keepalive.discard(lease)


def _start_thread(target: Callable[[], None]) -> None:
    threading.Thread(target=target, name="relock-inbox", daemon=True).start()
