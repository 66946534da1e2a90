"""Drives the model and a real Redis with the same random commands and compares all they show."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import redis
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from celery_relock.core.answers import Beat, Busy, Claim, Duplicate, Held, Queued
from tests.property import snapshot
from tests.property.invariants import Invariants
from tests.property.model import Model, Reply
from tests.support import leftovers
from tests.support.desk import Desk, Inbox

NAMES = ("a", "b")
RUNS = tuple(f"r{i}" for i in range(6))
INBOXES = ("steady", "flaky", "gone")
LIFE = 1000.0  # seconds: nothing lapses unless a rule says so

runs, inboxes = st.sampled_from(RUNS), st.sampled_from(INBOXES)
nonces = st.sampled_from(["n1", "n1", "n2", "n3"])
lineages = st.lists(runs, max_size=2, unique=True).map(tuple)
picks = st.integers(0, 30)
copies = st.sampled_from([1, 1, 2])  # how often a command arrives
ends = st.sampled_from(["", "", "attempt"])

somebody_holds = precondition(lambda self: any(self.model.holds[name] for name in NAMES))
somebody_waits = precondition(lambda self: any(self.model.queues[name] for name in NAMES))


class LockMachine(Invariants):
    """Six runs of up to three owners; some of them want both of two locks."""

    pool: redis.ConnectionPool

    @initialize(
        wants=st.tuples(*[st.sampled_from([("a",), ("a",), ("b",), NAMES])] * len(RUNS)),
        limits=st.tuples(st.integers(1, 2), st.integers(1, 3)),
        owners=st.tuples(*[st.sampled_from(["o1", "o2", "o3"])] * len(RUNS)),
    )
    def begin(self, wants: Any, limits: Any, owners: Any) -> None:
        self.wants = dict(zip(RUNS, wants, strict=True))
        self.limits = dict(zip(NAMES, limits, strict=True))
        self.owners = dict(zip(RUNS, owners, strict=True))
        self.model = Model()
        self.desk = Desk("", f"ns{uuid.uuid4().hex[:12]}", self.pool)
        self.ears: dict[str, Inbox] = {inbox: self.desk.listen(inbox) for inbox in INBOXES[:2]}
        self.model.reachable = set(self.ears)
        self.entry_of: dict[int, int] = {}  # fence -> entry of the model
        self.known_fences, self.highest_fence = set(), 0
        self.before = self.now = snapshot.read(self.desk, NAMES)

    # Commands

    @rule(run=runs, nonce=nonces, waits=st.booleans(), inbox=inboxes, by_owner=st.booleans(),
          lineage=lineages, copies=copies)  # fmt: skip
    def acquire(self, run: str, nonce: str, **how: Any) -> None:
        self._acquire(run, nonce, **how)

    @rule(run=runs, inbox=inboxes, copies=copies)
    def come_and_wait(self, run: str, inbox: str, copies: int) -> None:
        self._acquire(run, "n1", inbox=inbox, copies=copies)

    @somebody_waits
    @rule(pick=picks, lineage=lineages, by_owner=st.booleans(), waits=st.booleans())
    def ask_again(self, pick: int, **how: Any) -> None:
        """A waiter's command is sent once more, perhaps knowing more of where it comes from."""
        _, run, place = self._pick(self.model.queues, pick)
        self._acquire(run, place.nonce, inbox=place.inbox, **how)

    @somebody_holds
    @rule(pick=picks, ended=st.sampled_from(["", "", "attempt", "run"]), copies=copies)
    def finish(self, pick: int, ended: str, copies: int) -> None:
        _, run, hold = self._pick(self.model.holds, pick)
        self._release(run, hold.nonce, ended, copies)

    @somebody_waits
    @rule(pick=picks, ended=ends, copies=copies)
    def cancel(self, pick: int, ended: str, copies: int) -> None:
        _, run, place = self._pick(self.model.queues, pick)
        self._release(run, place.nonce, ended, copies)

    @rule(run=runs, nonce=nonces, ended=ends, copies=copies)
    def release_late(self, run: str, nonce: str, ended: str, copies: int) -> None:
        self._release(run, nonce, ended, copies)

    @rule(run=runs, nonce=nonces)
    def renew(self, run: str, nonce: str) -> None:
        for name in self.wants[run]:
            kept = self._send(partial(self.desk.renew, run, nonce, name, LIFE))
            self.invariant_09_a_renewal_brings_nothing_back()
            assert kept == self.model.renew(run, nonce, name)

    @somebody_waits
    @rule(which=st.lists(picks, min_size=1, max_size=3), copies=copies)
    def heartbeat(self, which: list[int], copies: int) -> None:
        found = (self._pick(self.model.queues, pick) for pick in which)
        self._heartbeat({run: place.nonce for _, run, place in found}, copies)

    @rule(run=runs, nonce=nonces)
    def beat_late(self, run: str, nonce: str) -> None:
        self._heartbeat({run: nonce}, 1)

    @somebody_holds
    @rule(pick=picks, whole=st.booleans())
    def force_release(self, pick: int, whole: bool) -> None:
        name, run, _ = self._pick(self.model.holds, pick)
        only = "" if whole else run
        taken = self._send(lambda: self.desk.store.force_release(name, only))
        assert {hold.run for hold in taken} == self.model.force_release(name, only)
        self._match_fences()
        self._compare_messages()

    # What happens by itself

    @somebody_holds
    @rule(pick=picks)
    def a_lease_runs_out(self, pick: int) -> None:
        name, run, _ = self._pick(self.model.holds, pick)
        self._send(lambda: self.desk.lapse(run, name))
        self.model.lapse_hold(name, run)
        self.invariant_06_a_hold_that_ends_by_itself_ends_alone(run)

    @somebody_waits
    @rule(pick=picks)
    def a_waiter_dies(self, pick: int) -> None:
        name, run, _ = self._pick(self.model.queues, pick)
        self._send(lambda: self.desk.lapse_place(run, name))
        self.model.lapse_place(name, run)

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
        self.desk.client.delete(f"{self.desk.keys.prefix(0)}d:{run}")
        self.model.ended.pop(run, None)

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        try:
            self.invariant_12_everybody_who_waits_is_served_in_the_end()
            self.invariant_16_an_idle_lock_has_no_key()
        finally:
            for key in leftovers(self.desk.client, self.desk.keys.namespace):
                self.desk.client.delete(key)
            self.desk.close()

    def invariant_12_everybody_who_waits_is_served_in_the_end(self) -> None:
        for _ in range(2 * len(RUNS)):
            waiting = {
                r: p.nonce for n in NAMES for r, p in self.model.queues[n].items() if not p.dead
            }
            for run, nonce in waiting.items():
                self._heartbeat({run: nonce}, 1)
            for name in NAMES:
                for run, hold in list(self.model.holds[name].items()):
                    self._release(run, hold.nonce, "", 1)
            if not waiting and not any(self.model.holds[name] for name in NAMES):
                return
        raise AssertionError(f"they wait for each other: {waiting}")

    def invariant_16_an_idle_lock_has_no_key(self) -> None:
        for name in NAMES:  # clears away what has lapsed
            self.desk.fence("last", "n", names=(name,))
            self.desk.give_back("last", "n", names=(name,))
        meta = self.desk.keys.meta()
        for key in leftovers(self.desk.client, self.desk.keys.namespace):
            assert key == meta or (":d:" in key and self.desk.client.pttl(key) > 0), key

    # Both worlds

    def _acquire(
        self, run: str, nonce: str, *, inbox: str, waits: bool = True, by_owner: bool = False,
        lineage: tuple[str, ...] = (), copies: int = 1,
    ) -> None:  # fmt: skip
        names = self.wants[run]
        limits = tuple(self.limits[name] for name in names)
        claim = Claim(run, nonce, self.owners[run], names, limits, LIFE, "", by_owner, lineage)

        def check(real: Any, expected: Reply) -> None:
            self.invariant_02_reentry_never_blocks(claim, real)
            self.invariant_03_siblings_exclude_each_other(claim, real)
            self.invariant_05_a_duplicate_is_no_reentry(claim, real)
            assert self._told(real) == expected

        self._both(
            lambda: self.desk.store.acquire(claim, LIFE if waits else 0.0, inbox),
            lambda: self.model.acquire(claim, waits, inbox),
            check,
            copies,
            run,
        )

    def _release(self, run: str, nonce: str, ended: str, copies: int) -> None:
        names = self.wants[run]
        lapsed = any(run in self.now[name].lapsed for name in names)

        def check(real: bool, expected: bool) -> None:
            # What lapsed and was not looked at since may count as given back.
            assert real == expected or (lapsed and real)

        self._both(
            lambda: self.desk.store.release(names, run, nonce, ended=ended, remember=LIFE),
            lambda: self.model.release(run, nonce, names, ended),
            check,
            copies,
            run,
        )
        for name in names:
            hold, place = self.now[name].holds.get(run), self.now[name].queue.get(run)
            assert hold is None or hold.nonce != nonce
            assert place is None or place["nonce"] != nonce

    def _heartbeat(self, nonce_of: dict[str, str], copies: int) -> None:
        beats = [(name, run, nonce_of[run]) for run in nonce_of for name in self.wants[run]]

        def check(real: list[Any], expected: list[Reply]) -> None:
            assert [self._told_beat(answer) for answer in real] == expected
            for run in nonce_of if len(nonce_of) == 1 else ():
                self.invariant_12_who_looks_needs_no_message(run, nonce_of[run])

        self._both(
            lambda: self.desk.store.heartbeat([Beat(*beat, LIFE, LIFE) for beat in beats]),
            lambda: self.model.heartbeat(beats),
            check,
            copies,
        )

    def _both(
        self,
        real: Callable[[], Any],
        model: Callable[[], Any],
        check: Callable[[Any, Any], None],
        copies: int,
        run: str = "",
    ) -> None:
        """Send a command so many times to both, and compare after each."""
        answers = []
        for _ in range(copies):
            expected = model()
            answers.append(self._send(real))
            self._match_fences()
            check(answers[-1], expected)
            self._compare_messages()
        if copies == 2 and not isinstance(answers[0], bool):
            self.invariant_04_sent_twice_it_acts_once(run, answers)

    def _send(self, command: Callable[[], Any]) -> Any:
        answer = command()
        self.before, self.now = self.now, snapshot.read(self.desk, NAMES)
        return answer

    def _match_fences(self) -> None:
        """Every entry of the model is one fence in Redis, in the same order."""
        for name in NAMES:
            for run, hold in self.model.holds[name].items():
                assert run in self.now[name].holds, f"{run} should hold {name}"
                fence = self.now[name].holds[run].fence
                assert self.entry_of.setdefault(fence, hold.entry) == hold.entry
        assert [e for _, e in sorted(self.entry_of.items())] == sorted(self.entry_of.values())
        assert len(set(self.entry_of.values())) == len(self.entry_of)

    def _compare_messages(self) -> None:
        for inbox, ear in self.ears.items():
            heard = [text.split(" ") for text in ear.heard() if text.startswith("granted ")]
            real = [(*m[:3], [self.entry_of[int(fence)] for fence in m[3:]]) for m in heard]
            assert real == [message[1:] for message in self.model.messages if message[0] == inbox]
        self.model.messages.clear()

    def _told(self, answer: Any) -> Reply:
        if isinstance(answer, Held):
            return ("HELD", [self.entry_of[f] for f in answer.fences], list(answer.reentered))
        if isinstance(answer, Busy):
            return ("BUSY", answer.name, answer.owner, answer.waiting)
        if isinstance(answer, Queued):
            return ("WAIT", answer.rank)
        return ("DUPLICATE",) if isinstance(answer, Duplicate) else ("ENDED",)

    def _told_beat(self, answer: Any) -> Reply:
        if isinstance(answer, Held):
            return ("HELD", self.entry_of[answer.fences[0]])
        return ("LOST",) if answer is None else self._told(answer)

    def _pick(self, table: Any, pick: int) -> tuple[str, str, Any]:
        found = [(name, run, what) for name in NAMES for run, what in table[name].items()]
        return found[pick % len(found)]
