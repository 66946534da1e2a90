"""The short ways come to the same as the long one: random histories, each with them and without."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

import pytest

from celery_relock.backends.redis.scripts import Script, scripts
from celery_relock.engine.protocol import SHARED, Claim, Release, Renewal, Successor
from tests.lua.twins import HOME, NAMES, RUNS, Twin, Twins
from tests.support.desk import Desk
from tests.support.long import LONG

pytestmark = pytest.mark.slow

HISTORIES, STEPS = (2000 if LONG else 28), 40
CHANNELS = ("p-1", "p-2", "p", "parked")


def without_short_ways(script: Script) -> Script:
    source = script.source
    # Those for one lock, and that of a release where nobody waits.
    ways = [("#keys == 3", "#keys == 0")]
    ways += [("if not is_queued and", "if false and")] if script.name == "release" else []
    for condition, never in ways:
        assert source.count(condition) == 1
        source = source.replace(condition, never)
    sha = hashlib.sha1(source.encode()).hexdigest()
    return script._replace(source=source, sha=sha)


@pytest.fixture
def both(script_server, namespace):
    """Open two desks: the first has the short ways, the second has not."""
    opened: list[Twins] = []
    long = {verb: without_short_ways(scripts()[verb]) for verb in ("acquire", "release")}

    def open_both() -> Twins:
        which = (f"{namespace}-{way}-{len(opened)}" for way in ("short", "long"))
        desks = [Desk(script_server.url, each) for each in which]
        desks[1].backend._scripts = {**scripts(), **long}
        opened.append(Twins(*(Twin(desk, CHANNELS) for desk in desks)))
        return opened[-1]

    yield open_both
    for twins in opened:
        twins.close()


class History:
    """Random commands. The more `spice`, the fewer of them are plain."""

    def __init__(self, twins: Twins, seed: int):
        self.random = random.Random(seed)
        self.spice = (0.0, 0.01, 0.05, 0.3)[seed % 4]
        self.twins, self.short = twins, twins.both[0]
        # An execution asks for the same locks again, as its arguments are the same, unless a
        # callable `lock_key` names others.
        self.wants = {
            run: self.random.choice([("a", "b"), ("b",)]) if self.spicy() else ("a",)
            for run in RUNS
        }
        self.sharers = {run for run in RUNS if self.spicy() or self.random.random() < 0.3}
        self.owners = {run: "o" if self.spicy() else run for run in RUNS}
        # So many that the lock has an index.
        self.crowd = [f"base{number}" for number in range(40 if seed % 7 == 3 else 0)]
        for each in self.crowd:
            claim = Claim(each, "n", each, ("a",), (99,), 300.0, each)
            self.ask(
                "crowd", claim, lambda twin, claim=claim: twin.desk.backend.acquire(claim, 0.0, "p")
            )

    def spicy(self) -> bool:
        return self.random.random() < self.spice

    def step(self) -> None:
        plain = {self.wait: 16, self.end: 10, self.beat: 2, self.die: 1, self.forget: 2}
        rare = {self.acquire: 1, self.lapse: 1, self.leave: 1, self.renew: 1, self.turn: 0.5}
        spice = {self.park: 3, self.resume: 1, self.withdraw: 1, self.force: 1}
        verbs: dict[Callable[[], None], float] = spice if self.spicy() else plain | rare
        self.random.choices(list(verbs), list(verbs.values()))[0]()

    def claim(self) -> Claim:
        some = self.random.choice
        idle = [run for run in RUNS if not self.attempt_of(run)]
        # Now and then one that waits or holds: the command is repeated, or is another attempt's.
        run = some(idle if idle and self.random.random() < 0.85 else RUNS)
        last = self.attempt_of(run) or "n"
        if self.spicy():
            self.wants[run] = some([("a", "b"), ("a",), ("b",)])
        return Claim(
            run,
            some(["n", "n2"]) if self.random.random() < 0.2 else last,
            self.owners[run],
            names=self.wants[run],
            limits=tuple(self.limit(run) for _ in self.wants[run]),
            lease=some([300.0, 700.0]),
            label=f"who {run}",
            by_owner=self.spicy(),
            ancestors=(some(RUNS),) if self.spicy() else (),
            stuck=(some(RUNS),) if self.spicy() else (),
        )

    def limit(self, run: str) -> int:
        if self.crowd and run not in self.sharers:
            return self.random.choice([38, 99])
        return 2 if self.spicy() else SHARED if run in self.sharers else 1

    def attempt_of(self, run: str) -> str:
        """The attempt that holds or waits."""
        for name in NAMES:
            if hold := self.short.holds(name).get(run):
                return hold[2]
            if place := self.short.places(name).get(run):
                return place["attempt"]
        return ""

    def wait(self) -> None:
        claim, wait = self.claim(), self.random.choice([25.0, 50.0])
        channel = self.random.choice(["p-1"] * 8 + ["p-2", "p-2", "gone"])
        self.ask(
            f"wait {wait} {channel}",
            claim,
            lambda twin: twin.desk.backend.acquire(claim, wait, channel),
        )

    def acquire(self) -> None:
        claim = self.claim()
        self.ask("acquire", claim, lambda twin: twin.desk.backend.acquire(claim, 0.0, "p"))

    def park(self) -> None:
        more = (claim := self.claim())._asdict()
        del more["execution_id"], more["stuck"]
        self.ask("park", claim, lambda twin: twin.desk.leave(claim.execution_id, **more))

    def ask(self, what: str, claim: Claim, command: Callable[[Twin], Any]) -> Any:
        self.twins.bury(claim.execution_id)
        return self.twins.do(f"{what} {claim}", command, claim.names)

    def end(self) -> None:
        """Somebody releases what it holds; now and then its successor is kept in the permit."""
        name = self.random.choice(NAMES) if self.spicy() else "a"
        if not (holds := self.short.holds(name)):
            return
        run = self.random.choice(list(holds))
        ended = self.random.choice([""] * 6 + ["execution", "retried", "attempt"])
        self.release(run, holds[run][2], name, ended, self.spicy())

    def leave(self) -> None:
        """Somebody leaves the queue, or releases what it may not have."""
        run = self.random.choice(RUNS)
        attempt_id = (not self.spicy() and self.attempt_of(run)) or self.random.choice(["n", "n2"])
        self.release(run, attempt_id, self.random.choice(NAMES) if self.spicy() else "a", "", False)

    def release(self, run: str, attempt_id: str, name: str, ended: str, successor: bool) -> None:
        self.twins.bury(run)
        names = NAMES if self.spicy() else (name,)
        to = Successor(self.random.choice(RUNS), 400.0) if successor else None
        # Whether a lease had run out unseen is for the holder's own clock to say.
        lapsed = any(
            run in twin.locks[each][0] and run not in twin.holds(each)
            for twin in self.twins.both
            for each in names
        )

        def command(twin: Twin) -> Any:
            found = twin.desk.backend.release(
                Release(
                    names, run, attempt_id, ended=ended, remember=900.0, homes=HOME, successor=to
                )
            )
            return found._replace(had=None) if lapsed else found

        self.twins.do(f"release {run} {attempt_id} {names} {ended} {to}", command)

    def beat(self) -> None:
        name = self.random.choice(NAMES) if self.spicy() else "a"
        if waiting := self.short.places(name):
            run = self.random.choice(list(waiting))
            beat = Renewal(name, run, waiting[run]["attempt"], 300.0, 50.0)
            self.twins.do(f"beat {beat}", lambda twin: twin.desk.backend.heartbeat([beat])[0])

    def renew(self) -> None:
        name, execution_id = self.random.choice(NAMES), self.random.choice(RUNS)
        beat = Renewal(name, execution_id, "n", self.random.choice([300.0, 700.0]))
        self.twins.do(f"renew {beat}", lambda twin: twin.desk.backend.renew([beat]))

    def die(self) -> None:
        """A process that waits does not beat any more."""
        name = self.random.choice(NAMES) if self.spicy() else "a"
        waiting = [run for run, p in self.short.places(name).items() if not p.get("parked")]
        if waiting:
            run = self.random.choice(waiting)
            self.twins.do(f"die {run} {name}", lambda twin: twin.kill(run, name))

    def lapse(self) -> None:
        """A process that holds does not renew any more, and nobody has looked yet."""
        name = self.random.choice(NAMES)
        if holds := self.short.holds(name):
            run = self.random.choice(list(holds))
            self.twins.do(f"lapse {run} {name}", lambda twin: twin.desk.lapse(run, name))

    def forget(self) -> None:
        """What is known of an execution that has ended goes."""
        run = self.random.choice(RUNS)
        self.twins.do(f"forget {run}", lambda twin: twin.forget(run))

    def turn(self) -> None:
        self.twins.do("turn p-2", lambda twin: twin.ears.turn("p-2"))

    def force(self) -> None:
        name = self.random.choice(NAMES)
        self.twins.do(f"force {name}", lambda twin: len(twin.desk.backend.force_release(name)))

    def resume(self) -> None:
        due, by = self.random.random() < 0.5, f"by{len(self.twins.story)}"

        def command(twin: Twin) -> Any:
            if due:
                twin.desk.all_due()
            return twin.desk.backend.resume(HOME, by)

        self.twins.do(f"resume {due}", command)

    def withdraw(self) -> None:
        run = self.random.choice(RUNS)
        self.twins.do(f"withdraw {run}", lambda twin: twin.desk.withdraw(run, 900.0))


def assert_the_index_fits(desk: Desk) -> None:
    ends, fences, owners = (f"{desk.keys.prefix(0)}{kind}:a" for kind in "efo")
    if not desk.client.exists(ends, fences, owners):
        return
    found = desk.client.hgetall(desk.keys.lock("a"))
    holds = {run: record.split(b" ") for run, record in found.items() if run[:1] != b"@"}
    assert set(desk.client.zrange(ends, 0, -1)) == holds.keys()
    assert dict(desk.client.zrange(fences, 0, -1, withscores=True)) == {
        run: float(record[1]) for run, record in holds.items()
    }
    texts = {b" ".join((record[3], record[1], run)) for run, record in holds.items()}
    permits = {record[1] for record in holds.values()}
    assert set(desk.client.zrange(owners, 0, -1)) == texts | permits


def test_with_and_without_the_short_ways_all_comes_to_the_same(both):
    for seed in range(HISTORIES):
        history = History(both(), seed)
        for _ in range(STEPS):
            history.step()
            for twin in history.twins.both:
                assert_the_index_fits(twin.desk)
