"""The backends without a server (memory and off) for the coroutines of one event loop. Their verbs
answer at once, so a coroutine waits for notices alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from ..engine.protocol import (
    Answer,
    Claim,
    Downgraded,
    Held,
    LockState,
    Notice,
    Queued,
    Released,
    Renewal,
)
from .memory import MemoryBackend
from .off import NoLocks


class _Bell(threading.Event):
    """An event that any thread can set and a coroutine of the loop awaits."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        self._rung = asyncio.Event()

    def set(self) -> None:
        with suppress(RuntimeError):  # the loop is closed, and with it the listener
            self._loop.call_soon_threadsafe(self._rung.set)

    async def heard(self) -> None:
        await self._rung.wait()
        self._rung.clear()


class LocalBackend:
    """See `engine.asyncio.Coroutines`."""

    replicated = False

    def __init__(self, same: MemoryBackend | NoLocks) -> None:
        self.same = same

    async def acquire(self, claim: Claim, waiter_lease: float = 0.0, inbox: str = "-") -> Answer:
        return self.same.acquire(claim, waiter_lease, inbox)

    async def release(
        self,
        names: Sequence[str],
        execution_id: str,
        attempt_id: str,
        ended: str = "",
        remember: float = 0.0,
        *,
        waited: bool = False,
    ) -> Released:
        return self.same.release(names, execution_id, attempt_id, ended, remember)

    async def downgrade(
        self, names: Sequence[str], execution_id: str, attempt_id: str
    ) -> Downgraded:
        return self.same.downgrade(names, execution_id, attempt_id)

    async def renew(
        self, renewals: Sequence[Renewal], *, within: float | None = None, once: bool = False
    ) -> list[bool]:
        return self.same.renew(renewals)

    async def heartbeat(
        self, renewals: Sequence[Renewal], *, within: float | None = None
    ) -> list[Held | Queued | None]:
        return self.same.heartbeat(renewals)

    async def inspect(self, name: str) -> LockState:
        return self.same.inspect(name)

    async def listen(
        self, inbox: str, ready: Callable[[], None], hear: Callable[[Notice], None]
    ) -> None:
        bell = _Bell(asyncio.get_running_loop())
        if isinstance(self.same, NoLocks):
            ready()
            await bell.heard()  # without locks nobody is ever notified
            return
        with self.same.ear(inbox) as ear:
            ear.bell = bell
            ready()
            while True:
                ear.pass_on(hear)
                await bell.heard()

    def keep(self, keeps: bool) -> None:
        pass

    async def close(self) -> None:
        pass
