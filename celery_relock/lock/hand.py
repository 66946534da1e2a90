"""What a thread has in hand of a lock, and what it can tell of it."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from ..engine import process
from ..engine.engine import Engine
from ..engine.lease import Lease, State
from ..engine.protocol import Held
from .errors import LockNotOwned, LockNotTaken


class Grip:
    """What a thread has in hand. It goes when the thread ends, or the `Lock` does, and then nothing
    renews the lease any more. (By a weak reference and not in `__del__`: a time limit's signal that
    struck there would be swallowed.)"""

    __slots__ = ("__weakref__", "borrowed", "depth", "lease", "length", "thread")

    def __init__(self, lease: Lease, borrowed: bool = False) -> None:
        self.lease = lease
        self.length = lease.claim.lease
        self.depth = 1
        #: The lease is an outer holder's, who gives it back.
        self.borrowed = borrowed
        #: Whose it is, where it is not the only one who finds it.
        self.thread = threading.current_thread() if lease.shared else None
        if not borrowed:
            lease.holder = weakref.ref(self)


class Hand:
    """The part of `Lock` that tells how it stands.

    Attributes:
        name: the lock name.
        local: what each thread has in hand; with `thread_local=False` one thing for all of them.
    """

    name: str
    local: Any
    _engine: Engine
    _shared: bool

    def locked(self) -> bool:
        """Whether anybody holds the lock."""
        return bool(self._engine.inspect(self.name).holds)

    def owned(self) -> bool:
        """Whether this thread holds the lock, and the server agrees."""
        lease = self._lease
        if lease is None or lease.lost:
            return False
        ours = lease.claim.execution_id, lease.claim.attempt_id
        return any(
            (hold.execution_id, hold.attempt_id) == ours
            for hold in self._engine.inspect(self.name).holds
        )

    @property
    def fence(self) -> int:
        """The number of this entry, 0 if the lock is not held here. See `Hold.fence`."""
        lease = self._lease
        return 0 if lease is None else lease.fences[lease.claim.names.index(self.name)]

    @property
    def lost(self) -> bool:
        """Whether the lock was taken here and has ended since."""
        lease = self._lease
        return lease is not None and lease.lost

    @property
    def remaining(self) -> float:
        """Seconds for which the lock is certain; 0 if it is not held here."""
        lease = self._lease
        return 0.0 if lease is None else lease.remaining

    def check(self) -> None:
        """Call before anything that must not happen without the lock.

        Raises:
            LockNotTaken: it is not held here.
            LockNotOwned: it is lost.
        """
        self._still_ours(self._grip("relied on").lease)

    @property
    def _lease(self) -> Lease | None:
        """The lease of this thread's hold, lost or not."""
        grip = self._own_grip()
        return grip.lease if grip and grip.lease.state in (State.HELD, State.LOST) else None

    def _enter_again(self, grip: Grip) -> Held | None:
        lease = grip.lease
        if lease.state is State.ASKED:
            self._engine.release(lease)  # what could not be given back stands in our own way
        elif lease.state in (State.HELD, State.LOST) and (
            not self._shared or grip.thread is threading.current_thread()
        ):
            self._still_ours(lease)
            grip.depth += 1
            return Held(lease.fences, lease.reentered)
        return None

    def _own_grip(self) -> Grip | None:
        grip: Grip | None = getattr(self.local, "grip", None)
        # A forked child does not hold what its parent holds.
        return None if grip is None or grip.lease.pid != process.pid else grip

    def _standing(self) -> tuple[Grip | None, int]:
        """What this thread has in hand, and how many times."""
        grip = self._own_grip()
        return grip, 0 if grip is None else grip.depth

    def _grip(self, verb: str) -> Grip:
        grip = self._own_grip()
        if grip is None:
            text = f"the lock {self.name!r} is not held by this thread, so it cannot be {verb}"
            raise LockNotTaken(text, name=self.name)
        return grip

    def _still_ours(self, lease: Lease) -> None:
        if lease.lost:
            raise self._not_owned("was lost: nobody renewed it in time, or it was taken by force")

    def _not_owned(self, what: str) -> LockNotOwned:
        return LockNotOwned(f"the lock {self.name!r} {what}", name=self.name)
