"""Messages that wait for a lock in Redis, and their way back to the broker."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence

from ..errors import LockUnavailable
from . import events, ids, process
from .protocol import Backend, Message, Sender

logger = logging.getLogger("celery_relock")

# How often a Redis that was away is asked again, in seconds.
AGAIN = 0.5


class Parking:
    """The parked messages of one store, as far as this process can send them on.

    Attributes:
        sender: sends them to their broker; None where nobody can (a `Lock` without an app).
    """

    def __init__(self, backend: Backend) -> None:
        self._store = backend
        self.sender: Sender | None = None
        self._reset()

    def _reset(self) -> None:
        self._over: list[str] = []
        self._guard = threading.Lock()
        self._pid = process.pid

    @property
    def home(self) -> str:
        """The broker that this process sends to, "" for none."""
        return "" if self.sender is None else self.sender.home

    def forward(self, messages: Iterable[Message]) -> None:
        """Send messages on. One that fails stays parked, and is handed out again before long."""
        for message in messages:
            try:
                if self.sender is not None:
                    self.sender.send(message)
            except Exception as error:
                if events.is_thrown_in(error):
                    raise
                logger.warning(
                    "a run that is parked for the lock %r could not be sent on, it is tried again "
                    "in some seconds: %s",
                    message.name,
                    error,
                )

    def resume(self, tasks: Sequence[str] = ()) -> float | None:
        """Send on whatever is due, and these tasks (short ids) in any case.

        Returns:
            In how many seconds to look again; None while nothing is parked.

        Raises:
            LockUnavailable, LockConfigError: see `LockStore`.
        """
        found = self._store.resume(self.home, ids.new_attempt_id(), tasks)
        self.forward(found.messages)
        return found.recheck

    def withdraw(self, execution_id: str, remember: float = 3600.0) -> bool:
        """Take a run's message out of the line for good. False if it was not parked."""
        had, messages = self._store.withdraw(execution_id, remember, self.home)
        self.forward(messages)
        return had

    def withdraw_later(self, execution_id: str) -> None:
        """The same as soon as Redis can be asked again, from another thread."""
        if self._pid != process.pid:
            self._reset()  # what a forked child has a copy of, its parent's thread takes out
        with self._guard:
            self._over.append(execution_id)
            if len(self._over) > 1:
                return
        threading.Thread(target=self._clear, name="relock-withdraw", daemon=True).start()

    def _clear(self) -> None:
        while True:
            try:
                self.withdraw(self._over[0])
            except LockUnavailable:
                time.sleep(AGAIN)
                continue
            except Exception:
                logger.exception("the parked run %s cannot be taken out of its line", self._over[0])
            with self._guard:
                del self._over[0]
                if not self._over:
                    return
