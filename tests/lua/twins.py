"""Two ways to do the same, held against each other: each in a namespace of its own, on one server.

What a command answers, tells and leaves behind is made comparable: fences become numbers in the
order in which they were first seen, moments are equal when they are near, and what is dead is not
looked at, as one way may clear it away later than the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from celery_relock.engine.protocol import Conflict, Held, Parked, Queued, Resumed
from tests.support.desk import Desk, as_text
from tests.support.ears import Ears

NAMES = ("a", "b")
RUNS = tuple(f"r{i}" for i in range(6))
HOME = "h"
#: Every lease and wait differs by more from the others.
NEAR_MS = 5000


class Near:
    """A moment, or a length of time, that may differ a little."""

    def __init__(self, milliseconds: float):
        self.ms = milliseconds

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Near) and abs(self.ms - other.ms) < NEAR_MS

    def __hash__(self) -> int:
        raise TypeError("what is near is not the same")

    def __repr__(self) -> str:
        return f"~{self.ms:.0f}"


class Twin:
    """One of the two: a desk, what is heard there, and all that its namespace has."""

    def __init__(self, desk: Desk, channels: Iterable[str]):
        self.desk = desk
        self.ears = Ears(desk, channels)
        self._numbers: dict[int, int] = {}
        self.look()

    def look(self) -> None:
        """Read everything."""
        pipe, keys = self.desk.client.pipeline(), self.desk.keys
        prefix = keys.prefix(0)
        of_lock = [f"{prefix}{kind}:{name}" for name in NAMES for kind in "lqwm"]
        others = [keys.meta(), f"{prefix}parked", keys.due(), f"{prefix}owed:{HOME}"]
        ends = [keys.tombstone(run) for run in RUNS]
        self.keys = [*of_lock, *others, *ends]
        for key in of_lock:
            pipe.zrange(key, 0, -1, withscores=True) if ":q:" in key else pipe.hgetall(key)
        pipe.hgetall(others[0]).hgetall(others[1]).zrange(others[2], 0, -1, withscores=True)
        pipe.zrange(others[3], 0, -1).mget(ends)
        for key in self.keys:
            pipe.pttl(key)
        seconds, micros = self.desk.client.time()
        self.now = seconds * 1000 + micros / 1000
        replies = [as_text(reply) for reply in pipe.execute()]
        self.locks = {
            name: tuple(replies[4 * i : 4 * i + 4]) for i, name in enumerate(NAMES)
        }  # holds, queue, waiters, messages
        self.bucket = replies[8:13]
        self.lifetimes = dict(zip(self.keys, replies[13:], strict=True))
        self._count([int(hold[1]) for name in NAMES for hold in self.holds(name).values()])

    def holds(self, name: str) -> dict[str, list[str]]:
        """Of the live ones the record, by run."""
        records = {run: text.split(" ") for run, text in self.locks[name][0].items()}
        return {run: r for run, r in records.items() if run[0] != "@" and int(r[0]) > 1}

    def places(self, name: str, *, dead: bool = False) -> dict[str, dict[str, Any]]:
        """Of the live ones, or the dead, what is known of them, by run, in order."""
        known = {run: json.loads(self.locks[name][2][run]) for run, _ in self.locks[name][1]}
        return {
            run: place
            for run, place in known.items()
            if (not place.get("parked") and place["expiry"] == 1) == dead
        }

    def kill(self, run: str, name: str) -> None:
        """The place of an execution lapses, wherever it is, and is else as it was."""
        place = self.places(name)[run]
        text = json.dumps({**place, "expiry": 1})
        for each in place.get("names") or [name]:
            self.desk.client.hset(self.desk.keys.of_lock("w", each), run, text)

    def forget(self, run: str) -> None:
        """Let the time go by for which the end of an execution is remembered."""
        self.desk.client.delete(self.desk.keys.tombstone(run))

    def bury(self, run: str, name: str) -> None:
        """Clear away a dead place."""
        self.desk.client.zrem(self.desk.keys.of_lock("q", name), run)
        self.desk.client.hdel(self.desk.keys.of_lock("w", name), run)

    def state(self) -> dict[str, Any]:
        """All that is alive, to be compared."""
        meta, parked, due, owed, ends = self.bucket
        found: dict[str, Any] = {"meta": sorted(meta), "parked": parked, "owed": owed, "ends": ends}
        found["due"] = {member: Near(score) for member, score in due}
        for name in NAMES:
            holds, places = self.holds(name), self.places(name)
            label = {f"@{run}": self.locks[name][0].get(f"@{run}") for run in holds}
            found[name] = {
                "holds": {run: self._hold(*record) for run, record in holds.items()} | label,
                "line": list(places),
                "places": {run: _place(place) for run, place in places.items()},
                "messages": self.locks[name][3],
            }
        return {**found, "lifetimes": self._lifetimes()}

    def _lifetimes(self) -> dict[str, Any]:
        """Of each key whether it ends by itself. That of a lock or a line may be as long as of
        somebody who is gone or dead, but is no shorter than of anybody who lives."""
        found: dict[str, Any] = {}
        for key, left in self.lifetimes.items():
            kind, _, name = key.partition("}:")[2].partition(":")
            if name not in NAMES or kind == "m":
                found[key.partition("}")[2]] = Near(left) if left > 0 else left
                continue
            lively = [float(record[0]) for record in self.holds(name).values()]
            if kind != "l":
                lively = [p["expiry"] for p in self.places(name).values()]
            assert left < 0 or not lively or self.now + left > max(lively), key
            if lively:
                found[f"{kind}:{name}"] = "ends" if left > 0 else left
        return found

    def _hold(self, expiry: str, fence: str, attempt_id: str, owner: str, bound: str) -> Any:
        return Near(int(expiry)), self._numbers[int(fence)], attempt_id, owner, bound

    def told(self, answer: Any, names: tuple[str, ...]) -> Any:
        """An answer, to be compared; ranks without the dead, where that is to be known."""
        if isinstance(answer, Held):
            fences = [self._numbers[fence] for fence in answer.fences]
            return "HELD", fences, answer.reentered, answer.resumed
        if isinstance(answer, Queued):
            return "WAIT", self._alive(names, answer.rank), Near(answer.recheck * 1000)
        if isinstance(answer, Parked):
            return "PARKED", self._alive(names, answer.rank)
        if isinstance(answer, Conflict):
            number = self._numbers.get(answer.fence)
            plain = answer._replace(remaining=0, fence=0, waiting=0)
            waiting = self._alive((answer.name,), answer.waiting)
            return plain, number, waiting, Near(answer.remaining * 1000)
        if isinstance(answer, Resumed):
            recheck = None if answer.recheck is None else Near(answer.recheck * 1000)
            return answer.messages, recheck
        if hasattr(answer, "remaining"):
            return answer._replace(remaining=0), Near(answer.remaining * 1000)
        return answer

    def news(self) -> list[Any]:
        """What was published since, to be compared."""
        found = []
        for channel, words in self.ears.heard():
            fences = words[3:] if words[0] == "granted" else []
            numbers = [self._numbers[int(fence)] for fence in fences]
            found.append((channel, words[: len(words) - len(fences)], numbers))
        return found

    def _alive(self, names: tuple[str, ...], rank: int) -> int | None:
        ahead = [run for run, _ in self.locks[names[0]][1][:rank]]
        dead = {run for name in names for run in self.places(name, dead=True)}
        if len(names) > 1 and dead:
            return None
        return rank - len(dead.intersection(ahead))

    def _count(self, fences: list[int]) -> None:
        for fence in sorted(set(fences) - set(self._numbers)):
            assert fence > max(self._numbers, default=0), "fences increase"
            self._numbers[fence] = len(self._numbers)


class Twins:
    """Gives each command to both and compares."""

    def __init__(self, one: Twin, other: Twin):
        self.both = one, other
        self.story: list[str] = []

    def do(self, what: str, command: Callable[[Twin], Any], names: tuple[str, ...] = NAMES) -> Any:
        """Returns the answer of the first."""
        self.story.append(what)
        answers = [command(twin) for twin in self.both]
        self.compare(*answers, names=names)
        return answers[0]

    def compare(self, *answers: Any, names: tuple[str, ...]) -> None:
        for twin in self.both:
            twin.look()
        one, other = self.both
        story = "\n".join(self.story)
        differ = _differences(one.state(), other.state())
        assert not differ, f"{story}\nleft behind: {differ}"
        told = [twin.told(x, names) for twin, x in zip(self.both, answers, strict=True)]
        assert told[0] == told[1], f"{story}\nanswered: {told}"
        news = [twin.news() for twin in self.both]
        assert news[0] == news[1], f"{story}\npublished: {news}"
        assert one.desk.messages() == other.desk.messages(), story

    def bury(self, run: str) -> None:
        """One of the two may have cleared the dead place of this execution away already."""
        for name in NAMES:
            dead = [run in twin.places(name, dead=True) for twin in self.both]
            if dead[0] != dead[1]:
                for twin in self.both:
                    twin.bury(run, name)
                    twin.look()

    def close(self) -> None:
        for twin in self.both:
            twin.ears.close()
            twin.desk.close()


def _differences(one: Any, other: Any) -> Any:
    """Of two dicts, and of dicts in them, only what differs."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return {} if one == other else (one, other)
    found = {key: _differences(one.get(key), other.get(key)) for key in one.keys() | other.keys()}
    return {key: what for key, what in found.items() if what != {}}


def _place(place: dict[str, Any]) -> dict[str, Any]:
    times = {
        key: Near(place[key])
        for key in ("expiry", "back", "first", "deadline", "unheard")
        if key in place
    }
    return {**place, **times}
