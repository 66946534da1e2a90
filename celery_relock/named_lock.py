"""What the `Lock` for threads and that for coroutines have in common: what their caller has of the
lock, what is asked for, and the errors."""

from __future__ import annotations

import math
import os
import sys
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeAlias, TypeVar

from redis.exceptions import LockError, LockNotOwnedError

from . import engines
from .engine import ids, reentrancy
from .engine.engine import Engine
from .engine.events import describe_conflict, describe_deadlock, label_of
from .engine.lease import Lease, State
from .engine.platform import Guard
from .engine.protocol import (
    LONGEST,
    MODES,
    SHARED,
    Answer,
    Claim,
    Conflict,
    Deadlocked,
    Held,
    OtherAttempt,
)
from .engine.renewal import keepalive
from .errors import (
    LockConfigError,
    LockConflict,
    LockDeadlock,
    LockLost,
    RelockError,
    without_locals,
)
from .naming.template import check_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from .engine.events import Work
    from .engine.protocol import LockState

DEFAULT_LEASE = 30.0
Token: TypeAlias = "str | bytes | None"
# The shortest lease, in seconds: Redis gets leases in milliseconds.
_SHORTEST = 0.001


class _AsInRedisPy(RelockError):
    def __init__(self, message: str, name: str | None = None, *more: Any, **told: Any) -> None:
        super().__init__(message, name, *more, **told)
        #: The lock name, under the name of redis-py's attribute.
        self.lock_name = name


class LockNotAcquired(_AsInRedisPy, LockConflict, LockError):
    """The lock could not be acquired in the time allowed. Also redis-py's `LockError`."""


class LockNeverFree(_AsInRedisPy, LockDeadlock, LockError):
    """Waiting for the lock would never end. Also redis-py's `LockError`."""


class LockNotTaken(_AsInRedisPy, LockError):
    """The caller has not acquired the lock, or has released it. Also redis-py's `LockError`."""


class LockNotOwned(_AsInRedisPy, LockLost, LockNotOwnedError):
    """The caller acquired the lock and has lost it since. Also redis-py's `LockNotOwnedError`."""


class Grip:
    """What a thread, or an asyncio task, has of a `Lock`. The grip disappears with the thread, the
    task or the `Lock`, and then nothing renews the lease. (The lease has a weak reference to it.
    `__del__` would swallow the exception of a time limit's signal.)

    Attributes:
        length: seconds of a whole lease, as it was acquired.
        depth: how often it was acquired, re-entries included.
        borrowed: whether the lease belongs to an outer holder, which releases it.
    """

    __slots__ = ("__weakref__", "_holder", "borrowed", "depth", "lease", "length")

    def __init__(self, lease: Lease, caller: Any, borrowed: bool = False) -> None:
        self.lease = lease
        self.length = lease.claim.lease
        self.depth = 1
        self._holder = weakref.ref(caller)
        self.borrowed = borrowed
        if borrowed:
            lease.rely(self)
        else:
            lease.holder = weakref.ref(self)

    @property
    def outlived(self) -> bool:
        """Whether the outer holder has released the lock."""
        return self.borrowed and self.lease.state not in (State.HELD, State.LOST)

    @property
    def holder(self) -> object:
        """The caller that acquired the lock, a thread or an asyncio task; None if it is gone."""
        return self._holder()


Client = TypeVar("Client")
# Held for a few lines, by a thread that a signal's handler may interrupt there.
_guard = Guard()


