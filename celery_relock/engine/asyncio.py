"""The locks of one event loop: what `engine` is for threads, for coroutines.

The states of a lease, what is due and what an answer means are those of `lease` and `renewal`. Here
is what waits otherwise: the engine awaits, a waiter sleeps on a future, and one task of the loop
renews all leases. Everything runs in the loop's thread but the backend's calls, which a few threads
make, and one that hears the inbox.

A task may be cancelled at every `await`. The acquiring code then calls `let_go`, which releases in
a task of its own, which that cancellation does not reach.
"""

from __future__ import annotations

import asyncio
import math
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from ..errors import RelockError
from . import ids, platform
from .engine import Step, acquiring
from .events import logger
from .lease import Lease, State
from .protocol import REMEMBER_ATTEMPT, Answer, Backend, Claim, LockState, Notice, Outcome
from .renewal import Registry, ask_for
from .wakeup import OPENING, Listening

_T = TypeVar("_T")

# Calls on their way at the same time; others wait for their turn. As many as connections are kept.
MOST = 4
# Threads and tasks that nobody needed for so many seconds end.
_LINGER = 10.0
# Seconds after which a loop whose tasks were all cancelled seems to go on: one that ends is closed
# sooner, as a rule, and no lease should run out meanwhile.
_GOES_ON = 0.05


class _Threads:
    """Threads that make calls for the coroutines of a loop: at most so many, however many wait.
    The loop's own threads can all be busy for longer than a lease."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._pool: ThreadPoolExecutor | None = None

    async def __call__(self, call: Callable[..., _T], *args: Any, **named: Any) -> _T:
        if self._pool is None:
            # gevent's are greenlets of the main thread, which is to have its signals.
            begin = None if platform.green() else platform.block_signals
            self._pool = ThreadPoolExecutor(self._most, "relock", begin)
        loop, work = asyncio.get_running_loop(), partial(copy_context().run, call, *args, **named)
        return await loop.run_in_executor(self._pool, work)

    def end(self) -> None:
        """End the threads, after the calls that they have to make; the next call starts others."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)


class TaskLease(Lease):
    """A lease that an asyncio task waits for and holds."""

    __slots__ = ("_ringing", "_task")

    def __init__(
        self,
        claim: Claim,
        backend: Backend,
        task: asyncio.Task[Any] | None,
        open_inbox: Callable[[], None] | None,
    ) -> None:
        super().__init__(claim, backend, open_inbox)
        self._ringing: asyncio.Future[None] | None = None
        self._task = None if task is None else weakref.ref(task)

    def is_here(self) -> bool:
        # A task that was begun in the block has a copy of its context, and is not in the block.
        here = self._task is None or self._task() is platform.coroutine()
        return here and super().is_here()

    def ring(self) -> None:
        if self._ringing is not None and not self._ringing.done():
            self._ringing.set_result(None)

    async def doze(self, seconds: float) -> None:
        """Wait for a ring, at most so long."""
        loop = asyncio.get_running_loop()
        self._ringing = loop.create_future()
        alarm = loop.call_later(seconds, self.ring)
        try:
            await self._ringing
        finally:
            alarm.cancel()
            self._ringing = None


