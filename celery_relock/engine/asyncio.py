"""The locks of one event loop: what `engine` is for threads, for coroutines.

The states of a lease, what is due and what an answer means are those of `lease` and `renewal`. Here
is what waits otherwise: the engine awaits, a waiter sleeps on a future, one task of the loop renews
all leases, and one hears the inbox. Everything runs in the loop's thread.

A task may be cancelled at every `await`. The acquiring code then calls `let_go`, which releases in
a task of its own, which that cancellation does not reach.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol

from ..errors import RelockError
from . import ids, platform
from .engine import WAITER_LEASE, Step, acquiring
from .events import logger
from .lease import Lease, State
from .protocol import (
    REMEMBER_ATTEMPT,
    Answer,
    Backend,
    Claim,
    Downgraded,
    Held,
    LockState,
    Notice,
    Outcome,
    Queued,
    Released,
    Renewal,
)
from .renewal import Registry, ask_for
from .wakeup import OPENING, Listening

# Connections and tasks that nobody needed for so many seconds end.
_LINGER = 10.0


class Coroutines(Protocol):
    """The verbs of a `Backend`, as coroutines."""

    #: The backend whose locks these are.
    same: Any
    replicated: bool

    async def acquire(
        self, claim: Claim, waiter_lease: float = 0.0, inbox: str = "-"
    ) -> Answer: ...

    async def release(
        self,
        names: Sequence[str],
        execution_id: str,
        attempt_id: str,
        ended: str = "",
        remember: float = 0.0,
        *,
        waited: bool = False,
    ) -> Released: ...

    async def renew(
        self, renewals: Sequence[Renewal], *, within: float | None = None, once: bool = False
    ) -> list[bool]: ...

    async def heartbeat(
        self, renewals: Sequence[Renewal], *, within: float | None = None
    ) -> list[Held | Queued | None]: ...

    async def downgrade(
        self, names: Sequence[str], execution_id: str, attempt_id: str
    ) -> Downgraded: ...

    async def inspect(self, name: str) -> LockState: ...

    async def listen(
        self, inbox: str, ready: Callable[[], None], hear: Callable[[Notice], None]
    ) -> None: ...

    def keep(self, keeps: bool) -> None:
        """Whether connections may stay open while nobody uses them."""

    async def close(self) -> None:
        """Close what is idle; all can still be used."""


class TaskLease(Lease):
    """A lease that an asyncio task waits for and holds."""

    __slots__ = ("_ringing", "_task")

    def __init__(
        self,
        claim: Claim,
        backend: Backend,
        task: asyncio.Task[Any] | None,
        listen: Callable[[], None] | None,
    ) -> None:
        super().__init__(claim, backend, min(claim.lease, WAITER_LEASE), listen)
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


class Engine:
    """Locks over one backend, for the coroutines of one event loop. As `engine.Engine`."""

    def __init__(self, backend: Coroutines) -> None:
        self.backend = backend
        self._inbox = ids.new_attempt_id()
        self._ear: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()
        self._listening = Listening(self._tried)
        self._keeper = Keeper(backend, self._rest)
        self._at_work: set[asyncio.Task[None]] = set()

    def lease(self, claim: Claim, task: asyncio.Task[Any] | None) -> TaskLease:
        """A lease for the claim of a task (None: of who drives the loop); nothing is sent."""
        hears = self._ear is not None and not self._ear.done()
        return TaskLease(claim, self.backend.same, task, None if hears else self._listen)

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
                called = self.backend.acquire(lease.claim, number, self._inbox)
                result = await self._asked(called)
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
        lease.listen = None  # else each grant would wake the keeper for it
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
        self._keeper.discard(lease)
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
                await self.release(lease)  # only the end of the loop cancels this, and only once

    async def extend(self, lease: TaskLease, length: float) -> bool:
        """As `engine.Engine.extend`."""
        before, sent = lease.claim, time.monotonic()
        renewals, once = lease.extensions(sent, length)
        try:
            lease.claim = before._replace(lease=length)
            kept = not lease.lost and all(
                await self._asked(self.backend.renew(renewals, within=once, once=bool(once)))
            )
        except BaseException:
            lease.claim = before
            if once:
                lease.doubt(sent, length)
            self._keeper.add(lease)
            raise
        return self._keeper.found(lease, kept and lease.renew(sent, length))

    async def downgrade(self, lease: TaskLease) -> bool:
        """As `engine.Engine.downgrade`."""
        of, before = lease.claim, lease.share()
        called = self.backend.downgrade(of.names, of.execution_id, of.attempt_id)
        done = await self._asked(called)
        if done.joined:
            raise lease.joined(done, before)
        return self._keeper.found(lease, done.held and not lease.lost)

    async def inspect(self, name: str) -> LockState:
        """Who holds a lock and who waits for the lock, by the server's clock."""
        state: LockState = await self._asked(self.backend.inspect(name))
        return state

    async def _asked(self, command: Coroutine[Any, Any, Any]) -> Any:
        self._keeper.wake()  # it closes the connection
        return await command

    async def _ask(self, lease: TaskLease, wait: float) -> Answer:
        lease.switch(State.ASKED, State.NEW)
        sent = time.monotonic()
        if wait > 0:
            # Before the command is sent: the message of a grant may overtake the answer "wait".
            self._keeper.add(lease)
        called = self.backend.acquire(lease.claim, wait, self._inbox)
        answer: Answer = await self._asked(called)
        if lease.answered(answer, sent):
            self._keeper.add(lease)
        else:
            self._keeper.discard(lease)
        return answer

    async def _drop(self, lease: TaskLease) -> None:
        lease.switch(State.ASKED, State.HELD, State.LOST)
        self._keeper.discard(lease)
        await self._release(lease, "attempt" if lease.repeated else "")
        # A copy of that release may come late, so what follows is another attempt.
        lease.again(ids.new_attempt_id())

    async def _release(self, lease: TaskLease, ended: str) -> bool:
        of = lease.claim
        asked = of.names, of.execution_id, of.attempt_id, ended, REMEMBER_ATTEMPT
        waited = lease.waits_since > 0
        back = await self._asked(self.backend.release(*asked, waited=waited))
        return bool(back.had)

    def _listen(self) -> None:
        """Begin to hear the inbox."""
        self._keeper.wake()
        if self._ear is None or self._ear.done():
            self._tried.clear()
            self._ear = asyncio.ensure_future(self._hear())

    async def _hear(self) -> None:
        try:
            while True:
                try:
                    await self.backend.listen(self._inbox, self._connected, self._noticed)
                except Exception as error:  # noqa: BLE001 - whatever it is, it is tried again
                    await asyncio.sleep(self._listening.fail(error))
        finally:
            self._listening.hears = False

    def _connected(self) -> None:
        self._listening.begin()
        self._keeper.look_now(self.backend.same)

    def _noticed(self, notice: Notice) -> None:
        self._keeper.hear(self.backend.same, notice)

    async def _rest(self) -> None:
        """Nobody needs anything any more, or the loop ends."""
        ear, self._ear = self._ear, None
        if ear is not None:
            ear.cancel()
        await self.backend.close()


