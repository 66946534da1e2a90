"""The backend of `relock_enabled=False`: every caller gets the lock, with fencing token 0, and no
state is kept. The layers above it work as usual, so a task without locks runs the same code as a
task with locks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ..engine.protocol import (
    STILL_WANTED,
    Claim,
    Downgraded,
    Held,
    HoldInfo,
    Listener,
    LockState,
    Queued,
    Released,
    Renewal,
    Resumed,
)


class NoLocks:
    """Grants every lock; see `engine.protocol.Backend`."""

    id = "relock_enabled=False"
    replicated = False

    def route(self, *_: Any, **__: Any) -> object:
        return None

    def acquire(self, claim: Claim, *_: Any, **__: Any) -> Held:
        return Held((0,) * len(claim.names), (False,) * len(claim.names))

    park = acquire

    def release(self, *_: Any, **__: Any) -> Released:
        return Released(True)

    def downgrade(self, *_: Any, **__: Any) -> Downgraded:
        return Downgraded()

    def resume(self, *_: Any, **__: Any) -> Resumed:
        return Resumed((), None)

    def place(self, *_: Any, **__: Any) -> int:
        return 0

    def withdraw(self, *_: Any, **__: Any) -> bool:
        return False

    def arrived(self, *_: Any, **__: Any) -> None:
        pass

    def announce(self, *_: Any, **__: Any) -> None:
        pass

    def consumed(self, *_: Any, **__: Any) -> bool:
        return False

    def burst(self, *_: Any, **__: Any) -> None:
        return None

    def debounce(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("without locks each call is sent at once")

    def renew(self, renewals: Sequence[Renewal], **_: Any) -> list[bool]:
        return [True] * len(renewals)

    def heartbeat(self, renewals: Sequence[Renewal], **_: Any) -> list[Held | Queued | None]:
        return [Held((0,), (False,)) for _ in renewals]

    def inspect(self, *_: Any, **__: Any) -> LockState:
        return LockState((), 0)

    def force_release(self, *_: Any, **__: Any) -> tuple[HoldInfo, ...]:
        return ()

    def listen(self, inbox: str, listener: Listener) -> None:
        listener.ready()
        while listener.wanted():
            time.sleep(STILL_WANTED)
