"""What must hold whatever happened: numbered as in the design, checked on what Redis really has."""

from __future__ import annotations

from typing import Any

from hypothesis.stateful import RuleBasedStateMachine, invariant

from celery_relock.engine.protocol import (
    SHARED,
    Answer,
    Claim,
    Conflict,
    Ended,
    Held,
    OtherAttempt,
    Parked,
    Queued,
)
from tests.property.model import Model
from tests.property.snapshot import RealLock, RealParking

# Seconds of a place and of a hold: nothing lapses unless a rule says so. They differ, as a hold
# that got the life of its place would else look right (field test, B2).
LIFE, LEASE = 1000.0, 3000.0


class Invariants(RuleBasedStateMachine):
    """`before` and `now` are the locks as Redis had them around the last command.

    `sound` is False from a command on until what came of it has been checked.
    """

    model: Model
    before: dict[str, RealLock]
    now: dict[str, RealLock]
    parking: RealParking
    limits: dict[str, int]
    highest_fence: int
    least_end: float
    known_fences: set[int]
    sound = False

    @invariant()
    def redis_has_what_the_model_has(self) -> None:
        for name, lock in self.now.items():
            real = {run: (h.attempt_id, h.owner, h.shared) for run, h in lock.holds.items()}
            model = self.model.holds[name].items()
            assert real == {run: (h.attempt_id, h.owner, h.shared) for run, h in model}
            waiting = [
                (run, facts["attempt"], facts["expiry"] == 1, facts.get("parked", False))
                for run, facts in lock.queue.items()
            ]
            places = self.model.queues[name].items()
            assert waiting == [(run, p.attempt_id, p.dead, p.parked) for run, p in places]
        self.sound = True

    @invariant()
    def invariant_13_what_is_parked_is_there_and_will_be_looked_at(self) -> None:
        parked = self.model.parked()
        for name, lock in self.now.items():
            first = {run for run in lock.messages if next(iter(parked[run].limits)) == name}
            for run, text in lock.messages.items():
                assert text == (f"text of {run}" if run in first else "")
            here = {run for run, place in self.model.queues[name].items() if place.parked}
            assert set(lock.messages) == here
        index, due, owed, counted = self.parking
        looks = {f"l {name}" for name, lock in self.now.items() if lock.messages}
        assert due == looks | {f"r {run}" for run in self.model.deadlines}
        assert index == {run: next(iter(place.limits)) for run, place in parked.items()} | {
            f"#t-{run}": run for run in parked
        }
        assert owed == {home: set(self.model.owed[home]) for home in owed}
        assert counted == (len(parked), sum(len(f"text of {run}") for run in parked))

    @invariant()
    def invariant_01_at_most_so_many_permits_as_the_limit(self) -> None:
        for name, lock in self.now.items():
            assert len(lock.fences) <= self.limits[name]
            modes = {hold.shared for hold in lock.holds.values()}
            assert modes <= {False} or (modes == {True} and len(lock.fences) == 1)

    @invariant()
    def a_new_hold_has_its_whole_lease(self) -> None:
        """However it was acquired: at once, by a grant, by joining a permit, out of the park."""
        for name, lock in self.now.items():
            for run in lock.holds.keys() - self.before[name].holds.keys():
                found_later = (LEASE - LIFE) * 1000 if run in self.model.found_later else 0
                assert lock.ends[run] + 1 >= self.least_end - found_later, f"{run} at {name}"

    @invariant()
    def invariant_10_every_new_fence_is_the_highest(self) -> None:
        new = {f for name, lock in self.now.items() for f in lock.fences - self.before[name].fences}
        for fence in sorted(new - self.known_fences):
            assert fence > self.highest_fence
            self.highest_fence = fence
        self.known_fences |= new

    @invariant()
    def invariant_11_nobody_overtakes_who_can_be_reached(self) -> None:
        for name, lock in self.now.items():
            before = self.before[name]
            line = list(before.queue)
            for fence in lock.fences - before.fences:
                # Whoever joined the permit, in the same command, needed no turn.
                entered = [run for run, hold in lock.holds.items() if hold.fence == fence]
                places = [line.index(run) if run in line else len(line) for run in entered]
                for other in line[: min(places)]:
                    may_pass = self._has_joined(entered, other)
                    assert may_pass or self._may_be_passed(name, other), f"{entered} at {name}"

    @invariant()
    def invariant_11_who_shares_a_lock_overtakes_nobody_either(self) -> None:
        for name, lock in self.now.items():
            before = self.before[name]
            line = list(before.queue)
            for run in lock.holds.keys() - before.holds.keys():
                hold = lock.holds[run]
                kin = [r for r, h in lock.holds.items() if r != run and h.owner == hold.owner]
                if (
                    not hold.shared
                    or kin
                    or any(h.owner == hold.owner for h in before.holds.values())
                ):
                    continue
                for other in line[: line.index(run) if run in line else len(line)]:
                    may_pass = self._has_joined([run], other)
                    assert may_pass or self._may_be_passed(name, other), f"{run} at {name}"

    def _has_joined(self, runs: list[str], other: str) -> bool:
        """Whether one of them has joined the permit of a lock where this one waits as well."""
        return any(
            other in self.before[name].queue and lock.holds[run].fence in self.before[name].fences
            for name, lock in self.now.items()
            for run in runs
            if run in lock.holds
        )

    def _may_be_passed(self, name: str, run: str) -> bool:
        place, before = self.now[name].queue.get(run), self.before[name].queue[run]
        # It has come back for more locks, or fewer: its new places are behind all others.
        if place is None or place.get("names") != before.get("names"):
            return True
        if place.get("parked"):  # on its way, or a copy of an execution that holds
            is_in = any(run in each.holds for each in self.now.values())
            return bool(place.get("back", 1) > 1 or is_in)
        return bool(place["expiry"] == 1 or place["inbox"] not in self.model.reachable)

    @invariant()
    def invariant_16_nothing_stays_for_ever(self) -> None:
        for lock in self.now.values():
            assert (lock.lifetimes["holds"] == -2) == (not lock.holds and not lock.lapsed)
            assert (lock.lifetimes["queue"] == -2) == (not lock.queue)
            assert lock.lifetimes["holds"] != -1, "a key without an end"
            assert (lock.lifetimes["queue"] == -1) == bool(lock.messages)
            assert (lock.lifetimes["waiters"] == -1) == bool(lock.messages)

    def invariant_02_reentry_never_blocks(self, claim: Claim, answer: Answer) -> None:
        if isinstance(answer, (OtherAttempt, Ended)) or self._is_late_copy(claim):
            return
        for name in claim.names:
            permits = self._admitting(claim, name)
            if not permits or claim.execution_id in self.before[name].holds:
                continue
            if isinstance(answer, Conflict):
                assert answer.name != name
            if isinstance(answer, (Conflict, Queued, Parked)):  # it waits for another lock
                assert len(claim.names) > 1
                continue
            fence = self.now[name].holds[claim.execution_id].fence
            # Its place may have come to the head in this very call: then the permit is its own.
            assert fence == max(permits) or claim.execution_id in self.before[name].queue

    def _is_late_copy(self, claim: Claim) -> bool:
        """Whether this very attempt has parked its message, which has not come back since."""
        places = (self.before[name].queue.get(claim.execution_id) for name in claim.names)
        return any(
            place
            and place.get("parked")
            and not place.get("arrived")
            and place["attempt"] == claim.attempt_id
            for place in places
        )

    def invariant_03_siblings_exclude_each_other(self, claim: Claim, answer: Answer) -> None:
        """Who shares an owner, and no more than that, gets a permit of its own."""
        if claim.by_owner or not isinstance(answer, (Held, Queued)):
            return
        for name in claim.names:
            before, hold = self.before[name], self.now[name].holds.get(claim.execution_id)
            place = before.queue.get(claim.execution_id, {})
            asked_before = place.get("by_owner") or place.get("ancestors")
            if hold and claim.execution_id not in before.holds and not asked_before:
                joined = hold.fence in before.fences and not hold.shared
                assert not joined or self._admitting(claim, name)

    def invariant_04_sent_twice_it_acts_once(self, run: str, answers: list[Any]) -> None:
        """The second copy, the last command, may grant a lock to others, and takes nothing away."""
        first, second = answers
        assert type(first) is type(second), answers
        if isinstance(first, (Held, Ended)):
            assert first[:3] == second[:3]  # all of `Held` but when it was sent
        for name in self.now if run else ():
            assert self.now[name].holds.get(run) == self.before[name].holds.get(run)
            assert (run in self.now[name].queue) == (run in self.before[name].queue)

    def invariant_05_a_duplicate_is_no_reentry(self, claim: Claim, answer: Answer) -> None:
        for name in claim.names:
            hold, place = (
                getattr(self.before[name], x).get(claim.execution_id) for x in ("holds", "queue")
            )
            other = hold is not None and hold.attempt_id != claim.attempt_id
            waits = bool(place) and place["expiry"] > 1 and not place.get("parked")
            if other or (waits and place["attempt"] != claim.attempt_id):
                assert isinstance(answer, (OtherAttempt, Ended, Parked))
                assert hold == self.now[name].holds.get(claim.execution_id)

    def invariant_05_who_was_withdrawn_has_no_place(self, run: str, had: bool) -> None:
        for name, lock in self.now.items():
            assert not had or run not in lock.queue
            before = self.before[name].queue.get(run, {})
            assert not before.get("parked") or had

    def invariant_06_a_hold_that_ends_by_itself_ends_alone(self, run: str) -> None:
        for name, lock in self.now.items():
            others = {key: hold for key, hold in self.before[name].holds.items() if key != run}
            assert {key: hold for key, hold in lock.holds.items() if key != run} == others

    def invariant_09_a_renewal_brings_nothing_back(self) -> None:
        for name, lock in self.now.items():
            assert lock.holds == self.before[name].holds
            assert lock.lapsed <= self.before[name].lapsed

    def invariant_12_who_looks_needs_no_message(self, run: str, attempt_id: str) -> None:
        """A heartbeat of a waiter leaves it waiting only for somebody who is there."""
        for name, lock in self.now.items():
            if run not in lock.queue or lock.queue[run]["attempt"] != attempt_id:
                continue
            here = lock.queue[run]
            if here["expiry"] == 1 or here.get("names") or here.get("parked"):
                continue
            line = list(lock.queue)
            ahead = [lock.queue[other] for other in line[: line.index(run)]]
            wait_elsewhere = [
                facts for facts in ahead if facts.get("names") and facts["expiry"] > 1
            ]
            places = self.model.queues[name]
            limits = [places[other].limits[name] for other in line[: line.index(run) + 1]]
            come = any(facts.get("back", 0) > 1 for facts in ahead)
            if limits.pop() == SHARED:
                wait = [x for x, of in zip(ahead, limits, strict=True) if of != SHARED]
                full = lock.holds and not next(iter(lock.holds.values())).shared
                full = full or (wait and (lock.holds or come))
            else:
                promised = sum(facts.get("back", 0) > 1 for facts in ahead)
                full = len(lock.fences) + promised >= self.limits[name]
                full = full or any(hold.shared for hold in lock.holds.values())
                share = [x for x, of in zip(ahead, limits, strict=True) if of == SHARED]
                full = full or (share and (lock.holds or come))
            assert full or wait_elsewhere, f"{run} at {name}"

    def _admitting(self, claim: Claim, name: str) -> list[int]:
        """The fences of the permits that this claim may join."""
        return [
            hold.fence
            for run, hold in self.before[name].holds.items()
            if hold.owner == claim.owner and (claim.by_owner or run in claim.ancestors)
            if not hold.shared or claim.limits[claim.names.index(name)] == SHARED
        ]
