"""Keeps every lease of this process alive, and tells when a lease is lost.

One native daemon thread, started with the first lease that needs renewal and reset after a fork,
looks after all backends of the process: it renews holds and keeps places in queues at a third of
their life, in batches. The thread waits for nobody but the server, and not long for the server:
another thread says what there is to say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TypeAlias
from weakref import WeakKeyDictionary

from .events import logger, tell
from .lease import LONG, Lease, State
from .outage import Outage, Say
from .platform import SideThread, Solo, anew_in_a_child, clock, green, native_lock
from .protocol import Backend, Held, Notice, Queued, Renewal

# How early a lease may be renewed to share a call with another one: a share of the time between the
# heartbeats of a waiter.
_TOGETHER = 0.25
# Bounds of the time that an answer may take, in seconds: the upper bound for a connection whose
# other end is gone in silence, the lower bound for a server that is only slow.
_SHORTEST, _LONGEST = 0.2, 5.0
# In how many seconds to try again to open an inbox.
_LISTEN_AGAIN = 10.0

# Why a hold was lost.
_GONE = "the server does not have the hold any more"
_RAN_OUT = "no renewal came through before the lease ran out"

# What is sent for a lease in this state.
_VERBS = {State.HELD: "renew", State.WAITING: "heartbeat"}
#: A verb and, of the leases that share one call, which backend and route.
_Batch: TypeAlias = tuple[str, int, object]
_aside = SideThread()


class KeepAlive:
    """The registry of this process's leases and the thread that looks after the leases."""

    def __init__(self) -> None:
        anew_in_a_child(self)

    def _reset(self) -> None:
        # In a forked child: the parent's leases are not ours, and its thread did not come along.
        self._leases: dict[tuple[str, str], Lease] = {}
        self._thread = Solo(self._live, lambda: self._leases)
        self._wake_at = 0.0
        self._used = False
        self._outages: WeakKeyDictionary[Backend, dict[_Batch, Outage]] = WeakKeyDictionary()
        self._opening = Outage("opening the inbox", _aside)
        self._bell = native_lock()
        self._bell.acquire()

    def add(self, lease: Lease) -> None:
        """Look after a lease from now on. Call again after a change that makes the lease due
        sooner."""
        self._leases[lease.claim.execution_id, lease.claim.attempt_id] = lease
        if lease.state is State.RELEASED:  # by another thread, which has discarded it before this
            self.discard(lease)
            return
        self._used = True
        if not self._thread.on:
            self._thread.start()
        if lease.next_look < self._wake_at or lease.abandoned:
            self._ring()

    def discard(self, lease: Lease) -> None:
        """Stop looking after a lease. Answers that are on their way for it are ignored."""
        self._leases.pop((lease.claim.execution_id, lease.claim.attempt_id), None)

    def found(self, lease: Lease, held: bool) -> bool:
        """Look after a lease that was found to be held, or to be lost."""
        if held:
            self.add(lease)
        else:
            # Past the deadline the server can have it all the same.
            self.lose(lease, _RAN_OUT if lease.lost else _GONE)
        return held

    def lose(self, lease: Lease, reason: str, say: Say = lambda call: call()) -> bool:
        """Mark a held lease as lost and tell everybody, once. `say` makes calls that may take long.
        False: it is not held, or no longer, as when it is being released."""
        # Before: whoever sees the loss may go on with the lease, for another attempt.
        event = lease.event("lost", reason, clock() - lease.renewed)
        if not lease.switch(State.LOST, State.HELD):
            return False
        self.discard(lease)
        lease.lost_by = reason
        for hear in reversed(lease.on_lost):
            try:
                hear()
            except Exception as error:  # noqa: BLE001 - the loss is told all the same
                text = "the handler for the loss of %s failed"
                say(partial(logger.error, text, lease.claim.names, exc_info=error))
        say(partial(tell, event))
        return True

    def find(self, execution_id: str, attempt_id: str) -> Lease | None:
        """The lease of an attempt, if it is looked after."""
        return self._leases.get((execution_id, attempt_id))

    def leases(self) -> list[Lease]:
        """Those that are looked after: a copy, as other threads add and discard meanwhile."""
        return list(self._leases.values())

    def look_now(self, backend: Backend) -> None:
        """A notice may have been missed: ask at once for every waiter and hold of the backend."""
        for lease in self.leases():
            if lease.backend is backend and (lease.state is State.WAITING or lease.renews):
                lease.due = 0.0
        self._ring()

    def hear(self, backend: Backend, notice: Notice) -> None:
        """A message came to the inbox of this process at a backend."""
        lease = self.find(notice.execution_id, notice.attempt_id)
        if lease is None or lease.backend is not backend:
            return
        if notice.kind == "granted":
            self._granted(lease, notice.attempt_id, (notice.fence,))
        elif notice.kind == "lost" and not self.lose(lease, "it was released by force"):
            lease.taken_from()
            self._ring()

    def _ring(self) -> None:
        with suppress(RuntimeError):  # it rings already
            self._bell.release()

    def _live(self) -> None:
        """The thread. Only the end of the process ends it: no error does, and no exception that
        somebody throws in from outside, which may even land in the handler of another exception."""
        while True:
            try:
                self._wait(self._pass())
            except BaseException as error:  # noqa: BLE001 - whatever it is, leases go on
                _aside(partial(logger.error, "Renewal failed and goes on", exc_info=error))
                self._bell.acquire(timeout=0.1)

    def _wait(self, until: float) -> None:
        self._wake_at = until
        # A lease added since the pass looked found the old `_wake_at` and rang nobody.
        if all(lease.next_look >= until for lease in self.leases()):
            pause = until - clock()
            if pause > 0:
                self._bell.acquire(timeout=min(pause, 3600.0))
        self._wake_at = 0.0

    def _pass(self) -> float:
        """Look after everything that is due. Returns when the next look is due."""
        now = clock()
        self._tell_losses()
        due = self._due(now)

        def turn(call: _Batch) -> tuple[int, bool]:
            return self._outage(call, due[call]).failures, call[0] == "heartbeat"

        # Those that answer come first. After one that does not, they may be due again: with several
        # silent servers, or nodes of a cluster, their leases would otherwise wait for all of these.
        for call in sorted(due, key=turn):
            if not self._make(call, due[call]):
                break
        return self._next(now)

    def _next(self, now: float) -> float:
        """When the next look is due."""
        # After a short lock comes another: nobody rings for that if somebody looks all the same.
        used, self._used = self._used, False
        idle = now + LONG if used else math.inf
        return min((lease.next_look for lease in self.leases()), default=idle)

    def _due(self, now: float) -> dict[_Batch, list[Lease]]:
        """The leases to renew now and the waiters that need a heartbeat, by call."""
        calls: dict[_Batch, list[Lease]] = {}
        for lease in self.leases():
            if now >= lease.listen_at and lease.inbox is not None:
                lease.listen_at = now + _LISTEN_AGAIN  # no thread to spare costs no renewal
                with self._opening:
                    lease.inbox.start()
                    lease.listen_at = math.inf
            verb = _VERBS.get(lease.state)
            if verb and lease.due <= now + _TOGETHER * lease.waiter_lease / 3:
                # Not by the backend: another way to the same Redis is equal, and has other
                # credentials and another number of replicas.
                call = verb, id(lease.backend), lease.backend.route(lease.claim.names)
                calls.setdefault(call, []).append(lease)
        return calls

    def _outage(self, call: _Batch, leases: Sequence[Lease]) -> Outage:
        tries = self._outages.setdefault(leases[0].backend, {})
        return tries.setdefault(call, Outage("renewing leases", _aside))

    def _make(self, call: _Batch, leases: list[Lease]) -> bool:
        """Make a call. False if nobody has answered."""
        verb, backend, outage = call[0], leases[0].backend, self._outage(call, leases)
        with outage:  # whatever it is, it is tried again until the deadline
            asked = [(lease, lease.renewals()) for lease in leases]
            sent = clock()  # from now on it counts
            every = [each for _, renewals in asked for each in renewals]
            patience = self._patience(sent, outage.failures)
            found = iter(getattr(backend, verb)(every, within=patience))
            told = self._renewal_answered if verb == "renew" else self._heartbeat_answered
            for lease, renewals in asked:
                answers = [next(found) for _ in renewals]
                # Else it was released meanwhile, and another attempt has followed.
                if lease.claim.attempt_id == renewals[0].attempt_id:
                    told(lease, renewals, sent, answers)
            # The next failure begins another one. Else a backend that comes and goes would leave it
            # with one that stays and equals it.
            self._outages.get(backend, {}).pop(call, None)
            return True
        self._put_off(leases, outage)
        return False

    def _tell_losses(self) -> None:
        for lease in self.leases():
            if lease.state is State.HELD and lease.lost:
                self.lose(lease, _RAN_OUT, _aside)
            elif lease.abandoned:
                if lease.holder is not None:
                    self.lose(lease, "it was dropped without being released", _aside)
                # Not what its coroutine releases, which may wait for a thread. Nor under gevent: a
                # greenlet would make the call, in this thread.
                elif lease.may_hold and not green():
                    lease.withdraw()
                self.discard(lease)

    def _put_off(self, leases: list[Lease], outage: Outage) -> None:
        """Nobody answered for these leases: they are tried again soon."""
        held = [lease for lease in leases if lease.state is State.HELD]
        _aside(partial(_tell_unrenewed, held, str(outage.error)))
        again = clock()
        for lease in leases:
            lease.due = again + min(1.0, lease.waiter_lease / 15)
        self._tell_losses()  # what comes next may take as long

    def _renewal_answered(
        self, lease: Lease, renewals: Sequence[Renewal], sent: float, answers: Sequence[bool]
    ) -> None:
        """The renewal of a lease came back."""
        # A name that is not in the claim any more was released meanwhile.
        gone = [each.name for each, kept in zip(renewals, answers, strict=True) if not kept]
        if not set(gone).isdisjoint(lease.claim.names):
            self.lose(lease, _GONE, _aside)
        elif not lease.renew(sent, renewals[0].lease) and lease.lost:
            self.lose(lease, "its renewal was answered after the lease had run out", _aside)

    def _heartbeat_answered(
        self,
        lease: Lease,
        renewals: Sequence[Renewal],
        sent: float,
        answers: Sequence[Held | Queued | None],
    ) -> None:
        """A heartbeat came back for a lease that waits, or waited when the heartbeat was sent."""
        if any(answer is None for answer in answers):
            # The place is gone: the waiter has to ask again. A grant that was announced meanwhile
            # stands: the server made it after this answer.
            if lease.switch(State.ASKED, State.WAITING):
                lease.ring()
        elif all(isinstance(answer, Held) for answer in answers):
            fences = tuple(answer.fences[0] for answer in answers if isinstance(answer, Held))
            self._granted(lease, renewals[0].attempt_id, fences, sent=sent)
            # The message came first: then this answer still says that the hold has a whole lease.
            lease.renew(sent, renewals[0].lease)
        else:
            queued = [answer for answer in answers if isinstance(answer, Queued)]
            lease.wait_on(sent, min((q.recheck for q in queued if q.recheck > 0), default=0.0))

    def _granted(
        self, lease: Lease, attempt_id: str, fences: tuple[int, ...], *, sent: float | None = None
    ) -> None:
        """The server granted a waiter its lock: told by a message, or by a heartbeat of `sent`."""
        if lease.granted(attempt_id, fences, sent):
            lease.ring()
            self.add(lease)  # it may be due sooner

    def _patience(self, now: float, failures: int) -> float:
        """How long to wait for an answer: half the time to the next deadline, of whatever backend.

        Else a server that hangs would keep this thread from telling a loss in time, and from
        renewing what other servers have. Half, so that a new connection has its chance, too. With
        each failure in a row longer: beside short leases, a slow server would never be heard."""
        left = min((d - now for lease in self.leases() if (d := lease.deadline) > now), default=1e9)
        shortest = _SHORTEST * 2.0 ** min(failures, 5)
        return min(max(left / 2, shortest), _LONGEST)


def _tell_unrenewed(leases: Sequence[Lease], reason: str) -> None:
    # Not in the keep-alive's thread: to ask whether it is logged can wait for who sets up logging.
    for lease in leases:
        lease.tell("unrenewed", reason)


keepalive = KeepAlive()
