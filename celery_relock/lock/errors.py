"""The errors of `Lock`: each is one of ours, and what a user of redis-py expects."""

from __future__ import annotations

from redis.exceptions import LockError, LockNotOwnedError

from ..errors import LockConflict, LockDeadlock, LockLost, RelockError


class _AsInRedisPy(RelockError):
    def __init__(
        self,
        message: str,
        name: str | None = None,
        owner: str | None = None,
        remaining: float | None = None,
    ) -> None:
        super().__init__(message, name, owner, remaining)
        #: As redis-py calls it.
        self.lock_name = name


class LockNotAcquired(_AsInRedisPy, LockConflict, LockError):
    """The lock was not to be had in the time allowed. Also redis-py's `LockError`."""


class LockNeverFree(_AsInRedisPy, LockDeadlock, LockError):
    """To wait for the lock would never end. Also redis-py's `LockError`."""


class LockNotTaken(_AsInRedisPy, LockError):
    """This thread has not taken the lock, or has given it back. Also redis-py's `LockError`."""


class LockNotOwned(_AsInRedisPy, LockLost, LockNotOwnedError):
    """This thread took the lock and has lost it since. Also redis-py's `LockNotOwnedError`."""
