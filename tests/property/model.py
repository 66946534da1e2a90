"""The lock as it is meant to be: dictionaries and lists, no keys, no scripts, no clock.

Time enters from outside: a test says which hold or which waiter has lapsed. A hold that has lapsed
is no hold. A waiter that has lapsed keeps its place until somebody comes past it in the queue, and
another attempt of its execution may take the place over until then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from celery_relock.engine.protocol import SHARED, Claim
from tests.property.parking import Hold, ParkedRuns, Place

Reply = tuple[Any, ...]
EXECUTION_ENDED = "*"


class Model(ParkedRuns):
    def __init__(self) -> None:
        super().__init__()
        self.holds: dict[str, dict[str, Hold]] = defaultdict(dict)
        self.queues: dict[str, dict[str, Place]] = defaultdict(dict)  # in order
        self.ended: dict[str, set[str]] = defaultdict(set)
        self.reachable: set[str] = set()
        self.messages: list[Reply] = []
        self.last_permit = 0

    # The verbs

    def acquire(
        self, claim: Claim, wait: bool, inbox: str, home: str = "", deadline: bool = False
    ) -> Reply:
        """With a home it parks, and else waits, or not."""
        self._begin()
        reply = self._acquire(claim, wait, inbox, home, deadline)
        self._promote_others("")
        return reply

    def _acquire(self, claim: Claim, wait: bool, inbox: str, home: str, deadline: bool) -> Reply:
        run, names = claim.execution_id, claim.names
        limits = dict(zip(names, claim.limits, strict=True))
        place = Place(claim.attempt_id, claim.owner, inbox, claim.by_owner, limits, home=home)
        place.ancestors = claim.ancestors
        if refusal := self._refusal(claim, place, deadline):
            return refusal
        is_in = bool(self._holds_of(claim))
        self._take_over_places(claim, place, bool(wait or home), is_in)

        ahead = {name for name in names if self.promote(name, caller=run)}
        missing = self._missing(claim)
        joins = {name: permit for name in missing if (permit := self.permit_of(name, run, place))}
        wanted = [name for name in missing if name not in joins]
        full = {n for n in names if self._is_full(n, limits[n], self.promised[n])}
        blocked = [name for name in wanted if name in ahead | full]
        passed = {name for name in ahead if blocked and self._is_ahead_of_itself(name, run, joins)}
        blocked = [name for name in wanted if name in ahead - passed | full]

        if blocked and not (wait or home):
            return self._busy(blocked[0], run)
        self._leave_places_but_for(run, missing if blocked else [], is_in)
        place.limits = {name: limits[name] for name in missing}
        if blocked and home:
            return self._park(run, place, deadline, first=bool(passed))
        if blocked:
            return self._wait(run, place, blocked[0], first=bool(passed))
        for name, permit in joins.items():
            self._hold(name, run, claim.attempt_id, claim.owner, permit, limits[name])
        return self._acquired(claim, wanted)

    def _refusal(self, claim: Claim, place: Place, deadline: bool) -> Reply | None:
        ended = self.ended[claim.execution_id]
        if EXECUTION_ENDED in ended:
            self._withdraw(claim.execution_id)
        if ended & {EXECUTION_ENDED, claim.attempt_id}:
            return ("ENDED",)
        if self._another_attempt_waits(claim):
            return ("ATTEMPT",)
        if all(hold.attempt_id == claim.attempt_id for hold in self._holds_of(claim)):
            return self._refusal_of_a_late_copy(claim, place)
        if place.parked:
            self._leave_places_but_for(claim.execution_id, list(claim.names), is_in=False)
            return self._park(claim.execution_id, place, deadline, first=True)
        return ("ATTEMPT",)

    def _is_ahead_of_itself(self, name: str, run: str, joins: dict[str, int]) -> bool:
        """Whether somebody ahead waits elsewhere for a permit that this one may join."""
        line = list(self.queues[name])
        ahead = line[: line.index(run)] if run in line else line
        places = {other: self.queues[name][other] for other in ahead if name not in joins}
        return any(
            self._waits_for(joins[each], each, other, place)
            for other, place in places.items()
            for each in place.limits
            if each in joins and other not in self.holds[name]
            if not (place.dead or place.handed_out)
        )

    def _waits_for(self, permit: int, name: str, run: str, place: Place) -> bool:
        if self.permits(name) != {permit} or self.permit_of(name, run, place) is not None:
            return False
        limit, line = place.limits[name], self.queues[name]
        if limit != SHARED or not self.readers(name):
            return self._is_full(name, limit, [])
        ahead = list(line)[: list(line).index(run)]
        return any(
            line[other].limits[name] != SHARED and other not in self.holds[name]
            for other in ahead
            if not line[other].dead
        )

    def _wait(self, run: str, place: Place, name: str, *, first: bool) -> Reply:
        self._forget(run)
        self._enter(run, place, first=first)
        return ("WAIT", self._rank(name, run))

    def _acquired(self, claim: Claim, wanted: list[str]) -> Reply:
        run, limits = claim.execution_id, dict(zip(claim.names, claim.limits, strict=True))
        joined = {n: self.readers(n) if limits[n] == SHARED else None for n in wanted}
        self.last_permit += None in joined.values()
        for name, permit in joined.items():
            of = claim.attempt_id, claim.owner, permit or self.last_permit, limits[name]
            self._hold(name, run, *of)
        permits = [self.holds[name][run].permit for name in claim.names]
        return ("HELD", permits, [self._is_reentered(name, claim) for name in claim.names])

    def _hold(
        self, name: str, run: str, attempt_id: str, owner: str, permit: int, limit: int
    ) -> None:
        shared = limit == SHARED and (not self.permits(name) or bool(self.readers(name)))
        self.holds[name][run] = Hold(attempt_id, owner, permit, shared)

    def release(
        self, run: str, attempt_id: str, names: Iterable[str], ended: str, home: str
    ) -> bool:
        self._begin(home, f"{run} {attempt_id}")
        had_something = False
        for name in names:
            hold, place = self.holds[name].get(run), self.queues[name].get(run)
            if hold and hold.attempt_id == attempt_id:
                del self.holds[name][run]
                had_something = True
            taken_back = place and not place.arrived and ended not in ("killed", "parked")
            mine = place and place.attempt_id == attempt_id and (not place.parked or taken_back)
            if place and (mine or (place.parked and ended == "execution")):
                self._leave(run, place)
                had_something = True
        for name in names:
            self.promote(name)
        if ended:
            self.ended[run].add(EXECUTION_ENDED if ended == "execution" else attempt_id)
        return had_something

    def downgrade(self, run: str, attempt_id: str, names: Iterable[str]) -> Reply:
        self._begin()
        for name in names:
            hold = self.holds[name].get(run)
            if not hold or hold.attempt_id != attempt_id:
                return ("LOST",)
            if not hold.shared and len(self.holds[name]) > 1:
                return ("JOINED", name)
        for name in names:
            self.holds[name][run].shared = True
        for name in names:
            self.promote(name)
        return ("SHARED",)

    def withdraw(self, run: str) -> bool:
        found = super().withdraw(run)
        if found:
            self.ended[run].add(EXECUTION_ENDED)
        return found

    def renew(self, run: str, attempt_id: str, name: str) -> bool:
        return run in self.holds[name] and self.holds[name][run].attempt_id == attempt_id

    def heartbeat(self, renewals: list[tuple[str, str, str]]) -> list[Reply]:
        """For (lock, execution, attempt)."""
        self._begin()
        kept = []
        for name, run, attempt_id in renewals:
            place = self.queues[name].get(run)
            alive = place and place.attempt_id == attempt_id and not place.dead and not place.parked
            kept.append(place if alive else None)
        for (name, run, _), place in zip(renewals, kept, strict=True):
            if place and run not in self.holds[name]:
                self.promote(name, caller=run)
                if run not in self.holds[name] and place.by_owner:
                    self._admit(run, place, first_in=None, caller=run)
                    self._promote_others(run)
        return [self._beat_reply(*beat, place) for beat, place in zip(renewals, kept, strict=True)]

    def force_release(self, name: str, only: str) -> set[str]:
        self._begin()
        taken = {run for run in self.holds[name] if only in ("", run)}
        for run in taken:
            del self.holds[name][run]
        self.promote(name)
        return taken

    # What happens by itself

    def lapse_hold(self, name: str, run: str) -> None:
        del self.holds[name][run]

    def lapse_place(self, name: str, run: str) -> None:
        self.queues[name][run].dead = True

    # The rules

    def promote(self, name: str, caller: str = "") -> bool:
        """Let in who is first, again and again. True: somebody must enter before the caller."""
        is_ahead = self._promote(name, caller)
        self._promote_others(caller)
        return is_ahead

    def _note_others(self, place: Place) -> None:
        self.left += place.limits if len(place.limits) > 1 else ()

    def _promote_others(self, caller: str) -> None:
        """Where a waiter for several locks has left, whoever stood behind it moves up."""
        while self.left:
            self._promote(self.left.pop(0), caller)

    def _promote(self, name: str, caller: str) -> bool:
        self.promised[name] = []
        for run, place in list(self.queues[name].items()):
            has_left = self.queues[name].get(run) is not place or run == self.leaving
            if has_left or self.behind_itself(run, place):
                continue  # it acquired with its owner; or its turn comes if its execution dies
            if place.dead:
                self._leave(run, place)
                self._note_others(place)
            elif place.on_its_way and run != caller:
                if self._is_due_to_the_sender(run, place):
                    self._hand_out(run, place)
                self.promised[name] += self._promise(name, run, place)
            elif self._admission(run, place, first_in=name) is None:
                return run != caller
            elif self._admit(run, place, name, caller):
                for each in place.limits if place.by_owner else ():
                    self._bring_in_with(place.owner, each, caller)
            elif place.parked:
                self.promised[name] += self._promise(name, run, place)
        return False

    def _bring_in_with(self, owner: str, name: str, caller: str) -> None:
        for run, place in list(self.queues[name].items()):
            joins = place.by_owner and place.owner == owner and not place.dead
            joins = joins and run != self.leaving
            if joins and not self.behind_itself(run, place):
                self._admit(run, place, first_in=None, caller=caller)

    def _admit(self, run: str, place: Place, first_in: str | None, caller: str) -> bool:
        """Grant it all, or resume its message, if it may have all now. True: it holds them."""
        permits = self._admission(run, place, first_in)
        if permits is None:
            return False
        if place.parked and run != caller:
            if not place.on_its_way:
                self._hand_out(run, place)
            return False
        hears = run == caller or place.inbox in self.reachable
        if not hears and not place.unheard:
            return False
        self.found_later |= set() if hears else {run}
        self._leave(run, place)
        self._note_others(place)
        if None in permits.values():
            self.last_permit += 1
        for name, joined in permits.items():
            of = place.attempt_id, place.owner, joined or self.last_permit, place.limits[name]
            self._hold(name, run, *of)
        if run != caller and hears:
            told = self.holds[next(iter(permits))][run].permit
            self.messages.append((place.inbox, "granted", run, place.attempt_id, [told]))
        return True

    def _admission(
        self, run: str, place: Place, first_in: str | None
    ) -> dict[str, int | None] | None:
        """For each lock the permit to join, or None for a new one. None: not all are to be had."""
        permits: dict[str, int | None] = {}
        for name, limit in place.limits.items():
            permits[name] = self.permit_of(name, run, place)
            here = name == first_in
            promised = self.promised[name] if here else self._promised_ahead(name, run)
            if permits[name] is None:
                if promised is None or self._is_full(name, limit, promised):
                    return None
                permits[name] = self.readers(name) if limit == SHARED else None
        return permits

    def _is_full(self, name: str, limit: int, promised: list[int]) -> bool:
        permits, readers = self.permits(name), self.readers(name)
        if limit == SHARED:
            return any(each != SHARED for each in promised) or bool(permits and not readers)
        return bool(readers) or SHARED in promised or len(permits) + len(promised) >= limit

    def _busy(self, name: str, run: str) -> Reply:
        holds, line = self.holds[name], self.queues[name]
        oldest = min(holds, key=lambda each: (holds[each].permit, each), default="")
        owner = holds[oldest].owner if oldest else ""
        parked = run in line and line[run].parked
        return ("BUSY", name, owner, len(line), parked)

    def _holds_of(self, claim: Claim) -> list[Hold]:
        return [
            self.holds[n][claim.execution_id]
            for n in claim.names
            if claim.execution_id in self.holds[n]
        ]

    def _refusal_of_a_late_copy(self, claim: Claim, asks: Place) -> Reply | None:
        """This very attempt has parked its message, which has not come back since."""
        for name in claim.names:
            place = self.queues[name].get(claim.execution_id)
            is_mine = place and place.attempt_id == claim.attempt_id
            if place and is_mine and place.parked and not place.arrived:
                return (
                    self._parked_before(claim)
                    if asks.parked
                    else self._busy(name, claim.execution_id)
                )
        return None

    def _parked_before(self, claim: Claim) -> Reply:
        for name in claim.names:
            self.promote(name)
        return ("PARKED",)

    def _another_attempt_waits(self, claim: Claim) -> bool:
        places = [self.queues[name].get(claim.execution_id) for name in claim.names]
        return any(
            place and place.attempt_id != claim.attempt_id and not place.dead and not place.parked
            for place in places
        )

    def _beat_reply(self, name: str, run: str, attempt_id: str, kept: Place | None) -> Reply:
        hold = self.holds[name].get(run)
        if hold and hold.attempt_id == attempt_id:
            return ("HELD", hold.permit)
        return ("WAIT", self._rank(name, run)) if kept else ("LOST",)

    def permits(self, name: str) -> set[int]:
        return {hold.permit for hold in self.holds[name].values()}

    def _rank(self, name: str, run: str) -> int:
        return list(self.queues[name]).index(run)

    def _is_reentered(self, name: str, claim: Claim) -> bool:
        run = claim.execution_id
        mine, holds = self.holds[name][run], self.holds[name].values()
        if mine.shared:
            of = claim.owner, claim.by_owner, claim.ancestors
            return self._of_kin(name, *of, but_for=run) is not None
        return sum(hold.permit == mine.permit for hold in holds) > 1
