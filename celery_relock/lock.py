"""A lock for use outside of tasks, or inside a task's body: a context manager with the interface
of redis-py's lock.

    with Lock("redis://localhost", "account:42") as lock:
        write(fence=lock.fence)

    client.lock("account:42", timeout=30, lock_class=Lock)
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from contextlib import AbstractContextManager, suppress
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from redis.exceptions import LockError, LockNotOwnedError

from . import engines
from .engine import ids, platform, reentrancy
from .engine.engine import Engine
from .engine.events import describe_conflict, describe_deadlock, label_of
from .engine.lease import Lease, State
from .engine.protocol import LONGEST, SHARED, Answer, Claim, Conflict, Deadlocked, Held
from .errors import (
    LockConfigError,
    LockConflict,
    LockDeadlock,
    LockLost,
    LockUnavailable,
    RelockError,
)
from .naming.template import check_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from redis import Redis

    from .engine.events import Work

__all__ = ["Lock", "LockNotAcquired", "LockNotOwned", "LockNotTaken"]

logger = logging.getLogger("celery_relock")

DEFAULT_LEASE = 30.0
MODES = ("exclusive", "shared")
_Token: TypeAlias = "str | bytes | None"
# The shortest lease, in seconds: Redis gets leases in milliseconds.
_SHORTEST = 0.001


class _AsInRedisPy(RelockError):
    def __init__(
        self,
        message: str,
        name: str | None = None,
        owner: str | None = None,
        remaining: float | None = None,
    ) -> None:
        super().__init__(message, name, owner, remaining)
        #: The lock name, under the name of redis-py's attribute.
        self.lock_name = name


class LockNotAcquired(_AsInRedisPy, LockConflict, LockError):
    """The lock could not be acquired in the time allowed. Also redis-py's `LockError`."""


class LockNeverFree(_AsInRedisPy, LockDeadlock, LockError):
    """Waiting for the lock would never end. Also redis-py's `LockError`."""


class LockNotTaken(_AsInRedisPy, LockError):
    """This thread has not acquired the lock, or has released it. Also redis-py's `LockError`."""


class LockNotOwned(_AsInRedisPy, LockLost, LockNotOwnedError):
    """This thread acquired the lock and has lost it since. Also redis-py's `LockNotOwnedError`."""


class Grip:
    """A thread's hold on a `Lock`. The grip disappears with its thread or its `Lock`, and then
    nothing renews the lease. (The lease has a weak reference to it. `__del__` would swallow the
    exception of a time limit's signal.)"""

    __slots__ = ("__weakref__", "borrowed", "coroutine", "depth", "lease", "length", "thread")

    def __init__(self, lease: Lease, borrowed: bool = False) -> None:
        self.lease = lease
        self.length = lease.claim.lease
        self.depth = 1
        #: Whether the lease belongs to an outer holder, which releases it.
        self.borrowed = borrowed
        coroutine = platform.coroutine()
        #: The asyncio task that acquired the lock, if one did.
        self.coroutine = None if coroutine is None else weakref.ref(coroutine)
        #: The thread that acquired the lock, if other threads share the grip.
        self.thread = threading.current_thread() if lease.shared else None
        if not borrowed:
            lease.holder = weakref.ref(self)


