"""A task that is cancelled at whatever `await` leaves neither a hold nor a place, and no answer for
somebody else."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Generator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_relock.asyncio import Lock
from celery_relock.engine import asyncio as engine_asyncio
from celery_relock.engine import crash
from celery_relock.engine.crash import journal
from celery_relock.engine.engine import MOST_CALLS, Engine
from celery_relock.engine.protocol import Claim, LockState
from celery_relock.engine.renewal import keepalive
from celery_relock.engine.wakeup import Inbox
from celery_relock.errors import LockUnavailable
from tests.support import RedisServer, programs, wait_for
from tests.support.coroutines import run, until
from tests.support.listening import subscribe
from tests.support.proxy import Proxy
from tests.support.strikes import Stop, Strike

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


@pytest.mark.parametrize("scenario", [free, held, by_owner])
def test_nothing_is_left_though_a_thread_asks_after_the_release(
    scenario: Scenario,
    lock: MakeLock,
    state: State,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(crash.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(journal, "on", True)
    noted = set(journal._slots)  # of tests before, if one had a worker in this process
    engine = lock()._engine
    do = engine.do

    def late(*args: Any) -> Any:
        time.sleep(0.01)
        return do(*args)

    monkeypatch.setattr(engine, "do", late)
    run(wherever_it_is_cancelled(scenario, "early", lock, state))
    assert journal._slots.keys() <= noted


async def wherever_it_is_cancelled(
    scenario: Scenario, how: str, lock: MakeLock, state: State
) -> None:
    """Cancel it at each `await`, and see that nothing is left."""
    told: dict[str, list[str]] = defaultdict(list)
    end = subscribe(lambda event: told[event.execution_id].append(event.kind))

    async def at(number: int, fresh: bool) -> int:
        engine = lock()._engine
        if fresh:  # also while the inbox is opened
            engine.inbox = Inbox(engine.backend)
        cancelled = CancelledAt(scenario(lock), number, how)

        async def main() -> None:
            await cancelled

        task = asyncio.create_task(main())
        with suppress(asyncio.CancelledError):
            await task
            assert cancelled.count < number, f"cancellation {number} was swallowed"
        await asyncio.gather(*_others)
        if how == "twice":  # the second one leaves the rest to be done by itself
            await asyncio.to_thread(until_it_has_made_its_calls, engine)
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
    end()
    assert not [kinds for kinds in told.values() if "released" in kinds and "acquired" not in kinds]


def until_it_has_made_its_calls(engine: Engine) -> None:
    """Each of its threads has nothing left but this."""
    all_of_them = threading.Barrier(MOST_CALLS)
    pool = engine.pool_for(("a",))
    for done in [pool.submit(all_of_them.wait, 30) for _ in range(MOST_CALLS)]:
        done.result()


def test_a_confirmation_that_was_cancelled_and_comes_late_holds_the_lock_for_nobody(
    lock: MakeLock, state: State, redis_server: RedisServer
) -> None:
    async def main() -> None:
        async with lock():
            waiter = asyncio.create_task(lock(redis=proxy.url, owner="somebody").acquire())
            await until(lambda: state().waiting)
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
        await until(lambda: state().waiting)
        del waiting  # both are cancelled with the loop
        return asyncio.get_running_loop()

    loop = run(main())
    assert (state().holds, state().waiting) == ((), 0)
    assert not asyncio.all_tasks(loop), "a task that nobody will ever end"


class Slow:
    """The backend's answers to a verb, which come when `deliver` is called."""

    def __init__(self, patch: pytest.MonkeyPatch, backend: Any, verb: str) -> None:
        self.begun, self._answered = threading.Event(), threading.Event()
        self._ask = getattr(backend, verb)
        patch.setattr(backend, verb, self._answer)

    def _answer(self, *args: Any, **named: Any) -> Any:
        self.begun.set()
        assert self._answered.wait(30)
        return self._ask(*args, **named)

    def deliver(self) -> None:
        self._answered.set()


def unreachable(*_: Any, **__: Any) -> None:
    raise LockUnavailable("no answer")


def test_what_is_being_released_when_the_program_ends_is_released(
    redis_url: str, namespace: str, state: State
) -> None:
    programs.run(
        """
        import asyncio, redis
        from celery_relock.asyncio import Lock

        async def hold(number, held):
            async with Lock(URL, "a", namespace=NAMESPACE, limit=20):
                held.set()
                await asyncio.sleep(60)

        async def main():
            held = [asyncio.Event() for _ in range(20)]
            tasks = [asyncio.create_task(hold(*each)) for each in enumerate(held)]
            for each in held:
                await each.wait()
            redis.Redis.from_url(URL).client_pause(500)  # so most are not sent yet at the end
            for _ in "12":
                for task in tasks:
                    task.cancel()
                await asyncio.sleep(0)
            # and asyncio.run cancels them once more

        asyncio.run(main())
        """,
        redis_url,
        namespace,
    )
    assert not state().holds