class GripOfAll:
    """What all threads, or all asyncio tasks, have of a `Lock(thread_local=False)` together: the
    grip of the last one who acquired the lock.

    The holder before, who has lost the lock or has another of its permits, keeps its own grip until
    it releases that. Else it would take the next one's hold for its own, and release it.
    """

    def __init__(self) -> None:
        self._last: Grip | None = None
        self._replaced: weakref.WeakKeyDictionary[Any, Grip] = weakref.WeakKeyDictionary()

    def of(self, caller: object) -> Grip | None:
        """What a caller has of the lock."""
        return self._replaced.get(caller) or self._last

    def acquired(self, caller: object, grip: Grip) -> None:
        """A caller has acquired the lock."""
        with _guard.lock:
            last, self._last = self._last, grip
            before = None if last is None else last.holder
            if last is not None and before is not None and before is not caller:
                self._replaced[before] = last
            self._replaced.pop(caller, None)

    def released(self, caller: object, grip: Grip) -> None:
        """A caller is about to release what it has."""
        with _guard.lock:
            if self._last is grip:
                self._last = None
            elif self._replaced.get(caller) is grip:
                del self._replaced[caller]

    def not_released(self, caller: object, grip: Grip) -> None:
        """The release has failed: the caller can try again."""
        with _guard.lock:
            if self._last is None:
                self._last = grip
            elif self._last is not grip:  # another has acquired the lock meanwhile
                self._replaced[caller] = grip


