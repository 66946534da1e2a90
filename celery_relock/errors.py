"""The errors of celery-relock: one class for each case that a caller handles differently.

    RelockError
    ├── LockConflict       another execution held the lock for as long as this one waits
    │   └── LockDeadlock   waiting would never end: holders wait for each other, or for themselves
    ├── DuplicateTask      an equal call is queued or runs
    ├── LockLost           a hold ended before its work did; the work might be unprotected
    ├── LockUnavailable    Redis cannot be reached, or cannot take writes now; try again later
    └── LockConfigError    an option, a lock name or the server is wrong; a retry will not help

Every error survives `pickle` with its attributes: it crosses process borders in a worker, and an
exception that cannot be unpickled stops the worker's main process (celery-singleton issue 55).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from .version import __version__

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: Where the documentation of this version is.
SITE = f"https://celery-relock.readthedocs.io/en/{__version__}/"


class RelockError(Exception):
    """Base of all errors of celery-relock.

    Attributes:
        name (str | None): the lock name; None if the error is not about a single lock.
        owner (str | None): the owner of the conflicting hold; None if it is not known.
        remaining (float | None): seconds until the lease of the conflicting hold ends; None if
            they are not known.
        reason (str): the text of the error, without the address of its page.
    """

    def __init__(
        self,
        message: str,
        name: str | None = None,
        owner: str | None = None,
        remaining: float | None = None,
    ) -> None:
        super().__init__(message)
        # All of them: Celery rebuilds the error from `args` when it reads a result stored as JSON.
        self.args = (message, name, owner, remaining)
        self.reason = message
        self.name = name
        self.owner = owner
        self.remaining = remaining

    def __str__(self) -> str:
        return f"{self.reason} ({self.page})"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.reason!r})"  # Celery's log shows it

    @property
    def page(self) -> str:
        """The URL of the page that says what the error means and what to do."""
        # Only our own classes have a page: users define subclasses.
        documented = (kind.__name__ for kind in type(self).__mro__ if kind.__module__ == __name__)
        name = next(documented)
        return f"{SITE}errors/{'index' if name == 'RelockError' else name}.html"

    def __reduce__(self) -> tuple[Any, ...]:
        # Bypass the constructor: a user's subclass may have changed its arguments.
        return _rebuild, (type(self), self.args, self.__dict__.copy())


def _rebuild(kind: type[RelockError], args: tuple[Any, ...], state: dict[str, Any]) -> RelockError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class LockConflict(RelockError):
    """Another execution held the lock for as long as this one waits. The body did not run."""


class LockDeadlock(LockConflict):
    """Waiting would never end: the holder of the lock waits for a lock that you hold."""


class DuplicateTask(RelockError):
    """An equal call is queued or runs (`lock_dedup`). Nothing was sent.

    Attributes:
        task_id (str | None): the task id of the equal call.
    """

    def __init__(
        self,
        message: str,
        name: str | None = None,
        owner: str | None = None,
        remaining: float | None = None,
        task_id: str | None = None,
    ) -> None:
        super().__init__(message, name, owner, remaining)
        self.args = (*self.args, task_id)
        self.task_id = task_id


class LockLost(RelockError):
    """The hold ended before its work did: its lease ran out, or it was released by force."""


class LockUnavailable(RelockError):
    """Redis cannot be reached, or refuses writes now. Nothing is known about the lock."""


class LockConfigError(RelockError):
    """An option, a lock name or the server cannot be used. The message says what to change."""


def without_locals(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Around a function that is given a password: a LockConfigError comes without the frames in
    between, whose local variables crash reporters print."""

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except LockConfigError as error:
            refusal = error.with_traceback(None)
        del args, kwargs
        if refusal.__cause__ is not None:
            refusal.__cause__.with_traceback(None)
        refusal.__context__ = refusal.__cause__
        raise refusal

    return call