@pytest.mark.parametrize("times", [1, 2])
def test_a_release_that_fails_when_its_task_was_cancelled_is_tried_again(
    lock: MakeLock, state: State, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    async def main() -> None:
        one = lock(timeout=300)
        await one.acquire()
        with monkeypatch.context() as away:
            away.setattr(one._engine.backend, "release", unreachable)
            slow = Slow(away, one._engine.backend, "release")
            releasing = asyncio.ensure_future(one.release())
            await asyncio.to_thread(slow.begun.wait, 30)
            for _ in range(times):
                releasing.cancel()
                await asyncio.sleep(0)
            slow.deliver()
            with pytest.raises(asyncio.CancelledError):
                await releasing
            await asyncio.to_thread(until_it_has_made_its_calls, one._engine)
        await asyncio.to_thread(wait_for, lambda: not state().holds)

    run(main())


def test_what_is_being_released_when_its_task_has_ended_is_not_lost(
    lock: MakeLock, state: State, client: redis.Redis
) -> None:
    told: list[str] = []

    async def hold(held: asyncio.Event) -> None:
        async with lock(limit=20):
            held.set()
            await asyncio.sleep(60)

    async def main() -> None:
        held = [asyncio.Event() for _ in range(20)]
        tasks = [asyncio.create_task(hold(each)) for each in held]
        for each in held:
            await each.wait()
        client.client_pause(1000)
        for _ in "123":
            for task in tasks:
                task.cancel()
            await asyncio.sleep(0)
        await asyncio.wait(tasks)
        keepalive.look_now(lock()._engine.backend)
        await asyncio.to_thread(wait_for, lambda: not state().holds)
        await asyncio.to_thread(until_it_has_made_its_calls, lock()._engine)

    end = subscribe(lambda event: told.append(event.kind), {"released", "lost"})
    run(main())
    end()
    assert told == ["released"] * 20


def test_an_answer_that_comes_when_the_release_has_failed_is_not_renewed(
    lock: MakeLock, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        one = lock()
        with monkeypatch.context() as away:
            slow = Slow(away, one._engine.backend, "acquire")
            away.setattr(one._engine.backend, "release", unreachable)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(one.acquire(), 0.1)
            slow.deliver()
            await asyncio.to_thread(until_it_has_made_its_calls, one._engine)
            assert state().holds
            keepalive.look_now(one._engine.backend)
            await asyncio.to_thread(wait_for, lambda: not of(one))

    def of(one: Lock) -> list[Any]:
        return [each for each in keepalive.leases() if each.backend is one._engine.backend]

    run(main())


def test_what_no_thread_has_begun_to_ask_for_is_not_asked(
    lock: MakeLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        slow = Slow(monkeypatch, lock()._engine.backend, "inspect")
        busy = [asyncio.create_task(lock().locked()) for _ in range(MOST_CALLS)]
        await asyncio.sleep(0)
        acquire = Slow(monkeypatch, lock()._engine.backend, "acquire")
        release = Slow(monkeypatch, lock()._engine.backend, "release")
        waiter = asyncio.create_task(lock().acquire())
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.sleep(0)
        slow.deliver()
        await asyncio.gather(*busy)
        with suppress(asyncio.CancelledError):
            await waiter
        assert not acquire.begun.is_set()
        assert not release.begun.is_set(), "there is nothing to release"

    run(main())


def test_who_waits_for_a_thread_while_the_server_is_given_up_asks_nobody(
    lock: MakeLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_asyncio, "_PATIENCE", 0.0)
    asked: list[str] = []
    given_up = threading.Event()

    def away(claim: Claim, *_: Any) -> None:
        asked.extend(claim.names)
        assert given_up.wait(30)
        raise LockUnavailable("Redis cannot be reached")

    async def main() -> list[BaseException | bool]:
        monkeypatch.setattr(lock()._engine.backend, "acquire", away)
        release = Slow(monkeypatch, lock()._engine.backend, "release")
        every = [asyncio.create_task(lock(f"n{n}").acquire()) for n in range(3 * MOST_CALLS)]
        await asyncio.to_thread(wait_for, lambda: len(asked) == MOST_CALLS)
        given_up.set()
        release.deliver()
        return await asyncio.gather(*every, return_exceptions=True)

    errors = run(main())
    assert len(asked) == MOST_CALLS
    assert {type(error) for error in errors} == {LockUnavailable}
    assert [error.name for error in errors[MOST_CALLS:]] == [
        f"n{n}" for n in range(MOST_CALLS, 3 * MOST_CALLS)
    ]
    assert "'n11', as its Redis has failed others: Redis cannot be" in str(errors[11])


@pytest.mark.parametrize("then", ["releases", "is cancelled"])
def test_who_releases_while_the_server_is_given_up_waits_for_few_others(
    lock: MakeLock, state: State, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    monkeypatch.setattr(engine_asyncio, "_PATIENCE", 0.0)
    asked: list[str] = []
    given_up = threading.Event()

    def away(*_: Any) -> None:
        if threading.current_thread().name != "relock-later":
            asked.append("")
            assert given_up.wait(30)
        raise LockUnavailable("Redis cannot be reached")

    async def main() -> None:
        many, first = 3 * MOST_CALLS, lock()
        locks = [lock(limit=many) for _ in range(many)] if then == "releases" else [lock()] * many
        if then == "releases":
            await asyncio.gather(*(each.acquire() for each in locks))
            every = [asyncio.create_task(each.release()) for each in locks]
        else:
            await first.acquire()
            every = [asyncio.create_task(each.acquire()) for each in locks]
            await asyncio.to_thread(wait_for, lambda: state().waiting == many)
        with monkeypatch.context() as gone:
            gone.setattr(first._engine.backend, "release", away)
            if then != "releases":
                for each in every:
                    each.cancel()
            await until(lambda: len(asked) == MOST_CALLS)
            # The keep-alive leaves to their own release those that still wait for a thread.
            keepalive.look_now(first._engine.backend)
            if then != "releases":
                mine = first.name
                await until(lambda: sum(mine in e.claim.names for e in keepalive.leases()) == 1)
            given_up.set()
            ends = await asyncio.gather(*every, return_exceptions=True)
        assert len(asked) == MOST_CALLS
        if then == "releases":
            assert {type(end) for end in ends} == {LockUnavailable}
            assert "'a', as its Redis has failed others: Redis cannot be" in str(ends[-1])
            await asyncio.gather(*(each.release() for each in locks))
            assert not state().holds
        else:
            assert {type(end) for end in ends} == {asyncio.CancelledError}
            await asyncio.to_thread(wait_for, lambda: not state().waiting)
            await first.release()

    run(main())


@pytest.mark.parametrize("loop_ends", [True, False])
@pytest.mark.parametrize("verb", ["acquire", "release"])
def test_nothing_is_logged_of_a_call_that_fails_when_its_task_or_loop_has_ended(
    verb: str,
    loop_ends: bool,
    lock: MakeLock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def use(one: Lock) -> None:
        async with one:
            pass

    async def main() -> Slow:
        one = lock()
        monkeypatch.setattr(one._engine.backend, verb, unreachable)
        slow = Slow(monkeypatch, one._engine.backend, verb)
        using = asyncio.create_task(use(one))
        await asyncio.to_thread(slow.begun.wait, 30)
        for _ in "12":  # the second time nobody waits any more
            using.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await using
        if not loop_ends:
            await asyncio.to_thread(deliver, slow)
        return slow

    def deliver(slow: Slow) -> None:
        slow.deliver()
        until_it_has_made_its_calls(lock()._engine)

    deliver(run(main()))
    gc.collect()
    assert [each for each in caplog.records if each.levelno >= 30] == []
    monkeypatch.undo()
    # Else the next test hears of the release that is made up for.
    wait_for(lambda: not lock()._engine.later._calls, what="what has failed to be made up for")


@pytest.mark.parametrize("around", [0, 1])
@pytest.mark.parametrize("where", ["beginning", "end"])
def test_a_signal_at_any_line_of_a_block_leaves_nothing_behind(
    lock: MakeLock, where: str, around: int
) -> None:
    # asyncio only logs what strikes in a callback, and `_settle` guards but its own first line.
    strike = Strike("asyncio.py", "named_lock.py", but="_settle")

    async def block(at: int) -> bool:
        one, begun = lock(), False
        strike.left = at
        with suppress(Stop):
            async with AsyncExitStack() as blocks:
                for _ in range(around):
                    await blocks.enter_async_context(one)
                blocks.callback(sys.settrace, None)
                if where == "beginning":
                    sys.settrace(strike)
                async with one:
                    begun = True
                    sys.settrace(strike if where == "end" else None)
        sys.settrace(None)
        assert one._own_grip() is None, at
        await until(lambda: not state_of(one).holds)
        return begun

    def state_of(one: Lock) -> LockState:
        return one._engine.inspect("a")

    async def main() -> None:
        at = first = 1 if where == "beginning" else 3  # as with any context manager before
        while strike.count == at - first:
            begun = await block(at)
            at += 1
        assert begun
        assert strike.count > (5 if around else 20)

    run(main())
