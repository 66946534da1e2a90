"""The seam between the engine and the server: seven verbs, each atomic and safe to send twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from .answers import Answer, Beat, Claim, Held, HoldInfo, LockState, Notice, Queued


class LockStore(Protocol):
    """Where locks live. Every verb raises LockUnavailable when the server cannot be asked and
    LockConfigError when it must not be (somebody else's key, an old server, no permission)."""

    @property
    def id(self) -> str:
        """The same in every process that has the same locks; tells no address and no password."""

    def acquire(self, claim: Claim, wait: float = 0.0, inbox: str = "-") -> Answer:
        """Take all locks of the claim, or none. With `wait` seconds > 0 queue for them: the place
        lives that long without a heartbeat, and grants are announced to `inbox`."""

    def release(
        self, names: Sequence[str], run: str, nonce: str, *, ended: str = "", remember: float = 0.0
    ) -> bool:
        """Give back what the attempt has, or its places. False if it had nothing.

        `ended` is "", "run" or "attempt": what shall count as ended for `remember` seconds."""

    def renew(self, beats: Sequence[Beat], *, within: float | None = None) -> list[bool]:
        """Extend holds; False for each that is lost. `within`: the keep-alive thread calls, and
        waits so many seconds for an answer at the most."""

    def heartbeat(
        self, beats: Sequence[Beat], *, within: float | None = None
    ) -> list[Held | Queued | None]:
        """Keep places in queues and find grants; None for each that is neither queued nor holding.
        `within` as for `renew`."""

    def inspect(self, name: str, most: int = 100) -> LockState:
        """Who holds a lock and who waits for it."""

    def force_release(self, name: str, run: str = "") -> tuple[HoldInfo, ...]:
        """Take the lock from its holders, or from one run, and tell them. Returns those holds."""

    def listen(self, inbox: str, ready: Callable[[], None], hear: Callable[[Notice], None]) -> None:
        """Hear the inbox's notices for ever. `ready` is called at each (re)connection, because what
        was sent meanwhile is gone. Returns only by an exception."""
