"""Random histories: what runs, waiters, connections and leases may do next."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from celery_relock.engine.protocol import Renewal
from tests.property import snapshot
from tests.property.driver import HOMES, LIFE, NAMES, STRANGER, Driver
from tests.property.model import Model
from tests.support.desk import Desk

RUNS = tuple(f"r{i}" for i in range(6))
INBOXES = ("steady", "flaky", "gone")

runs, inboxes = st.sampled_from(RUNS), st.sampled_from(INBOXES)
attempt_ids = st.sampled_from(["n1", "n1", "n2", "n3"])
few_ancestors = st.lists(runs, max_size=2, unique=True).map(tuple)
picks = st.integers(0, 30)
copies = st.sampled_from([1, 1, 2])  # how often a command arrives
ends = st.sampled_from(["", "", "attempt", "killed", "parked"])
homes = st.sampled_from(["", *HOMES, HOMES[0]])

somebody_holds = precondition(lambda self: any(self.model.holds[name] for name in NAMES))
somebody_waits = precondition(lambda self: any(self.model.queues[name] for name in NAMES))
somebody_is_parked = precondition(lambda self: self.model.parked())


class LockMachine(Driver):
    """Six executions of up to three owners; some of them want both of two locks.

    Attributes:
        open_desk: opens the backend that is held against the model, empty.
    """

    open_desk: Callable[[], Desk]

    @initialize(
        wants=st.tuples(*[st.sampled_from([("a",), ("a",), ("b",), NAMES])] * len(RUNS)),
        limits=st.tuples(st.integers(1, 2), st.integers(1, 3)),
        owners=st.tuples(*[st.sampled_from(["o1", "o2", "o3"])] * len(RUNS)),
        shares=st.tuples(*[st.tuples(st.booleans(), st.booleans())] * len(RUNS)),
    )
    def begin(self, wants: Any, limits: Any, owners: Any, shares: Any) -> None:
        self.wants = dict(zip(RUNS, wants, strict=True))
        self.limits = dict(zip(NAMES, limits, strict=True))
        self.owners = dict(zip(RUNS, owners, strict=True))
        self.shares = dict(zip(RUNS, shares, strict=True))
        self.model = Model()
        self.desk = self.open_desk()
        self.desk.stranger(STRANGER.name)
        self.ears = {inbox: self.desk.listen(inbox) for inbox in INBOXES[:2]}
        self.model.reachable = set(self.ears)
        self.permit_of, self.sent = {}, []
        self.known_fences, self.highest_fence = set(), 0
        self.before = self.now = snapshot.read(self.desk, NAMES)
        self.parking = snapshot.read_parking(self.desk, HOMES)

    # Commands

    @rule(run=runs, attempt_id=attempt_ids, waits=st.booleans(), inbox=inboxes,
          by_owner=st.booleans(), ancestors=few_ancestors, copies=copies)  # fmt: skip
    def acquire(self, run: str, attempt_id: str, **how: Any) -> None:
        self._acquire(run, attempt_id, **how)

    @rule(run=runs, inbox=inboxes, copies=copies)
    def come_and_wait(self, run: str, inbox: str, copies: int) -> None:
        self._acquire(run, "n1", inbox=inbox, copies=copies)

    @somebody_waits
    @rule(pick=picks, ancestors=few_ancestors, by_owner=st.booleans(), waits=st.booleans())
    def ask_again(self, pick: int, **how: Any) -> None:
        """A waiter's command is sent once more, perhaps knowing more of where it comes from."""
        _, run, place = self._pick(self.model.queues, pick)
        self._acquire(run, place.attempt_id, inbox=place.inbox, **how)

    @somebody_holds
    @rule(pick=picks, ended=st.sampled_from(["", "", "attempt", "execution"]), copies=copies,
          home=homes, tight=st.booleans())  # fmt: skip
    def finish(self, pick: int, ended: str, copies: int, home: str, *, tight: bool) -> None:
        _, run, hold = self._pick(self.model.holds, pick)
        self._release(run, hold.attempt_id, ended, copies, home, tight=tight)

    @somebody_waits
    @rule(pick=picks, ended=ends, copies=copies, home=homes)
    def cancel(self, pick: int, ended: str, copies: int, home: str) -> None:
        _, run, place = self._pick(self.model.queues, pick)
        self._release(run, place.attempt_id, ended, copies, home)

    @rule(run=runs, attempt_id=attempt_ids, ended=ends, copies=copies)
    def release_late(self, run: str, attempt_id: str, ended: str, copies: int) -> None:
        self._release(run, attempt_id, ended, copies)

    @rule(run=runs, attempt_id=attempt_ids, home=st.sampled_from(HOMES), deadline=st.booleans(),
          by_owner=st.booleans(), ancestors=few_ancestors, copies=copies)  # fmt: skip
    def park(self, run: str, attempt_id: str, **how: Any) -> None:
        self._acquire(run, attempt_id, inbox="-", **how)

    @somebody_holds
    @rule(pick=picks, home=st.sampled_from(HOMES), ancestors=few_ancestors)
    def park_a_copy(self, pick: int, **how: Any) -> None:
        _, run, hold = self._pick(self.model.holds, pick)
        self._acquire(run, "n1" if hold.attempt_id != "n1" else "n2", inbox="-", **how)

    @somebody_is_parked
    @rule(pick=picks, attempt_id=attempt_ids, ancestors=few_ancestors, by_owner=st.booleans(),
          copies=copies, home=homes, waits=st.booleans())  # fmt: skip
    def arrive(self, pick: int, attempt_id: str, **how: Any) -> None:
        """A parked message comes to a worker: one that was sent, or one sent before."""
        parked = list(self.model.parked())
        self._acquire(parked[pick % len(parked)], attempt_id, inbox="flaky", **how)

    @somebody_is_parked
    @rule(pick=picks, copies=copies, home=homes)
    def the_command_that_parked_comes_late(self, pick: int, **how: Any) -> None:
        parked = list(self.model.parked().items())
        run, place = parked[pick % len(parked)]
        self._acquire(run, place.attempt_id, inbox="-", waits=False, **how)

    @somebody_is_parked
    @rule(home=st.sampled_from(HOMES), by=st.sampled_from(["b1", "b2"]),
          tasks=st.lists(runs, max_size=1), all_is_due=st.booleans())  # fmt: skip
    def resume(self, home: str, by: str, tasks: list[str], *, all_is_due: bool) -> None:
        self._resume(home, by, tasks, all_is_due=all_is_due)

    @somebody_is_parked
    @rule(pick=picks, copies=copies)
    def withdraw(self, pick: int, copies: int) -> None:
        self._withdraw(RUNS[pick % len(RUNS)], copies)

    @somebody_holds
    @rule(pick=picks, copies=copies)
    def downgrade(self, pick: int, copies: int) -> None:
        _, run, hold = self._pick(self.model.holds, pick)
        self._downgrade(run, hold.attempt_id, copies)

    @rule(run=runs, shares=st.tuples(st.booleans(), st.booleans()))
    def a_deploy_changes_the_mode(self, run: str, shares: Any) -> None:
        """Of an execution that is nowhere, or is parked, and comes back by another attempt."""
        places = [line[run] for line in self.model.queues.values() if run in line]
        is_here = any(run in self.model.holds[name] for name in NAMES)
        if not is_here and all(place.parked for place in places):
            self.shares[run] = shares

    @rule(run=runs, attempt_id=attempt_ids)
    def renew(self, run: str, attempt_id: str) -> None:
        for name in self.wants[run]:
            renewals = [STRANGER, Renewal(name, run, attempt_id, LIFE)]
            _, kept = self._send(partial(self.desk.backend.renew, renewals))
            self.invariant_09_a_renewal_brings_nothing_back()
            assert kept == self.model.renew(run, attempt_id, name)

    @somebody_waits
    @rule(which=st.lists(picks, min_size=1, max_size=3), copies=copies)
    def heartbeat(self, which: list[int], copies: int) -> None:
        found = (self._pick(self.model.queues, pick) for pick in which)
        self._heartbeat({run: place.attempt_id for _, run, place in found}, copies)

    @rule(run=runs, attempt_id=attempt_ids)
    def beat_late(self, run: str, attempt_id: str) -> None:
        self._heartbeat({run: attempt_id}, 1)

    @somebody_holds
    @rule(pick=picks, whole=st.booleans())
    def force_release(self, pick: int, whole: bool) -> None:
        name, run, _ = self._pick(self.model.holds, pick)
        only = "" if whole else run
        lost = [
            (self.desk.inbox_of(each, name), each, hold.attempt_id)
            for each, hold in self.now[name].holds.items()
            if whole or each == run
        ]
        taken = self._send(lambda: self.desk.backend.force_release(name, only))
        assert {hold.execution_id for hold in taken} == self.model.force_release(name, only)
        self._every_permit_is_one_fence()
        self._the_messages_are_the_models(lost=lost)

    @precondition(lambda self: self.sent)
    @rule(pick=picks)
    def a_copy_comes_late(self, pick: int) -> None:
        """Of one of the last commands, whose client has sent it again, and has gone on."""
        self._both(*self.sent[-1 - pick % len(self.sent)], 1)

    # What happens by itself

    @somebody_holds
    @rule(pick=picks)
    def a_lease_runs_out(self, pick: int) -> None:
        name, run, _ = self._pick(self.model.holds, pick)
        self._send(lambda: self.desk.lapse(run, name))
        self.model.lapse_hold(name, run)
        self.invariant_06_a_hold_that_ends_by_itself_ends_alone(run)

    @somebody_is_parked
    @rule(pick=picks)
    def a_message_gets_lost(self, pick: int) -> None:
        parked = list(self.model.parked())
        self._lose_message(parked[pick % len(parked)])

    @somebody_is_parked
    @rule(pick=picks)
    def a_message_is_long_overdue(self, pick: int) -> None:
        for run, place in list(self.model.travellers())[pick % 2 :]:
            self._send(partial(self.desk.lapse_place, run, next(iter(place.limits)), first=1))
            place.overdue = True

    @somebody_waits
    @rule(pick=picks)
    def a_waiter_dies(self, pick: int) -> None:
        name, run, place = self._pick(self.model.queues, pick)
        if place.parked:
            return  # it has no process
        self._send(lambda: self.desk.lapse_place(run, name))
        self.model.lapse_place(name, run)

    @somebody_waits
    @rule(pick=picks)
    def a_waiter_is_not_reached_for_long(self, pick: int) -> None:
        name, run, place = self._pick(self.model.queues, pick)
        if not place.parked:
            self._send(lambda: self.desk.lapse_place(run, name, unheard=1))
            place.unheard = True

    @rule()
    def a_connection_drops_or_comes_back(self) -> None:
        if "flaky" in self.ears:
            self.ears.pop("flaky").leave()
        else:
            self.ears["flaky"] = self.desk.listen("flaky")
        self.model.reachable = set(self.ears)
        self.before = self.now

    @rule(run=runs)
    def an_end_is_forgotten(self, run: str) -> None:
        self.desk.forget(run)
        self.model.ended.pop(run, None)

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        try:
            if not self.sound:
                return  # it has failed already
            self.invariant_12_everybody_who_waits_is_served_in_the_end()
            self.desk.stranger(STRANGER.name, goes=True)
            self.invariant_16_an_idle_lock_has_no_key()
        finally:
            self.desk.wipe()
            self.desk.close()