class NamedLock:
    """What the `Lock` for threads and the `Lock` for coroutines have in common."""

    def __init__(
        self, name: str | bytes, timeout: float | None, owner: str | None, limit: Any, mode: str
    ) -> None:
        self.name = check_name(as_text(name), "Lock")
        self.timeout = timeout
        self._owner = None if owner is None else ids.short(owner)
        self._limit = SHARED if mode == "shared" else limit
        if timeout is not None:
            check_length(timeout, f"timeout={timeout!r}", self.name)
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise LockConfigError(
                f"Lock {self.name!r}: limit={limit!r} cannot be used. Use a whole number from 1.",
                name=self.name,
            )
        if mode not in MODES or (mode == "shared" and limit != 1):
            raise LockConfigError(
                f"Lock {self.name!r}: mode={mode!r} with limit={limit!r} cannot be used. Use "
                '"exclusive", or "shared" without a limit.',
                name=self.name,
            )

    def _claim(self, token: _Token, owner: str | None, outer: Lease | None, ends: bool) -> Claim:
        execution_id = ids.new_id() if token is None else ids.short(as_text(token))
        return Claim(
            execution_id=execution_id,
            # Without a token each attempt is an execution of its own, whose id is random.
            attempt_id=execution_id[:8] if token is None else ids.new_attempt_id(),
            owner=owner or execution_id,
            names=(self.name,),
            limits=(self._limit,),
            lease=DEFAULT_LEASE if self.timeout is None else float(self.timeout),
            label=label_of("Lock"),
            by_owner=self._owner is not None,
            # The outer holder used another client: the server finds its hold by its execution.
            ancestors=(outer.claim.execution_id,) if outer else (),
            # A bounded wait cannot deadlock: it ends by its bound, as redis-py's does.
            stuck=() if ends else reentrancy.stuck(),
        )

    def _covering(self, lease: Lease) -> bool:
        """Whether the lease covers what is asked for: a shared lease does not cover an exclusive
        lock."""
        of = lease.claim
        return self._limit == SHARED or of.limits[of.names.index(self.name)] != SHARED

    def _check_downgrade(self, lease: Lease, borrowed: bool, depth: int) -> None:
        self._still_ours(lease)
        if borrowed or depth > 1:
            outer = "an outer holder" if borrowed else "an outer block"
            raise LockConfigError(
                f"the lock {self.name!r} cannot be downgraded here, as {outer} relies on it: "
                "downgrade it where it was acquired first",
                name=self.name,
            )

    def _still_ours(self, lease: Lease) -> None:
        if lease.lost:
            raise self._not_owned(
                "was lost: it was not renewed in time, or it was released by force"
            )
        if lease.state is not State.HELD:
            raise self._not_owned(
                "might be released already: Redis did not answer its release. Release it again"
            )

    def _not_owned(self, what: str) -> LockNotOwned:
        return LockNotOwned(f"the lock {self.name!r} {what}", name=self.name)


