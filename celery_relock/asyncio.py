"""The `Lock` for coroutines, with the interface of redis.asyncio's lock.

    async with Lock("redis://localhost", "account:42") as lock:
        await write(fence=lock.fence)

    client.lock("account:42", timeout=30, lock_class=Lock)  # a client of redis.asyncio

It is the same lock that tasks and threads acquire under that name.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from redis.exceptions import LockError

from .engine import platform, reentrancy
from .engine.asyncio import AsyncEngine, TaskLease
from .engine.events import logger
from .engine.lease import Lease, State
from .engine.protocol import Answer, Held
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
    import redis.asyncio
    from redis.cluster import RedisCluster

    Client = redis.Redis | RedisCluster | redis.asyncio.Redis | redis.asyncio.RedisCluster

__all__ = ["Lock", "LockNeverFree", "LockNotAcquired", "LockNotOwned", "LockNotTaken"]


class _Own:
    """What each asyncio task has of a `Lock`. As `GripOfAll`."""

    def __init__(self) -> None:
        self._grips: weakref.WeakKeyDictionary[object, Grip] = weakref.WeakKeyDictionary()

    def of(self, caller: object) -> Grip | None:
        return self._grips.get(caller)

    def acquired(self, caller: object, grip: Grip) -> None:
        self._grips[caller] = grip

    def released(self, caller: object, grip: Grip) -> None:
        self._grips.pop(caller, None)

    not_released = acquired


class Lock(NamedLock["Client"]):
    """A named lock with the interface of `redis.asyncio.lock.Lock`, and what redis-py's lock lacks:
    the lease is renewed while the holder lives, waiters are served in turn, and a holder can
    re-enter.

    The same object re-enters in the same asyncio task, and so does every `Lock` with the same
    `owner`. Inside a Celery task a `Lock` without another owner re-enters what the task's own call
    stack holds. Many asyncio tasks can use one object: they exclude each other. The task that calls
    `acquire` is the holder, so `asyncio.wait_for(lock.acquire(), 5)` acquires for the caller;
    outside of asyncio the thread is.

    A task that is cancelled while it acquires, waits or releases leaves nothing behind.

    The lease is renewed until the task ends, or its event loop is closed. You can use a `Lock` in
    one event loop after another.

    The arguments are those of `celery_relock.Lock`, with two differences.

    Args:
        redis: as there, or a client of redis.asyncio. Only its address and credentials are used.
        thread_local: False lets another task release what this task acquired. Then the object
            re-enters only by an `async with` block inside of an `async with` block.

    Raises:
        LockConfigError: a value cannot be used.
    """

    _who = "this asyncio task"
    _loops = True
    _own = _Own

    @property
    def _aside(self) -> AsyncEngine:
        return AsyncEngine(self._engine, self.name)

    # These are not coroutine functions: a call belongs to the task that makes it, even if another
    # task awaits the result, as in `asyncio.wait_for` before Python 3.12.

    def acquire(
        self,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: Token = None,
    ) -> Coroutine[Any, Any, bool]:
        wait = self._wait(blocking, blocking_timeout)
        return self._acquire(wait, token, _caller())

    def release(self) -> Coroutine[Any, Any, None]:
        return self._release(_caller())

    def extend(
        self, additional_time: float, replace_ttl: bool = False
    ) -> Coroutine[Any, Any, bool]:
        return self._extend(self._grip("extended"), additional_time, replace_ttl)

    def downgrade(self) -> Coroutine[Any, Any, None]:
        return self._downgrade(self._grip("downgraded"))

    def reacquire(self) -> Coroutine[Any, Any, bool]:
        grip = self._grip("extended")
        return self._extend(grip, grip.length, replace_ttl=True)

    def owned(self) -> Coroutine[Any, Any, bool]:
        return self._owned(self._lease)

    async def locked(self) -> bool:
        return bool((await self._aside.call("inspect", self._engine.inspect, self.name)).holds)

    async def __aenter__(self) -> Lock:
        wait, before = self._wait(None, None), self._standing()
        try:
            self._check_acquired(await self._take(wait, None, _caller(), block=True), wait)
            return self
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException:
            # A signal's exception, once the lock was acquired, as for threads.
            if self._has_begun(_caller(), before):
                with suppress(RelockError):
                    await self.release()
            raise

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        before = None
        try:
            before = self._standing()
            await self.release()
        except (LockError, LockUnavailable) as failure:
            # What the block itself raised says more.
            if self.raise_on_release_error and error is None:
                raise
            logger.warning("Cannot release a lock at the end of its block: %s", failure)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException:
            # A signal's exception, on any line above, as for threads.
            if before in (None, self._standing()):
                with suppress(RelockError):
                    await self.release()
            raise

    def fenced(self, connection: Any) -> AbstractAsyncContextManager[None]:
        from .contrib.sql import fenced_async

        return fenced_async(connection, *self._to_fence())

    async def _acquire(self, wait: float | None, token: Token, caller: object) -> bool:
        return isinstance(await self._take(wait, token, _for(caller)), Held)

    async def _take(
        self, wait: float | None, token: Token, caller: object, *, block: bool = False
    ) -> Answer:
        engine, grip = self._aside, self._grip_of(caller)
        if grip is not None and grip.lease.state is State.ASKED:
            await self._release(caller)  # a failed release has left it in our own way
        elif grip is not None and (again := self._re_enter(caller, grip, block)) is not None:
            return again
        outer = self._outer()
        if (borrowed := self._borrow(caller, outer)) is not None:
            return borrowed
        task: Any = None if isinstance(caller, threading.Thread) else caller
        lease = TaskLease(self._claim(token, outer, wait), self._engine, task)
        self._set_up(lease)
        try:
            answer = await engine.acquire(lease, wait)
            if isinstance(answer, Held):
                self._put_on_the_stack(lease, block)
                self._acquired(caller, lease)
                return answer
        except GeneratorExit:
            raise
        except BaseException:
            if lease.state is State.HELD:  # a signal's exception came after it was acquired
                reentrancy.pop(lease)
                if (grip := self._grip_of(caller)) is not None and grip.lease is lease:
                    self.local.released(caller, grip)
                lease.withdraw()
            raise
        self._tell_conflict(lease, answer, wait)
        try:
            await engine.release(lease)
        except LockUnavailable:
            self._engine.later.add(partial(self._engine.release, lease))
        self._check_deadlock(answer)
        return answer

    async def _release(self, caller: object) -> None:
        caller = _for(caller)
        grip = self._grip_of(caller)
        if grip is None:
            raise self._not_taken("released")
        if self._let_go(caller, grip):
            return
        lease = grip.lease
        try:
            # Before the command is sent: another task can acquire the lock before this continues.
            self.local.released(caller, grip)
            reentrancy.pop(lease)
            kept = await self._aside.release(lease)
        except BaseException:
            if lease.may_hold:
                self.local.not_released(caller, grip)
            raise
        if not kept:
            raise self._not_owned("was lost before it was released")

    async def _extend(self, grip: Grip, additional_time: float, replace_ttl: bool) -> bool:
        length = self._length(grip, additional_time, replace_ttl)
        extend = self._engine.extend
        if not grip.borrowed and not await self._aside.call("extend", extend, grip.lease, length):
            raise self._not_owned("was lost before it was extended")
        return True

    async def _downgrade(self, grip: Grip) -> None:
        self._check_downgrade(grip)
        if not await self._aside.call("downgrade", self._engine.downgrade, grip.lease):
            raise self._not_owned("was lost before it was downgraded")

    async def _owned(self, lease: Lease | None) -> bool:
        if lease is None or lease.lost:
            return False
        only = (lease.claim.execution_id,)
        state = await self._aside.call("inspect", self._engine.inspect, self.name, only)
        return self._is_among(state, lease)

    def _own_grip(self) -> Grip | None:
        grip: Grip | None = self._grip_of(_caller())
        return grip


def _caller() -> object:
    """Who calls a method: the asyncio task; in a callback of an event loop, the loop; outside of
    any, the thread, which may drive one (`loop.run_until_complete(lock.acquire())`)."""
    if (task := platform.coroutine()) is not None:
        return task
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return threading.current_thread()


def _for(caller: object) -> object:
    """For whom a coroutine of `Lock` runs. Two callbacks of a loop exclude each other: what one
    asks for has the task that runs it."""
    task = platform.coroutine() if isinstance(caller, asyncio.AbstractEventLoop) else None
    return task or caller