class NamedLock(Generic[Client]):
    """A `Lock` up to the point where it waits for Redis. The caller is a thread or a task."""

    #: Whose lock it is, for people.
    _who = "this caller"
    #: Whether coroutines use it.
    _loops = False
    #: Makes what each caller has by itself, as `GripOfAll`.
    _own: Callable[[], Any]
    #: What it is that a caller has.
    _grip_type: type[Grip] = Grip

    @without_locals
    def __init__(
        self,
        redis: Client | str | Callable[[], Client] | Engine,
        name: str | bytes,
        timeout: float | None = None,
        sleep: float = 0.1,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
        *,
        owner: str | None = None,
        limit: int = 1,
        mode: Literal["exclusive", "shared"] = "exclusive",
        renew: bool = True,
        namespace: str = engines.NAMESPACE,
        min_replicas: int = 0,
    ) -> None:
        self.name = check_name(as_text(name, "a lock name"), "Lock")
        self.timeout = timeout
        self.blocking = blocking
        self.blocking_timeout = blocking_timeout
        self.raise_on_release_error = raise_on_release_error
        self._owner = None if owner is None else self._owner_id(owner)
        self._limit = SHARED if mode == "shared" else limit
        self._renew = renew
        self._for_any_thread = not thread_local
        if timeout is not None:
            self._check_length(timeout, f"timeout={timeout!r}")
        self._check_wait(self.blocking_timeout)
        if not isinstance(renew, bool):
            raise self._refused(f"renew={renew!r:.80}", "True or False")
        given: object = limit
        if isinstance(given, bool) or not isinstance(given, int) or limit < 1:
            raise self._refused(f"limit={limit!r}", "a whole number from 1")
        if mode not in MODES or (mode == "shared" and limit != 1):
            what = f"mode={mode!r} with limit={limit!r}"
            raise self._refused(what, '"exclusive", or "shared" without a limit')
        self._engine = (
            redis
            if isinstance(redis, Engine)
            else engines.engine_for(
                redis, namespace, replicas=(min_replicas, 1.0), loops=self._loops
            )
        )
        self.local: Any = self._own() if thread_local else GripOfAll()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"the lock {self.name!r} cannot be pickled or copied: what it holds is this process's. "
            "Send its name, and make a Lock there"
        )

    # What each has in its own way. The texts are for both; a coroutine returns when it is awaited.

    def acquire(self, *args: Any, **kwargs: Any) -> Any:
        """Acquire the lock, or re-enter what the caller holds.

        Args:
            sleep: not used; accepted, for threads, because redis-py's Lock has it.
            blocking: whether to wait. Default: the `blocking` of this object.
            blocking_timeout: seconds to wait at most. Default: the `blocking_timeout` of this
                object.
            token: not needed; accepted because redis-py's Lock has it. It becomes the id of the
                hold.

        Returns:
            True if acquired; False if another holder kept the lock until `blocking_timeout` passed.

        Raises:
            LockNotOwned: the caller acquired the lock before and has lost it since.
            LockNeverFree: waiting without a bound would never end: the holder waits for the
                caller, or is the caller through another object, unless that one has
                `thread_local=False` or `renew=False`.
            LockUnavailable: Redis cannot be reached.
            LockConfigError: the token or the `blocking_timeout` cannot be used.
        """

    def release(self) -> Any:
        """Release the lock. After re-entries, only the last release counts.

        Raises:
            LockNotTaken: the caller does not hold the lock.
            LockNotOwned: the lock was lost meanwhile.
            LockUnavailable: Redis cannot be reached. The lock ends with its lease, or by another
                `release`.
        """

    def extend(self, additional_time: float, replace_ttl: bool = False) -> Any:
        """Make the lease longer, or set its length.

        If this `Lock` has re-entered the hold of an outer holder, such as its task, the lease is
        the outer holder's and stays as it is.

        Args:
            additional_time: seconds to add to the lease.
            replace_ttl: True makes the lease end `additional_time` seconds from now.

        Returns:
            True.

        Raises:
            LockNotTaken: the caller does not hold the lock.
            LockNotOwned: the lock is lost, or might be released already: a `release` failed.
            LockConfigError: the lease would be shorter than a millisecond; or the outer holder's
                lease is not renewed, and ends before the time asked for.
            LockUnavailable: Redis did not answer. If the call makes the lease shorter, `remaining`
                counts the shorter lease from now on.
        """

    def downgrade(self) -> Any:
        """Share the lock that the caller holds, without a moment in which it is free: shared
        waiters that are first in the queue get it at once. The lock stays shared until it is
        released.

        Raises:
            LockNotTaken: the caller does not hold the lock.
            LockNotOwned: the lock is lost.
            LockConfigError: the lock has several permits, or another holder of the permit relies on
                it.
            LockUnavailable: Redis cannot be reached. The lock might be shared; call again.
        """

    def reacquire(self) -> Any:
        """Set the lease back to its full length. Returns and raises as `extend` does."""

    def locked(self) -> Any:
        """Whether anybody holds the lock.

        Raises:
            LockUnavailable: Redis cannot be reached.
        """

    def owned(self) -> Any:
        """Whether the caller holds the lock, according to Redis as well.

        Raises:
            LockUnavailable: Redis cannot be reached.
        """

    def fenced(self, connection: Any) -> Any:
        """A block of a database transaction that only the holder of the lock can commit. See
        `Hold.fenced`. For coroutines:

            async with session.begin(), lock.fenced(session):
                ...

        Args:
            connection: for coroutines, an AsyncConnection or AsyncSession of SQLAlchemy.

        Raises:
            LockNotTaken: the caller does not hold the lock.
            LockNotOwned: the lock is lost.
            LockLost: the database has seen a higher fencing token.
            LockConfigError: the connection cannot be used, is not in a transaction, or the lock has
                several permits.
        """

    @property
    def fence(self) -> int:
        """The fencing token, also when the lock is lost; 0 if the caller has none. See
        `Hold.fence`."""
        lease = self._lease
        return 0 if lease is None else lease.fence_of(self.name)

    @property
    def lost(self) -> bool:
        """Whether the caller acquired the lock and has lost it since, or its outer holder has."""
        grip = self._own_grip()  # also after a release that failed
        return grip is not None and (grip.lease.lost or grip.outlived)

    @property
    def remaining(self) -> float:
        """Seconds for which the hold is certain; 0 if the caller does not hold the lock."""
        lease = self._lease
        return 0.0 if lease is None else lease.remaining

    def _to_fence(self) -> tuple[dict[str, int], int, Callable[[], None]]:
        """The token, how many permits the lock has, and what tells a loss, for `contrib.sql`."""
        lease = self._grip("relied on").lease
        return {self.name: lease.fence_of(self.name)}, lease.limit_of(self.name), self.check

    def check(self) -> None:
        """Make sure that the lock is not lost. Call it before anything that needs the lock.

        Raises:
            LockNotTaken: the caller does not hold the lock.
            LockNotOwned: the lock is lost.
        """
        self._still_has(self._grip("relied on"))

    def _own_grip(self) -> Grip | None:
        """What the caller has of the lock, lost or not."""
        raise NotImplementedError

    def _standing(self) -> tuple[Grip | None, int]:
        """The caller's grip, and how often it holds the lock, re-entries included."""
        grip = self._own_grip()
        return grip, 0 if grip is None else grip.depth

    def _has_begun(self, caller: object, before: tuple[Grip | None, int]) -> bool:
        """Whether a caller has acquired the lock since: with thread_local=False another may have,
        for all of them."""
        now = self._standing()
        return now != before and now[0] is not None and now[0].holder is caller

    def _grip(self, verb: str) -> Grip:
        grip = self._own_grip()
        if grip is None:
            raise self._not_taken(verb)
        return grip

    @property
    def _lease(self) -> Lease | None:
        """The lease of the caller's hold, lost or not."""
        grip = self._own_grip()
        return grip.lease if grip and grip.lease.state in (State.HELD, State.LOST) else None

    def _wait(self, blocking: bool | None, timeout: float | None) -> float | None:
        """For how many seconds `acquire` is to wait, None without a bound. Raises
        LockConfigError."""
        if not (self.blocking if blocking is None else blocking):
            return 0.0
        wait = self.blocking_timeout if timeout is None else timeout
        self._check_wait(wait)
        return None if wait == math.inf else wait

    def _is_passed_on(self, grip: Grip, block: bool) -> bool:
        """Whether another may be about to release what its holder has acquired, who asks for it
        again: a thread of a pool, perhaps, that is back for other work. Not inside of its block;
        not for an owner or in a Celery task, which re-enter all the same."""
        if not self._for_any_thread or self._limit != 1 or self._owner or self._outer():
            return False
        return grip.lease.state is State.HELD and not (block and reentrancy.has(grip.lease))

    def _re_enter(self, caller: object, grip: Grip, block: bool) -> Held | None:
        """Once more what the caller has already, if that is a hold of its own."""
        lease = grip.lease
        if self._for_any_thread and grip.holder is not caller:
            return None
        if self._is_passed_on(grip, block) or lease.state not in (State.HELD, State.LOST):
            return None
        self._still_ours(lease, ". Call release() before you acquire it again")
        if self._limit != SHARED and lease.shares(self.name):
            return None  # it was downgraded: the acquire that follows reports the deadlock
        grip.depth += 1
        return Held(lease.fences, lease.reentered)

    def _borrow(self, caller: object, outer: Lease | None) -> Held | None:
        """Re-enter what an outer holder has through this client. None if there is none."""
        if outer is None or outer.backend is not self._engine.backend:
            return None
        self._still_ours(outer)
        self._acquired(caller, outer, borrowed=True)
        outer.tell("reentered")
        return Held(outer.fences, outer.reentered)

    def _put_on_the_stack(self, lease: Lease, block: bool) -> None:
        # `acquire` alone does not say that what runs here later is inside: another thread may be
        # about to release the lock, and this one be back for other work.
        if block or not self._for_any_thread or lease.work:
            reentrancy.push(lease)

    def _acquired(self, caller: object, lease: Lease, borrowed: bool = False) -> None:
        self.local.acquired(caller, self._grip_type(lease, caller, borrowed))

    def _let_go(self, caller: object, grip: Grip) -> bool:
        """Release what was only re-entered. False if Redis has to be told, of the last release."""
        if grip.depth > 1:
            grip.depth -= 1
        elif grip.borrowed:
            self.local.released(caller, grip)
            grip.lease.rely(grip, False)
            self._still_has(grip)
        else:
            return False
        return True

    def _outer(self) -> Lease | None:
        """What the task that runs here has of the lock, through this client or another."""
        if self._owner is not None:
            return None
        shared = self._limit == SHARED
        # Here before elsewhere: a lock of that name in another namespace is another lock.
        found = (
            reentrancy.holding(backend, self.name, shared)
            for backend in (self._engine.backend, None)
        )
        lease = next(filter(None, found), None)
        # By what a task has acquired, also where another thread runs with the task's context, as
        # with asyncio.to_thread and asgiref.
        return lease if lease is not None and (lease.work or work()) else None

    def _claim(self, token: Token, outer: Lease | None, wait: float | None) -> Claim:
        execution_id = ids.new_id() if token is None else ids.short(as_text(token, "a token"))
        within = work()
        owner = self._owner or (outer.claim.owner if outer else workflow() if within else None)
        return Claim(
            execution_id=execution_id,
            # Without a token each attempt is an execution of its own, whose id is random.
            attempt_id=execution_id[:8] if token is None else ids.new_attempt_id(),
            owner=owner or execution_id,
            names=(self.name,),
            limits=(self._limit,),
            lease=DEFAULT_LEASE if self.timeout is None else float(self.timeout),
            # Who looks at the lock finds the task, and who asks for the task finds the lock.
            label=label_of("Lock", within.id if within else ""),
            by_owner=self._owner is not None,
            # The outer holder used another client: the server finds its hold by its execution.
            ancestors=(outer.claim.execution_id,) if outer else (),
            # A bounded wait cannot deadlock: it ends by its bound, as redis-py's does.
            stuck=reentrancy.stuck() if wait is None else (),
        )

    def _set_up(self, lease: Lease) -> None:
        lease.renews, lease.for_any_thread = self._renew, self._for_any_thread
        lease.work = work()
        # Outside of a task a thread that runs with a copy of the context is another holder.
        lease.thread = None if self._loops or lease.work else threading.get_ident()

    def _tell_conflict(self, lease: Lease, answer: Answer, wait: float | None) -> None:
        waits = not isinstance(answer, Deadlocked) and (wait is None or wait > 0)
        lease.tell("conflict", self._reason(answer), policy="block" if waits else "raise")

    def _reason(self, answer: Answer) -> str:
        if isinstance(answer, Deadlocked):
            return describe_deadlock(answer.path, reentrancy.sharing(answer.path[-1]))
        return describe_conflict(self.name, answer)

    def _check_deadlock(self, answer: Answer) -> None:
        if isinstance(answer, Deadlocked):
            raise LockNeverFree(self._reason(answer), name=self.name)

    def _check_acquired(self, answer: Answer, wait: float | None) -> None:
        if not isinstance(answer, Held):
            waited = max(wait or 0.0, 0.0)
            text = f"{self._reason(answer)}; not acquired within {waited:g} s"
            owner = ids.full(answer.owner) if isinstance(answer, Conflict) else None
            left = answer.remaining if isinstance(answer, Conflict | OtherAttempt) else None
            raise LockNotAcquired(text, name=self.name, owner=owner, remaining=left)

    def _grip_of(self, caller: object) -> Any:
        """The grip of a thread or an asyncio task, None if it has none. A forked child does not
        hold what its parent holds."""
        grip = self.local.of(caller)
        return None if grip is None or grip.lease.pid != os.getpid() else grip

    def _owner_id(self, owner: Any) -> str:
        # A variable that is not set gives an empty text, and with one owner nobody excludes the
        # other.
        if not isinstance(owner, str) or not owner.strip():
            raise self._refused(f"owner={owner!r:.80}", "a text that is not blank")
        return ids.short(owner)

    def _check_length(self, seconds: Any, where: str) -> None:
        """Raise LockConfigError if a lease cannot have this length."""
        if not _is_number(seconds) or not _SHORTEST <= seconds <= LONGEST:
            use = f"a lease of {_SHORTEST} s to ten years, as a number of seconds"
            raise self._refused(where, use)

    def _check_wait(self, seconds: Any) -> None:
        """Raise LockConfigError if nobody can wait for so long. A wait of nan would never end."""
        with suppress(OverflowError):
            if seconds is None or (isinstance(seconds, int | float) and not math.isnan(seconds)):
                return
        use = "seconds, or None to wait without a bound"
        raise self._refused(f"blocking_timeout={seconds!r:.80}", use)

    def _refused(self, what: str, use: str) -> LockConfigError:
        text = f"Lock {self.name!r}: {what} cannot be used. Use {use}."
        return LockConfigError(text, name=self.name)

    def _length(self, grip: Grip, additional_time: float, replace_ttl: bool) -> float:
        """How long the lease is to be, in seconds, according to `extend`. Raises LockNotOwned."""
        self._still_has(grip)
        lease = grip.lease
        if not _is_number(additional_time):
            self._check_length(additional_time, f"extend({additional_time!r:.80})")
        length = additional_time if replace_ttl else lease.left_on_server + additional_time
        self._check_length(length, f"extend({additional_time!r}) to {length:g} s")
        if grip.borrowed and not lease.renews and length > lease.left_on_server:
            raise LockConfigError(
                f"the lock {self.name!r} is held by an outer Lock(renew=False): extend the outer "
                "Lock",
                name=self.name,
            )
        return length

    def _is_among(self, state: LockState, lease: Lease) -> bool:
        """Whether a lease is among the holds of its lock. If not, it is lost. With
        `relock_enabled=False`, when the token is 0, there are none to be among."""
        if not lease.fence_of(self.name):
            return True
        ours = lease.claim.execution_id, lease.claim.attempt_id
        found = any((hold.execution_id, hold.attempt_id) == ours for hold in state.holds)
        if not found and lease.state is State.HELD:
            keepalive.found(lease, held=False)
        return found

    def _check_downgrade(self, grip: Grip) -> None:
        self._still_ours(grip.lease)
        if grip.borrowed or grip.depth > 1:
            outer = "an outer holder" if grip.borrowed else "an outer block"
            raise LockConfigError(
                f"the lock {self.name!r} cannot be downgraded here, as {outer} relies on it: "
                "downgrade it where it was acquired first",
                name=self.name,
            )

    def _still_has(self, grip: Grip) -> None:
        if grip.outlived:
            raise self._not_owned("was released by its outer holder")
        self._still_ours(grip.lease)

    def _still_ours(self, lease: Lease, and_now: str = "") -> None:
        if lease.lost:
            why = lease.lost_by or "it was not renewed in time, or it was released by force"
            raise self._not_owned(f"was lost: {why}{and_now}")
        if lease.state is not State.HELD:
            raise self._not_owned(
                "might be released already: Redis did not answer its release. Release it again"
            )

    def _not_taken(self, verb: str) -> LockNotTaken:
        text = f"the lock {self.name!r} is not held by {self._who}, so it cannot be {verb}"
        return LockNotTaken(text, name=self.name)

    def _not_owned(self, what: str) -> LockNotOwned:
        return LockNotOwned(f"the lock {self.name!r} {what}", name=self.name)


def _is_number(seconds: Any) -> bool:
    return isinstance(seconds, int | float) and not isinstance(seconds, bool)


def as_text(value: str | bytes, what: str) -> str:
    """A lock name, or the token of an `acquire`, as text. Raises LockConfigError."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise LockConfigError(f"{what} must be UTF-8 text, not {value!r:.200}") from error
    if not isinstance(value, str):
        raise LockConfigError(f"{what} must be text, not {value!r:.200}")
    return value


def workflow() -> str | None:
    """The workflow of the task that runs here, None if the task was called directly."""
    from .worker import message

    return message.workflow()


def work() -> Work | None:
    """The Celery task that runs here, called directly or by a worker, as events carry it; None
    outside of tasks. Does not load Celery."""
    celery = sys.modules.get("celery._state")
    if celery is None or (task := celery._task_stack.top) is None:
        return None
    from .worker.message import work_for

    return work_for(task, None)
