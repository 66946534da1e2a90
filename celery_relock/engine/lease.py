"""A lease: one execution's claim on its locks while it waits for them, holds them, or has lost
them.

How long a lease counts: from just before the command was sent that the server answered, as the
server cannot have counted from any earlier moment, and less a margin.
"""

from __future__ import annotations

import enum
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar
from weakref import ref

from ..errors import LockConfigError, LockUnavailable, RelockError
from . import platform
from .crash import Entry
from .events import NO_TASK, LockEvent, Work, tell, wanted
from .platform import Guard, clock
from .protocol import (
    COOLDOWN,
    SHARED,
    Claim,
    Downgraded,
    Ended,
    Held,
    Parked,
    Queued,
    Renewal,
    Successor,
)

if TYPE_CHECKING:
    from .protocol import Answer, Backend, Full
    from .wakeup import Inbox

# The share of every lease by which a hold ends here before it ends on the server.
MARGIN = 0.05
# A hold this old, in seconds, is worth a connection on which its process hears of its loss.
LONG = 1.0
# The longest wait for the answer to a command that is sent only once, in seconds.
ANSWER = 2.0
# Seconds for which a place in the queue lives without a heartbeat, unless the lease is shorter. A
# dead waiter holds up those behind it for no longer.
WAITER_LEASE = 6.0

# One for all leases of the process: held for two lines, and only where threads may meet.
_guard = Guard()
_T = TypeVar("_T")


class State(enum.Enum):
    NEW = "new"  #: nothing sent yet
    ASKED = "asked"  #: a claim is on its way; the server may have granted it
    WAITING = "waiting"  #: has a place in the queue
    HELD = "held"
    LOST = "lost"  #: ended before its work did
    RELEASED = "released"  #: released, or about to be: nothing renews it any more


