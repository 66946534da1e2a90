"""What an execution of a message holds beside its locks (the marker of `dedup`, the line of
`order`), from its arrival until nobody needs it any more."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded

from .message import afterwards
from .states import is_autoretried


class HeldBeside(ABC):
    """Base class: `around` ends it when the execution ends, or leaves it to the retry.

    Attributes:
        running: what the room knows while a retry may be sent that gets it; set by `offer`.
        begun: whether the execution has its locks.
    """

    running: ContextVar[Any]

    def __init__(self, task: Any, message: Any) -> None:
        self.task = task
        self.message = message
        self.begun = False

    @property
    @abstractmethod
    def is_for_retries(self) -> bool:
        """Whether a retry that is sent now gets it."""

    @abstractmethod
    def offer(self) -> None:
        """From now on a retry that is sent gets it."""

    @abstractmethod
    def end(self, error: BaseException | None) -> None:
        """The execution is over, or comes again.

        Args:
            error: that it ends with.
        """

    def around(self, call: Callable[[], Any]) -> Any:
        """Call, and end what is held as the call ends."""
        token = self.running.set(None)
        raised, stays_open, done = None, False, False
        try:
            return call()
        except BaseException as error:
            raised = error
            raise
        finally:
            try:
                stays_open = self._stays_open(raised)
                if not stays_open:
                    self.end(raised)
                done = True
            except SoftTimeLimitExceeded:
                pass  # the execution had its outcome before the limit
            finally:
                # A signal's exception strikes where a call begins: here one of those above.
                if not done:
                    stays_open = False
                    self.end(raised)
                if not stays_open:
                    self.running.reset(token)

    def _stays_open(self, error: BaseException | None) -> bool:
        """Whether Celery's autoretry, which lies around the lock, is to make a retry of this error:
        then the retry gets what is held, and the execution ends with its message."""
        if not (self.is_for_retries and isinstance(error, Exception)):
            return False
        if not is_autoretried(self.task, error):
            return False
        if not self.begun:  # a conflict, say
            self.offer()
        afterwards(self.message, lambda: self._end_with_its_message(error))
        return True

    def _end_with_its_message(self, error: Exception) -> None:
        """The retry of its error was sent, or there is none."""
        self.running.set(None)
        self.end(error)
