"""A lock for use outside of tasks, or inside a task's body: a context manager with the interface
of redis-py's lock.

    with Lock("redis://localhost", "account:42") as lock:
        write(fence=lock.fence)

    client.lock("account:42", timeout=30, lock_class=Lock)
"""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from redis.exceptions import LockError

from .engine import platform, reentrancy
from .engine.events import logger
from .engine.lease import Lease, State
from .engine.protocol import Answer, Conflict, Held
from .errors import LockUnavailable, RelockError
from .named_lock import (
    Grip,
    LockNeverFree,
    LockNotAcquired,
    LockNotOwned,
    LockNotTaken,
    NamedLock,
    Token,
)

if TYPE_CHECKING:
    from redis import Redis
    from redis.cluster import RedisCluster

    Client = Redis | RedisCluster

__all__ = ["Lock", "LockNeverFree", "LockNotAcquired", "LockNotOwned", "LockNotTaken"]


class ThreadGrip(Grip):
    """What a thread has of a `Lock`."""

    __slots__ = ("_coroutine",)

    def __init__(self, lease: Lease, caller: threading.Thread, borrowed: bool = False) -> None:
        super().__init__(lease, caller, borrowed)
        task = platform.coroutine()
        self._coroutine = None if task is None else weakref.ref(task)

    @property
    def of_another(self) -> bool:
        """Whether another coroutine of this thread acquired the lock, and has not ended."""
        task = None if self._coroutine is None else self._coroutine()
        others = task is not None and not task.done() and task is not platform.coroutine()
        return others and self.holder is threading.current_thread()


class _Own:
    """What each thread has of a `Lock`. As `GripOfAll`."""

    def __init__(self) -> None:
        self._here = threading.local()

    def of(self, caller: object) -> ThreadGrip | None:
        return getattr(self._here, "grip", None)

    def acquired(self, caller: object, grip: ThreadGrip) -> None:
        self._here.grip = grip

    def released(self, caller: object, grip: ThreadGrip) -> None:
        self._here.grip = None

    not_released = acquired