class Lock(NamedLock):
    """A named lock with the interface of `redis.lock.Lock`, and what redis-py's lock lacks: the
    lease is renewed while the holder lives, waiters are served in turn, and a holder can re-enter.

    The same object re-enters in the same thread, and so does every `Lock` with the same `owner`.
    Inside a Celery task a `Lock` re-enters what the task's own call stack holds. Two objects
    without an owner exclude each other, as redis-py's do.

    Args:
        redis: a client of redis-py, the URL of a Redis, or a function that returns a client.
        name: the lock name. It excludes any `Lock` and any `LockedTask` with the same name.
        timeout: the lease: seconds for which the lock outlives a dead holder. Default 30.
        sleep: not used, as there is no polling; accepted because redis-py's Lock has it.
        blocking: whether to wait by default.
        blocking_timeout: seconds to wait at most; None waits without a bound.
        thread_local: False lets another thread release what this thread acquired.
        raise_on_release_error: False logs a lock that was lost inside `with` instead of raising.
        owner: any text. Every `Lock` with the same owner re-enters.
        limit: how many permits the lock has, 1 or more.
        mode: "exclusive"; or "shared", to hold the lock together with all other shared holders.
        renew: False lets the lock end `timeout` seconds after the acquire, as redis-py's does.
        namespace: the prefix of all keys. Use the Celery app's `relock_namespace`.
        min_replicas: how many replicas must have a hold before it is valid, as with
            `relock_min_replicas`.

    Attributes:
        local: what each thread holds; with `thread_local=False`, what all threads hold together.

    Raises:
        LockConfigError: a value cannot be used.
    """

    def __init__(
        self,
        redis: Redis | str | Callable[[], Redis] | Engine,
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
        mode: str = "exclusive",
        renew: bool = True,
        namespace: str = engines.NAMESPACE,
        min_replicas: int = 0,
    ) -> None:
        super().__init__(name, timeout, owner, limit, mode)
        self.blocking = blocking
        self.blocking_timeout = blocking_timeout
        self.raise_on_release_error = raise_on_release_error
        self._renew = renew
        self._engine = (
            redis
            if isinstance(redis, Engine)
            else engines.engine_for(redis, namespace, replicas=(min_replicas, 1.0))
        )
        self.local: Any = threading.local() if thread_local else SimpleNamespace()
        self._shared = not thread_local
        # Threads whose lost grip another thread has replaced: their release is not of its lock.
        self._replaced: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def acquire(
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: _Token = None,
    ) -> bool:
        """Acquire the lock, or re-enter what this thread holds.

        Args:
            sleep: not used; accepted because redis-py's Lock has it.
            blocking: whether to wait. Default: the `blocking` of this object.
            blocking_timeout: seconds to wait at most. Default: the `blocking_timeout` of this
                object.
            token: not needed; accepted because redis-py's Lock has it. It becomes the id of the
                hold.

        Returns:
            True if acquired; False if another holder kept the lock until `blocking_timeout` passed.

        Raises:
            LockNotOwned: this thread acquired the lock before and has lost it since.
            LockNeverFree: waiting without a bound would never end: the holder waits for this
                thread, or is this thread through another object.
            LockUnavailable: Redis cannot be reached.
            LockConfigError: the token cannot be used.
        """
        if not (self.blocking if blocking is None else blocking):
            wait: float | None = 0.0
        else:
            wait = self.blocking_timeout if blocking_timeout is None else blocking_timeout
        return isinstance(self._take(wait, token), Held)

    def release(self) -> None:
        """Release the lock. After re-entries, only the last release counts.

        Raises:
            LockNotTaken: this thread does not hold the lock.
            LockNotOwned: the lock was lost meanwhile.
            LockUnavailable: Redis cannot be reached. The lock ends with its lease, or by another
                `release`.
        """
        if threading.current_thread() in self._replaced:
            self._replaced.discard(threading.current_thread())
            raise self._not_owned(
                "was lost, and another thread has acquired it through this object"
            )
        grip = self._own_grip() or self._grip("released")
        if grip.depth > 1:
            grip.depth -= 1
            return
        if grip.borrowed:
            self.local.grip = None  # the outer hold goes on
            grip.lease.rely(-1)
            return
        try:
            # Before the command is sent: with thread_local=False another thread may acquire the
            # lock before this call returns.
            self.local.grip = None
            reentrancy.pop(grip.lease)
            kept = self._engine.release(grip.lease)
        except BaseException:
            if self._own_grip() is None:  # else another thread has acquired the lock meanwhile
                self.local.grip = grip  # the caller can try again
            raise
        if not kept:
            raise self._not_owned("was lost before it was released")

    def extend(self, additional_time: float, replace_ttl: bool = False) -> bool:
        """Make the lease longer, or set its length.

        If this `Lock` has re-entered the hold of an outer holder, such as its task, the lease is
        the outer holder's and stays as it is.

        Args:
            additional_time: seconds to add to the lease.
            replace_ttl: True makes the lease end `additional_time` seconds from now.

        Returns:
            True.

        Raises:
            LockNotTaken: this thread does not hold the lock.
            LockNotOwned: the lock is lost.
            LockConfigError: the lease would be shorter than a millisecond; or the outer holder's
                lease is not renewed, and ends before the time asked for.
            LockUnavailable: Redis did not answer. If the call makes the lease shorter, `remaining`
                counts the shorter lease from now on.
        """
        grip = self._grip("extended")
        lease = grip.lease
        length = additional_time if replace_ttl else lease.remaining + additional_time
        check_length(length, f"extend({additional_time!r}) to {length:g} s", self.name)
        if grip.borrowed:
            self._still_ours(lease)
            if not lease.renews and length > lease.remaining:
                raise LockConfigError(
                    f"the lock {self.name!r} is held by an outer Lock(renew=False): extend the "
                    "outer Lock",
                    name=self.name,
                )
            return True
        if not self._engine.extend(lease, length):
            raise self._not_owned("was lost before it was extended")
        return True

    def downgrade(self) -> None:
        """Share the lock that this thread holds, without a moment in which it is free: shared
        waiters that are first in the queue get it at once. The lock stays shared until it is
        released.

        Raises:
            LockNotTaken: this thread does not hold the lock.
            LockNotOwned: the lock is lost.
            LockConfigError: the lock has several permits, or another holder of the permit relies on
                it.
            LockUnavailable: Redis cannot be reached. The lock might be shared; call again.
        """
        grip = self._grip("downgraded")
        self._check_downgrade(grip.lease, grip.borrowed, grip.depth)
        if not self._engine.downgrade(grip.lease):
            raise self._not_owned("was lost before it was downgraded")

    def reacquire(self) -> bool:
        """Set the lease back to its full length. Returns and raises as `extend` does."""
        return self.extend(self._grip("extended").length, replace_ttl=True)

    def __enter__(self) -> Lock:
        wait = self.blocking_timeout if self.blocking else 0.0
        answer = self._take(wait, None)
        if not isinstance(answer, Held):
            text = f"{describe_conflict(self.name, answer)}; not acquired within {wait or 0:g} s"
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
            logger.warning("Cannot release a lock at the end of its block: %s", failure)
        except BaseException:
            # A signal's exception, on any line above. Nobody would release the lock later, and
            # while this object lives it would be renewed. (Nothing can be done about an exception
            # that strikes before the first line.)
            if before in (None, self._standing()):
                with suppress(RelockError):
                    self.release()
            raise

    def _take(self, wait: float | None, token: _Token) -> Answer:
        grip = self._own_grip()
        if grip is not None and grip.coroutine and (other := self._is_another(grip, wait)):
            return other
        if grip is not None and (again := self._re_enter(grip)) is not None:
            return again
        working = in_task()
        outer = None
        if working and self._owner is None:
            outer = reentrancy.holding(None, self.name, self._limit == SHARED)
        if outer is not None and outer.backend is self._engine.backend:
            self._still_ours(outer)
            outer.rely()
            self.local.grip = Grip(outer, borrowed=True)
            outer.tell("reentered")
            return Held(outer.fences, outer.reentered)
        owner = self._owner or (outer.claim.owner if outer else workflow() if working else None)
        lease = self._engine.lease(self._claim(token, owner, outer, ends=wait is not None))
        lease.renews, lease.shared = self._renew, self._shared
        lease.work = work() if working else None
        try:
            answer = self._engine.acquire(lease, wait)
            if isinstance(answer, Held):
                reentrancy.push(lease)
                if grip is not None and grip.thread is not None and grip.lease.lost:
                    self._replaced.add(grip.thread)
                self._replaced.discard(threading.current_thread())
                self.local.grip = Grip(lease)
                return answer
        except BaseException:
            # A signal's exception can strike on any line above.
            reentrancy.pop(lease)
            with suppress(RelockError):
                self._engine.release(lease)
            raise
        policy = "raise" if wait == 0 else "block"
        lease.tell("conflict", describe_conflict(self.name, answer), policy=policy)
        self._engine.release(lease)
        if isinstance(answer, Deadlocked):
            path = answer.path
            text = describe_deadlock(path, reentrancy.shares(path[-1]))
            raise LockNeverFree(text, name=self.name)
        return answer

    def locked(self) -> bool:
        """Whether anybody holds the lock.

        Raises:
            LockUnavailable: Redis cannot be reached.
        """
        return bool(self._engine.inspect(self.name).holds)

    def owned(self) -> bool:
        """Whether this thread holds the lock, according to Redis as well.

        Raises:
            LockUnavailable: Redis cannot be reached.
        """
        lease = self._lease
        if lease is None or lease.lost:
            return False
        ours = lease.claim.execution_id, lease.claim.attempt_id
        return any(
            (hold.execution_id, hold.attempt_id) == ours
            for hold in self._engine.inspect(self.name).holds
        )

    @property
    def fence(self) -> int:
        """The fencing token; 0 if this thread does not hold the lock. See `Hold.fence`."""
        lease = self._lease
        return 0 if lease is None else lease.fences[lease.claim.names.index(self.name)]

    @property
    def lost(self) -> bool:
        """Whether this thread acquired the lock and has lost it since."""
        lease = self._lease
        return lease is not None and lease.lost

    @property
    def remaining(self) -> float:
        """Seconds for which the hold is certain; 0 if this thread does not hold the lock."""
        lease = self._lease
        return 0.0 if lease is None else lease.remaining

    def check(self) -> None:
        """Make sure that the lock is not lost. Call it before anything that needs the lock.

        Raises:
            LockNotTaken: this thread does not hold the lock.
            LockNotOwned: the lock is lost.
        """
        self._still_ours(self._grip("relied on").lease)

    def fenced(self, connection: Any) -> AbstractContextManager[None]:
        """A block of a database transaction that only the holder of the lock can commit. See
        `Hold.fenced`.

        Raises:
            LockNotTaken: this thread does not hold the lock.
            LockNotOwned: the lock is lost.
            LockLost: the database has seen a higher fencing token.
            LockConfigError: the connection cannot be used, is not in a transaction, or the lock has
                several permits.
        """
        from .contrib.sql import fenced

        limits = self._grip("relied on").lease.claim.limits
        return fenced(connection, {self.name: self.fence}, max(limits), self.check)

    @property
    def _lease(self) -> Lease | None:
        """The lease of this thread's hold, lost or not."""
        grip = self._own_grip()
        return grip.lease if grip and grip.lease.state in (State.HELD, State.LOST) else None

    def _is_another(self, grip: Grip, wait: float | None) -> Conflict | None:
        """The conflict, if another coroutine of this thread holds the lock through this object."""
        task, lease = grip.coroutine and grip.coroutine(), grip.lease
        if not task or task.done() or task is platform.coroutine() or lease.state is not State.HELD:
            return None
        if wait is None:
            raise LockNeverFree(
                f"the lock {self.name!r} is held by another coroutine of this thread, which cannot "
                "release it while this one waits: use celery_relock.asyncio.Lock",
                name=self.name,
            )
        of = lease.claim
        return Conflict(self.name, lease.remaining, lease.fences[0], of.owner, of.label, 0)

    def _re_enter(self, grip: Grip) -> Held | None:
        lease = grip.lease
        if lease.state is State.ASKED:
            self._engine.release(lease)  # a failed release has left it in our own way
        elif lease.state in (State.HELD, State.LOST) and (
            not self._shared or grip.thread is threading.current_thread()
        ):
            self._still_ours(lease)
            if not self._covering(lease):
                return None  # it was downgraded: the acquire that follows reports the deadlock
            grip.depth += 1
            return Held(lease.fences, lease.reentered)
        return None

    def _own_grip(self) -> Grip | None:
        grip: Grip | None = getattr(self.local, "grip", None)
        # A forked child does not hold what its parent holds.
        return None if grip is None or grip.lease.pid != platform.pid else grip

    def _standing(self) -> tuple[Grip | None, int]:
        """This thread's grip, and how often it holds the lock, re-entries included."""
        grip = self._own_grip()
        return grip, 0 if grip is None else grip.depth

    def _grip(self, verb: str) -> Grip:
        grip = self._own_grip()
        if grip is None:
            text = f"the lock {self.name!r} is not held by this thread, so it cannot be {verb}"
            raise LockNotTaken(text, name=self.name)
        return grip


