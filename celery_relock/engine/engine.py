"""Acquire locks, wait for them, park for them and release them: the state machine of a claim.

    lease = engine.lease(claim)
    try:
        answer = engine.acquire(lease, wait=10.0)
    finally:
        engine.release(lease)

The lease exists before anything is sent, and `release` may be called in any state. So an exception
that lands anywhere in between (the signal of a time limit, say) cannot leak a hold.
"""

from __future__ import annotations

import enum
import math
import os
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

from ..errors import LockUnavailable
from . import ids, platform
from .crash import journal
from .later import Later
from .lease import Lease, State
from .parking import Parking
from .platform import clock
from .protocol import (
    MOST_PARKED,
    REMEMBER,
    REMEMBER_ATTEMPT,
    Answer,
    Backend,
    Claim,
    Conflict,
    Deadlocked,
    Ended,
    EndedAs,
    Held,
    LockState,
    OtherAttempt,
    Outcome,
    ParkAnswer,
    Parked,
    ParkRequest,
    Queued,
    Release,
)
from .renewal import keepalive
from .wakeup import OPENING, Inbox

# How often a lock is asked for if each answer comes after its lease has ended, without a bound.
TRIES = 3
# Calls for coroutines on their way to a server at the same time. As many as connections are kept.
MOST_CALLS = 4
# For how many seconds the threads for a server stay that nobody asks, while others are asked.
UNASKED = 60.0

_A = TypeVar("_A", bound="Answer | ParkAnswer")
_T = TypeVar("_T")


class Step(enum.Enum):
    """What an engine does next for who acquires, and for how many seconds."""

    ASK = "ask the backend"  #: a place in the queue lives for so long; 0 does not queue
    ASK_AGAIN = "ask the backend, as the lease is granted already"
    DOZE = "wait for a ring, for so long at the most"
    SLEEP = "wait for so long"
    LISTEN = "open the inbox, and wait for it for so long at the most"
    DROP = "release what the attempt has on the server, and make another attempt"


_Steps: TypeAlias = Generator[tuple[Step, float], Any, _T]


def acquiring(lease: Lease, wait: float | None, listening: bool) -> _Steps[Outcome]:
    """The decisions of `Engine.acquire`: yields each step, and takes the backend's answer to it.

    Here nothing is sent and nobody waits: that is done by who drives it, for a thread or for a
    coroutine.
    """
    until = math.inf if wait is None else clock() + wait
    queue = (wait is None or wait > 0) and listening
    late = 0
    yield from _anew(lease)
    while True:
        answer: Answer = yield Step.ASK, lease.waiter_lease if queue else 0.0
        if isinstance(answer, Queued):
            answer = yield from _waiting(lease, answer, until)
        held = lease.state is State.HELD and clock() < lease.deadline
        if isinstance(answer, Held) and held:
            lease.tell("acquired")
            return answer
        left = until - clock()
        if isinstance(answer, Held):
            late += 1
            is_last = left <= 0 or (wait is None and late == TRIES)
            yield from _too_late(lease, is_last)
            if is_last:
                if wait is None:
                    raise lease.too_late_error()
                # With nobody in the way, as `describe_conflict` tells.
                return Conflict(lease.claim.names[0], 0.0, fence=0, owner="", label="", waiting=0)
        elif isinstance(answer, Queued):
            queue = left > 0  # asked without a wait, the answer names who is in the way
        elif isinstance(answer, Ended | Deadlocked) or left <= 0:
            return answer
        elif isinstance(answer, OtherAttempt):
            # The other attempt renews, ends or lapses without a message to us: look now and then.
            yield Step.SLEEP, min(max(answer.remaining, 0.05), lease.waiter_lease / 3, left)
        else:
            yield Step.LISTEN, left
            queue = True


def _anew(lease: Lease) -> _Steps[None]:
    """A command of the attempt before had no answer, or was sent twice: what that does later must
    not be done for this one."""
    if lease.state is State.ASKED:
        lease.repeated = True
        yield Step.DROP, 0.0


def _too_late(lease: Lease, is_last: bool) -> _Steps[None]:
    """The lease ran out before the answer came: asked again, it begins anew. What was told as lost
    (it was released by force at this moment, or the process stood still) is another attempt then.
    """
    if is_last or lease.state is State.LOST:
        yield Step.DROP, 0.0


def _waiting(lease: Lease, place: Queued, until: float) -> _Steps[Held | Queued]:
    """Wait for the grant. Queued: the wait is over, or the place was lost; nothing is held."""
    if not lease.waits_since:
        lease.waits_since = lease.renewed
        lease.tell("waiting", f"{place.rank} ahead")
    while lease.state is State.WAITING:
        left = until - clock()
        if left <= 0 and lease.switch(State.ASKED, State.WAITING):
            break
        # In slices: a missed ring delays by one heartbeat and hangs nobody.
        yield Step.DOZE, min(left, lease.waiter_lease / 3)
    if lease.state is State.HELD and not lease.lost and (yield from _confirming(lease)):
        return Held(lease.fences, lease.reentered)
    yield Step.DROP, 0.0
    return place


