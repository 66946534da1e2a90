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
import threading
import time
from collections.abc import Callable

from . import ids
from .answers import Answer, Busy, Claim, Duplicate, Ended, Held, LockState, Notice, Queued
from .events import logger
from .keepalive import granted, keepalive, lose
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
        self._inbox = _Inbox(store)

    def lease(self, claim: Claim, on_lost: Callable[[str], None] | None = None) -> Lease:
        """A lease for the claim; nothing is sent. `on_lost` is called from another thread."""
        return Lease(claim, self.store, min(claim.lease, WAITER_LEASE), on_lost)

    def acquire(self, lease: Lease, wait: float | None = 0.0) -> Held | Busy | Duplicate | Ended:
        """Take the locks of a lease, waiting in line for at most `wait` seconds (None: no bound).

        Returns:
            Held, or after the time is over what stood in the way. Ended at once.

        Raises:
            LockUnavailable, LockConfigError: see `LockStore`. Nothing is held then.
        """
        until = None if wait is None else time.monotonic() + wait
        queue = wait != 0 and self._inbox.listening
        while True:
            answer = self._ask(lease, queue)
            if isinstance(answer, Queued):
                if self._stand_in_line(lease, until):
                    lease.tell("acquired")
                    return Held(lease.fences, lease.reentered)
                queue = _left(until) > 0
            elif isinstance(answer, Held):
                lease.tell("acquired")
                return answer
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
        before = lease.state
        # A forked child has a copy of its parent's leases, and no say in them.
        if before in (State.NEW, State.RELEASED) or lease.pid != os.getpid():
            return True
        # Marked before it is sent: a renewal that comes back empty from now on is no loss.
        lost = lease.lost
        lease.switch(State.RELEASED, State.ASKED, State.WAITING, State.HELD, State.LOST)
        keepalive.discard(lease)
        claim = lease.claim
        what = "run" if ended else "attempt" if lease.repeated or before is State.ASKED else ""
        seconds = remember if ended else REMEMBER_ATTEMPT
        try:
            had = self.store.release(
                claim.names, claim.run, claim.nonce, ended=what, remember=seconds
            )
        except BaseException:
            # Perhaps given back and perhaps not: nothing renews it, and it may be tried again.
            lease.switch(State.ASKED, State.RELEASED)
            raise
        if before is State.HELD and not had:
            lost = True
            lease.tell("lost", "found at give-back", time.monotonic() - lease.renewed)
        elif before is State.HELD:
            lease.tell("released")
        return not lost

    def extend(self, lease: Lease, length: float) -> bool:
        """Make a held lease `length` seconds long, from now and at every renewal. False if lost.

        Raises:
            LockUnavailable: the server could not be told; the lease is as it was.
        """
        lease.claim = lease.claim._replace(lease=length)
        sent = time.monotonic()
        if not lease.lost and all(self.store.renew(lease.beats(), background=False)):
            lease.renewed_at(sent)
            keepalive.add(lease)
            return True
        lose(lease, "the server does not have the hold any more")
        keepalive.discard(lease)
        return False

    def inspect(self, name: str) -> LockState:
        """Who holds a lock and who waits for it, by the server's clock."""
        return self.store.inspect(name)

    def _ask(self, lease: Lease, queue: bool) -> Answer:
        lease.switch(State.ASKED, State.NEW, State.WAITING)
        sent = time.monotonic()
        inbox = self._inbox.name
        answer = self.store.acquire(lease.claim, lease.wait if queue else 0.0, inbox)
        if isinstance(answer, Held):
            lease.fences, lease.reentered, repeated = answer
            lease.repeated = lease.repeated or repeated
            lease.renewed_at(sent)
            lease.switch(State.HELD, State.ASKED)
            keepalive.add(lease)
        elif isinstance(answer, Queued):
            lease.reentered = (False,) * len(lease.claim.names)
            lease.repeated = lease.repeated or answer.repeated
            lease.rank = answer.rank
            lease.waiting_at(sent, answer.recheck)
            lease.switch(State.WAITING, State.ASKED)
            keepalive.add(lease)
        else:
            lease.switch(State.NEW, State.ASKED)
        return answer

    def _stand_in_line(self, lease: Lease, until: float | None) -> bool:
        """Wait for the grant. False: the time is over, or the place was lost and nothing is held."""
        while lease.state is State.WAITING:
            left = _left(until)
            if left <= 0 and lease.switch(State.ASKED, State.WAITING):
                break
            # In slices: a missed ring delays by one heartbeat and hangs nobody.
            lease.sleep(min(left, lease.wait / 3))
        if lease.state is State.HELD and not lease.lost:
            return True
        # Out of time, or frozen for longer than the place lived: whatever is left of it goes back.
        keepalive.discard(lease)
        claim = lease.claim
        self.store.release(
            claim.names, claim.run, claim.nonce, ended="attempt", remember=REMEMBER_ATTEMPT
        )
        lease.claim = claim._replace(nonce=ids.nonce())
        lease.switch(State.NEW, State.ASKED, State.HELD, State.LOST)
        return False


def _left(until: float | None) -> float:
    return float("inf") if until is None else until - time.monotonic()


class _Inbox:
    """This process's inbox at one store: opened by the first wait, and again after a fork."""

    def __init__(self, store: LockStore) -> None:
        self._store = store
        self._pid = 0
        self._name = ""
        self._started = False
        self._ready = threading.Event()
        self._starting = threading.Lock()

    @property
    def name(self) -> str:
        if self._pid != os.getpid():
            self._pid, self._name = os.getpid(), ids.nonce()
            self._ready, self._starting = threading.Event(), threading.Lock()
            self._started = False
        return self._name

    @property
    def listening(self) -> bool:
        return bool(self.name) and self._ready.is_set()

    def open(self, timeout: float = 2.0) -> None:
        """Be reachable for grants. Past the timeout it goes on unheard: heartbeats find the grant."""
        name = self.name
        with self._starting:
            if not self._started:
                self._started = True
                listen = threading.Thread(target=self._listen, args=(name,), daemon=True)
                listen.name = "relock-inbox"
                listen.start()
        self._ready.wait(timeout)

    def _listen(self, name: str) -> None:
        while True:
            try:
                self._store.listen(name, self._connected, self._hear)
            except Exception as error:
                self._ready.clear()
                logger.debug("the inbox lost its connection and opens it again: %s", error)
                time.sleep(0.2)

    def _connected(self) -> None:
        self._ready.set()
        keepalive.look_now(self._store)

    def _hear(self, notice: Notice) -> None:
        lease = keepalive.find(notice.run, notice.nonce)
        if lease is None or lease.store is not self._store:
            return
        if notice.kind == "granted":
            granted(lease, (notice.fence,))
        elif notice.kind == "lost":
            lose(lease, "it was taken away by force")
            keepalive.discard(lease)
