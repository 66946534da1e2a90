"""A claim for locks in several buckets: no script can take them all at once.

They are taken bucket by bucket in one order, so two claims cannot wait for each other. Who has to
wait keeps what it has meanwhile: nobody else could have that either, in a line that is served in
order. Who does not wait gives it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..engine.protocol import (
    Answer,
    Claim,
    Conflict,
    Deadlocked,
    Duplicate,
    Ended,
    Full,
    Held,
    Message,
    Parked,
    ParkRequest,
    Queued,
    Released,
    Renewal,
    Successor,
)
from ..errors import RelockError
from .keyspace import Keyspace

# What a parked run has got is kept for it so many seconds, while it waits for the rest.
KEEP = 60.0


class Verbs(Protocol):
    """The verbs of a store, for locks of one bucket."""

    def acquire(self, claim: Claim, wait: float = 0.0, inbox: str = "-") -> Answer: ...

    def park(
        self, claim: Claim, park_request: ParkRequest, inbox: str = "-"
    ) -> Held | Parked | Full | Duplicate | Deadlocked | Ended: ...

    def release(
        self, names: Sequence[str], execution_id: str, attempt_id: str, ended: str = "", remember: float = 0.0,
        home: str = "", successor: Successor | None = None,
    ) -> Released: ...  # fmt: skip


@dataclass(slots=True)
class _Standing:
    """A claim that waits in its bucket number `at`, and has not asked the ones behind it."""

    claim: Claim
    wait: float
    inbox: str
    at: int


class Spread:
    """The verbs for claims over several buckets, made of the verbs for one."""

    def __init__(self, verbs: Verbs, keyspace: Keyspace) -> None:
        self._verbs = verbs
        self._keys = keyspace
        self._standing: dict[tuple[str, str], _Standing] = {}

    def buckets(self, names: Sequence[str]) -> int:
        """Over how many buckets the names are spread."""
        return 1 if len(names) == 1 else len({self._keys.bucket(name) for name in names})

    def acquire(self, claim: Claim, wait: float, inbox: str) -> Answer:
        """As `LockStore.acquire`."""
        standing = _Standing(claim, wait, inbox, 0)
        answer, held = self._go_on(standing, self._verbs)
        if isinstance(answer, Queued):
            self._standing[claim.execution_id, claim.attempt_id] = standing
        elif not isinstance(answer, Held):
            self._give_back(claim, held)
        return answer

    def park(
        self, claim: Claim, park_request: ParkRequest, inbox: str
    ) -> Held | Parked | Full | Duplicate | Deadlocked | Ended:
        """As `LockStore.park`. The message waits in one bucket; what the run has in those before is
        kept for it, and for a while only: it has no process that could renew it."""
        held: list[tuple[Claim, Held]] = []
        for part in self._parts(claim):
            answer = self._verbs.park(part, park_request, inbox)
            if isinstance(answer, Held):
                held.append((part, answer))
            elif isinstance(answer, Parked):
                messages = self._give_back(
                    claim, held, park_request.home, Successor(claim.execution_id, KEEP)
                )
                return Parked(answer.rank, answer.messages + messages)
            else:
                self._give_back(claim, held)
                return answer
        return _together(claim, held)

    def release(
        self, names: Sequence[str], execution_id: str, attempt_id: str, ended: str = "", remember: float = 0.0,
        home: str = "", successor: Successor | None = None,
    ) -> Released:  # fmt: skip
        """As `LockStore.release`. Where one bucket cannot be asked the others are all the same."""
        self._standing.pop((execution_id, attempt_id), None)
        error: RelockError | None = None
        had: list[bool] = []
        messages: tuple[Message, ...] = ()
        # Backwards: whom the first one lets in finds the others free.
        for part in reversed(self._by_bucket(names)):
            try:
                back = self._verbs.release(
                    part, execution_id, attempt_id, ended, remember, home, successor
                )
            except RelockError as problem:
                error = problem
            else:
                had.append(back.had)
                messages += back.messages
        if error is not None:
            raise error
        # Of the dead whatever is left is good; who lives is to know that a part was lost.
        return Released(any(had) if ended == "killed" else all(had), messages)

    def follow(
        self, renewals: Sequence[Renewal], answers: list[Held | Queued | None], verbs: Verbs
    ) -> None:
        """A heartbeat may have found that a bucket's turn has come: then the next one is asked.

        Args:
            answers: one for each beat; corrected in place.
        """
        lines: dict[tuple[str, str], list[int]] = {}
        for index, beat in enumerate(renewals):
            if (beat.execution_id, beat.attempt_id) in self._standing:
                lines.setdefault((beat.execution_id, beat.attempt_id), []).append(index)
        for key, indexes in lines.items():
            found = {renewals[index].name: answers[index] for index in indexes}
            standing = self._standing[key]
            for name, answer in self._found(standing, found, verbs).items():
                answers[next(i for i in indexes if renewals[i].name == name)] = answer

    def _found(
        self, standing: _Standing, found: dict[str, Held | Queued | None], verbs: Verbs
    ) -> dict[str, Held | Queued | None]:
        claim, parts = standing.claim, self._by_bucket(standing.claim.names)
        asked = [found.get(name) for part in parts[: standing.at + 1] for name in part]
        waits = next((answer for answer in asked if isinstance(answer, Queued)), None)
        if None in asked:
            return dict.fromkeys(found)  # a part was lost: the claim is to be made anew
        if waits is None:
            standing.at += 1
            answer, _ = self._go_on(standing, verbs)
            if isinstance(answer, Held):
                fences = zip(claim.names, answer.fences, answer.reentered, strict=True)
                return {name: Held((fence,), (joined,)) for name, fence, joined in fences}
            waits = answer if isinstance(answer, Queued) else None
        if waits is None:
            return dict.fromkeys(found)
        behind = [name for part in parts[standing.at :] for name in part]
        return {name: found.get(name) or waits for name in behind}

    def _go_on(self, standing: _Standing, verbs: Verbs) -> tuple[Answer, list[tuple[Claim, Held]]]:
        """Ask from the start on, or from where it stands. Returns the last answer, and what
        it has."""
        claim = standing.claim
        held: list[tuple[Claim, Held]] = []
        for index, part in enumerate(self._parts(claim)):
            answer = verbs.acquire(part, standing.wait, standing.inbox)
            standing.at = index
            if not isinstance(answer, Held):
                repeated = any(each.repeated for _, each in held)
                if repeated and isinstance(answer, Queued | Conflict | Duplicate):
                    answer = answer._replace(repeated=True)
                return answer, held
            held.append((part, answer))
        self._standing.pop((claim.execution_id, claim.attempt_id), None)
        return _together(claim, held), held

    def _give_back(
        self,
        claim: Claim,
        held: Sequence[tuple[Claim, Held]],
        home: str = "",
        successor: Successor | None = None,
    ) -> tuple[Message, ...]:
        messages: tuple[Message, ...] = ()
        for part, _ in reversed(held):
            back = self._verbs.release(
                part.names, claim.execution_id, claim.attempt_id, "", 0.0, home, successor
            )
            messages += back.messages
        return messages

    def _by_bucket(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        found: dict[int, list[str]] = {}
        for name in names:
            found.setdefault(self._keys.bucket(name), []).append(name)
        return [tuple(found[bucket]) for bucket in sorted(found)]

    def _parts(self, claim: Claim) -> list[Claim]:
        limits = dict(zip(claim.names, claim.limits, strict=True))
        return [
            claim._replace(names=names, limits=tuple(limits[name] for name in names))
            for names in self._by_bucket(claim.names)
        ]


def _together(claim: Claim, held: Sequence[tuple[Claim, Held]]) -> Held:
    fences: dict[str, Any] = {}
    for part, answer in held:
        for name, fence, joined in zip(part.names, answer.fences, answer.reentered, strict=True):
            fences[name] = fence, joined
    return Held(
        tuple(fences[name][0] for name in claim.names),
        tuple(fences[name][1] for name in claim.names),
        any(answer.repeated for _, answer in held),
    )