class Keeper(Registry):
    """The registry of a loop's leases at one backend, and the task that looks after the leases.

    Args:
        rest: called at its end, which comes when nobody has needed it for a while.
    """

    def __init__(self, backend: Coroutines, rest: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self._backend = backend
        self._rest = rest
        self._bell = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._over = False
        self._used_at = 0.0

    def wake(self) -> None:
        """Somebody needs the backend."""
        self._used_at = time.monotonic()
        if not self._running:
            self._start()

    def _ring(self) -> None:
        self._bell.set()

    def _start(self) -> None:
        if self._over:
            return  # a task that begins while the loop ends is never cancelled
        self._running = True
        self._used_at = time.monotonic()
        self._backend.keep(True)
        self._task = asyncio.ensure_future(self._live())

    async def _live(self) -> None:
        try:
            while True:
                try:
                    until = await self._look()
                except Exception:  # noqa: BLE001 - whatever it is, leases go on
                    logger.exception("Renewing the locks of an event loop failed and goes on")
                    until = time.monotonic() + 0.1
                if not self._leases and time.monotonic() - self._used_at > _LINGER:
                    return
                await self._wait(min(until, time.monotonic() + _LINGER))
        except asyncio.CancelledError:
            self._over = True  # only the end of the loop cancels it
            raise
        finally:
            self._running = False
            self._backend.keep(False)
            await self._rest()

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
        outage = self._outage(self._backend.same, verb)
        with outage:  # whatever it is, it is tried again until the deadline
            sent, asked, every = ask_for(leases)
            within = self._patience(sent)
            if verb == "renew":
                self._renewed(sent, asked, await self._backend.renew(every, within=within))
            else:
                self._beaten(sent, asked, await self._backend.heartbeat(every, within=within))
            return
        self._put_off(leases, outage)
