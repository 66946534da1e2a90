"""A lock outside of tasks, or anywhere in one: a context manager, and a redis-py citizen.

with Lock("redis://localhost", "account:42") as lock:
    write(fence=lock.fence)

client.lock("account:42", timeout=30, lock_class=Lock)
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from types import SimpleNamespace, TracebackType
from typing import Any

import redis as redis_py
from redis.exceptions import LockError, LockNotOwnedError

from . import compose
from .core import callstack, ids
from .core.answers import Answer, Claim, Held
from .core.engine import Engine
from .core.keepalive import keepalive
from .core.lease import Lease
from .core.messages import describe_conflict, who_am_i
from .errors import LockConfigError, LockConflict, LockLost

logger = logging.getLogger("celery_relock")

DEFAULT_LEASE = 30.0


class LockNotAcquired(LockConflict, LockError):
    """The lock was not to be had in the time allowed. Also redis-py's `LockError`."""


class LockNotOwned(LockLost, LockNotOwnedError):
    """This thread does not hold the lock, or not any more. Also redis-py's `LockNotOwnedError`."""


class Lock:
    """A named lock with the interface of `redis.lock.Lock`, and what that one lacks: its lease is
    renewed while the holder lives, waiters are served in turn, and it can be re-entered.

    Who re-enters: the same object in the same thread; every `Lock` with the same `owner`; inside a
    Celery task, whatever the task's own call stack holds. Two objects without an owner exclude each
    other, as redis-py's do.

    Args:
        redis: a client of redis-py, or the URL of a Redis.
        name: the lock name. A `LockedTask` with the same name is excluded by it, and the other way.
        timeout: seconds that the lock outlives its holder's death (its lease), 30 by default.
        sleep: not used, there is no polling; accepted because redis-py's Lock has it.
        blocking: whether to wait by default.
        blocking_timeout: seconds to wait at most; None waits as long as it takes.
        thread_local: False lets another thread give back what this one took.
        raise_on_release_error: False logs a lock that was lost inside `with` instead of raising.
        owner: who may re-enter; any text.
        limit: how many may be in at the same time.
        renew: False lets the lock end `timeout` seconds after it was taken, as redis-py's does.
        namespace: prefix of all keys; that of the Celery app's `relock_namespace`.

    Raises:
        LockConfigError: a value that cannot be used.
    """

    def __init__(
        self,
        redis: redis_py.Redis | str,
        name: str | bytes,
        timeout: float | None = None,
        sleep: float = 0.1,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
        *,
        owner: str | None = None,
        limit: int = 1,
        renew: bool = True,
        namespace: str = compose.NAMESPACE,
    ) -> None:
        self.name = name.decode() if isinstance(name, bytes) else name
        self.timeout = timeout
        self.blocking = blocking
        self.blocking_timeout = blocking_timeout
        self.raise_on_release_error = raise_on_release_error
        self._owner = owner
        self._limit = limit
        self._renew = renew
        self._engine = _engine(redis, namespace)
        self.local: Any = threading.local() if thread_local else SimpleNamespace()
        _check(self)

    def acquire(
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """Take the lock, or enter once more what this thread holds.

        Args:
            sleep, token: not needed; accepted because redis-py's Lock has them. A token becomes
                the id of the hold.

        Returns:
            False if it was not to be had in time.

        Raises:
            LockNotOwned: this thread took the lock before and has lost it since.
            LockUnavailable: Redis cannot be asked.
        """
        if self._lease is not None:
            self._still_ours()
            self.local.depth += 1
            return True
        outer = self._around()
        if outer is not None:
            self.local.lease, self.local.depth, self.local.inner = outer, 1, True
            self._still_ours()
            return True
        wait = self.blocking_timeout if blocking_timeout is None else blocking_timeout
        if not (self.blocking if blocking is None else blocking):
            wait = 0.0
        lease = self._engine.lease(self._claim(token))
        lease.renews = self._renew
        answer: Answer | None = None
        try:
            answer = self._engine.acquire(lease, wait)
        finally:
            if not isinstance(answer, Held):
                self._engine.release(lease)
        self.local.answer = answer
        if not isinstance(answer, Held):
            return False
        self.local.lease, self.local.depth, self.local.inner = lease, 1, False
        callstack.push(lease)
        return True

    def release(self) -> None:
        """Leave the lock; the last leave gives it back.

        Raises:
            LockError: this thread has not taken it.
            LockNotOwned: it was lost meanwhile.
            LockUnavailable: Redis cannot be told; the lease ends it.
        """
        lease = self._lease
        if lease is None:
            raise LockError(f"the lock {self.name!r} is not held here, so it cannot be given back")
        if self.local.depth > 1:
            self.local.depth -= 1
            return
        self.local.lease = None
        if self.local.inner:
            return
        callstack.pop(lease)
        if not self._engine.release(lease):
            raise self._not_owned("was lost before it was given back")

    def extend(self, additional_time: float, replace_ttl: bool = False) -> bool:
        """Make the lease longer by `additional_time` seconds, or with `replace_ttl` exactly so long.

        Raises:
            LockError: this thread has not taken the lock.
            LockNotOwned: it is lost.
        """
        lease = self._lease
        if lease is None:
            raise LockError(f"the lock {self.name!r} is not held here, so it cannot be extended")
        length = additional_time if replace_ttl else lease.remaining + additional_time
        if not self._engine.extend(lease, length):
            raise self._not_owned("was lost before it was extended")
        return True

    def reacquire(self) -> bool:
        """Set the lease back to its full length. Raises as `extend` does."""
        return self.extend(self._length, replace_ttl=True)

    def locked(self) -> bool:
        """Whether anybody holds the lock."""
        return bool(self._engine.inspect(self.name).holds)

    def owned(self) -> bool:
        """Whether this thread holds the lock, and the server agrees."""
        lease = self._lease
        if lease is None or lease.lost:
            return False
        holds = self._engine.inspect(self.name).holds
        return any(hold.nonce == lease.claim.nonce for hold in holds)

    @property
    def fence(self) -> int:
        """The number of this entry, 0 if the lock is not held here. See `Hold.fence`."""
        lease = self._lease
        if lease is None:
            return 0
        return lease.fences[lease.claim.names.index(self.name)]

    @property
    def lost(self) -> bool:
        """Whether the lock was taken here and has ended since."""
        lease = self._lease
        return lease is not None and lease.lost

    @property
    def remaining(self) -> float:
        """Seconds for which the lock is certain; 0 if it is not held here."""
        lease = self._lease
        return 0.0 if lease is None else lease.remaining

    def check(self) -> None:
        """Raises LockNotOwned if the lock is not held here, or is lost."""
        if self._lease is None:
            raise self._not_owned("is not held here")
        self._still_ours()

    def __enter__(self) -> Lock:
        if not self.acquire():
            text = describe_conflict(self.name, self.local.answer)
            waited = f"not to be had within {self.blocking_timeout or 0:g} s"
            raise LockNotAcquired(f"{text}; {waited}", name=self.name)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.release()
        except LockError:
            if self.raise_on_release_error:
                raise
            logger.warning("the lock %r was lost before its block had ended", self.name)

    def __del__(self) -> None:
        # Dropped while held: nobody is left to give it back, so nothing may go on renewing it.
        lease = getattr(getattr(self, "local", None), "lease", None)
        if lease is not None and not self.local.inner:
            keepalive.discard(lease)

    @property
    def _lease(self) -> Lease | None:
        lease: Lease | None = getattr(self.local, "lease", None)
        # A forked child does not hold what its parent holds.
        return None if lease is None or lease.pid != os.getpid() else lease

    @property
    def _length(self) -> float:
        return DEFAULT_LEASE if self.timeout is None else float(self.timeout)

    def _around(self) -> Lease | None:
        """What the call stack of this task holds already, or None outside of tasks."""
        if self._owner is None and _workflow() is not None:
            return callstack.holding(self._engine.store, self.name)
        return None

    def _claim(self, token: str | bytes | None) -> Claim:
        text = token.decode() if isinstance(token, bytes) else token
        run = ids.new_id() if text is None else ids.short(text)
        owner = _workflow() or run if self._owner is None else ids.short(self._owner)
        return Claim(
            run=run,
            nonce=ids.nonce(),
            owner=owner,
            names=(self.name,),
            limits=(self._limit,),
            lease=self._length,
            who=who_am_i("Lock"),
            by_owner=self._owner is not None,
        )

    def _still_ours(self) -> None:
        if self.lost:
            raise self._not_owned("was lost: nobody renewed it in time, or it was taken by force")

    def _not_owned(self, what: str) -> LockNotOwned:
        return LockNotOwned(f"the lock {self.name!r} {what}", name=self.name)


def _engine(redis: redis_py.Redis | str, namespace: str) -> Engine:
    if isinstance(redis, str):
        return compose.engine_for_url(redis, namespace)
    if isinstance(redis, redis_py.Redis):
        return compose.engine_for_client(redis, namespace)
    raise LockConfigError(f"Lock needs a redis.Redis client or a Redis URL, not {type(redis)}")


def _check(lock: Lock) -> None:
    if not lock.name.strip():
        raise LockConfigError("a lock name must not be empty")
    if lock.timeout is not None and lock.timeout <= 0:
        raise LockConfigError(f"timeout={lock.timeout!r}: give seconds above 0", name=lock.name)
    if lock._limit < 1:
        raise LockConfigError(f"limit={lock._limit!r}: give at least 1", name=lock.name)


def _workflow() -> str | None:
    """The workflow of the Celery task that runs here. Celery is not loaded just to say none does."""
    if "celery._state" not in sys.modules:
        return None
    from .task.owner import workflow

    return workflow()


__all__ = ["Lock", "LockNotAcquired", "LockNotOwned"]
