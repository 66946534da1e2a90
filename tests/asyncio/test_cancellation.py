"""A task that is cancelled at whatever `await` leaves neither a hold nor a place, and no answer for
somebody else."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any

import pytest

from celery_relock.asyncio import Lock
from celery_relock.engine.asyncio import LoopEngine
from celery_relock.engine.protocol import LockState
from tests.asyncio.conftest import run
from tests.support import RedisServer
from tests.support.proxy import Proxy

MakeLock = Callable[..., Lock]
State = Callable[[], LockState]
Scenario = Callable[[MakeLock], Coroutine[Any, Any, None]]


class CancelledAt:
    """Runs a coroutine and cancels its task where it suspends for the nth time: as it begins to
    wait, or when it has got what it waited for and has not gone on yet; and once more at the next
    one, if so asked. `count` is how often it suspended."""

    def __init__(self, inner: Coroutine[Any, Any, None], number: int, how: str) -> None:
        self._inner, self._number, self._how = inner, number, how
        self.count = 0

    def __await__(self) -> Generator[Any, Any, None]:
        task = asyncio.current_task()
        assert task is not None
        steps, thrown = self._inner.__await__(), None
        while True:
            try:
                future = steps.send(None) if thrown is None else steps.throw(thrown)
            except StopIteration:
                return
            self.count += 1
            again = self._how == "twice" and self.count == self._number + 1
            if self.count == self._number or again:
                if self._how == "late" and future is not None:
                    future.add_done_callback(lambda _: task.cancel())
                else:
                    task.cancel()
            try:
                thrown = None
                yield future
            except BaseException as error:
                thrown = error


async def free(lock: MakeLock) -> None:
    async with lock():
        await asyncio.sleep(0)


async def held(lock: MakeLock) -> None:
    """It waits in the queue, and gets its turn."""
    other = lock()
    await asyncio.create_task(_hold(other))
    async with lock():
        await asyncio.sleep(0)


async def _hold(other: Lock) -> None:
    task = asyncio.ensure_future(_hold_for(other, acquired := asyncio.Event()))
    _others.add(task)
    task.add_done_callback(_others.discard)
    await acquired.wait()


async def _hold_for(other: Lock, acquired: asyncio.Event) -> None:
    async with other:
        acquired.set()
        await asyncio.sleep(0.02)


_others: set[asyncio.Task[None]] = set()


async def given_up(lock: MakeLock) -> None:
    """It waits in the queue until its time is over."""
    await asyncio.create_task(_hold(lock()))
    one = lock()
    if await one.acquire(blocking_timeout=0.005):  # on a busy machine
        await one.release()


async def by_owner(lock: MakeLock) -> None:
    """Its grant has to be confirmed by another command."""
    await asyncio.create_task(_hold(lock()))
    async with lock(owner="somebody"):
        await asyncio.sleep(0)


async def extended(lock: MakeLock) -> None:
    async with lock() as one:
        await one.extend(5)
        assert await one.owned()


@pytest.mark.parametrize("how", ["early", "late", "twice"])
@pytest.mark.parametrize("scenario", [free, held, given_up, by_owner, extended])
def test_nothing_is_left_wherever_a_task_is_cancelled(
    scenario: Scenario, how: str, lock: MakeLock, state: State
) -> None:
    run(wherever_it_is_cancelled(scenario, how, lock, state))


async def wherever_it_is_cancelled(
    scenario: Scenario, how: str, lock: MakeLock, state: State
) -> None:
    """Cancel it at each `await`, and see that nothing is left."""

    async def at(number: int, fresh: bool) -> int:
        if fresh:  # also while the connection is made, and while the inbox is opened
            lock()._engine._rest()
            await asyncio.sleep(0)
        cancelled = CancelledAt(scenario(lock), number, how)

        async def main() -> None:
            await cancelled

        task = asyncio.create_task(main())
        with suppress(asyncio.CancelledError):
            await task
            assert cancelled.count < number, f"cancellation {number} was swallowed"
        await asyncio.gather(*_others)
        # The second one leaves the rest to be done by itself. A command that a thread sends only
        # after that finds that its attempt has ended.
        while lock()._engine._at_work:
            await asyncio.sleep(0.005)
        assert (state().holds, state().waiting) == ((), 0), number
        # The connections are good: no answer of a cancelled command is left in one.
        assert not await lock().locked()
        async with lock(blocking_timeout=30) as one:
            assert one.fence
        return cancelled.count

    for fresh in (False, True):
        number = 1
        while await at(number, fresh) >= number:
            number += 1
        assert number > 2  # fewer where another task is slow


def test_a_confirmation_that_was_cancelled_and_comes_late_holds_the_lock_for_nobody(
    lock: MakeLock, state: State, redis_server: RedisServer
) -> None:
    async def main() -> None:
        async with lock():
            waiter = asyncio.create_task(lock(redis=proxy.url, owner="somebody").acquire())
            while not state().waiting:
                await asyncio.sleep(0.01)
            copy = proxy.hold("acquire")
        assert await asyncio.to_thread(copy.arrived.wait, 30)
        waiter.cancel()
        with suppress(asyncio.CancelledError):
            await waiter
        copy.deliver()
        assert not state().holds

    with Proxy(redis_server.port) as proxy:
        run(main())


def test_when_the_loop_ends_whoever_holds_releases(lock: MakeLock, state: State) -> None:
    async def hold() -> None:
        async with lock(), lock("b"):
            await asyncio.sleep(60)

    async def main() -> asyncio.AbstractEventLoop:
        waiting = asyncio.create_task(hold()), asyncio.create_task(hold())
        while not state().waiting:
            await asyncio.sleep(0.01)
        del waiting  # both are cancelled with the loop
        return asyncio.get_running_loop()

    loop = run(main())
    assert (state().holds, state().waiting) == ((), 0)
    assert not asyncio.all_tasks(loop), "a task that nobody will ever end"


def cancel_all(*but: asyncio.Task[Any]) -> None:
    """A usual clean-up, in a loop that goes on."""
    for task in asyncio.all_tasks() - {asyncio.current_task(), *but}:
        task.cancel()


async def until(holds: Callable[[], object]) -> None:
    """Not `wait_for` around it, which would be cancelled, too."""
    latest = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < latest
        await asyncio.sleep(0.01)


async def until_it_is_renewed(one: Lock) -> None:
    since = time.monotonic()
    while one._lease.renewed < since:
        one.check()
        await asyncio.sleep(0.01)


def test_a_short_lease_is_renewed_though_all_tasks_of_the_loop_are_cancelled(
    lock: MakeLock,
) -> None:
    async def main() -> None:
        async with lock(timeout=1) as one:
            for _ in range(2):  # also the task that comes after the first one
                cancel_all()
                await until_it_is_renewed(one)

    asyncio.run(main())


def test_who_waits_hears_again_after_all_other_tasks_were_cancelled(
    lock: MakeLock, state: State
) -> None:
    async def main() -> None:
        async with lock() as one:
            waiter = asyncio.create_task(lock().acquire())
            listening = one._engine._listening
            await until(lambda: listening.hears and state().waiting)
            cancel_all(waiter)
            while listening.hears:
                await asyncio.sleep(0)
            await until(lambda: listening.hears)
        assert await waiter

    asyncio.run(main())


def test_a_renewing_task_that_was_cancelled_before_it_began_is_followed_by_another(
    lock: MakeLock,
) -> None:
    async def hold(one: Lock) -> None:
        async with one:
            await until_it_is_renewed(one)

    async def main() -> None:
        one = lock(timeout=1)
        holder = asyncio.create_task(hold(one))
        while not one._engine.keeper._running:
            await asyncio.sleep(0)
        cancel_all(holder)
        await holder

    asyncio.run(main())


def test_what_is_held_while_the_loop_ends_is_renewed_and_no_task_outlives_the_loop(
    lock: MakeLock, state: State
) -> None:
    async def hold(one: Lock) -> None:
        async with one:
            try:
                await asyncio.sleep(60)
            finally:
                await until_it_is_renewed(one)
                async with lock("another"):
                    pass

    async def main() -> tuple[asyncio.AbstractEventLoop, LoopEngine, asyncio.Task[None]]:
        one = lock(timeout=1)
        holder = asyncio.create_task(hold(one))
        await until(lambda: state().holds)
        return asyncio.get_running_loop(), one._engine, holder

    loop, engine, holder = run(main())
    assert holder.cancelled(), "it has lost the lock"
    assert not asyncio.all_tasks(loop)
    assert engine._ear is None
    assert not state().holds


def test_a_renewal_on_its_way_keeps_no_task_from_ending_with_the_loop(
    lock: MakeLock, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived, answered = threading.Event(), threading.Event()

    async def hold(one: Lock) -> None:
        async with one:
            try:
                await asyncio.sleep(60)
            finally:
                await until(arrived.is_set)

    async def main() -> asyncio.AbstractEventLoop:
        one = lock(timeout=1.5)
        backend = one._engine.backend
        renew = backend.renew

        def slow(*args: Any, **named: Any) -> list[bool]:
            arrived.set()
            answered.wait(30)
            return renew(*args, **named)

        monkeypatch.setattr(backend, "renew", slow)
        holder = asyncio.create_task(hold(one))
        await until(lambda: state().holds)
        del holder  # it is cancelled with the loop
        return asyncio.get_running_loop()

    loop = run(main())
    try:
        assert not asyncio.all_tasks(loop), "a task that nobody will ever end"
    finally:
        answered.set()
