"""Take locks and give them back: the one state machine of a claim, from asking to giving back.

    engine = Engine(store)
    lease = engine.lease(claim)
    try:
        answer = engine.acquire(lease, wait=10.0)
        if isinstance(answer, Held):
            ...
    finally:
        engine.release(lease)

The lease exists before anything is sent and `release` may be called in any state, so an exception
that lands anywhere in between (a time limit's signal, say) cannot leak a hold.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from . import ids
from .answers import Answer, Busy, Claim, Duplicate, Ended, Held, LockState, Queued
from .inbox import Inbox
from .journal import Entry, journal
from .keepalive import keepalive, lose
from .lease import Lease, State
from .store import LockStore

# A place in the queue lives so long without a heartbeat, in seconds: what a dead waiter can cost.
WAITER_LEASE = 6.0
# For how long an attempt stays refused after it ended, when a copy of its claim may be on its way.
REMEMBER_ATTEMPT = 60.0


class Engine:
    """Locks over one store. One per store and process; it survives a fork."""

    def __init__(self, store: LockStore) -> None:
        self.store = store
        self._inbox = Inbox(store)

    def lease(self, claim: Claim, on_lost: Callable[[str], None] | None = None) -> Lease:
        """A lease for the claim; nothing is sent. `on_lost` is called from another thread."""
        wait = min(claim.lease, WAITER_LEASE)
        listen = None if self._inbox.started else self._inbox.start
        return Lease(claim, self.store, wait, on_lost, listen)

    def acquire(self, lease: Lease, wait: float | None = 0.0) -> Held | Busy | Duplicate | Ended:
        """Take the locks of a lease, waiting in line for at most `wait` seconds (None: no bound).

        Returns:
            Held, or after the time is over what stood in the way. Ended at once.

        Raises:
            LockUnavailable, LockConfigError: see `LockStore`. Nothing is held then.
        """
        until = None if wait is None else time.monotonic() + wait
        queue = _left(until) > 0 and self._inbox.listening
        while True:
            answer = self._ask(lease, queue)
            if isinstance(answer, Queued) and self._stand_in_line(lease, until):
                answer = Held(lease.fences, lease.reentered)
            if isinstance(answer, Held):
                lease.tell("acquired")
                return answer
            if isinstance(answer, Queued):
                # Without a wait it tells who is in the way.
                queue = _left(until) > 0
            elif isinstance(answer, Ended) or _left(until) <= 0:
                return answer
            elif isinstance(answer, Duplicate):
                # It renews, ends or lapses without a message to us: it is looked at now and then.
                time.sleep(min(max(answer.remaining, 0.05), lease.wait / 3, _left(until)))
            else:
                self._inbox.open()
                queue = True

    def release(self, lease: Lease, *, ended: bool = False, remember: float = 3600.0) -> bool:
        """Give back whatever the lease has; in any state, as often as you like.

        Args:
            ended: the run is over, so a late copy of it is to be told so for `remember` seconds.

        Returns:
            False if a hold had been lost before it was given back.

        Raises:
            LockUnavailable: the server could not be told. The end of the lease frees the lock.
        """
        # A forked child has a copy of its parent's leases, and no say in them.
        if lease.state in (State.NEW, State.RELEASED) or lease.pid != os.getpid():
            return True
        lost, claim = lease.lost, lease.claim
        try:
            # Before it is sent: a renewal that comes back empty from now on is no loss.
            before = lease.give_up()
            keepalive.discard(lease)
            doubtful = lease.repeated or before is State.ASKED
            had = self.store.release(
                claim.names,
                claim.run,
                claim.nonce,
                ended="run" if ended else "attempt" if doubtful else "",
                remember=remember if ended else REMEMBER_ATTEMPT,
            )
        except BaseException:
            # Perhaps given back and perhaps not: nothing renews it, and it may be tried again.
            lease.switch(State.ASKED, State.RELEASED)
            raise
        journal.remove(claim.nonce)
        if before is State.HELD and (lost or not had):
            lost = True
            lease.tell("lost", "found at give-back", time.monotonic() - lease.renewed)
        elif before is State.HELD:
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
            kept = not lease.lost and all(self.store.renew(lease.beats()))
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

    def inspect(self, name: str) -> LockState:
        """Who holds a lock and who waits for it, by the server's clock."""
        return self.store.inspect(name)

    def _ask(self, lease: Lease, queue: bool) -> Answer:
        lease.switch(State.ASKED, State.NEW)
        if journal.on:
            claim = lease.claim
            journal.add(Entry(self.store.id, claim.run, claim.nonce, claim.names))
        sent = time.monotonic()
        if queue:
            # Before it is sent: the message of the grant may overtake the answer that says "wait".
            keepalive.add(lease)
        answer = self.store.acquire(lease.claim, lease.wait if queue else 0.0, self._inbox.name)
        if isinstance(answer, Held):
            lease.fences, lease.reentered, repeated = answer
            lease.repeated = lease.repeated or repeated
            lease.take(sent)
            keepalive.add(lease)
            return answer
        if not isinstance(answer, Ended):
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
                journal.remove(lease.claim.nonce)
        return answer

    def _stand_in_line(self, lease: Lease, until: float | None) -> bool:
        """Wait for the grant. False: the time is over, or the place was lost; nothing is held."""
        while lease.state is State.WAITING:
            left = _left(until)
            if left <= 0 and lease.switch(State.ASKED, State.WAITING):
                break
            # In slices: a missed ring delays by one heartbeat and hangs nobody.
            lease.sleep(min(left, lease.wait / 3))
        if lease.state is State.HELD and not lease.lost and self._confirmed(lease):
            return True
        # Out of time, or frozen for longer than the place lived: whatever is left of it goes back.
        lease.switch(State.ASKED, State.HELD, State.LOST)
        keepalive.discard(lease)
        claim, ended = lease.claim, "attempt" if lease.repeated else ""
        self.store.release(
            claim.names, claim.run, claim.nonce, ended=ended, remember=REMEMBER_ATTEMPT
        )
        journal.remove(claim.nonce)
        # A copy of that give-back may come late, so what is asked for next has another nonce.
        lease.again(ids.nonce())
        return False

    def _confirmed(self, lease: Lease) -> bool:
        """Learn what a grant's message does not say. The others are confirmed by their renewal."""
        claim = lease.claim
        if claim.by_owner or claim.lineage:
            # The entry it joined, one for each lock: a claim sent again tells and changes nothing.
            answer = self.store.acquire(claim, 0.0, self._inbox.name)
            if not isinstance(answer, Held):
                return False
            lease.fences, lease.reentered, _ = answer
        # The grant gave it what was left of its place; its whole lease begins now.
        return lease.renews or self.extend(lease, claim.lease)


def _left(until: float | None) -> float:
    return float("inf") if until is None else until - time.monotonic()
