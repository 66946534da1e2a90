"""The seam between the engine and the server: its verbs, each atomic and safe to send twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from .answers import (
    Answer,
    Beat,
    Claim,
    Deadlocked,
    Duplicate,
    Ended,
    Full,
    Heir,
    Held,
    HoldInfo,
    LockState,
    Message,
    Notice,
    Parcel,
    Parked,
    Queued,
    Released,
    Resumed,
)


class LockStore(Protocol):
    """Where locks live. Every verb raises LockUnavailable when the server cannot be asked and
    LockConfigError when it must not be (somebody else's key, an old server, no permission)."""

    @property
    def id(self) -> str:
        """The same in every process that has the same locks; tells no address and no password."""

    @property
    def replicated(self) -> bool:
        """Holds count when replicas have them: one that a message told of, when it is renewed."""

    def route(self, names: Sequence[str]) -> object:
        """What renewals of these locks share: those with another route are sent by another call,
        which does not fail with this one."""

    def acquire(
        self, claim: Claim, wait: float = 0.0, inbox: str = "-", channel: str = ""
    ) -> Answer:
        """Take all locks of the claim, or none. With `wait` seconds > 0 queue for them: the place
        lives that long without a heartbeat, and the grant is announced to `channel`, by default to
        `inbox`, as a loss of the hold will be."""

    def park(
        self, claim: Claim, parcel: Parcel, inbox: str = "-"
    ) -> Held | Parked | Full | Duplicate | Deadlocked | Ended:
        """As `acquire`, but leave a message in the queue. A copy of a run that is in is parked
        behind it."""

    def release(
        self,
        names: Sequence[str],
        run: str,
        nonce: str,
        ended: str = "",
        remember: float = 0.0,
        home: str = "",
        heir: Heir | None = None,
        waited: bool = False,
    ) -> Released:
        """Give back what the attempt has, or its places.

        `ended` is "", "run" or "attempt": what shall count as ended for `remember` seconds;
        "killed" is an attempt that leaves the message that it parked.
        `home`: parked messages of this broker that may go on are handed out to the caller.
        `heir`: the run that is to go on with the holds.
        `waited`: the attempt has waited, so others are likely to: the next one is to be told before
        the caller is answered."""

    def resume(self, home: str, by: str, tasks: Sequence[str] = ()) -> Resumed:
        """The parked messages of a broker that are to be sent on now; `tasks` (short ids) in any
        case. `by` is the id of this call, for its repetition."""

    def withdraw(self, run: str, remember: float, home: str = "") -> Released:
        """Take a parked message out of its queues for good; the run counts as ended."""

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

    def dangers(self) -> list[str]:
        """What of the server's settings could lose parked messages, a sentence each."""

    def listen(self, inbox: str, ready: Callable[[], None], hear: Callable[[Notice], None]) -> None:
        """Hear the inbox's notices for ever. `ready` is called at each (re)connection, because what
        was sent meanwhile is gone. Returns only by an exception."""

    def line(self, channel: str) -> Line | None:
        """A channel for the one thread that waits. None where there is no such thing."""


class Line(Protocol):
    """One subscription."""

    def hear(self, seconds: float) -> Notice | None:
        """The next notice, None if none came in time. Raises LockUnavailable: it is gone."""

    def close(self) -> None:
        """End it."""


class Sender(Protocol):
    """Sends parked messages to one broker."""

    @property
    def home(self) -> str:
        """Which broker, without its password."""

    def send(self, message: Message) -> None:
        """Send it on. Raises whatever the broker's client raises."""