class LoopEngine:
    """Locks over one backend, for the coroutines of one event loop. As `engine.Engine`."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._threads = _Threads(MOST)
        self._inbox = ids.new_attempt_id()
        self._ear: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()
        self._listening = Listening(self._tried)
        self.keeper = Keeper(backend, self._listen, self._rest)
        self._at_work: set[asyncio.Task[None]] = set()

    def lease(self, claim: Claim, task: asyncio.Task[Any] | None) -> TaskLease:
        """A lease for the claim of a task (None: of who drives the loop); nothing is sent."""
        hears = self._ear is not None and not self._ear.done()
        return TaskLease(claim, self.backend, task, None if hears else self._listen)

    async def acquire(self, lease: TaskLease, wait: float | None = 0.0) -> Outcome:
        """As `engine.Engine.acquire`. Whatever it raises, call `let_go` then."""
        steps = acquiring(lease, wait, self._listening.hears, self.backend.replicated)
        result: Answer | None = None
        while True:
            try:
                step, number = steps.send(result)
            except StopIteration as end:
                outcome: Outcome = end.value
                return outcome
            if step is Step.ASK:
                result = await self._ask(lease, number)
            elif step is Step.ASK_AGAIN:
                result = await self._asked(self.backend.acquire, lease.claim, number, self._inbox)
            elif step is Step.DOZE:
                await lease.doze(min(number, lease.waiter_lease))
            elif step is Step.SLEEP:
                await asyncio.sleep(number)
            elif step is Step.LISTEN:
                await self._begin_to_listen(lease, number)
            else:
                await self._drop(lease)

    async def _begin_to_listen(self, lease: TaskLease, timeout: float) -> None:
        self._listen()
        lease.open_inbox = None  # else each grant would wake the keeper for it
        # Not `wait_for`, which may swallow a cancellation before Python 3.12.
        tried = asyncio.ensure_future(self._tried.wait())
        try:
            await asyncio.wait([tried], timeout=min(OPENING, timeout))
        finally:
            tried.cancel()

    async def release(self, lease: TaskLease) -> bool:
        """Release what the lease has. May be called in any state, and repeatedly. As
        `engine.Engine.release`. Cancelled, it releases all the same."""
        if not lease.may_hold or not Lease.is_here(lease):
            return True
        before, lost = lease.give_up()
        self.keeper.discard(lease)
        try:
            doubtful = lease.repeated or before is State.ASKED
            had = await self._release(lease, "attempt" if doubtful else "")
        except BaseException as error:
            lease.switch(State.ASKED, State.RELEASED)
            if isinstance(error, asyncio.CancelledError):
                await self.let_go(lease)
            raise
        return lease.tell_release(before, lost=lost, had=had)

    async def let_go(self, lease: TaskLease) -> None:
        """Release what the lease has or is about to have, and wait for that, unless the task is
        cancelled again. Raises nothing else: the end of the lease would do it, too."""
        if not lease.may_hold:
            return
        task = asyncio.ensure_future(self._let_go(lease))
        self._at_work.add(task)
        task.add_done_callback(self._at_work.discard)
        await asyncio.wait([task])

    async def _let_go(self, lease: TaskLease) -> None:
        with suppress(RelockError):
            try:
                await self.release(lease)
            except asyncio.CancelledError:
                await self.release(lease)  # only who cancels every task of the loop cancels this

    async def extend(self, lease: TaskLease, length: float) -> bool:
        """As `engine.Engine.extend`."""
        before, sent = lease.claim.lease, time.monotonic()
        renewals, once = lease.extensions(sent, length)
        try:
            lease.resize(length)
            kept = not lease.lost and all(
                await self._asked(self.backend.renew, renewals, within=once, once=bool(once))
            )
        except BaseException:
            lease.resize(before)
            if once:
                lease.doubt(sent, length)
            self.keeper.add(lease)
            raise
        return self.keeper.found(lease, kept and lease.renew(sent, length))

    async def downgrade(self, lease: TaskLease) -> bool:
        """As `engine.Engine.downgrade`."""
        of, before = lease.claim, lease.share()
        ids_of = of.names, of.execution_id, of.attempt_id
        done = await self._asked(self.backend.downgrade, *ids_of)
        if done.joined:
            raise lease.joined(done, before)
        return self.keeper.found(lease, done.held and not lease.lost)

    async def inspect(self, name: str) -> LockState:
        """Who holds a lock and who waits for the lock, by the server's clock."""
        return await self._asked(self.backend.inspect, name)

    async def _asked(self, verb: Callable[..., _T], *args: Any, **named: Any) -> _T:
        self.keeper.wake()  # it ends the threads
        return await self._threads(verb, *args, **named)

    async def _ask(self, lease: TaskLease, wait: float) -> Answer:
        lease.switch(State.ASKED, State.NEW)
        sent = time.monotonic()
        if wait > 0:
            # Before the command is sent: the message of a grant may overtake the answer "wait".
            self.keeper.add(lease)
        answer = await self._asked(self.backend.acquire, lease.claim, wait, self._inbox)
        if lease.answered(answer, sent):
            self.keeper.add(lease)
        else:
            self.keeper.discard(lease)
        return answer

    async def _drop(self, lease: TaskLease) -> None:
        lease.switch(State.ASKED, State.HELD, State.LOST)
        self.keeper.discard(lease)
        await self._release(lease, "attempt" if lease.repeated else "")
        # A copy of that release may come late, so what follows is another attempt.
        lease.again(ids.new_attempt_id())

    async def _release(self, lease: TaskLease, ended: str) -> bool:
        of = lease.claim
        asked = of.names, of.execution_id, of.attempt_id, ended, REMEMBER_ATTEMPT
        waited = lease.waits_since > 0
        back = await self._asked(self.backend.release, *asked, waited=waited)
        return back.had

    def _listen(self) -> None:
        """Begin to hear the inbox."""
        self.keeper.wake()
        if self._ear is None or self._ear.done():
            self._tried.clear()
            self._ear = asyncio.ensure_future(self._hear())

    async def _hear(self) -> None:
        wanted, loop = True, asyncio.get_running_loop()

        def pass_on(what: Callable[..., object], *args: Any) -> None:
            # The thread is late to notice that nobody wants to hear any more.
            _tell(loop, lambda: wanted and what(*args))

        def is_wanted() -> bool:
            return wanted and not loop.is_closed()  # a loop may be closed with its tasks unended

        calls = partial(pass_on, self._connected), partial(pass_on, self._noticed)
        listen = partial(self.backend.listen, self._inbox, *calls, is_wanted)
        try:
            while True:
                try:
                    await _in_thread(listen)
                except Exception as error:  # noqa: BLE001 - whatever it is, it is tried again
                    await asyncio.sleep(self._listening.fail(error))
        finally:
            wanted = self._listening.hears = False

    def _connected(self) -> None:
        self._listening.begin()
        self.keeper.look_now(self.backend)

    def _noticed(self, notice: Notice) -> None:
        self.keeper.hear(self.backend, notice)

    def _rest(self) -> None:
        """Nobody needs anything any more, or the loop ends."""
        ear, self._ear = self._ear, None
        if ear is not None:
            ear.cancel()
        self._threads.end()