class Lease:
    """The state of one claim in this process. Times are seconds by `platform.clock`.

    The waiter's thread, the keep-alive thread and the inbox's thread all meet here: every change of
    state is made under one guard, and only one of the threads wins.

    Attributes:
        claim, backend: what is asked for, and where.
        pid: of the process that made it. A forked child has a copy, and none of the holds.
        fences, reentered: as in `Held`, one for each name of the claim.
        waiter_lease: seconds that its place in the queue lives without a heartbeat.
        deadline: when this side stops believing in the hold (or in a grant while it waits).
        renewed: when the last command was sent that the server answered well.
        due: when the keep-alive thread next looks after the lease.
        repeated: a command that acquires may have been sent more than once, so a copy of it may
            still come, and acquire the lock for nobody.
        unheld: the last answer that did not grant the claim; None if there was none.
        renews: False lets the hold end by itself.
        on_lost: each is called once when the hold is lost, from whatever thread finds out; the
            last that was added first.
        inbox: opened when the hold is `LONG`, at `listen_at`, if it is not open; from then on the
            process hears of a loss. None to do without.
        for_any_thread: another thread may release the lock.
        holder: returns who releases the lock; when it returns None, nothing renews the lease.
        lost_by: why the hold was lost, once that is known.
        thread: the id of the thread that alone can re-enter it; None for all in its context.
        work: the task that the lock is for, None outside of tasks.
        of_workflow: it is a part of a workflow lock.
        unbroken: False if what was left to its execution had ended before that came.
        reliers: who has re-entered it on its call stack and relies on it, while they live.
        successor: the execution that the hold is left to, instead of being released.
        waits_since: when the execution first had to wait in this process; 0 if it did not.
        put_off_since: the same for one whose message was sent again, in seconds since the epoch.
        held_since: when the hold began; 0 before.
    """

    __slots__ = (
        "_believed_at_most", "_bell", "_granted_early", "_is_untold", "_lost", "backend", "claim",
        "deadline", "due", "fences", "for_any_thread", "held_since", "holder", "inbox", "listen_at",
        "lost_by", "of_workflow", "on_lost", "pid", "put_off_since", "reentered",
        "reliers", "renewed", "renews", "repeated", "state", "successor", "thread", "unbroken",
        "unheld", "waiter_lease", "waits_since", "work",
    )  # fmt: skip

    def __init__(self, claim: Claim, backend: Backend, inbox: Inbox | None = None) -> None:
        self.pid = os.getpid()
        if self.pid != platform.begun_in:
            platform.notice_fork()
        self.claim = claim
        self.backend = backend
        self.waiter_lease = min(claim.lease, WAITER_LEASE)
        self.on_lost: tuple[Callable[[], None], ...] = ()
        self.inbox = inbox
        self.state = State.NEW
        self.fences: tuple[int, ...] = ()
        self.reentered: tuple[bool, ...] = ()
        self.repeated = False
        self.unheld: Answer | Parked | Full | None = None
        self.for_any_thread = False
        self.of_workflow = False
        self.unbroken = True
        self.renews = True
        self.deadline = self.due = self.renewed = 0.0
        self.waits_since = self.put_off_since = self.held_since = 0.0
        self.listen_at = math.inf
        self.holder: Callable[[], object] | None = None
        self.work: Work | None = None
        self.lost_by = ""
        self.thread: int | None = None
        self.successor: Successor | None = None
        self.reliers: tuple[ref[object], ...] = ()
        self._bell: threading.Lock | None = None  # few leases ever wait
        # The tokens of a grant whose message was faster than the answer "wait".
        self._granted_early: tuple[int, ...] = ()
        # What `give_up` found: that it was lost; that it was held, and its end is to be told.
        self._lost = self._is_untold = False
        # The shortest length that a lost command of `extend` may have given the lease.
        self._believed_at_most = math.inf

    def is_here(self) -> bool:
        """Whether the call stack that runs now may be that of who acquired it."""
        return self.pid == os.getpid()

    def limit_of(self, name: str) -> int:
        """How many permits this one of its locks has, or `SHARED`."""
        return self.claim.limits[self.claim.names.index(name)]

    def fence_of(self, name: str) -> int:
        """The fencing token of this one of its locks."""
        return self.fences[self.claim.names.index(name)]

    def shares(self, name: str) -> bool:
        """Whether it shares this one of its locks with others."""
        return self.limit_of(name) == SHARED

    @property
    def may_hold(self) -> bool:
        """Whether the server has something of it, or may have: an answer can be on its way."""
        return self.state not in (State.NEW, State.RELEASED)

    @property
    def abandoned(self) -> bool:
        """Whether nobody is there any more who would release it."""
        return self.holder is not None and self.holder() is None

    def withdraw(self) -> None:
        """Release it in another thread, as it was abandoned before anybody was told that it holds.
        (A thread waits for its answer. A coroutine can be cancelled meanwhile: see `TaskLease`.)"""

    def switch(self, to: State, *allowed: State) -> bool:
        """Go to a state if the present one is among those allowed. True if it did."""
        with _guard.lock:
            if self.state not in allowed:
                return False
            self.state = to
            return True

    def narrow(self, kept: Sequence[bool]) -> None:
        """Of its locks it has only these any more; the others were released."""
        claim = self.claim

        def of(values: tuple[_T, ...]) -> tuple[_T, ...]:
            return tuple(each for each, is_kept in zip(values, kept, strict=True) if is_kept)

        with _guard.lock:
            self.claim = claim._replace(names=of(claim.names), limits=of(claim.limits))
            self.fences, self.reentered = of(self.fences), of(self.reentered)

    def rely(self, who: object, on: bool = True) -> None:
        """Somebody has re-entered it on its call stack, or does not rely on it any more."""
        with _guard.lock:
            others = tuple([each for each in self.reliers if each() not in (None, who)])
            self.reliers = (*others, ref(who)) if on else others

    def resize(self, length: float) -> None:
        """Its leases are so many seconds long from now on."""
        with _guard.lock:  # another thread may downgrade it meanwhile
            self.claim = self.claim._replace(lease=length)

    def share(self) -> tuple[int, ...]:
        """From now on others may share its locks. Returns the limits before.

        Raises:
            LockConfigError: a lock has several permits, or a call on its call stack relies on it.
        """
        with _guard.lock:
            claim = self.claim
            relied_on = any(each() is not None for each in self.reliers)
            if relied_on and claim.limits != (SHARED,) * len(claim.names):
                names = ", ".join(map(repr, claim.names))
                raise LockConfigError(
                    f"the lock {names} cannot be downgraded here, as a call inside of its holder "
                    "has re-entered it and relies on it: downgrade it when that call has returned",
                    name=claim.names[0],
                )
            if any(limit > 1 for limit in claim.limits):
                raise LockConfigError(
                    f"the lock {claim.names[0]!r} cannot be downgraded, as it has several permits "
                    "(lock_limit)",
                    name=claim.names[0],
                )
            self.claim = claim._replace(limits=(SHARED,) * len(claim.names))
            return claim.limits

    def joined_error(self, done: Downgraded, limits: tuple[int, ...]) -> RelockError:
        """The lock was not downgraded, as others have re-entered it."""
        name = done.joined
        if done.repeated:
            return LockUnavailable(
                f"the lock {name!r} might become shared: other executions have re-entered it, and "
                "the command that shares it was sent more than once. Downgrade it again when they "
                "have ended",
                name=name,
            )
        with _guard.lock:
            self.claim = self.claim._replace(limits=limits)
        return LockConfigError(
            f"the lock {name!r} cannot be downgraded: other executions have re-entered it and rely "
            "on it. Downgrade it when they have ended, where it was acquired first",
            name=name,
        )

    def give_up(self) -> State:
        """Nothing renews the lease from now on. Returns the state before. A loss stays one, and the
        end of a hold is still to be told: the release may fail, and the caller try again."""
        with _guard.lock:
            before = self.state
            late = before is State.HELD and clock() >= self.deadline
            self._lost = self._lost or late or before is State.LOST
            self._is_untold = self._is_untold or before is State.HELD
            self.state = State.NEW if before is State.NEW else State.RELEASED
            return before

    def tell_release(self, before: State, had: bool) -> bool:
        """Tell of a release: the state before `give_up`, and whether the server had a hold. Returns
        False if that was lost."""
        if not self._is_untold:
            return not self._lost
        # After a first try, which may have released it unheard, it is asked for.
        if self._lost or not (had or before is State.ASKED):
            self.tell("lost", "found at the release", clock() - self.renewed)
            return False
        if self.successor is None:
            self.tell("released")
        elif self.cools:
            self.tell("released", f"it cools down for {self.cools:g} s")
        return True

    def answered(self, answer: Answer | Parked | Full, sent: float) -> bool:
        """The server answered the claim, in a command that was sent at `sent`.

        False if the execution neither holds nor waits, as when the lease of its hold had run out
        before the answer came.
        """
        if not isinstance(answer, Ended):
            self.repeated = self.repeated or answer.repeated
        if isinstance(answer, Held):
            self.fences, self.reentered = answer.fences, answer.reentered
            with _guard.lock:
                return self.state is State.ASKED and self._hold(answer.sent or sent)
        self.unheld = answer
        if isinstance(answer, Queued):
            self.reentered = (False,) * len(self.claim.names)
            with _guard.lock:
                return self.state is State.ASKED and self._queue(sent, answer.recheck)
        # A parked message is no longer this process's. Else the state stays "asked" while a copy of
        # the command may still come, and acquire the lock for nobody.
        if isinstance(answer, Parked) or not self.repeated:
            self.switch(State.NEW, State.ASKED)
        return False

    def _queue(self, sent: float, recheck: float) -> bool:
        self.state = State.WAITING
        self._expect(sent, recheck)
        if self._granted_early:  # the message of the grant, on another connection, was faster
            self._grant(self._granted_early, known=self._is_plain)
        return True

    def wait_on(self, sent: float, recheck: float) -> None:
        """The server kept the place, as it says in answer to a command that was sent at `sent`. In
        `recheck` seconds the next lease of the lock ends, which is worth a look; 0 if none does."""
        with _guard.lock:
            if self.state is State.WAITING:
                self._expect(sent, recheck)

    def granted(self, attempt_id: str, fences: tuple[int, ...], sent: float | None = None) -> bool:
        """The server granted a waiter its lock, as a message says or a heartbeat sent at `sent`.

        True if the state changed. Not if the news is of an attempt that another has followed.
        """
        with _guard.lock:
            if attempt_id != self.claim.attempt_id:
                return False
            if self.state is State.ASKED:
                self._granted_early = fences
            if self.state is not State.WAITING:
                return False
            if sent is not None:
                self.renewed = sent
            self._grant(fences, known=sent is not None or self._is_plain)
            return True

    def taken_from(self) -> None:
        """A hold of it was released by force before it had all of its locks, or before it heard so:
        a heartbeat tells what is left."""
        with _guard.lock:
            self._granted_early = ()
            if self.state is State.WAITING:
                self.due = 0.0

    @property
    def _is_plain(self) -> bool:
        """Whether the message of a grant says all. It does not say which of several permits were
        joined; and where the command was sent twice the grant may be that of the first, which has
        lapsed since. A heartbeat does."""
        return len(self.claim.names) == 1 and not self.repeated

    def _grant(self, fences: tuple[int, ...], known: bool) -> None:
        self._granted_early = ()
        if not known:
            self.due = 0.0
            return
        self.fences = fences
        # The server granted the lock after the last command that found the place, so the whole
        # lease counts from that command at the earliest. A waiter that was frozen for longer may
        # have lost the lock again; nobody has been told yet that it holds, so it asks once more.
        if not self._hold(self.renewed):
            self.state = State.ASKED

    def _hold(self, sent: float) -> bool:
        self._believe(sent, self.claim.lease)
        now = clock()
        if now >= self.deadline:
            return False
        self.held_since = now
        if self.inbox is not None and not self.inbox.thread.on:
            self.listen_at = sent + LONG
        self.state = State.HELD
        return True

    def again(self, attempt_id: str) -> None:
        """Nothing of the attempt is left on the server: what comes next is another attempt."""
        with _guard.lock:
            self.claim = self.claim._replace(attempt_id=attempt_id)
            self.fences = self._granted_early = ()
            self.repeated = self._lost = self._is_untold = False
            self.held_since = 0.0
            self.state = State.NEW

    def renew(self, sent: float, length: float) -> bool:
        """The server extended the hold to `length` seconds by a command that was sent at `sent`.

        False if the answer came after the deadline: a lease that was called lost stays lost.
        """
        with _guard.lock:
            if self.state is not State.HELD or clock() >= self.deadline:
                return False
            # A renewal that was on its way when `extend` set another length says nothing of the new
            # length.
            if length == self.claim.lease:
                self._believe(sent, length)
            return True

    def doubt(self, sent: float, length: float) -> None:
        """A command sent at `sent` was to make the lease as short as this, and nobody knows whether
        it did, or still will."""
        with _guard.lock:
            self._believed_at_most = min(self._believed_at_most, length)
            self.deadline = min(self.deadline, sent + length - length * MARGIN)
            self.due = min(self.due, sent) if self.renews else math.inf

    def _believe(self, sent: float, length: float) -> None:
        length = min(length, self._believed_at_most)
        self.renewed = sent
        self.deadline = sent + length - length * MARGIN
        self.due = sent + length / 3 if self.renews else math.inf

    def _expect(self, sent: float, recheck: float) -> None:
        self.renewed = sent
        self.deadline = sent + self.waiter_lease - self.waiter_lease * MARGIN
        self.due = sent + self.waiter_lease / 3
        if recheck > 0:
            self.due = min(self.due, clock() + recheck + 0.005)

    @property
    def next_look(self) -> float:
        """When the keep-alive has to look after the lease; never if it neither holds nor waits."""
        if self.state is State.HELD:
            return min(self.due, self.deadline, self.listen_at)
        return self.due if self.state is State.WAITING else math.inf

    @property
    def remaining(self) -> float:
        """Seconds for which the hold is certain if nothing renews it; 0 if nothing is held."""
        return self._until(self.deadline)

    @property
    def left_on_server(self) -> float:
        """As `remaining`, without the margin by which a hold is given up before the server does."""
        return self._until(self.renewed + min(self.claim.lease, self._believed_at_most))

    def _until(self, end: float) -> float:
        if self.state is not State.HELD or self.pid != os.getpid():
            return 0.0
        return max(0.0, end - clock())

    @property
    def cools(self) -> float:
        """For how many seconds the lock stays taken after the release (`lock_cooldown`)."""
        to = self.successor
        return to.keep if to is not None and to.execution_id.startswith(COOLDOWN) else 0.0

    @property
    def lost(self) -> bool:
        """The server said so, or no renewal came through in time. Never goes back to False.

        A forked child has a copy of its parent's leases and none of the holds.
        """
        if self.pid != os.getpid():
            return True
        if self.state is State.HELD and clock() < self.deadline:
            return False
        with _guard.lock:  # a renewal may have moved the deadline just in time
            late = self.state is State.HELD and clock() >= self.deadline
            return late or self.state is State.LOST or self._lost

    def renewals(self) -> list[Renewal]:
        """What the keep-alive sends for the lease: one renewal for each lock name."""
        claim, place = self.claim, self.waiter_lease if self.state is State.WAITING else 0.0
        return [
            Renewal(name, claim.execution_id, claim.attempt_id, claim.lease, place, longer=True)
            for name in claim.names
        ]

    def too_late_error(self) -> LockUnavailable:
        """The server grants the claim, and each answer comes when the lease has run out."""
        name = self.claim.names[0]
        return LockUnavailable(
            f"Cannot acquire lock {name!r}: each answer of Redis took longer than the lease of "
            f"{self.claim.lease:g} s (lock_ttl)",
            name=name,
        )

    def extensions(self, sent: float, length: float) -> tuple[list[Renewal], float | None]:
        """What is sent to make the lease this long, and within how many seconds it is to be
        answered. None: it only makes the lease longer, and may be sent again. What makes it shorter
        is sent once: a copy that comes late would shorten what was extended since."""
        shorter = sent + length < self.deadline
        renewals = [each._replace(lease=length, longer=not shorter) for each in self.renewals()]
        return renewals, min(length / 2, ANSWER) if shorter else None

    def entry(self) -> Entry:
        """What the journal notes of the lease."""
        claim, work = self.claim, self.work or NO_TASK
        whose = claim.execution_id, claim.attempt_id, claim.names
        return Entry(self.backend.id, *whose, claim.owner, task_name=work.name, task_id=work.id)

    def tell(self, kind: str, reason: str = "", since: float = 0.0, policy: str = "") -> None:
        """Tell the subscribers what happened to the lease."""
        if wanted(kind):
            tell(self.event(kind, reason, since, policy))

    def event(self, kind: str, reason: str = "", since: float = 0.0, policy: str = "") -> LockEvent:
        """What they are told."""
        return LockEvent(
            kind,
            self.claim.names,
            self.claim.execution_id,
            self.claim.owner,
            fence=max(self.fences, default=0),
            reason=reason,
            since=since,
            work=self.work,
            waited=self.waited,
            held=self._held(),
            reentered=bool(self.reentered) and all(self.reentered),
            policy=policy,
            of_workflow=self.of_workflow,
        )

    @property
    def waited(self) -> float:
        """Seconds for which the execution has had to wait until it held its locks, or until now."""
        until = self.held_since or clock()
        here = until - self.waits_since if self.waits_since else 0.0
        if not self.put_off_since:
            return here
        return max(here, time.time() - self.put_off_since - self._held())

    def _held(self) -> float:
        return clock() - self.held_since if self.held_since else 0.0

    def sleep(self, seconds: float, over: Callable[[], bool]) -> None:
        """Wait for a ring, at most so long; not at all if what it is to tell is over."""
        if self._bell is None:
            # Not an Event: an exception that a signal throws into its `wait` can get lost.
            bell = threading.Lock()
            bell.acquire()
            self._bell = bell
        # Asked after the bell is there: a ring before that found none.
        if not over():
            self._bell.acquire(timeout=max(seconds, 0.0))

    def ring(self) -> None:
        """Wake the sleeper: a hint, as the sleeper looks for itself, now and then unasked."""
        if self._bell is not None:
            with suppress(RuntimeError):  # it has rung already
                self._bell.release()


class QuietLease(Lease):
    """A lease of which nothing is told: to who listens it is no lock."""

    __slots__ = ()

    def tell(self, kind: str, reason: str = "", since: float = 0.0, policy: str = "") -> None:
        pass
