"""Take locks and give them back: the one state machine of a claim, from asking to giving back.

    lease = engine.lease(claim)
    try:
        answer = engine.acquire(lease, wait=10.0)
    finally:
        engine.release(lease)

The lease exists before anything is sent and `release` may be called in any state, so an exception
that lands anywhere in between (a time limit's signal, say) cannot leak a hold.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from . import ids, process
from .journal import journal
from .lease import Lease, State
from .parking import Parking
from .protocol import (
    Answer,
    Backend,
    Claim,
    Deadlocked,
    Duplicate,
    Ended,
    Full,
    Held,
    LockState,
    Outcome,
    Parked,
    ParkRequest,
    Queued,
)
from .renewal import keepalive, lose
from .wakeup import Inbox

# A place in the queue lives so long without a heartbeat, in seconds: what a dead waiter can cost.
WAITER_LEASE = 6.0
# For how long an attempt stays refused after it ended, when a copy of its claim may be on its way.
REMEMBER_ATTEMPT = 60.0


class Engine:
    """Locks over one store. One per store and process; it survives a fork."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.parking = Parking(backend)
        self._inbox = Inbox(backend)

    def lease(self, claim: Claim, on_lost: Callable[[str], None] | None = None) -> Lease:
        """A lease for the claim; nothing is sent. `on_lost` is called from another thread."""
        wait = min(claim.lease, WAITER_LEASE)
        listen = None if self._inbox.started else self._inbox.start
        return Lease(claim, self.backend, wait, on_lost, listen)

    def acquire(self, lease: Lease, wait: float | None = 0.0) -> Outcome:
        """Take the locks of a lease, waiting in line for at most `wait` seconds (None: no bound).

        Returns:
            Held, or after the time is over what stood in the way. Ended and Deadlocked at once.

        Raises:
            LockUnavailable, LockConfigError: see `LockStore`. Nothing is held then.
        """
        until = math.inf if wait is None else time.monotonic() + wait
        queue = (wait is None or wait > 0) and self._inbox.listening
        while True:
            answer = self._ask(lease, queue)
            if isinstance(answer, Queued) and self._stand_in_line(lease, until):
                answer = Held(lease.fences, lease.reentered)
            if isinstance(answer, Held):
                lease.tell("acquired")
                return answer
            left = until - time.monotonic()
            if isinstance(answer, Queued):
                queue = left > 0  # without a wait it tells who is in the way
            elif isinstance(answer, Ended | Deadlocked) or left <= 0:
                return answer
            elif isinstance(answer, Duplicate):
                # It renews, ends or lapses without a message to us: a look now and then.
                time.sleep(min(max(answer.remaining, 0.05), lease.wait / 3, left))
            else:
                self._inbox.listen()
                queue = True

    def release(self, lease: Lease, *, ended: bool = False, remember: float = 3600.0) -> bool:
        """Give back what the lease has, or leave it to its heir; in any state, and repeatedly.

        Args:
            ended: the run is over, so a late copy of it is to be told so for `remember` seconds.

        Returns:
            False if a hold had been lost before it was given back.

        Raises:
            LockUnavailable: the server could not be told. The end of the lease frees the lock.
        """
        # A forked child has a copy of its parent's leases, and no say in them.
        if lease.state in (State.NEW, State.RELEASED) or lease.pid != process.pid:
            return True
        lost = lease.lost
        try:
            # Before it is sent: a renewal that comes back empty from now on is no loss.
            before = lease.give_up()
            keepalive.discard(lease)
            doubtful = lease.repeated or before is State.ASKED
            what = "run" if ended else "attempt" if doubtful else ""
            had = self._give_back(lease, what, remember if ended else REMEMBER_ATTEMPT)
        except BaseException:
            # Perhaps given back and perhaps not: nothing renews it, and it may be tried again.
            lease.switch(State.ASKED, State.RELEASED)
            raise
        if before is State.HELD and (lost or not had):
            lost = True
            lease.tell("lost", "found at give-back", time.monotonic() - lease.renewed)
        elif before is State.HELD and lease.successor is None:
            lease.tell("released")
        return not (lost or before is State.LOST)

    def extend(self, lease: Lease, length: float) -> bool:
        """Make a held lease `length` seconds long, from now and at every renewal. False if lost.

        Raises:
            LockUnavailable: the server could not be told; the lease is as it was.
        """
        before = lease.claim
        try:
            lease.claim = before._replace(lease=length)
            sent = time.monotonic()
            kept = not lease.lost and all(self.backend.renew(lease.renewals()))
        except BaseException:
            lease.claim = before
            raise
        # A renewal of the keep-alive's that crossed this one may be the server's last word, with
        # the old length: the shorter one counts until it has renewed once more, which is due now.
        certain = min(before.lease, length) if lease.renews else length
        if kept and lease.renew(sent, certain):
            lease.due = sent if lease.renews else lease.due
            keepalive.add(lease)
            return True
        lose(lease, "the server does not have the hold any more")
        keepalive.discard(lease)
        return False

    def park(
        self, lease: Lease, park_request: ParkRequest
    ) -> Held | Parked | Full | Duplicate | Deadlocked | Ended:
        """Take the locks of a lease, or leave a message in line for them, which `release` takes
        back. Raises as `acquire` does."""
        sent = self._begin(lease)
        answer = self.backend.park(lease.claim, park_request, self._inbox.name)
        if isinstance(answer, Held):
            self._enter(lease, answer, sent)
            lease.tell("acquired")
        else:
            # What has been parked is no longer this process's.
            lease.switch(State.NEW, State.ASKED)
            journal.remove(lease.claim.attempt_id)
        if isinstance(answer, Parked):
            self.parking.forward(answer.messages)
        return answer

    def inspect(self, name: str) -> LockState:
        """Who holds a lock and who waits for it, by the server's clock."""
        return self.backend.inspect(name)

    def _begin(self, lease: Lease) -> float:
        lease.switch(State.ASKED, State.NEW)
        if journal.on:
            journal.add(lease.entry())
        return time.monotonic()

    def _ask(self, lease: Lease, queue: bool) -> Answer:
        sent = self._begin(lease)
        if queue:
            # Before it is sent: the message of the grant may overtake the answer that says "wait".
            keepalive.add(lease)
        place = lease.wait if queue else 0.0, self._inbox.name
        answer = self.backend.acquire(lease.claim, *place)
        if isinstance(answer, Held):
            self._enter(lease, answer, sent)
            return answer
        if not isinstance(answer, Ended | Deadlocked):
            lease.repeated = lease.repeated or answer.repeated
        if isinstance(answer, Queued):
            lease.reentered = (False,) * len(lease.claim.names)
            lease.rank = answer.rank
            lease.stand(sent, answer.recheck)
            keepalive.add(lease)
        else:
            keepalive.discard(lease)
            if not lease.repeated:
                # Else it stays "asked": a copy may still come, and take the lock for nobody.
                lease.switch(State.NEW, State.ASKED)
                journal.remove(lease.claim.attempt_id)
        return answer

    def _enter(self, lease: Lease, answer: Held, sent: float) -> None:
        lease.fences, lease.reentered, repeated = answer
        lease.repeated = lease.repeated or repeated
        lease.take(sent)
        keepalive.add(lease)

    def _stand_in_line(self, lease: Lease, until: float) -> bool:
        """Wait for the grant. False: the time is over, or the place was lost; nothing is held."""
        while lease.state is State.WAITING:
            left = until - time.monotonic()
            if left <= 0 and lease.switch(State.ASKED, State.WAITING):
                break
            # In slices: a missed ring delays by one heartbeat and hangs nobody.
            lease.sleep(min(left, lease.wait / 3))
        if lease.state is State.HELD and not lease.lost and self._confirmed(lease):
            return True
        # Out of time, or frozen for longer than the place lived: whatever is left of it goes back.
        lease.switch(State.ASKED, State.HELD, State.LOST)
        keepalive.discard(lease)
        self._give_back(lease, "attempt" if lease.repeated else "", REMEMBER_ATTEMPT)
        # A copy of that give-back may come late, so what is asked for next has another nonce.
        lease.again(ids.new_attempt_id())
        return False

    def _give_back(self, lease: Lease, ended: str, remember: float) -> bool:
        of, home = lease.claim, self.parking.home
        what = (
            of.names,
            of.execution_id,
            of.attempt_id,
            ended,
            remember,
            home,
            lease.successor,
        )
        back = self.backend.release(*what)
        journal.remove(of.attempt_id)
        if back.messages:
            self.parking.forward(back.messages)
        return back.had

    def _confirmed(self, lease: Lease) -> bool:
        """Learn what a grant's message does not say. The others are confirmed by their renewal."""
        claim, sent = lease.claim, time.monotonic()
        if lease.renews and not (claim.by_owner or claim.ancestors or self.backend.replicated):
            return True
        # Sent again it tells the entry it joined, one for each lock, and begins the whole lease.
        answer = self.backend.acquire(claim, 0.0, self._inbox.name)
        if not isinstance(answer, Held):
            return False
        lease.fences, lease.reentered, _ = answer
        return lease.renew(sent, claim.lease)
