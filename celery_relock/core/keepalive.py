"""Keeps every lease of this process alive, and says so when one is lost.

One native daemon thread, started with the first lease that needs it and reset after a fork, looks
after all stores of the process: holds are renewed and places in queues kept at a third of their
life, in batches.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable

from .answers import Held, Queued
from .lease import Lease, State
from .store import LockStore
from .threads import native_lock, start_native_thread

logger = logging.getLogger("celery_relock")

# How early a lease may be renewed so that it shares a call with another one.
_TOGETHER = 0.25


class KeepAlive:
    """The registry of this process's leases and the thread that looks after them."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        # In a forked child: the parent's leases are not ours, and its thread did not come along.
        self._leases: dict[tuple[str, str], Lease] = {}
        self._running = False
        self._starting = native_lock()
        self._bell = native_lock()
        self._bell.acquire()
        self._wake_at = 0.0

    def add(self, lease: Lease) -> None:
        """Look after a lease from now on."""
        self._leases[lease.claim.run, lease.claim.nonce] = lease
        if not self._running:
            self._start()
        if lease.due < self._wake_at:
            self._ring()

    def discard(self, lease: Lease) -> None:
        """Stop looking after a lease. What is on its way for it is ignored when it comes back."""
        self._leases.pop((lease.claim.run, lease.claim.nonce), None)

    def find(self, run: str, nonce: str) -> Lease | None:
        return self._leases.get((run, nonce))

    def leases(self) -> list[Lease]:
        return list(self._leases.values())

    def look_now(self, store: LockStore) -> None:
        """A wake-up may have been missed: look after every waiter of the store at once."""
        for lease in self.leases():
            if lease.store is store and lease.state is State.WAITING:
                lease.due = 0.0
        self._ring()

    def _ring(self) -> None:
        try:
            self._bell.release()
        except RuntimeError:
            pass  # it rings already

    def _start(self) -> None:
        with self._starting:
            if not self._running:
                self._running = True
                self._wake_at = 0.0
                try:
                    start_native_thread(self._live)
                except BaseException:
                    self._running = False
                    raise

    def _live(self) -> None:
        """The thread. Nothing but the end of the process ends it: an exception from outside
        (`PyThreadState_SetAsyncExc`) restarts it while there is something to look after."""
        try:
            while True:
                self._wait(self._pass())
        except BaseException:
            logger.exception("the keep-alive thread was interrupted and starts again")
        finally:
            self._running = False
            if self._leases:
                self._start()

    def _wait(self, until: float) -> None:
        self._wake_at = until
        # A lease added since the pass looked found the old `_wake_at` and rang nobody.
        if all(lease.next_look >= until for lease in self.leases()):
            pause = until - time.monotonic()
            if pause > 0:
                self._bell.acquire(timeout=min(pause, 3600.0))
        self._wake_at = 0.0

    def _pass(self) -> float:
        """Look after everything that is due. Returns when the next look is due."""
        now = time.monotonic()
        stores: dict[LockStore, tuple[list[Lease], list[Lease]]] = {}
        for lease in self.leases():
            if lease.state is State.HELD and now >= lease.deadline:
                lose(lease, "no renewal came through before the lease ran out", native=True)
                self.discard(lease)
            elif lease.due <= now + _TOGETHER * (lease.wait or lease.claim.lease) / 3:
                held, waiting = stores.setdefault(lease.store, ([], []))
                if lease.state is State.HELD:
                    held.append(lease)
                elif lease.state is State.WAITING:
                    waiting.append(lease)
        for store, (held, waiting) in stores.items():
            self._guarded(self._renew, store, held)
            self._guarded(self._heartbeat, store, waiting)
        return min((lease.next_look for lease in self.leases()), default=math.inf)

    def _guarded(
        self, look: Callable[[LockStore, list[Lease]], None], store: LockStore, leases: list[Lease]
    ) -> None:
        if not leases:
            return
        try:
            look(store, leases)
        except Exception as error:
            logger.warning("%d leases could not be renewed, trying again: %s", len(leases), error)
            again = time.monotonic()
            for lease in leases:
                lease.due = again + min(1.0, (lease.wait or lease.claim.lease) / 15)

    def _renew(self, store: LockStore, leases: list[Lease]) -> None:
        beats = [beat for lease in leases for beat in lease.beats()]
        sent = time.monotonic()
        answers = iter(store.renew(beats))
        for lease in leases:
            kept = all([next(answers) for _ in lease.claim.names])
            if kept:
                lease.renewed_at(sent)
            else:
                lose(lease, "the server does not have the hold any more", native=True)
                self.discard(lease)

    def _heartbeat(self, store: LockStore, leases: list[Lease]) -> None:
        beats = [beat for lease in leases for beat in lease.beats()]
        sent = time.monotonic()
        answers = iter(store.heartbeat(beats))
        for lease in leases:
            told(lease, sent, [next(answers) for _ in lease.claim.names])


def lose(lease: Lease, reason: str, *, native: bool = False) -> None:
    """Mark a held lease as lost and tell everybody, once."""
    if not lease.switch(State.LOST, State.HELD):
        return  # it is being given back: the loss is no longer news
    lease.tell("lost", reason, time.monotonic() - lease.renewed)
    if lease.on_lost is not None:
        try:
            lease.on_lost(reason)
        except Exception:
            logger.exception("the handler for a lost lock failed: %s", lease.claim.names)


def told(lease: Lease, sent: float, answers: Iterable[Held | Queued | None]) -> None:
    """A heartbeat came back for a lease that waits, or waited when it was sent."""
    answers = tuple(answers)
    if any(answer is None for answer in answers):
        # The place is gone: the waiter has to ask again. A grant announced meanwhile stands for
        # itself, it was written after this answer.
        if lease.switch(State.ASKED, State.WAITING):
            lease.ring(from_native_thread=True)
    elif all(isinstance(answer, Held) for answer in answers):
        granted(lease, tuple(a.fences[0] for a in answers if isinstance(a, Held)), native=True)
        if lease.state is State.HELD:
            lease.renewed_at(sent)
    elif lease.state is State.WAITING:
        queued = [answer for answer in answers if isinstance(answer, Queued)]
        lease.rank = queued[0].rank
        lease.waiting_at(sent, min((q.recheck for q in queued if q.recheck > 0), default=0.0))


def granted(lease: Lease, fences: tuple[int, ...], *, native: bool = False) -> None:
    """The server let a waiter in: by a message, or as a heartbeat found."""
    with_all = fences if len(fences) == len(lease.claim.names) else fences * len(lease.claim.names)
    if lease.switch(State.HELD, State.WAITING):
        lease.fences = with_all
        lease.ring(from_native_thread=native)


keepalive = KeepAlive()
os.register_at_fork(after_in_child=keepalive._reset)
