"""A named lock with the interface of redis-py's."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from redis.exceptions import LockError

from .. import engines
from ..engine import ids, reentrancy
from ..engine.lease import Lease
from ..engine.messages import describe_conflict, describe_deadlock, label_of
from ..engine.protocol import Answer, Claim, Deadlocked, Held
from ..errors import LockConfigError, LockUnavailable, RelockError
from ..naming.names import check_name
from .errors import LockNeverFree, LockNotAcquired
from .hand import Grip, Hand
from .tasks import in_task, work, workflow
from .values import as_text, check_length

if TYPE_CHECKING:
    from collections.abc import Callable

    from redis import Redis

logger = logging.getLogger("celery_relock")

DEFAULT_LEASE = 30.0
_Token: TypeAlias = "str | bytes | None"


class Lock(Hand):
    """A named lock with the interface of `redis.lock.Lock`, and what that one lacks: its lease is
    renewed while the holder lives, waiters are served in turn, and it can be re-entered.

    Who re-enters: the same object in the same thread; every `Lock` with the same `owner`; inside a
    Celery task, whatever the task's own call stack holds. Two objects without an owner exclude each
    other, as redis-py's do.

    Args:
        redis: a client of redis-py, the URL of a Redis, or a function that makes a client.
        name: the lock name. A `LockedTask` with the same name is excluded by it, and the other way.
        timeout: seconds that the lock outlives its holder's death (its lease), 30 by default.
        sleep: not used, there is no polling; accepted because redis-py's Lock has it.
        blocking: whether to wait by default.
        blocking_timeout: seconds to wait at most; None waits as long as it takes.
        thread_local: False lets another thread give back what this one took.
        raise_on_release_error: False logs a lock that was lost inside `with` instead of raising.
        owner, limit: who may re-enter (any text), and how many may be in at the same time.
        renew: False lets the lock end `timeout` seconds after it was taken, as redis-py's does.
        namespace: prefix of all keys; that of the Celery app's `relock_namespace`.
        min_replicas: how many replicas have to have the hold; as `relock_min_replicas`.

    Raises:
        LockConfigError: a value that cannot be used.
    """

    def __init__(
        self,
        redis: Redis | str | Callable[[], Redis],
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
        namespace: str = engines.NAMESPACE,
        min_replicas: int = 0,
    ) -> None:
        self.name = check_name(as_text(name), "Lock")
        self.timeout = timeout
        self.blocking = blocking
        self.blocking_timeout = blocking_timeout
        self.raise_on_release_error = raise_on_release_error
        self._owner = None if owner is None else ids.short(owner)
        self._limit = limit
        self._renew = renew
        self._engine = engines.engine_for(redis, namespace, replicas=(min_replicas, 1.0))
        self.local: Any = threading.local() if thread_local else SimpleNamespace()
        self._shared = not thread_local
        if timeout is not None:
            check_length(timeout, f"timeout={timeout!r}", self.name)
        if limit < 1:
            raise LockConfigError(f"limit={limit!r}: give at least 1", name=self.name)

    def acquire(
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: _Token = None,
    ) -> bool:
        """Take the lock, or enter once more what this thread holds.

        Args:
            sleep, token: not needed; accepted because redis-py's Lock has them. A token becomes
                the id of the hold.

        Returns:
            False if it was not to be had in time.

        Raises:
            LockNotOwned: this thread took the lock before and has lost it since.
            LockNeverFree: to wait without a bound would never end: its holder waits for this
                thread, or is this thread by another object.
            LockUnavailable: Redis cannot be asked.
        """
        if not (self.blocking if blocking is None else blocking):
            wait: float | None = 0.0
        else:
            wait = self.blocking_timeout if blocking_timeout is None else blocking_timeout
        return isinstance(self._take(wait, token), Held)

    def release(self) -> None:
        """Leave the lock; the last leave gives it back.

        Raises:
            LockNotTaken: this thread does not hold it.
            LockNotOwned: it was lost meanwhile.
            LockUnavailable: Redis cannot be told. The lease ends it, or another `release`.
        """
        grip = self._own_grip() or self._grip("given back")
        if grip.depth > 1:
            grip.depth -= 1
            return
        if grip.borrowed:
            self.local.grip = None  # the outer hold goes on
            return
        try:
            # Before it is sent: with thread_local=False the next may be in before this returns.
            self.local.grip = None
            reentrancy.pop(grip.lease)
            kept = self._engine.release(grip.lease)
        except BaseException:
            self.local.grip = grip  # what could not be given back can be given back once more
            raise
        if not kept:
            raise self._not_owned("was lost before it was given back")

    def extend(self, additional_time: float, replace_ttl: bool = False) -> bool:
        """Make the lease `additional_time` seconds longer, or with `replace_ttl` exactly so long.

        Raises:
            LockNotTaken: this thread does not hold the lock.
            LockNotOwned: it is lost.
        """
        lease = self._grip("extended").lease
        length = additional_time if replace_ttl else lease.remaining + additional_time
        check_length(length, f"extend({additional_time!r}) makes it {length:g} s", self.name)
        if not self._engine.extend(lease, length):
            raise self._not_owned("was lost before it was extended")
        return True

    def reacquire(self) -> bool:
        """Set the lease back to its full length. Raises as `extend` does."""
        return self.extend(self._grip("extended").length, replace_ttl=True)

    def __enter__(self) -> Lock:
        wait = self.blocking_timeout if self.blocking else 0.0
        answer = self._take(wait, None)
        if not isinstance(answer, Held):
            text = f"{describe_conflict(self.name, answer)}; not to be had within {wait or 0:g} s"
            raise LockNotAcquired(text, name=self.name)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        before = None
        try:
            before = self._standing()
            self.release()
        except (LockError, LockUnavailable) as failure:
            # What the block itself raised says more.
            if self.raise_on_release_error and error is None:
                raise
            logger.warning("at the end of its block: %s", failure)
        except BaseException:
            # A signal's exception, on any line of that. Nobody comes back for what it has left:
            # while this object lives, the lock would be renewed, and entered once more. (One that
            # strikes before the first line finds no context manager in its way.)
            if before in (None, self._standing()):
                with suppress(RelockError):
                    self.release()
            raise

    def _take(self, wait: float | None, token: _Token) -> Answer:
        grip = self._own_grip()
        if grip is not None and (again := self._enter_again(grip)) is not None:
            return again
        working = in_task()
        outer = reentrancy.holding(None, self.name) if working and self._owner is None else None
        if outer is not None and outer.backend is self._engine.backend:
            self._still_ours(outer)
            self.local.grip = Grip(outer, borrowed=True)
            return Held(outer.fences, outer.reentered)
        owner = self._owner or (outer.claim.owner if outer else workflow() if working else None)
        lease = self._engine.lease(self._claim(token, owner, outer, ends=wait is not None))
        lease.renews, lease.shared = self._renew, self._shared
        lease.work = work() if working else None
        try:
            answer = self._engine.acquire(lease, wait)
            if isinstance(answer, Held):
                reentrancy.push(lease)
                self.local.grip = Grip(lease)
                return answer
        except BaseException:
            # A signal's exception may land on any line above.
            reentrancy.pop(lease)
            with suppress(RelockError):
                self._engine.release(lease)
            raise
        lease.tell("conflict", describe_conflict(self.name, answer))
        self._engine.release(lease)
        if isinstance(answer, Deadlocked):
            raise LockNeverFree(describe_deadlock(answer.path), name=self.name)
        return answer

    def _claim(self, token: _Token, owner: str | None, outer: Lease | None, ends: bool) -> Claim:
        execution_id = ids.new_id() if token is None else ids.short(as_text(token))
        return Claim(
            execution_id=execution_id,
            # A run of its own for each attempt is as random as its nonce has to be.
            attempt_id=execution_id[:8] if token is None else ids.new_attempt_id(),
            owner=owner or execution_id,
            names=(self.name,),
            limits=(self._limit,),
            lease=DEFAULT_LEASE if self.timeout is None else float(self.timeout),
            label=label_of("Lock"),
            by_owner=self._owner is not None,
            # Taken by way of another client: the server finds it by its run.
            ancestors=(outer.claim.execution_id,) if outer else (),
            # A wait that has a bound ends by that, as redis-py's does.
            stuck=() if ends else reentrancy.stuck(),
        )
