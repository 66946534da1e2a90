"""What an execution of a message holds beside its locks (the marker of `dedup`, the line of
`order`), from its arrival until nobody needs it any more."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded

from .delivery import afterwards, delivery_of
from .ending import is_retried


class HeldBeside(ABC):
    """Base class: `around` ends it when the execution ends, or leaves it to the retry.

    Attributes:
        field: of the header, by which a retry gets it.
        begun: whether the execution has its locks.
    """

    field: str

    def __init__(self, task: Any, message: Any) -> None:
        self.task = task
        self.message = message
        self.delivery = delivery_of(message)
        self.begun = False

    @property
    @abstractmethod
    def to_retry(self) -> list[Any] | None:
        """What stands in the header of a retry that is sent now and gets it; None if none does."""

    def offer(self) -> None:
        """From now on a retry that is sent gets it."""
        if (told := self.to_retry) is not None:
            self.delivery.to_retry[self.field] = told

    @abstractmethod
    def end(self, error: BaseException | None) -> None:
        """The execution is over, or comes again, with this error."""

    def around(self, call: Callable[[], Any]) -> Any:
        """Call, and end what is held as the call ends."""
        raised, done = None, False
        try:
            return call()
        except BaseException as error:
            raised = error
            raise
        finally:
            try:
                if not self._stays_open(raised):
                    self._close(raised)
                done = True
            except SoftTimeLimitExceeded:
                pass  # the execution had its outcome before the limit
            finally:
                if not done:  # the rule in `delivery`
                    self._close(raised)

    def _stays_open(self, error: BaseException | None) -> bool:
        """Whether a retry gets what is held: one that was sent, or that Celery's autoretry, which
        lies around the lock, is to make of this error. Then the execution ends with its message."""
        if self.to_retry is None or not is_retried(self.task, self.delivery, error):
            return False
        if not self.begun:  # a conflict, say
            self.offer()
        afterwards(partial(self._close, error))
        return True

    def _close(self, error: BaseException | None) -> None:
        """No retry gets it from now on, but one that was sent."""
        self.delivery.to_retry.pop(self.field, None)
        self.end(error)
