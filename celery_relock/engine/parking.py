"""Messages that are parked, and their way back to the broker."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence

from ..errors import LockUnavailable
from . import events, ids, platform
from .protocol import Backend, Message, Sender

logger = logging.getLogger("celery_relock")

# How soon a backend that was away is asked again, in seconds.
AGAIN = 0.5


class Parking:
    """The parked messages of one backend, as far as this process can resume them.

    Attributes:
        sender: publishes messages to their broker; None where nobody can (a `Lock` without an app).
        remember: for how many seconds an execution counts as ended that was taken out of the queue.
    """

    def __init__(self, backend: Backend, remember: float = 3600.0) -> None:
        self._backend = backend
        self.remember = remember
        self.sender: Sender | None = None
        self._reset()

    def _reset(self) -> None:
        self._over: list[str] = []
        self._guard = threading.Lock()
        self._pid = platform.pid

    @property
    def home(self) -> str:
        """The broker that this process sends to, "" for none."""
        return "" if self.sender is None else self.sender.home

    def forward(self, messages: Iterable[Message]) -> None:
        """Resume messages. A message that cannot be sent stays parked, and its turn comes again."""
        for message in messages:
            try:
                if self.sender is not None:
                    self.sender.send(message)
            except Exception as error:
                if events.is_thrown_in(error):
                    raise
                logger.warning(
                    "a message that is parked for the lock %r could not be resumed, trying again "
                    "in some seconds: %s",
                    message.name,
                    error,
                )

    def resume(self, tasks: Sequence[str] = ()) -> float | None:
        """Resume whatever is due, and these tasks (short ids) in any case.

        Returns:
            In how many seconds to look again; None while nothing is parked.

        Raises:
            LockUnavailable, LockConfigError: see `Backend`.
        """
        found = self._backend.resume(self.home, ids.new_attempt_id(), tasks)
        self.forward(found.messages)
        return found.recheck

    def withdraw(self, execution_id: str, remember: float | None = None) -> bool:
        """Take an execution's message out of its queues for good. False if it was not parked."""
        remember = self.remember if remember is None else remember
        had, messages = self._backend.withdraw(execution_id, remember, self.home)
        self.forward(messages)
        return had

    def withdraw_later(self, execution_id: str) -> None:
        """The same as soon as the backend can be asked again, in another thread."""
        if self._pid != platform.pid:
            self._reset()  # the parent's thread withdraws what a forked child has copies of
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
                logger.exception("the parked execution %s cannot be withdrawn", self._over[0])
            with self._guard:
                del self._over[0]
                if not self._over:
                    return
