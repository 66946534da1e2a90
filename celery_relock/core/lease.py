"""A lease: one run's claim on its locks while it waits for them, holds them, or has lost them."""

from __future__ import annotations

import enum
import math
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from .answers import Beat, Claim
from .events import LockEvent, tell, wanted
from .threads import native_lock, wakes_across_threads

if TYPE_CHECKING:
    from .store import LockStore

# Taken off every lease on this side, so that a hold ends here before it ends on the server.
MARGIN = 0.05


# One for all leases of the process: held for two lines, and only where threads may meet.
_guard = native_lock()


class State(enum.Enum):
    NEW = "new"  #: nothing sent yet
    ASKED = "asked"  #: a claim is on its way; the server may have granted it
    WAITING = "waiting"  #: has a place in the queue
    HELD = "held"
    LOST = "lost"  #: ended before its run did
    RELEASED = "released"  #: given back, or about to be: nothing renews it any more


class Lease:
    """The state of one claim in this process. Times are this process's monotonic seconds.

    The waiter's thread, the keep-alive thread and the inbox's thread all meet here: `switch` is the
    one way from a state to another, and only one of them wins.

    Attributes:
        claim, store: what is asked for, and where.
        wait: seconds that a place in the queue lives without a heartbeat.
        deadline: when this side stops believing in the hold (or in a grant while it waits).
        renewed: when the last good answer was asked for.
        due: when the keep-alive thread next looks after it.
        renews: False lets the hold end by itself.
    """

    __slots__ = (
        "_bell",
        "claim",
        "deadline",
        "due",
        "fences",
        "on_lost",
        "pid",
        "rank",
        "reentered",
        "renewed",
        "renews",
        "repeated",
        "state",
        "store",
        "wait",
    )

    def __init__(
        self,
        claim: Claim,
        store: LockStore,
        wait: float,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        self.claim = claim
        self.store = store
        self.wait = wait
        self.on_lost = on_lost
        self.state = State.NEW
        self.fences: tuple[int, ...] = ()
        self.reentered: tuple[bool, ...] = ()
        self.repeated = False
        self.renews = True
        self.deadline = self.due = self.renewed = 0.0
        self.rank = 0
        self.pid = os.getpid()
        self._bell: threading.Event | None = None

    def switch(self, to: State, *allowed: State) -> bool:
        """Go to a state if the present one is among those allowed. True if it did."""
        with _guard:
            if self.state not in allowed:
                return False
            self.state = to
            return True

    def renewed_at(self, sent: float) -> None:
        """The server extended the hold by a command that was sent at `sent`."""
        lease = self.claim.lease
        self.renewed = sent
        self.deadline = sent + lease - lease * MARGIN
        self.due = sent + lease / 3 if self.renews else math.inf

    def waiting_at(self, sent: float, recheck: float) -> None:
        """The server kept the place by a command sent at `sent`; the next lease ends in `recheck` s.

        A grant begins with what is left of the place's life, so the same deadline covers both.
        """
        self.renewed = sent
        self.deadline = sent + self.wait - self.wait * MARGIN
        self.due = sent + self.wait / 3
        if recheck > 0:
            self.due = min(self.due, time.monotonic() + recheck + 0.005)

    @property
    def next_look(self) -> float:
        """When the keep-alive has to look after it; never for what it neither holds nor waits for."""
        if self.state is State.HELD:
            return min(self.due, self.deadline)
        return self.due if self.state is State.WAITING else math.inf

    @property
    def remaining(self) -> float:
        """Seconds for which the hold is certain if nothing renews it; 0 when it is not held."""
        if self.state is not State.HELD:
            return 0.0
        return max(0.0, self.deadline - time.monotonic())

    @property
    def lost(self) -> bool:
        """The server said so, or no renewal came through in time."""
        return self.state is State.LOST or (
            self.state is State.HELD and time.monotonic() >= self.deadline
        )

    def beats(self) -> list[Beat]:
        """What the keep-alive sends for it: one beat for each lock name."""
        run, nonce, _, names, _, lease, *_ = self.claim
        wait = self.wait if self.state is State.WAITING else 0.0
        return [Beat(name, run, nonce, lease, wait) for name in names]

    def tell(self, kind: str, reason: str = "", since: float = 0.0) -> None:
        """Tell whoever wants to know what happened to it."""
        if wanted(kind):
            claim, fence = self.claim, max(self.fences, default=0)
            tell(LockEvent(kind, claim.names, claim.run, claim.owner, fence, reason, since))

    def ring(self, *, from_native_thread: bool = False) -> None:
        """Wake the thread that waits. Only a hint: it looks at the state, and now and then unasked."""
        bell = self._bell
        if bell is not None and not (from_native_thread and not wakes_across_threads()):
            bell.set()

    def sleep(self, seconds: float) -> None:
        """Wait for the bell, at most so long."""
        bell = self._bell
        if bell is None:
            bell = self._bell = threading.Event()
            # Made only now, since few leases ever wait: whoever rang before found no bell.
            if self.state is not State.WAITING:
                return
        bell.wait(seconds)


def _reset_guard() -> None:
    global _guard
    _guard = native_lock()


os.register_at_fork(after_in_child=_reset_guard)
