"""What a body sees of its lock: the fencing token, and whether the lock is still held."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ..errors import LockConfigError, LockLost
from . import ids
from .lease import Lease, State
from .platform import clock

if TYPE_CHECKING:
    from .engine import Engine


class Share(NamedTuple):
    """One lock of a hold: the lease that covers the lock, the fencing token, and whether the lock
    was re-entered."""

    name: str
    lease: Lease
    fence: int
    reentered: bool


class Hold:
    """An execution's hold, as `self.lock` shows it. With several locks it speaks for all of them.

    Attributes:
        in_order: with `lock_order`, True if no call that was sent later has begun before this one;
            False if this call was passed over, or had no place in the order. None without
            `lock_order`, and for a call that is not from a message.
    """

    __slots__ = ("_engine", "_owner", "_shares", "_unbroken", "in_order")

    def __init__(
        self,
        owner: str,
        shares: Sequence[Share],
        unbroken: bool = True,
        engine: Engine | None = None,
        in_order: bool | None = None,
    ) -> None:
        self._owner = owner
        #: Makes `downgrade` possible; None if an outer holder has some of the locks.
        self._engine = engine
        self._unbroken = unbroken
        self._shares = tuple(shares)
        self.in_order = in_order

    @property
    def owner(self) -> str:
        """The owner, who can re-enter the lock; by default the workflow's `root_id`. A UUID has its
        usual form."""
        return ids.full(self._owner)

    @property
    def name(self) -> str:
        """The lock name; several are joined by a comma and a space."""
        return ", ".join(share.name for share in self._shares)

    @property
    def names(self) -> tuple[str, ...]:
        """Each lock name by itself."""
        return tuple(share.name for share in self._shares)

    @property
    def fences(self) -> dict[str, int]:
        """The fencing token of each lock name."""
        return {share.name: share.fence for share in self._shares}

    @property
    def fence(self) -> int:
        """The fencing token, a number higher than the token of every permit before this one.

        Pass the token to what you protect, and refuse there any token lower than the highest one
        seen so far: nothing else stops a holder that was paused for longer than its lease
        (Kleppmann, "How to do distributed locking", 2016). 0 where the work goes on unprotected.
        """
        return max((share.fence for share in self._shares), default=0)

    @property
    def reentered(self) -> bool:
        """Whether an ancestor or a caller of this execution held every lock already."""
        return bool(self._shares) and all(share.reentered for share in self._shares)

    @property
    def protected(self) -> bool:
        """Whether a lock protects the body. False with `relock_enabled=False`, and if Redis could
        not be reached and the task declares `lock_on_unavailable="run"`."""
        return bool(self._shares) and all(share.fence for share in self._shares)

    @property
    def continuous(self) -> bool:
        """Whether nobody else can have held the lock since the workflow acquired it.

        It speaks also for what lies around: in a step for the locks of its workflow, in a direct
        call for those of its callers, whatever names it has itself. For a lock that this task has
        acquired anew it begins there.

        False if this hold is lost, or if a hold that was kept for this step or this retry had ended
        before that came, or was shared with others then (`downgrade`).
        """
        return self._unbroken and not self.lost

    @property
    def lost(self) -> bool:
        """Whether a lock was lost; or has been released, because the body has ended and a thread of
        it has not, or a caller did not wait. Never goes back to False."""
        return any(
            share.lease.lost or share.lease.state is not State.HELD for share in self._shares
        )

    @property
    def remaining(self) -> float:
        """Seconds until the first of the locks may be lost, if no renewal succeeds until then."""
        return min((share.lease.remaining for share in self._shares), default=0.0)

    def check(self) -> None:
        """Raise if a lock is lost. Call it before any step that must not happen without the lock.

        Raises:
            LockLost: a lock is lost, or the body has ended and a thread of it has not. Stop, or let
                the fencing token decide.
        """
        if any(share.lease.lost for share in self._shares):
            raise self.lost_error()
        if self.lost:
            text = f"the lock {self.name!r} was released when the body of its task ended"
            raise LockLost(text, name=self.name, owner=self.owner, remaining=0.0)

    def fenced(self, connection: Any) -> AbstractContextManager[None]:
        """A block of a database transaction that only the holder of the lock can commit:

            with transaction.atomic(), self.lock.fenced(connection):
                ...

        The block shows the database the fencing token when it begins and when it ends. See
        `celery_relock.contrib.sql.fence`, which lists the connections that can be used.

        Raises:
            LockLost: the lock is lost, or none is held.
            LockConfigError: the connection cannot be used, is not in a transaction, or the lock has
                several permits.
        """
        from ..contrib.sql import fenced

        if not self._shares:
            raise LockLost("no lock is held, so there is no fencing token")
        self.check()  # the lease of a hold that was left to a retry may have other names by now
        limit = max(share.lease.limit_of(share.name) for share in self._shares)
        return fenced(connection, self.fences, limit, self.check)

    def downgrade(self) -> None:
        """Share the lock from now on (`lock_mode="shared"`). The lock is never free in between.
        Shared waiters that are first in the queue get it at once. There is no way back.

        Raises:
            LockLost: the lock is lost.
            LockConfigError: the lock has several permits; or a caller of this task, or an execution
                that has re-entered the lock, relies on it.
            LockUnavailable: Redis cannot be reached. The lock might be shared already. Call again.
        """
        if not self._shares:
            return  # it runs without its lock
        if self._engine is None:
            raise LockConfigError(
                f"the lock {self.name!r} cannot be downgraded here, as a caller of this task holds "
                "it and relies on it: downgrade it there",
                name=self.name,
            )
        self.check()
        if not self._engine.downgrade(self._shares[0].lease):
            raise self.lost_error()

    def lost_error(self) -> LockLost:
        """The error that says which lock was lost, and since when nothing renewed it."""
        share = next((share for share in self._shares if share.lease.lost), self._shares[0])
        which = f"the lock {share.name!r} (fence {share.fence})"
        if share.lease.pid == os.getpid():
            ago = clock() - share.lease.renewed
            why = f"{share.lease.lost_by}; " if share.lease.lost_by else ""
            text = (
                f"{which} was lost: {why}its last renewal was {ago:.1f} s ago. Another task might "
                "hold it now: do not write without comparing the fencing token"
            )
        else:
            text = (
                f"{which} is held by process {share.lease.pid} alone, if it still is. This process "
                "was forked from it, and holds nothing: look at the lock there"
            )
        return LockLost(
            text,
            name=share.name,
            owner=self.owner,
            remaining=0.0,
        )

    def __repr__(self) -> str:
        state = "lost" if self.lost else "held" if self.protected else "unprotected"
        return f"<Hold {self.name!r} {state} owner={self.owner} fence={self.fence}>"


#: Makes the hold of an execution, once its body asks for `self.lock`. Most bodies do not.
MakeHold: TypeAlias = Callable[..., Hold]
#: Runs a body, under locks that are acquired.
Body: TypeAlias = Callable[[MakeHold], Any]
