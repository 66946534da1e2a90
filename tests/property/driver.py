"""Sends commands to the model and to a real Redis and compares all that they show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_relock.core.answers import Beat, Busy, Claim, Duplicate, Held, Queued
from tests.property import snapshot
from tests.property.invariants import Invariants
from tests.property.model import Reply
from tests.support import leftovers
from tests.support.desk import Desk, Inbox

NAMES = ("a", "b")
LIFE = 1000.0  # seconds: nothing lapses unless a rule says so


class Driver(Invariants):
    """Both worlds of one history.

    Attributes:
        wants, owners: of each run, which never change.
        ears: the inboxes that can be reached.
        entry_of: the model's entry for each fence that Redis has given.
    """

    desk: Desk
    wants: dict[str, tuple[str, ...]]
    owners: dict[str, str]
    ears: dict[str, Inbox]
    entry_of: dict[int, int]

    def _acquire(
        self, run: str, nonce: str, *, inbox: str, waits: bool = True, by_owner: bool = False,
        lineage: tuple[str, ...] = (), copies: int = 1,
    ) -> None:  # fmt: skip
        names = self.wants[run]
        limits = tuple(self.limits[name] for name in names)
        claim = Claim(run, nonce, self.owners[run], names, limits, LIFE, "", by_owner, lineage)

        def answers_agree(real: Any, expected: Reply) -> None:
            self.invariant_02_reentry_never_blocks(claim, real)
            self.invariant_03_siblings_exclude_each_other(claim, real)
            self.invariant_05_a_duplicate_is_no_reentry(claim, real)
            assert self._told(real) == expected

        self._both(
            lambda: self.desk.store.acquire(claim, LIFE if waits else 0.0, inbox),
            lambda: self.model.acquire(claim, waits, inbox),
            answers_agree,
            copies,
            run,
        )

    def _release(self, run: str, nonce: str, ended: str, copies: int) -> None:
        names = self.wants[run]
        lapsed = any(run in self.now[name].lapsed for name in names)

        def answers_agree(real: bool, expected: bool) -> None:
            # What lapsed and was not looked at since may count as given back.
            assert real == expected or (lapsed and real)

        self._both(
            lambda: self.desk.store.release(names, run, nonce, ended=ended, remember=LIFE),
            lambda: self.model.release(run, nonce, names, ended),
            answers_agree,
            copies,
            run,
        )
        for name in names:
            hold, place = self.now[name].holds.get(run), self.now[name].queue.get(run)
            assert hold is None or hold.nonce != nonce
            assert place is None or place["nonce"] != nonce

    def _heartbeat(self, nonce_of: dict[str, str], copies: int) -> None:
        beats = [(name, run, nonce_of[run]) for run in nonce_of for name in self.wants[run]]

        def answers_agree(real: list[Any], expected: list[Reply]) -> None:
            assert [self._told_beat(answer) for answer in real] == expected
            for run in nonce_of if len(nonce_of) == 1 else ():
                self.invariant_12_who_looks_needs_no_message(run, nonce_of[run])

        self._both(
            lambda: self.desk.store.heartbeat([Beat(*beat, LIFE, LIFE) for beat in beats]),
            lambda: self.model.heartbeat(beats),
            answers_agree,
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
            self._every_entry_is_one_fence()
            check(answers[-1], expected)
            self._the_messages_are_the_models()
        if copies == 2 and not isinstance(answers[0], bool):
            self.invariant_04_sent_twice_it_acts_once(run, answers)

    def _send(self, command: Callable[[], Any]) -> Any:
        self.sound = False
        answer = command()
        self.before, self.now = self.now, snapshot.read(self.desk, NAMES)
        return answer

    def _every_entry_is_one_fence(self) -> None:
        """Every entry of the model is one fence in Redis, in the same order."""
        for name in NAMES:
            for run, hold in self.model.holds[name].items():
                assert run in self.now[name].holds, f"{run} should hold {name}"
                fence = self.now[name].holds[run].fence
                assert self.entry_of.setdefault(fence, hold.entry) == hold.entry
        assert [e for _, e in sorted(self.entry_of.items())] == sorted(self.entry_of.values())
        assert len(set(self.entry_of.values())) == len(self.entry_of)

    def _the_messages_are_the_models(self) -> None:
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

    def invariant_12_everybody_who_waits_is_served_in_the_end(self) -> None:
        for _ in range(2 * len(self.wants)):
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
