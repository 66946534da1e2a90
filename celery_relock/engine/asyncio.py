"""An engine, for coroutines: what it asks of the backend, a few threads ask, and who waits for a
lock sleeps on a future of the event loop. All else is as for threads: the process's keep-alive
renews, and its inbox hears.

A task may be cancelled at every `await`, while a thread goes on with what the task has asked for.
The lease is then released by another call, which no cancellation reaches; and an answer that comes
later finds nobody who holds.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from ..errors import LockUnavailable, RelockError
from . import platform
from .engine import Engine, Step, acquiring
from .lease import Lease, State
from .protocol import Answer, Claim, Outcome
from .wakeup import OPENING

_T = TypeVar("_T")


# Seconds for which a coroutine waits for a thread though its server was given up meanwhile.
_PATIENCE = 2.0


class TaskLease(Lease):
    """A lease that an asyncio task (None: who drives the loop) waits for and holds.

    It is `unwanted` when its acquire was cancelled or has failed. Then it is `abandoned`, as it is
    when its loop is closed, or the task that holds it has ended. What nobody was told of is
    withdrawn then. What somebody was told of ends with its lease.
    """

    __slots__ = ("_engine", "_loop", "_ringing", "_task", "unwanted")

    def __init__(self, claim: Claim, engine: Engine, task: asyncio.Task[Any] | None) -> None:
        super().__init__(claim, engine.backend, engine.inbox)
        self._engine = engine
        self._loop = weakref.ref(asyncio.get_running_loop())
        self._task = None if task is None else weakref.ref(task)
        self._ringing: asyncio.Future[None] | None = None
        self.unwanted = False

    def is_here(self) -> bool:
        # A task that was begun in the block has a copy of its context, and is not in the block.
        here = self._task is None or self._task() is platform.coroutine()
        return here and super().is_here()

    @property
    def abandoned(self) -> bool:
        loop = self._loop()
        if self.unwanted or loop is None or loop.is_closed():
            return True
        # Another task may acquire the lock for one that has ended since: that is told afterwards.
        if self.holder is not None and self._task is not None and not self.for_any_thread:
            task = self._task()
            if task is None or task.done():
                return True
        return super().abandoned

    def withdraw(self) -> None:
        self.unwanted = True
        engine = self._engine
        with suppress(RuntimeError):  # no thread to spare: its lease ends it
            pool = engine.pool_for(self.claim.names)
            pool.submit(engine.later.try_now, partial(engine.release, self))

    def tell_release(self, before: State, had: bool) -> bool:
        # Nobody was told that it was acquired.
        return self.unwanted or super().tell_release(before, had)

    def ring(self) -> None:
        if (ringing := self._ringing) is not None:
            _tell(ringing)

    async def doze(self, seconds: float, over: Callable[[], bool]) -> None:
        """Wait for a ring, at most so long; not at all if what it is to tell is over."""
        loop = asyncio.get_running_loop()
        self._ringing = ringing = loop.create_future()
        alarm = loop.call_later(seconds, _settle, ringing)
        try:
            if not over():  # asked after the future is there: a ring before that found none
                await ringing
        finally:
            alarm.cancel()
            self._ringing = None


class AsyncEngine:
    """What an engine does for a lock of this name, for coroutines of any event loop."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name

    async def acquire(self, lease: TaskLease, wait: float | None = 0.0) -> Outcome:
        """As `Engine.acquire`. Cancelled, or if it fails, it releases what the lease has or is
        about to have, and waits for that, unless the task is cancelled again."""
        try:
            return await self._acquire(lease, wait)
        except BaseException as error:
            lease.unwanted = True
            if lease.may_hold and not isinstance(error, GeneratorExit):  # as of a closed loop
                work, released = self._begin_release(lease)
                # Later, if not now: a frozen server may still execute what was not answered.
                work.add_done_callback(partial(self._again, lease, LockUnavailable))
                await asyncio.wait([released])
            raise

    async def _acquire(self, lease: TaskLease, wait: float | None) -> Outcome:
        engine = self._engine
        steps = acquiring(lease, wait, engine.inbox.listening.hears)
        result: Answer | None = None
        while True:
            try:
                step, seconds = steps.send(result)
            except StopIteration as end:
                outcome: Outcome = end.value
                return outcome
            if step is Step.DOZE:
                await lease.doze(seconds, lambda: lease.state is not State.WAITING)
            elif step is Step.SLEEP:
                await asyncio.sleep(seconds)
            elif step is Step.LISTEN:
                with engine.inbox.opening(lease.ring) as tried:
                    await lease.doze(min(seconds, OPENING), tried)
            else:
                result = await self._do(lease, step, seconds)

    async def _do(self, lease: TaskLease, step: Step, seconds: float) -> Answer | None:
        """As `Engine.do`. Cancelled before a thread is free, nothing is sent."""
        # Here, not in the thread: who is cancelled while that begins has asked.
        is_first = lease.switch(State.ASKED, State.NEW)
        undo = partial(lease.switch, State.NEW, State.ASKED) if is_first else None
        return await self.call("acquire", self._engine.do, lease, step, seconds, undo=undo)

    def _in_turn(
        self, since: float, verb: str, call: Callable[[], _T], undo: Callable[[], object] | None
    ) -> _T:
        """Make a call that has waited for a thread since then. If that was as long as a server is
        given, and others were told meanwhile that it cannot do this, nobody is asked: else each of
        a thousand coroutines would wait for all those ahead."""
        engine = self._engine
        outages, key = engine.outages, (verb, engine.backend.route((self._name,)))
        seen, why = outages.get(key, (0.0, ""))
        if seen > since and time.monotonic() - since > _PATIENCE:
            if undo:
                undo()
            raise LockUnavailable(
                f"Cannot {verb} lock {self._name!r}, as its Redis has failed others: {why}",
                self._name,
            )
        try:
            return call()
        except LockUnavailable as error:
            outages[key] = time.monotonic(), error.reason
            raise

    async def release(self, lease: Lease) -> bool:
        """As `Engine.release`. Cancelled, it releases all the same, and waits for that, unless the
        task is cancelled again. If that fails, it is tried again, as nobody hears of it."""
        if not lease.may_hold:
            return True
        work, released = self._begin_release(lease)
        try:
            await asyncio.wait([released])
        except asyncio.CancelledError:
            work.add_done_callback(partial(self._again, lease, RelockError))
            await asyncio.wait([released])
            raise
        return released.result()

    def _begin_release(self, lease: Lease) -> tuple[Future[bool], asyncio.Future[bool]]:
        undo = partial(lease.switch, State.ASKED, State.RELEASED)  # who asks may try again
        try:
            # Here, not in the thread: who is cancelled until one is free has not lost the lock.
            release = partial(self._engine.release, lease, given_up=lease.give_up())
            return self._begin("release", release, undo)
        except BaseException:  # no thread to spare, or a signal's
            undo()
            raise

    def _again(self, lease: Lease, after: type[RelockError], work: Future[bool]) -> None:
        if isinstance(work.exception(), after):
            self._engine.later.add(partial(self._engine.release, lease))

    async def call(
        self,
        verb: str,
        call: Callable[..., _T],
        *args: Any,
        undo: Callable[[], object] | None = None,
    ) -> _T:
        """What a call of the engine returns, made in a thread. Cancelled before a thread is free,
        it is not made. `undo` is called if it is not."""
        work, done = self._begin(verb, partial(call, *args), undo)
        try:
            return await done
        finally:
            if work.cancel() and undo:
                undo()

    def _begin(
        self, verb: str, call: Callable[[], _T], undo: Callable[[], object] | None = None
    ) -> tuple[Future[_T], asyncio.Future[_T]]:
        """Let a thread make a call. `undo` is called if the thread makes none."""
        done = asyncio.get_running_loop().create_future()
        in_turn = partial(self._in_turn, time.monotonic(), verb, call, undo)
        work = self._engine.pool_for((self._name,)).submit(copy_context().run, in_turn)
        # Not `wrap_future`, which logs an error if the loop is closed by then.
        work.add_done_callback(partial(_tell, done))
        # Else asyncio logs the error of a release that nobody waits for any more.
        done.add_done_callback(lambda done: done.cancelled() or done.exception())
        return work, done


def _tell(future: asyncio.Future[Any], work: Future[Any] | None = None) -> None:
    """As `_settle`, from any thread."""
    with suppress(RuntimeError):  # the loop is closed
        future.get_loop().call_soon_threadsafe(_settle, future, work)


def _settle(future: asyncio.Future[Any], work: Future[Any] | None = None) -> None:
    """End the wait for a future, with what some work has come to."""
    try:
        _set(future, work)
    except BaseException:  # a signal's, which asyncio only logs: who waits has to go on
        _set(future, work)
        raise


def _set(future: asyncio.Future[Any], work: Future[Any] | None) -> None:
    if future.done() or (work is not None and work.cancelled()):
        return  # it was cancelled, or rung before, or a signal has ended the wait
    if work is None:
        future.set_result(None)
    elif (error := work.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(work.result())
