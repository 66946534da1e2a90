"""Sends commands to the model and to a backend and compares all that they show."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

from celery_relock.engine.protocol import (
    SHARED,
    Claim,
    Conflict,
    Downgraded,
    Held,
    OtherAttempt,
    Parked,
    Queued,
    Renewal,
)
from tests.property import snapshot
from tests.property.invariants import LEASE, LIFE, Invariants
from tests.property.model import Reply
from tests.support.desk import Desk, Inbox

NAMES = ("a", "b")
HOMES = ("h1", "h2")
#: Beats and renewals come together with this one, at whose lock somebody else's key is.
STRANGER = Renewal("foreign", "stranger", "n", LEASE, LIFE)


class Driver(Invariants):
    """Both worlds of one history.

    Attributes:
        wants, owners: of each execution, which never change.
        shares: of each execution, which of its locks it is to share.
        ears: the inboxes that can be reached.
        permit_of: the model's permit for each fence that the backend has given.
        sent: the commands so far, as `_both` takes them.
    """

    desk: Desk
    wants: dict[str, tuple[str, ...]]
    owners: dict[str, str]
    shares: dict[str, tuple[bool, bool]]
    ears: dict[str, Inbox]
    permit_of: dict[int, int]
    sent: list[tuple[Callable[[], Any], Callable[[], Any], Callable[[Any, Any], None]]]

    def _acquire(
        self, run: str, attempt_id: str, *, inbox: str, waits: bool = True, by_owner: bool = False,
        ancestors: tuple[str, ...] = (), copies: int = 1, home: str = "", deadline: bool = False,
    ) -> None:  # fmt: skip
        """With a home the execution is parked, if it has to wait."""
        names = self.wants[run]
        limits = tuple(
            SHARED if shared else self.limits[name]
            for name, shared in zip(names, self.shares[run], strict=False)
        )
        claim = Claim(
            run, attempt_id, self.owners[run], names, limits, LEASE, "", by_owner, ancestors
        )

        def ask() -> Any:
            if not home:
                return self.desk.backend.acquire(claim, LIFE if waits else 0.0, inbox)
            patience = LIFE if deadline else None
            how = {"home": home, "patience": patience, "owner": claim.owner, "by_owner": by_owner}
            return self.desk.leave(
                run, attempt_id, names=names, limits=limits, lease=LEASE, ancestors=ancestors, **how
            )

        def answers_agree(real: Any, expected: Reply) -> None:
            self.invariant_02_reentry_never_blocks(claim, real)
            self.invariant_03_siblings_exclude_each_other(claim, real)
            self.invariant_05_a_duplicate_is_no_reentry(claim, real)
            assert self._told(real) == expected

        self._both(
            ask,
            lambda: self.model.acquire(claim, waits, inbox, home, deadline),
            answers_agree,
            copies,
            run,
        )

    def _release(
        self,
        run: str,
        attempt_id: str,
        ended: str,
        copies: int,
        home: str = "",
        *,
        tight: bool = False,
    ) -> None:
        """`tight`: the server is out of memory. Whoever releases does; the next one acquires."""
        names = self.wants[run]

        def answers_agree(real: bool, expected: bool) -> None:
            # What lapsed and was not looked at since may count as released.
            assert real == expected or (real and run in self.lapsed)

        def release() -> bool:
            with self.desk.out_of_memory() if tight else nullcontext():
                return self.desk.release(
                    run, attempt_id, names=names, ended=ended, remember=LIFE, home=home
                )

        self._both(
            release,
            lambda: self.model.release(run, attempt_id, names, ended, home),
            answers_agree,
            copies,
            run,
        )
        for name in names:
            hold, place = self.now[name].holds.get(run), self.now[name].queue.get(run)
            assert hold is None or hold.attempt_id != attempt_id
            assert place is None or place["attempt"] != attempt_id or place.get("parked")

    def _downgrade(self, run: str, attempt_id: str, copies: int) -> None:
        names = self.wants[run]

        def answers_agree(real: Downgraded, expected: Reply) -> None:
            joined = ("JOINED", real.joined) if real.joined else ("SHARED",)
            assert (joined if real.held else ("LOST",)) == expected

        self._both(
            lambda: self.desk.backend.downgrade(names, run, attempt_id),
            lambda: self.model.downgrade(run, attempt_id, names),
            answers_agree,
            copies,
        )

    def _withdraw(self, run: str, copies: int) -> None:
        self._both(
            lambda: self.desk.withdraw(run, LIFE),
            lambda: self.model.withdraw(run),
            lambda real, expected: self.invariant_05_who_was_withdrawn_has_no_place(run, real),
            copies,
        )

    def _resume(self, home: str, by: str, tasks: list[str], *, all_is_due: bool) -> list[str]:
        """With all_is_due the time has come for whatever is to be looked at some time."""
        if all_is_due:
            self.desk.all_due()
        found = self._send(lambda: self.desk.resume(home, by, tuple(f"t-{run}" for run in tasks)))
        expected = self.model.resume(home, by, tasks, all_is_due=all_is_due)
        self._every_permit_is_one_fence()
        self._the_messages_are_the_models(found)
        assert found == expected
        return found

    def _heartbeat(self, attempt_of: dict[str, str], copies: int) -> None:
        renewals = [(name, run, attempt_of[run]) for run in attempt_of for name in self.wants[run]]

        def answers_agree(real: list[Any], expected: list[Reply]) -> None:
            assert [self._told_beat(answer) for answer in real] == expected
            for run in attempt_of if len(attempt_of) == 1 else ():
                self.invariant_12_who_looks_needs_no_message(run, attempt_of[run])

        self._both(
            lambda: self.desk.backend.heartbeat(
                [STRANGER, *(Renewal(*beat, LEASE, LIFE) for beat in renewals)]
            )[1:],
            lambda: self.model.heartbeat(renewals),
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
        self.sent.append((real, model, check))
        answers = []
        for _ in range(copies):
            expected = model()
            answers.append(self._send(real))
            self._every_permit_is_one_fence()
            check(answers[-1], expected)
            self._the_messages_are_the_models()
        if copies == 2 and not isinstance(answers[0], bool):
            self.invariant_04_sent_twice_it_acts_once(run, answers)

    def _send(self, command: Callable[[], Any]) -> Any:
        self.sound = False
        sent_ms = self.desk.now_ms()
        answer = command()
        self.lapsed = {run for lock in self.now.values() for run in lock.lapsed}
        self.least_end = sent_ms + LEASE * 1000
        self.before, self.now = self.now, snapshot.read(self.desk, NAMES)
        self.parking = snapshot.read_parking(self.desk, HOMES)
        return answer

    def _every_permit_is_one_fence(self) -> None:
        """Every permit of the model is one fence in Redis, in the same order."""
        for name in NAMES:
            for run, hold in self.model.holds[name].items():
                assert run in self.now[name].holds, f"{run} should hold {name}"
                fence = self.now[name].holds[run].fence
                assert self.permit_of.setdefault(fence, hold.permit) == hold.permit
        assert [e for _, e in sorted(self.permit_of.items())] == sorted(self.permit_of.values())
        assert len(set(self.permit_of.values())) == len(self.permit_of)

    def _the_messages_are_the_models(
        self, found: list[str] | None = None, lost: Collection[tuple[str, str, str]] = ()
    ) -> None:
        """`lost`: whose holds were released by force, as inbox, run and attempt."""
        out = self.desk.messages()
        assert [m.execution_id for m in out] + (found or []) == self.model.out
        assert all(m.text == f"text of {m.execution_id}" for m in out)
        for inbox, ear in self.ears.items():
            every = [text.split(" ") for text in ear.heard()]
            heard = [words for words in every if words[0] == "granted"]
            losses = {(words[1], words[2]) for words in every if words[0] == "lost"}
            assert losses == {(run, attempt_id) for of, run, attempt_id in lost if of == inbox}
            real = [(*m[:3], [self.permit_of[int(fence)] for fence in m[3:]]) for m in heard]
            assert real == [message[1:] for message in self.model.messages if message[0] == inbox]
        self.model.messages.clear()

    def _told(self, answer: Any) -> Reply:
        if isinstance(answer, Held):
            return ("HELD", [self.permit_of[f] for f in answer.fences], list(answer.reentered))
        if isinstance(answer, Conflict):
            return ("BUSY", answer.name, answer.owner, answer.waiting, answer.parked)
        if isinstance(answer, Parked):
            return ("PARKED",)
        if isinstance(answer, Queued):
            return ("WAIT", answer.rank)
        return ("ATTEMPT",) if isinstance(answer, OtherAttempt) else ("ENDED",)

    def _told_beat(self, answer: Any) -> Reply:
        if isinstance(answer, Held):
            return ("HELD", self.permit_of[answer.fences[0]])
        return ("LOST",) if answer is None else self._told(answer)

    def _pick(self, table: Any, pick: int) -> tuple[str, str, Any]:
        found = [(name, run, what) for name in NAMES for run, what in table[name].items()]
        return found[pick % len(found)]

    def invariant_12_everybody_who_waits_is_served_in_the_end(self) -> None:
        """And 13: so is whoever is parked, as long as anybody looks."""
        for number in range(2 * len(self.wants)):
            waiting = {r: p for n in NAMES for r, p in self.model.queues[n].items() if not p.dead}
            for run, place in waiting.items():
                if not place.parked:
                    self._heartbeat({run: place.attempt_id}, 1)
            for home in HOMES:
                for run in self._resume(home, f"last{number}", [], all_is_due=True):
                    # If it has to wait, it is parked again, as by a worker.
                    self._acquire(run, f"last{number}", inbox="gone", home=home)
            for name in NAMES:
                for run, hold in list(self.model.holds[name].items()):
                    self._release(run, hold.attempt_id, "", 1)
            for run in list(self.model.parked()):
                self._lose_message(run)
            if not waiting and not any(self.model.holds[name] for name in NAMES):
                return
        raise AssertionError(f"they wait for each other: {waiting}")

    def _lose_message(self, run: str) -> None:
        """It was resumed, and the time for it to arrive is over."""
        place = self.model.parked()[run]
        if place.on_its_way:
            self._send(lambda: self.desk.lapse_place(run, next(iter(place.limits)), back=1))
            place.on_its_way = False

    def invariant_16_an_idle_lock_has_no_key(self) -> None:
        for name in NAMES:  # clears away what has lapsed
            self.desk.fence("last", "n", names=(name,))
            self.desk.release("last", "n", names=(name,))
        assert self.desk.left() == []
