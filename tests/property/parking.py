"""The part of the model for parked executions: messages, who has them, whose they are.

A message is resumed to a caller of its home, and else owed to such a one. From then on it is on
its way, until a test says that the time for that is over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from celery_relock.engine.protocol import SHARED, Claim


@dataclass
class Hold:
    attempt_id: str
    owner: str
    permit: int
    shared: bool = False


@dataclass
class Place:
    """Where an execution stands in the queues of all the locks in `limits`."""

    attempt_id: str
    owner: str
    inbox: str
    by_owner: bool
    limits: dict[str, int]
    ancestors: tuple[str, ...] = ()
    dead: bool = False
    unheard: bool = False
    # Of a parked execution, whose message is in Redis:
    home: str = ""
    arrived: bool = False
    on_its_way: bool = False
    handed_out: bool = False
    overdue: bool = False
    owed: bool = False
    given_to: str | None = None

    @property
    def parked(self) -> bool:
        return self.home != ""


class ParkedRuns:
    """Attributes:
    home, caller_id: of whoever sent this command: what it can send, and its name.
    out: the executions whose messages this command gave to its sender.
    found_later: the executions that this command let in although they could not be reached.
    owed: by home, the executions whose messages nobody could send, with the number of the command.
    deadlines: the executions that are to be resumed at some time, lock or not.
    """

    holds: dict[str, dict[str, Hold]]
    queues: dict[str, dict[str, Place]]

    def __init__(self) -> None:
        self.owed: dict[str, dict[str, int]] = defaultdict(dict)
        self.deadlines: set[str] = set()
        self.commands = 0
        self._begin()

    def _begin(self, home: str = "", caller_id: str = "") -> None:
        self.home, self.caller_id = home, caller_id
        self.out: list[str] = []
        self.promised: dict[str, list[int]] = {}
        self.left: list[str] = []
        self.leaving = ""
        self.found_later: set[str] = set()
        self.commands += 1

    def parked(self) -> dict[str, Place]:
        return {run: p for line in self.queues.values() for run, p in line.items() if p.parked}

    def behind_itself(self, run: str, place: Place) -> bool:
        return place.parked and any(run in self.holds[each] for each in place.limits)

    def _hand_out(self, run: str, place: Place) -> None:
        place.on_its_way = place.handed_out = True
        if place.home == self.home:
            place.given_to, place.owed = self.caller_id, False
            self.owed[place.home].pop(run, None)
            self.out.append(run)
        else:
            place.owed = True
            self.owed[place.home].setdefault(run, self.commands)

    def _is_due_to_the_sender(self, run: str, place: Place) -> bool:
        its_own = place.given_to == self.caller_id or (place.owed and place.home == self.home)
        return its_own and run not in self.out

    def _promise(self, name: str, run: str, place: Place) -> list[int]:
        """The limits by which messages on their way are about to come in."""
        comes_anew = not place.overdue and self.permit_of(name, run, place) is None
        return [place.limits[name]] if comes_anew else []

    def _promised_ahead(self, name: str, run: str) -> list[int] | None:
        promised: list[int] = []
        for other, place in self.queues[name].items():
            if other == run:
                return promised
            if other != self.leaving and not self.behind_itself(other, place):
                if not place.on_its_way:
                    return None
                promised += self._promise(name, other, place)
        return None

    def _take_over_places(self, claim: Claim, by: Place, waits: bool, is_in: bool) -> None:
        for name in claim.names:
            place = self.queues[name].get(claim.execution_id)
            if place and list(place.limits) != self._missing(claim):
                self.leaving = claim.execution_id if place.parked else ""
            elif place and (
                not is_in and place.attempt_id != by.attempt_id
                if place.parked
                else waits and place.dead
            ):
                place.attempt_id, place.owner, place.inbox = by.attempt_id, by.owner, by.inbox
                place.by_owner, place.dead, place.arrived = by.by_owner, False, place.parked
                place.ancestors = claim.ancestors
                place.limits = {name: by.limits[name] for name in place.limits}

    def _missing(self, claim: Claim) -> list[str]:
        return [name for name in claim.names if claim.execution_id not in self.holds[name]]

    def _leave_places_but_for(self, run: str, wanted: list[str], is_in: bool) -> None:
        for line in self.queues.values():
            place = line.get(run)
            stays = place and place.parked and is_in and not wanted
            if place and list(place.limits) != wanted and not stays:
                self._leave(run, place)
                self.left += place.limits

    def _park(self, run: str, place: Place, deadline: bool, first: bool = False) -> tuple[str]:
        self._forget(run)
        self._enter(run, place, first=first)
        if deadline:
            self.deadlines.add(run)
        return ("PARKED",)

    def _enter(self, run: str, place: Place, *, first: bool) -> None:
        """Who is in the queue already keeps its rank."""
        for name in place.limits:
            line = self.queues[name]
            if first and run not in line:
                self.queues[name] = {run: place, **line}
            else:
                line[run] = place

    def _leave(self, run: str, place: Place) -> None:
        for name in place.limits:
            self.queues[name].pop(run, None)
        self._forget(run)

    def _forget(self, run: str) -> None:
        """Its message is gone."""
        self.deadlines.discard(run)
        for home in self.owed:
            self.owed[home].pop(run, None)

    def permit_of(self, name: str, run: str, place: Place) -> int | None:
        permit = self._of_kin(name, place.owner, place.by_owner, place.ancestors)
        return None if self.readers(name) and place.limits[name] != SHARED else permit

    def _of_kin(
        self, name: str, owner: str, by_owner: bool, ancestors: Iterable[str], but_for: str = ""
    ) -> int | None:
        admitting = [
            hold.permit
            for run, hold in self.holds[name].items()
            if hold.owner == owner and (by_owner or run in ancestors) and run != but_for
        ]
        return max(admitting, default=None)

    def readers(self, name: str) -> int | None:
        """The permit of those who share the lock."""
        return next((hold.permit for hold in self.holds[name].values() if hold.shared), None)

    # What the commands about messages do

    def resume(self, home: str, by: str, tasks: list[str], *, all_is_due: bool) -> list[str]:
        self._begin(home, by)
        for run, _ in sorted(self.owed[home].items(), key=lambda item: item[::-1]):
            self.owed[home].pop(run)
            place = self.parked()[run]
            if place.on_its_way:
                self._hand_out(run, place)
        for run in tasks:
            self._send_on(run)
        looked_at = [name for name in self.queues if self._parked_at(name)] if all_is_due else []
        deadlines = sorted(self.deadlines) if all_is_due else []
        for name in sorted(looked_at):
            self.promote(name)
        for run in deadlines:
            self._send_on(run)
        return self.out

    def _parked_at(self, name: str) -> list[str]:
        return [run for run, place in self.queues[name].items() if place.parked]

    def _send_on(self, run: str) -> None:
        place = self.parked().get(run)
        self.deadlines.discard(run)
        if place:
            if not place.on_its_way or self._is_due_to_the_sender(run, place):
                self._hand_out(run, place)
            self.deadlines.add(run)

    def withdraw(self, run: str) -> bool:
        self._begin()
        return self._withdraw(run)

    def _withdraw(self, run: str) -> bool:
        place = self.parked().get(run)
        if not place:
            return False
        self._leave(run, place)
        for name in place.limits:
            self.promote(name)
        return True

    def promote(self, name: str, caller: str = "") -> bool:
        raise NotImplementedError

    # What happens by itself

    def travellers(self) -> Iterator[tuple[str, Place]]:
        return ((run, place) for run, place in self.parked().items() if place.on_its_way)
