"""The lock as it is meant to be: dictionaries and lists, no keys, no scripts, no clock.

Time enters from outside: a test says which hold or which waiter has lapsed. A hold that has lapsed
is no hold. A waiter that has lapsed keeps its place until somebody comes past it in the queue, and
another attempt of its run may take the place over until then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from celery_relock.core.answers import Claim

Reply = tuple[Any, ...]
RUN_ENDED = "*"


@dataclass
class Hold:
    nonce: str
    owner: str
    entry: int


@dataclass
class Place:
    """Where a run stands in the queues of all the locks in `limits`."""

    nonce: str
    owner: str
    inbox: str
    by_owner: bool
    limits: dict[str, int]
    dead: bool = False


class Model:
    def __init__(self) -> None:
        self.holds: dict[str, dict[str, Hold]] = defaultdict(dict)
        self.queues: dict[str, dict[str, Place]] = defaultdict(dict)  # in order
        self.ended: dict[str, set[str]] = defaultdict(set)
        self.reachable: set[str] = set()
        self.messages: list[Reply] = []
        self.last_entry = 0

    # The verbs

    def acquire(self, claim: Claim, wait: bool, inbox: str) -> Reply:
        run, names = claim.run, claim.names
        if self.ended[run] & {RUN_ENDED, claim.nonce}:
            return ("ENDED",)
        if self._another_attempt_lives(claim):
            return ("DUPLICATE",)
        limits = dict(zip(names, claim.limits, strict=True))
        new_place = Place(claim.nonce, claim.owner, inbox, claim.by_owner, limits)
        if wait:
            self._take_over_dead_places(run, names, new_place)

        held_up = {name for name in names if self.promote(name, caller=run)}
        held_up |= {name for name in names if len(self.entries(name)) >= limits[name]}
        missing = [name for name in names if run not in self.holds[name]]
        joins = {name: entry for name in missing if (entry := self._entry_for(name, claim))}
        wanted = [name for name in missing if name not in joins]
        blocked = [name for name in wanted if name in held_up]

        if blocked and not wait:
            return (
                "BUSY",
                blocked[0],
                self._oldest_owner(blocked[0]),
                len(self.queues[blocked[0]]),
            )
        self._leave_places_but_for(run, names, wanted if blocked else [])
        for name, entry in joins.items():
            self.holds[name][run] = Hold(claim.nonce, claim.owner, entry)
        if blocked:
            new_place.limits = {name: limits[name] for name in wanted}
            for name in wanted:
                self.queues[name][run] = new_place  # who is in the queue already keeps its rank
            return ("WAIT", self._rank(blocked[0], run))
        self.last_entry += bool(wanted)
        for name in wanted:
            self.holds[name][run] = Hold(claim.nonce, claim.owner, self.last_entry)
        entries = [self.holds[name][run].entry for name in names]
        return ("HELD", entries, [self._shared(name, run) for name in names])

    def release(self, run: str, nonce: str, names: Iterable[str], ended: str) -> bool:
        had_something = False
        for name in names:
            hold, place = self.holds[name].get(run), self.queues[name].get(run)
            if hold and hold.nonce == nonce:
                del self.holds[name][run]
                had_something = True
            elif place and place.nonce == nonce:
                self._leave(run, place)
                had_something = True
        for name in names:
            self.promote(name)
        if ended:
            self.ended[run].add(RUN_ENDED if ended == "run" else nonce)
        return had_something

    def renew(self, run: str, nonce: str, name: str) -> bool:
        return run in self.holds[name] and self.holds[name][run].nonce == nonce

    def heartbeat(self, beats: list[tuple[str, str, str]]) -> list[Reply]:
        """For (lock, run, nonce)."""
        kept = []
        for name, run, nonce in beats:
            place = self.queues[name].get(run)
            kept.append(place if place and place.nonce == nonce and not place.dead else None)
        for (name, run, _), place in zip(beats, kept, strict=True):
            if place and run not in self.holds[name]:
                self.promote(name, caller=run)
                if run not in self.holds[name] and place.by_owner:
                    self._let_in_if_admitted(run, place, first_in=None, caller=run)
        return [self._beat_reply(*beat, place) for beat, place in zip(beats, kept, strict=True)]

    def force_release(self, name: str, only: str) -> set[str]:
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
        for run, place in list(self.queues[name].items()):
            if self.queues[name].get(run) is not place:
                continue  # came in with its owner just now
            if place.dead:
                self._leave(run, place)
            elif self._admission(run, place, first_in=name) is None:
                return run != caller
            elif self._let_in_if_admitted(run, place, name, caller) and place.by_owner:
                for each in place.limits:
                    self._bring_in_with(place.owner, each, caller)
        return False

    def _bring_in_with(self, owner: str, name: str, caller: str) -> None:
        for run, place in list(self.queues[name].items()):
            if place.by_owner and place.owner == owner and not place.dead:
                self._let_in_if_admitted(run, place, first_in=None, caller=caller)

    def _let_in_if_admitted(
        self, run: str, place: Place, first_in: str | None, caller: str
    ) -> bool:
        entries = self._admission(run, place, first_in)
        if entries is None or (run != caller and place.inbox not in self.reachable):
            return False
        self._leave(run, place)
        if None in entries.values():
            self.last_entry += 1
        for name, joined in entries.items():
            self.holds[name][run] = Hold(place.nonce, place.owner, joined or self.last_entry)
        if run != caller:
            told = [self.holds[name][run].entry for name in entries]
            self.messages.append((place.inbox, "granted", run, place.nonce, told))
        return True

    def _admission(
        self, run: str, place: Place, first_in: str | None
    ) -> dict[str, int | None] | None:
        """For each lock the entry to join, or None for a new one. None: not all are to be had."""
        entries: dict[str, int | None] = {}
        for name, limit in place.limits.items():
            own = [hold.entry for hold in self.holds[name].values() if hold.owner == place.owner]
            entries[name] = max(own) if own and place.by_owner else None
            full = len(self.entries(name)) >= limit
            first = name == first_in or self._rank(name, run) == 0
            if entries[name] is None and (full or not first):
                return None
        return entries

    def _entry_for(self, name: str, claim: Claim) -> int | None:
        admitting = [
            hold.entry
            for run, hold in self.holds[name].items()
            if hold.owner == claim.owner and (claim.by_owner or run in claim.lineage)
        ]
        return max(admitting, default=None)

    def _another_attempt_lives(self, claim: Claim) -> bool:
        for name in claim.names:
            hold, place = self.holds[name].get(claim.run), self.queues[name].get(claim.run)
            if hold and hold.nonce != claim.nonce:
                return True
            if place and place.nonce != claim.nonce and not place.dead:
                return True
        return False

    def _take_over_dead_places(self, run: str, names: Iterable[str], by: Place) -> None:
        for name in names:
            place = self.queues[name].get(run)
            if place and place.dead:
                place.nonce, place.owner, place.inbox = by.nonce, by.owner, by.inbox
                place.by_owner, place.dead = by.by_owner, False

    def _leave_places_but_for(self, run: str, names: Iterable[str], wanted: list[str]) -> None:
        for name in names:
            place = self.queues[name].get(run)
            if place and list(place.limits) != wanted:
                self._leave(run, place)

    def _leave(self, run: str, place: Place) -> None:
        for name in place.limits:
            self.queues[name].pop(run, None)

    def _beat_reply(self, name: str, run: str, nonce: str, kept: Place | None) -> Reply:
        hold = self.holds[name].get(run)
        if hold and hold.nonce == nonce:
            return ("HELD", hold.entry)
        return ("WAIT", self._rank(name, run)) if kept else ("LOST",)

    def entries(self, name: str) -> set[int]:
        return {hold.entry for hold in self.holds[name].values()}

    def _rank(self, name: str, run: str) -> int:
        return list(self.queues[name]).index(run)

    def _oldest_owner(self, name: str) -> str:
        holds = self.holds[name].values()
        return min(holds, key=lambda hold: hold.entry).owner if holds else ""

    def _shared(self, name: str, run: str) -> bool:
        entry = self.holds[name][run].entry
        return sum(hold.entry == entry for hold in self.holds[name].values()) > 1
