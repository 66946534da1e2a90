"""The backend of `relock_enabled=False`: every caller gets the lock, with fencing token 0, and no
state is kept. The layers above it work as usual, so a task without locks runs the same code as a
task with locks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ..engine.protocol import (
    Burst,
    Claim,
    Debounce,
    Downgraded,
    Held,
    HoldInfo,
    LockState,
    Notice,
    ParkRequest,
    PlaceRequest,
    Queued,
    Released,
    Renewal,
    Resumed,
    Successor,
)


class NoLocks:
    """Grants every lock; see `engine.protocol.Backend`."""

    id = "relock_enabled=False"
    replicated = False

    def route(self, names: Sequence[str]) -> object:
        return None

    def acquire(self, claim: Claim, waiter_lease: float = 0.0, inbox: str = "-") -> Held:
        return Held((0,) * len(claim.names), (False,) * len(claim.names))

    def park(self, claim: Claim, park_request: ParkRequest, inbox: str = "-") -> Held:
        return self.acquire(claim)

    def release(
        self,
        names: Sequence[str],
        execution_id: str,
        attempt_id: str,
        ended: str = "",
        remember: float = 0.0,
        home: str = "",
        successor: Successor | None = None,
        waited: bool = False,
    ) -> Released:
        return Released(True)

    def downgrade(
        self, names: Sequence[str], execution_id: str, attempt_id: str, home: str = ""
    ) -> Downgraded:
        return Downgraded()

    def resume(self, home: str, by: str, tasks: Sequence[str] = ()) -> Resumed:
        return Resumed((), None)

    def place(self, request: PlaceRequest) -> int:
        return 0

    def withdraw(self, execution_id: str, remember: float, home: str = "") -> Released:
        return Released(False)

    def arrived(self, execution_ids: Sequence[str], seconds: float) -> None:
        pass

    def announce(self, channels: Sequence[str], worker: str, seconds: float) -> None:
        pass

    def consumed(self, channel: str) -> bool:
        return False

    def burst(self, name: str, whole: bool) -> Burst | None:
        return None

    def debounce(self, name: str, call: Debounce, park_request: ParkRequest) -> None:
        raise NotImplementedError("without locks each call is sent at once")

    def renew(
        self, renewals: Sequence[Renewal], *, within: float | None = None, once: bool = False
    ) -> list[bool]:
        return [True] * len(renewals)

    def heartbeat(
        self, renewals: Sequence[Renewal], *, within: float | None = None
    ) -> list[Held | Queued | None]:
        return [Held((0,), (False,)) for _ in renewals]

    def inspect(self, name: str) -> LockState:
        return LockState((), 0)

    def force_release(self, name: str, execution_id: str = "") -> tuple[HoldInfo, ...]:
        return ()

    def dangers(self) -> list[str]:
        return ["relock_enabled=False: the tasks of this worker run without their locks"]

    def listen(
        self,
        inbox: str,
        ready: Callable[[], None],
        hear: Callable[[Notice], None],
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        ready()
        while wanted():
            time.sleep(2.0)
