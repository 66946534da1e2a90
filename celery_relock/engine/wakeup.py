"""The inbox of this process at a backend: where the process hears of grants and of forced releases.

A message is a hint. Whoever waits looks for itself at every heartbeat, so a message that is lost,
forged or garbled delays by a heartbeat at the most.
"""

from __future__ import annotations

import threading
import time

from ..errors import LockConfigError
from . import ids, platform
from .events import logger
from .platform import native_lock, start_native_thread
from .protocol import Backend, Notice
from .renewal import granted, keepalive, lose


class Inbox:
    """Opened by the first wait or the first long hold of this process, and anew after a fork."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._pid = 0
        self._reset()

    def _reset(self) -> None:
        self._name = ids.new_attempt_id()
        self._started = self._listening = self._refused = False
        self._tried = threading.Event()
        self._starting = native_lock()
        self._pid = platform.pid

    @property
    def name(self) -> str:
        if self._pid != platform.pid:
            self._reset()
        return self._name

    @property
    def listening(self) -> bool:
        return self._listening and self._pid == platform.pid

    @property
    def started(self) -> bool:
        return self._started and self._pid == platform.pid

    def start(self) -> None:
        """Begin to listen, without waiting for the subscription."""
        name = self.name
        with self._starting:
            first, self._started = not self._started, True
        if not first:
            return
        try:
            start_native_thread(lambda: self._listen(name))
        except BaseException:
            self._started = False
            raise

    def listen(self, timeout: float = 2.0) -> None:
        """Begin to listen, and wait for the subscription, or for the failure of a first try."""
        self.start()
        self._tried.wait(timeout)

    def _listen(self, name: str) -> None:
        pause = 0.1
        try:
            while True:
                try:
                    self._backend.listen(name, self._connected, self._hear)
                except Exception as error:  # noqa: BLE001 - whatever it is, it is tried again
                    pause = 0.1 if self._listening else min(pause * 2, 5.0)
                    self._listening = False
                    self._tried.set()
                    if isinstance(error, LockConfigError) and not self._refused:
                        self._refused = True
                        logger.warning("this process hears of its turn late: %s", error)
                    logger.debug("the inbox lost its connection and opens it again: %s", error)
                    time.sleep(pause)
        finally:
            # An exception from outside ended the thread: whoever waits next starts another thread.
            self._started = self._listening = False

    def _connected(self) -> None:
        self._listening = True
        self._tried.set()
        keepalive.look_now(self._backend)

    def _hear(self, notice: Notice) -> None:
        lease = keepalive.find(notice.execution_id, notice.attempt_id)
        if lease is None or lease.backend is not self._backend:
            return
        if notice.kind == "granted":
            granted(lease, notice.attempt_id, (notice.fence,))
        elif notice.kind == "lost":
            lose(lease, "it was released by force")
            keepalive.discard(lease)