def check_length(seconds: Any, where: str, name: str) -> None:
    """Raise LockConfigError if a lease cannot have this length."""
    if not isinstance(seconds, int | float) or not _SHORTEST <= seconds <= LONGEST:
        raise LockConfigError(
            f"Lock {name!r}: {where} cannot be used. Use a lease of {_SHORTEST} s or more, and of "
            "ten years at the most.",
            name=name,
        )


def as_text(value: str | bytes) -> str:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise LockConfigError(f"a lock name must be UTF-8 text, not {value!r:.200}") from error
    if not isinstance(value, str):
        raise LockConfigError(f"a lock name must be text, not {value!r:.200}")
    return value


def in_task() -> bool:
    """Whether a Celery task runs here, called directly or by a worker. Does not load Celery."""
    celery = sys.modules.get("celery._state")
    if celery is None:
        return False
    try:
        local = celery._task_stack._local
        found = local.__storage__.get(local.__ident_func__())
    except AttributeError:
        return bool(celery._task_stack.stack)
    # `_task_stack.stack`, without the exception that it raises and catches, which takes longer than
    # everything else before the request to Redis.
    return bool(found and found.get("stack"))


def workflow() -> str | None:
    """The workflow of the task that runs here, None if the task was called directly."""
    from .worker import message

    return message.workflow()


def work() -> Work | None:
    """The task that runs here, as events carry it."""
    from .worker import events as telling

    return telling.work_for(sys.modules["celery._state"]._task_stack.top, None)