def _confirming(lease: Lease) -> _Steps[bool]:
    """Ask for what the message of a grant does not say, where that matters. Every other grant is
    confirmed by its first renewal."""
    claim, sent = lease.claim, clock()
    plain = not (claim.by_owner or claim.ancestors or lease.backend.replicated)
    # The server granted a whole lease, but this side counts from its last heartbeat.
    if plain and lease.renews and lease.remaining > claim.lease / 3:
        return True
    # Sent again, the command tells the permit that was joined at each lock, and renews the lease.
    # Until it is answered, a copy may still come, and acquire the lock for nobody.
    before, lease.repeated = lease.repeated, True
    answer: Answer = yield Step.ASK_AGAIN, 0.0
    if not isinstance(answer, Held):
        return False
    lease.repeated = before or answer.repeated
    lease.fences, lease.reentered = answer.fences, answer.reentered
    return lease.renew(answer.sent or sent, claim.lease)


class Engine:
    """Locks over one backend. A process has one engine for each backend, also after a fork.

    Attributes:
        backend: where its locks live.
        parking: resumes what is parked there, and withdraws it.
        later: makes up for what has failed without the backend.
        inbox: hears from the backend.
        remember: for how many seconds an execution that has ended is remembered (a tombstone in the
            backend), so that a late copy of its message is told that there is nothing to do.
        most_parked: how many messages, of how many bytes, may be parked at all locks together.
        outages: by verb and route, when one of these calls has failed for a coroutine, and what the
            error said.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.remember = REMEMBER
        self.most_parked = MOST_PARKED
        self._is_configured = False
        self.parking = Parking(backend)
        self.later = Later()
        self.inbox = Inbox(backend)
        self._pools: dict[object, platform.Pool] = {}
        self.outages: dict[object, tuple[float, str]] = {}

    def configure(self, remember: float, most_parked: tuple[int, int]) -> None:
        """What an app asks for. Of several apps that share the engine the most counts."""
        if self._is_configured:
            remember = max(remember, self.remember)
            messages, size = most_parked
            most_parked = max(messages, self.most_parked[0]), max(size, self.most_parked[1])
        self._is_configured = True
        self.remember = self.parking.remember = remember
        self.most_parked = most_parked

    def pool_for(self, names: Sequence[str]) -> platform.Pool:
        """The threads that make the calls of coroutines for these locks (see `engine.asyncio`).
        Each server has its own: who waits for one that hangs holds up no others."""
        route = self.backend.route(names)
        pool = self._pools.get(route) or self._pools.setdefault(route, platform.Pool(MOST_CALLS))
        # A cluster's master may be gone for good: the threads for it end with their pool.
        for other, unused in list(self._pools.items()) if len(self._pools) > 1 else ():
            if unused is not pool and unused.idle_for() > UNASKED:
                self._pools.pop(other, None)
        return pool

    def lease(self, claim: Claim) -> Lease:
        """A lease for the claim; nothing is sent."""
        return Lease(claim, self.backend, self.inbox)

    def acquire(self, lease: Lease, wait: float | None = 0.0) -> Outcome:
        """Acquire the locks of a lease, waiting in the queue for at most `wait` seconds (None:
        without bound).

        Returns:
            Held, never for a lease that has run out already; or after the wait what stood in the
            way. Ended and Deadlocked at once.

        Raises:
            LockUnavailable, LockConfigError: see `Backend`. Nothing is held then.
        """
        steps = acquiring(lease, wait, self.inbox.listening.hears)
        result: Answer | None = None
        while True:
            try:
                step, seconds = steps.send(result)
            except StopIteration as end:
                outcome: Outcome = end.value
                return outcome
            if step is Step.DOZE:
                lease.sleep(seconds, lambda: lease.state is not State.WAITING)
            elif step is Step.SLEEP:
                time.sleep(seconds)
            elif step is Step.LISTEN:
                with self.inbox.opening(lease.ring) as tried:
                    lease.sleep(min(seconds, OPENING), tried)
            else:
                result = self.do(lease, step, seconds)

    def do(self, lease: Lease, step: Step, seconds: float) -> Answer | None:
        """Take one of the steps for which the backend is asked."""
        if step is Step.DROP:
            self._drop(lease)
            return None
        ask = partial(self.backend.acquire, lease.claim, seconds, self.inbox.name)
        return ask() if step is Step.ASK_AGAIN else self._ask(lease, ask, queue=seconds > 0)

    def release(self, lease: Lease, *, ended: EndedAs = "", given_up: State | None = None) -> bool:
        """Release what the lease has, or leave the hold to its successor. May be called in any
        state, and repeatedly.

        Args:
            ended: "execution", "unacknowledged" or "retried" if the execution is over: a late copy
                of its message is told so for `remember` seconds.
            given_up: what `Lease.give_up` has returned, if that was called already.

        Returns:
            False if a hold had been lost before it was released.

        Raises:
            LockUnavailable: the server could not be told. The end of the lease frees the lock.
        """
        # A forked child has a copy of its parent's leases, and no say in them.
        if lease.pid != os.getpid():
            return True
        try:
            # Before the command is sent: a renewal that finds nothing from now on is no loss.
            before = given_up or lease.give_up()
            if before in (State.NEW, State.RELEASED):
                return True
            keepalive.discard(lease)
            doubtful = lease.repeated or before is State.ASKED
            what: EndedAs = ended or ("attempt" if doubtful else "")
            had = self._release(lease, what, self.remember if ended else REMEMBER_ATTEMPT)
        except BaseException:
            # Perhaps released, perhaps not: nothing renews the lease, and the caller may try again.
            lease.switch(State.ASKED, State.RELEASED)
            raise
        return lease.tell_release(before, had)

    def extend(self, lease: Lease, length: float) -> bool:
        """Make a held lease `length` seconds long, from now and at every renewal. False if lost.

        Raises:
            LockUnavailable: the server could not be told, or did not answer. If the lease was to
                become shorter, no more than that is believed from now on.
        """
        before, sent = lease.claim.lease, clock()
        renewals, once = lease.extensions(sent, length)
        try:
            lease.resize(length)
            kept = not lease.lost and all(
                self.backend.renew(renewals, within=once, once=bool(once))
            )
            return keepalive.found(lease, kept and lease.renew(sent, length))
        except BaseException:
            lease.resize(before)
            if once:
                lease.doubt(sent, length)
            keepalive.add(lease)
            raise

    def downgrade(self, lease: Lease) -> bool:
        """Let others share the locks of a held lease. False if lost.

        Raises:
            LockConfigError: the lock has several permits, or others have re-entered it.
            LockUnavailable: the server could not be told, or has done it unheard: ask again.
        """
        claim = lease.claim
        # Before the command is sent: nobody here relies on being alone when others come in.
        before = lease.share()
        done = self.backend.downgrade(claim.names, claim.execution_id, claim.attempt_id)
        if done.joined:
            raise lease.joined_error(done, before)
        found = keepalive.found(lease, done.held and not lease.lost)
        if done.held:
            self.parking.resume_here()
        return found

    def park(self, lease: Lease, park_request: ParkRequest) -> ParkAnswer:
        """Acquire the locks of a lease, or park a message for them, which `release` takes back.
        Raises as `acquire` does."""
        most, size = self.most_parked
        park_request = park_request._replace(most_in_all=most, most_bytes=size)
        for _ in range(TRIES):
            park = partial(self.backend.park, lease.claim, park_request, self.inbox.name)
            answer = self._ask(lease, park)
            if not isinstance(answer, Held) or lease.state is not State.ASKED:
                break
        else:
            raise lease.too_late_error()
        if isinstance(answer, Held):
            lease.tell("acquired")
        elif isinstance(answer, Parked):
            lease.tell("parked", f"{answer.rank} ahead")
            if lease.repeated:
                # A copy of its command can come when the message has, and acquire for nobody.
                self.later.try_now(partial(self._release, lease, "parked", REMEMBER_ATTEMPT))
        return answer

    def inspect(self, name: str, only: Sequence[str] = ()) -> LockState:
        """Who holds a lock and who waits for the lock, by the server's clock; see `Backend`."""
        return self.backend.inspect(name, only)

    def _ask(self, lease: Lease, ask: Callable[[], _A], *, queue: bool = False) -> _A:
        if lease.state is State.NEW:
            lease.state = State.ASKED  # without the guard: no other thread looks after it yet
        if journal.on:
            journal.note(lease.claim.attempt_id, lease.entry())
        sent = clock()
        if queue:
            # Before the command is sent: the message of a grant may overtake the answer "wait".
            keepalive.add(lease)
        answer = ask()
        if lease.answered(answer, sent):
            keepalive.add(lease)
        else:
            keepalive.discard(lease)
            if not lease.may_hold:
                journal.remove(lease.claim.attempt_id)
        return answer

    def _drop(self, lease: Lease) -> None:
        """Out of time, or frozen for too long: release whatever the attempt has on the server."""
        lease.switch(State.ASKED, State.HELD, State.LOST)
        keepalive.discard(lease)
        try:
            # Its message may be parked, and keeps its place.
            self._release(lease, "parked" if lease.repeated else "", REMEMBER_ATTEMPT)
        except LockUnavailable as error:
            said = error.reason.replace("Cannot release", "Cannot acquire", 1)  # what was asked for
            raise LockUnavailable(said, error.name) from error.__cause__
        # A copy of that release may come late, so what follows is another attempt.
        lease.again(ids.new_attempt_id())

    def _release(self, lease: Lease, ended: EndedAs, remember: float) -> bool:
        claim, homes, left_to = lease.claim, self.parking.sender.homes, lease.successor
        whose, waited = (claim.names, claim.execution_id, claim.attempt_id), lease.waits_since > 0
        back = self.backend.release(
            Release(*whose, ended, remember, homes=homes, successor=left_to, waited=waited)
        )
        if journal.on:
            journal.remove(claim.attempt_id)
        if back.messages:
            self.parking.publish(back.messages)
        return back.had