class Lock(NamedLock["Client"]):
    """A named lock with the interface of `redis.lock.Lock`, and what redis-py's lock lacks: the
    lease is renewed while the holder lives, waiters are served in turn, and a holder can re-enter.

    The same object re-enters in the same thread, and so does every `Lock` with the same `owner`.
    Inside a Celery task a `Lock` without another owner re-enters what the task's own call stack
    holds. Two objects without an owner exclude each other, as redis-py's do.

    Args:
        redis: a client of redis-py, the URL of a Redis, or a function that returns a client.
        name: the lock name. It excludes any `Lock` and any `LockedTask` with the same name.
        timeout: the lease: seconds for which the lock outlives a dead holder. Default 30.
        sleep: not used, as there is no polling; accepted because redis-py's Lock has it.
        blocking: whether to wait by default.
        blocking_timeout: seconds to wait at most; None waits without a bound.
        thread_local: False lets another thread release what this thread acquired. Then the object
            re-enters only by a `with` block inside of a `with` block.
        raise_on_release_error: False logs a lock that was lost inside `with` instead of raising.
        owner: any text. Every `Lock` with the same owner re-enters.
        limit: how many permits the lock has, 1 or more.
        mode: "exclusive"; or "shared", to hold the lock together with all other shared holders.
        renew: False lets the lock end `timeout` seconds after the acquire, as redis-py's does. It
            counts as lost 5 % before, so that nobody works on when another one acquires it.
        namespace: the prefix of all keys. Use the Celery app's `relock_namespace`.
        min_replicas: how many replicas must have a hold before it is valid, as with
            `relock_min_replicas`.

    Attributes:
        local: what each thread holds; with `thread_local=False`, what all threads hold together.

    Raises:
        LockConfigError: a value cannot be used.
    """

    _who = "this thread"
    _own = _Own
    _grip_type = ThreadGrip

    def acquire(
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: Token = None,
    ) -> bool:
        return isinstance(self._take(self._wait(blocking, blocking_timeout), token), Held)

    def release(self) -> None:
        caller, grip = threading.current_thread(), self._grip("released")
        if self._let_go(caller, grip):
            return
        try:
            # Before the command is sent: with thread_local=False another thread may acquire the
            # lock before this call returns.
            self.local.released(caller, grip)
            reentrancy.pop(grip.lease)
            kept = self._engine.release(grip.lease)
        except BaseException:
            self.local.not_released(caller, grip)
            raise
        if not kept:
            raise self._not_owned("was lost before it was released")

    def extend(self, additional_time: float, replace_ttl: bool = False) -> bool:
        grip = self._grip("extended")
        length = self._length(grip, additional_time, replace_ttl)
        if not grip.borrowed and not self._engine.extend(grip.lease, length):
            raise self._not_owned("was lost before it was extended")
        return True

    def downgrade(self) -> None:
        grip = self._grip("downgraded")
        self._check_downgrade(grip)
        if not self._engine.downgrade(grip.lease):
            raise self._not_owned("was lost before it was downgraded")

    def reacquire(self) -> bool:
        return self.extend(self._grip("extended").length, replace_ttl=True)

    def __enter__(self) -> Lock:
        wait, before = self._wait(None, None), self._standing()
        try:
            self._check_acquired(self._take(wait, None, block=True), wait)
            return self
        except BaseException:
            # A signal's exception, once the lock was acquired: `with` calls no `__exit__` then.
            if self._has_begun(threading.current_thread(), before):
                with suppress(RelockError):
                    self.release()
            raise

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
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

    def _take(self, wait: float | None, token: Token, *, block: bool = False) -> Answer:
        caller, grip = threading.current_thread(), self._thread_grip()
        if grip is not None and (found := self._with(grip, wait, block)) is not None:
            return found
        outer = self._outer()
        if (borrowed := self._borrow(caller, outer)) is not None:
            return borrowed
        lease = self._engine.lease(self._claim(token, outer, wait))
        self._set_up(lease)
        try:
            answer = self._engine.acquire(lease, wait)
            if isinstance(answer, Held):
                self._put_on_the_stack(lease, block)
                self._acquired(caller, lease)
                return answer
        except BaseException:
            # A signal's exception can strike on any line above.
            reentrancy.pop(lease)
            with suppress(RelockError):
                # A frozen server may still execute an acquire that was not answered.
                self._engine.later.try_now(partial(self._engine.release, lease))
            raise
        self._tell_conflict(lease, answer, wait)
        self._engine.later.try_now(partial(self._engine.release, lease))
        self._check_deadlock(answer)
        return answer

    def locked(self) -> bool:
        return bool(self._engine.inspect(self.name).holds)

    def owned(self) -> bool:
        lease = self._lease
        if lease is None or lease.lost:
            return False
        state = self._engine.inspect(self.name, (lease.claim.execution_id,))
        return self._is_among(state, lease)

    def fenced(self, connection: Any) -> AbstractContextManager[None]:
        from .contrib.sql import fenced

        return fenced(connection, *self._to_fence())

    def _with(self, grip: ThreadGrip, wait: float | None, block: bool) -> Held | Conflict | None:
        """What this thread's grip says of another acquire, if that need not be asked for."""
        lease = grip.lease
        if lease.state is State.ASKED and self._own_grip() is grip:
            self.release()  # a failed release has left it in our own way
            return None
        if lease.may_hold and grip.of_another:
            return self._of_another(lease, wait)
        return self._re_enter(threading.current_thread(), grip, block)

    def _of_another(self, lease: Lease, wait: float | None) -> Conflict:
        """The conflict: another coroutine of this thread holds the lock through this object."""
        if wait is None:
            raise LockNeverFree(
                f"the lock {self.name!r} is held by another coroutine of this thread, which cannot "
                "release it while this one waits: use celery_relock.asyncio.Lock",
                name=self.name,
            )
        claim = lease.claim
        return Conflict(
            self.name, lease.remaining, lease.fences[0], claim.owner, claim.label, waiting=0
        )

    def _not_taken(self, verb: str) -> LockNotTaken:
        if self._thread_grip() is None:
            return super()._not_taken(verb)
        return LockNotTaken(
            f"the lock {self.name!r} is held by another coroutine of this thread, so it cannot be "
            f"{verb} here: use celery_relock.asyncio.Lock",
            name=self.name,
        )

    def _own_grip(self) -> ThreadGrip | None:
        grip = self._thread_grip()
        # With thread_local=False anybody can release the lock.
        others = grip is not None and grip.of_another and not self._for_any_thread
        return None if others else grip

    def _thread_grip(self) -> ThreadGrip | None:
        """This thread's grip, or that of all threads; any of its coroutines may have it."""
        grip: ThreadGrip | None = self._grip_of(threading.current_thread())
        return grip