class Keeper(Registry):
    """The registry of a loop's leases at one backend, and the task that looks after the leases.

    The task is cancelled with all tasks of the loop, as a rule because the loop ends: then nobody
    would end a task that begins later. If there are leases a moment later, another task looks after
    them, and ends with the last of them.

    Args:
        listen: called when the loop goes on though its tasks were cancelled, and there are leases.
        rest: called at its end, which comes when nobody has needed it for a while.
    """

    def __init__(
        self, backend: Backend, listen: Callable[[], None], rest: Callable[[], None]
    ) -> None:
        super().__init__()
        self._backend = backend
        self._thread = _Threads(1)  # renewals do not wait behind other calls
        self._listen = listen
        self._rest = rest
        self._bell = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._cancelled_at = -math.inf
        self._used_at = 0.0

    def discard(self, lease: Lease) -> None:
        super().discard(lease)
        if self._may_end and not self._leases and self._task is not None:
            _tell(self._task.get_loop(), self._dismiss)  # any thread may be here

    def wake(self) -> None:
        """Somebody needs the backend."""
        self._used_at = time.monotonic()
        if not self._running:
            self._start()

    @property
    def _may_end(self) -> bool:
        """Whether the loop may be about to end."""
        return time.monotonic() - self._cancelled_at < _LINGER

    def _dismiss(self) -> None:
        """End the task of a loop that may be about to end, also while it waits for the server."""
        task = self._task
        if task is not None and not self._leases:
            self._task = None
            task.cancel()

    def _ring(self) -> None:
        self._bell.set()

    def _start(self) -> None:
        if self._may_end and not self._leases:
            return
        self._running = True
        self._used_at = time.monotonic()
        self._task = asyncio.ensure_future(self._live())
        # Not a `finally`, which a task that is cancelled before it begins never comes to, and which
        # one that is collected after its loop was closed comes to when nothing can be cancelled.
        self._task.add_done_callback(self._ended)

    async def _live(self) -> None:
        while True:
            try:
                until = await self._look()
            except Exception:  # noqa: BLE001 - whatever it is, leases go on
                logger.exception("Renewing the locks of an event loop failed and goes on")
                until = time.monotonic() + 0.1
            idle = time.monotonic() - self._used_at
            if not self._leases and (self._may_end or idle > _LINGER):
                return
            await self._wait(min(until, time.monotonic() + _LINGER))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running = False
        self._thread.end()
        self._rest()
        if task.cancelled() and task is self._task:  # not dismissed
            self._cancelled_at = time.monotonic()
            task.get_loop().call_later(_GOES_ON, self._go_on)
        else:
            self._go_on()  # a lease may have been added since the task returned

    def _go_on(self) -> None:
        if self._leases:
            self._listen()  # which wakes this, too

    async def _wait(self, until: float) -> None:
        self._wake_at = until
        self._bell.clear()
        # A lease added since the last look found the old `_wake_at` and rang nobody.
        soonest = min((lease.next_look for lease in self.leases()), default=until)
        pause = min(until, soonest) - time.monotonic()
        if pause > 0:
            alarm = asyncio.get_running_loop().call_later(pause, self._ring)
            try:
                await self._bell.wait()
            finally:
                alarm.cancel()
        self._wake_at = 0.0

    async def _look(self) -> float:
        now = time.monotonic()
        self._tell_losses()
        for held, waiting in self._due(now).values():
            await self._guarded("renew", held)
            await self._guarded("heartbeat", waiting)
        return self._next(now)

    async def _guarded(self, verb: str, leases: list[Lease]) -> None:
        if not leases:
            return
        outage = self._outage(self._backend, verb)
        with outage:  # whatever it is, it is tried again until the deadline
            sent, asked, every = ask_for(leases)
            within = self._patience(sent)
            found = await self._thread(getattr(self._backend, verb), every, within=within)
            (self._renewed if verb == "renew" else self._beaten)(sent, asked, found)
            return
        self._put_off(leases, outage)


async def _in_thread(work: Callable[[], None]) -> None:
    """Do some work in a thread of its own, which does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        failed = None
        try:
            work()
        except Exception as error:  # noqa: BLE001 - raised where the work is awaited
            failed = error
        _tell(loop, settle, failed)

    platform.start_native_thread(run)
    await done


def _tell(loop: asyncio.AbstractEventLoop, what: Callable[..., object], *args: Any) -> None:
    with suppress(RuntimeError):  # the loop is closed, and its leases are released
        loop.call_soon_threadsafe(what, *args)
