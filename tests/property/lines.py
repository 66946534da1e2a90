"""Random histories of one line: calls are sent, come, end, die, get lost; and a plain model of it.

The model has no clock: a test says who is late, and which message on its way does not come.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from celery_relock.engine.protocol import (
    COMES_AGAIN,
    LINE,
    Conflict,
    Ended,
    Held,
    Parked,
    PlaceRequest,
    Release,
    Successor,
)
from tests.support.desk import Desk

LOCK = "a"
NAME = f"{LINE}{LOCK}"
LATER = 50_000.0


@dataclass
class Place:
    """Where a call stands.

    Attributes:
        due: 0 for now, or when it is due; then by `number`.
        ticket: 0 if its message came without a place.
        again: its message comes again if its process dies.
        here, out: its message is parked; is on its way, or `owed` to who can send it.
        turn, late: it is first and somebody waits behind it; for too long.
        later: who waited behind it when its turn came, by due and number.
        came: its message has come once, whatever became of it.
        at_lock: it had its turn, and its message is parked for its lock.
        since, seen: the number at which its message was sent, where that is not when the place was
            taken; the newest call sent before whose message has come since.
    """

    due: float
    number: int
    ticket: int = 0
    again: bool = False
    here: bool = False
    out: bool = False
    owed: bool = False
    turn: bool = False
    late: bool = False
    later: tuple[float, float] = (0.0, 0.0)
    came: bool = False
    at_lock: bool = False
    since: int = 0
    seen: int = 0

    @property
    def rank(self) -> tuple[float, float]:
        return self.due, self.number


class Model:
    """Attributes:
    queue: the places by execution, in order.
    holder: the execution that has the line, its attempt, and its ticket.
    had: the place of the last that got the line from it.
    """

    def __init__(self) -> None:
        self.queue: dict[str, Place] = {}
        self.holder: tuple[str, str, int] | None = None
        self.had = Place(0.0, 0)
        self.ended: set[str] = set()
        self.out: list[str] = []
        self.passed: list[str] = []

    def enter(self, run: str, place: Place) -> None:
        by_turn = {**self.queue, run: place}
        order = sorted(by_turn.items(), key=lambda item: item[1].rank)
        self.queue = dict(order)

    def serve(self, caller: tuple[str, str] | None = None, *, sends: bool = True) -> bool:
        """Whether the caller, who can send nothing, has to wait for somebody."""
        while self.queue:
            run, place = next(iter(self.queue.items()))
            is_caller = caller is not None and caller[0] == run
            if self.holder is not None:
                return not is_caller
            if is_caller and caller is not None:
                self._grant(run, caller[1], place)
                return False
            if place.here:
                self._hand_out(run, place, sends=sends and caller is None)
                return True
            if caller is not None and caller[0] not in self.queue and place.due and not place.since:
                return False
            if caller is not None and self._was_sent_before(self.queue.get(caller[0]), place):
                place.turn = place.late = False
            if place.at_lock:
                place.turn = place.late = False
                return True
            had_turn, here = place.turn, [each for each in self.queue.values() if each.here]
            come_again = [each for each in self.queue.values() if each.came and each is not place]
            place.turn = caller is not None or bool(here) or (had_turn and bool(come_again))
            place.late = place.late and place.turn
            if place.turn and not had_turn:
                place.later = here[0].rank if caller is None else self._rank_of(*caller)
            if not place.late:
                return True
            self.passed.append(run)
            del self.queue[run]
            self._pass_on_turn(place)
        return False

    def _hand_out(self, run: str, place: Place, *, sends: bool) -> None:
        place.owed = place.owed if place.out else True
        place.out = True
        if sends:
            self.send_owed(run)

    def _rank_of(self, run: str, attempt_id: str) -> tuple[float, float]:
        """Without a place it gets one when this attempt asks for it."""
        return self.queue[run].rank if run in self.queue else (0.0, int(attempt_id[1:]))

    def _pass_on_turn(self, passed: Place) -> None:
        """The next has been missing for as long."""
        place = next(iter(self.queue.values()), None)
        if place and not (place.came or place.since) and place.rank < passed.later:
            place.turn, place.late, place.later = True, not place.due, passed.later

    @staticmethod
    def _was_sent_before(comes: Place | None, place: Place) -> bool:
        if comes is None or not comes.ticket or comes.due:
            return False
        if not place.seen < comes.number < place.since:
            return False
        place.seen = comes.number
        return True

    def send_owed(self, run: str) -> None:
        place = self.queue[run]
        if place.out and place.owed:
            self.out.append(run)
            place.owed = False

    def _grant(self, run: str, attempt_id: str, place: Place) -> None:
        self.holder, self.had = (run, attempt_id, place.ticket), replace(place)
        if place.again and place.ticket:
            place.here = place.out = place.owed = place.turn = place.late = False
        else:
            del self.queue[run]


class LineMachine(RuleBasedStateMachine):
    """Attributes:
    open_desk: opens the backend that is held against the model, empty.
    late: commands of which a copy can come; the verb and the execution of each.
    doubtful: attempts with such a command; their end is remembered, as by an engine.
    """

    open_desk: Callable[[], Desk]

    @initialize()
    def begin(self) -> None:
        self.desk, self.model = self.open_desk(), Model()
        self.numbers = itertools.count()
        self.began = self.desk.now_ms() / 1000
        self.sent: dict[str, int] = {}
        self.again: dict[str, bool] = {}
        self.tasks: dict[str, str] = {}
        self.late: list[tuple[str, str, Callable[[], Any]]] = []
        self.doubtful: set[str] = set()
        self._another_holds_the_lock()

    def _new(self) -> str:
        return f"r{next(self.numbers)}"

    def _task(self, run: str) -> str:
        """A retry is of the task of its call."""
        return self.tasks.get(run, f"t-{run}")

    # Calls

    @rule(due=st.sampled_from([0.0, 0.0, 0.0, LATER, 2 * LATER]), again=st.booleans(),
          copies=st.sampled_from([1, 1, 2]))  # fmt: skip
    def send(self, due: float, again: bool, copies: int) -> None:
        if due and self.model.holder and self.model.had.due == due:
            return  # that moment has come, and its ticket may be free
        run = self._new()
        # Calls that are due later are due at one moment, to the millisecond.
        times = 1000.0, 0.0, due and self.began + due, 10 * LATER
        request = PlaceRequest(NAME, run, self._task(run), "call here", *times)
        place = partial(self.desk.backend.place, request)
        (self.sent[run],) = {place() for _ in range(copies)}
        self.late.append(("place", run, place))
        self.again[run] = again
        self.model.enter(run, Place(due, int(run[1:]), self.sent[run], again))
        self._compare()

    @rule(pick=st.integers(0, 30), known=st.booleans(), too_large=st.booleans(),
          twice=st.booleans())  # fmt: skip
    def a_message_comes(self, pick: int, known: bool, too_large: bool, twice: bool) -> None:
        """That of a call that has a place, or had one; or of a call that never had. One that is too
        large to be parked comes again."""
        found = list(self.model.queue if known else self.again)
        run = found[pick % len(found)] if found else self._new()
        if not self._is_at_lock(run):
            self._come(run, (False,) if too_large else (False, True), twice)

    @rule()
    def a_call_by_name_comes(self) -> None:
        self._come(self._new())

    @rule(ended=st.sampled_from(["execution", "execution", "execution", "killed", "attempt", ""]),
          pick=st.integers(-1, 3))  # fmt: skip
    @precondition(lambda self: self.model.holder)
    def end(self, ended: str, pick: int = -1) -> None:
        if self.late and pick >= 0:
            self.a_copy_comes_late(pick, of_holder=True)
        run, attempt_id, _ = self.model.holder
        self._release(run, attempt_id, ended)
        self.model.holder = None
        if ended == "execution":
            self.model.ended.add(run)
            self.model.queue.pop(run, None)
        self.model.serve()
        self._compare()

    @rule(again=st.booleans())
    @precondition(lambda self: self.model.holder and self.model.holder[2])
    def it_is_retried(self, again: bool) -> None:
        run, attempt_id, ticket = self.model.holder
        retry, had = self._new(), self.model.had
        self._release(run, attempt_id, "execution", Successor(retry, 1000.0))
        self.model.holder = None
        self.model.ended.add(run)
        self.model.queue.pop(run, None)
        self.sent[retry], self.again[retry] = ticket, again
        self.tasks[retry] = self._task(run)
        place = Place(had.due, had.number, ticket, again, since=next(self.numbers))
        self.model.enter(retry, place)
        self.model.serve()
        self._compare()

    @rule()
    @precondition(lambda self: self.model.holder or self.model.queue)
    @precondition(lambda self: not any(each.at_lock for each in self.model.queue.values()))
    def it_is_parked_for_its_lock(self) -> None:
        """The call that holds the line, or else the first of those that have a place."""
        if self.model.holder is None:
            self._come(next(iter(self.model.queue)))
        run, attempt_id, ticket = self.model.holder or ("", "", 0)
        if not ticket:
            return
        for_its_lock = {"names": (LOCK,), "task": self._task(run)}
        assert isinstance(self.desk.leave(run, self._new_attempt(), **for_its_lock), Parked)
        self._release(run, attempt_id, successor=Successor(run, 1000.0))
        had, self.model.holder = self.model.had, None
        how = {"at_lock": True, "since": next(self.numbers)}
        self.model.enter(run, Place(had.due, had.number, ticket, self.again[run], **how))
        self.desk.age_call(run, NAME)  # it may wait for as long as it likes
        self.model.serve()
        self._compare()

    @rule()
    @precondition(
        lambda self: (
            not self.model.holder
            and self.model.queue
            and next(iter(self.model.queue.values())).at_lock
        )
    )
    def its_lock_is_free_and_its_message_comes(self) -> None:
        run, place = next(iter(self.model.queue.items()))
        self.desk.release("another", names=(LOCK,))
        assert self.desk.out() == [run]
        place.at_lock = False
        self._come(run)
        assert self.model.holder is not None
        assert self.model.holder[0] == run
        attempt_id = self._new_attempt()
        assert isinstance(self.desk.acquire(run, attempt_id, names=(LOCK,)), Held)
        self.desk.release(run, attempt_id, names=(LOCK,))
        self._another_holds_the_lock()

    @rule()
    @precondition(lambda self: self.model.holder)
    def a_lease_runs_out(self) -> None:
        run = self.model.holder[0]
        self.desk.lapse(run, NAME)
        self.late = [each for each in self.late if each[1] != run]
        self.model.holder = None

    @rule(pick=st.integers(0, 30))
    @precondition(lambda self: self.model.queue)
    def a_call_is_withdrawn(self, pick: int) -> None:
        """Not if it runs, and only its message can come again."""
        run = list(self.model.queue)[pick % len(self.model.queue)]
        runs = self.model.holder is not None and self.model.holder[0] == run
        withdraw = partial(self.desk.withdraw, run)
        assert withdraw() is not runs
        if runs:
            self._compare()
            return
        if was_at_lock := self._is_at_lock(run):
            self.desk.release(run, self._new_attempt(), names=(NAME,), ended="execution")
        del self.model.queue[run]
        self.late.append(("withdraw", run, withdraw))
        self.model.ended.add(run)
        self.model.serve(sends=was_at_lock)
        self._compare()

    @rule(pick=st.integers(0, 30), of_holder=st.booleans())
    @precondition(lambda self: self.late)
    def a_copy_comes_late(self, pick: int, of_holder: bool) -> None:
        """It leaves the state of one. Its answer, and the messages in it, reach nobody.

        But for the place of a call that was passed over, or whose attempt has ended, and is to come
        again: it is taken once more. Those behind may wait there for a message that does not come.
        """
        holder = self.model.holder[0] if self.model.holder else ""
        late = [each for each in self.late if each[1] == holder or not (of_holder and holder)]
        verb, run, command = (late or self.late)[-1 - pick % len(late or self.late)]
        if verb == "place" and run not in {holder, *self.model.queue, *self.model.ended}:
            return
        command()
        if verb == "release":
            self.model.serve()
        self.desk.out()
        self.model.out.clear()
        self._compare()

    @rule(pick=st.integers(0, 30))
    @precondition(lambda self: any(not each.here for each in self.model.queue.values()))
    def a_call_is_revoked(self, pick: int) -> None:
        """Its place is free, unless it has its message, or runs."""
        awaited = [run for run, place in self.model.queue.items() if not place.here]
        run = awaited[pick % len(awaited)]
        runs = self.model.holder is not None and self.model.holder[0] == run
        if not self._is_at_lock(run):
            if not runs:
                del self.model.queue[run]
            self._look((self._task(run),))

    @rule(pick=st.integers(0, 30))
    @precondition(lambda self: any(not each.here for each in self.model.queue.values()))
    def a_message_cannot_be_sent(self, pick: int) -> None:
        """Its place is given up, if no message has come to it yet."""
        awaited = [run for run, place in self.model.queue.items() if not place.here]
        run = awaited[pick % len(awaited)]
        if self.desk.place(run, NAME)["attempt"] == "-" and not self._is_at_lock(run):
            self.desk.release(run, "-", names=(NAME,))
            del self.model.queue[run]
            self.model.serve()
            self._compare()

    @rule()
    @precondition(lambda self: self.model.queue)
    def the_first_is_late(self) -> None:
        run, place = next(iter(self.model.queue.items()))
        if place.turn and not place.here and not place.due:
            self.desk.age_call(run, NAME)
            place.late = True

    @rule(pick=st.integers(0, 30))
    @precondition(lambda self: any(each.out for each in self.model.queue.values()))
    def a_message_on_its_way_gets_lost(self, pick: int) -> None:
        out = [run for run, place in self.model.queue.items() if place.out]
        run = out[pick % len(out)]
        self.desk.lapse_place(run, NAME, back=1)
        self.model.queue[run].out = False

    @rule()
    def somebody_looks(self) -> None:
        self._look()

    # How

    def _new_attempt(self) -> str:
        return f"n{next(self.numbers)}"

    def _another_holds_the_lock(self) -> None:
        self.desk.fence("another", names=(LOCK,))

    def _is_at_lock(self, run: str) -> bool:
        return run in self.model.queue and self.model.queue[run].at_lock

    def _come(
        self, run: str, how_often: tuple[bool, ...] = (False, True), twice: bool = False
    ) -> None:
        attempt_id, model = self._new_attempt(), self.model
        owner = COMES_AGAIN * self.again.setdefault(run, False) + self._task(run)
        how: dict[str, Any] = {"names": (NAME,), "owner": owner}
        for parks in how_often:
            if run in model.ended:
                if (place := model.queue.get(run)) and place.here:
                    del model.queue[run]
                expected: Any = Ended
            elif model.holder is not None and model.holder[0] == run:
                return  # `test_lines` has copies
            else:
                expected = self._expected(run, attempt_id, parks)
            told = {"task": self._task(run)} if parks else {}
            send = self.desk.leave if parks else self.desk.acquire
            claim = partial(send, run, attempt_id, **how, **told)
            answer = claim()
            if twice:
                self.late.append(("acquire", run, claim))
                self.doubtful.add(attempt_id)
            assert isinstance(answer, expected), (answer, expected)
            if isinstance(answer, Held):
                self._holds(run, answer.fences[0])
            self._compare()
            if not isinstance(answer, Conflict):
                break
        if twice and not isinstance(answer, Held):
            self._release(run, attempt_id, "parked")
            self.model.serve()
            self._compare()

    def _release(
        self, run: str, attempt_id: str, ended: str = "", successor: Successor | None = None
    ) -> None:
        def release() -> None:
            back = self.desk.backend.release(
                Release((NAME,), run, attempt_id, how, 60.0, "h", successor)
            )
            self.desk.take_messages(back.messages)

        how = ended or "attempt" * (attempt_id in self.doubtful)
        release()
        self.late.append(("release", run, release))

    def _expected(self, run: str, attempt_id: str, parks: bool) -> Any:
        model = self.model
        had_place = run in model.queue
        if had_place:
            model.queue[run].came = True
        waits = model.serve((run, attempt_id)) if model.queue else False
        if model.holder is not None and model.holder[0] == run:
            return Held
        if not waits and model.holder is None:
            model.holder = run, attempt_id, 0
            return Held
        if parks:
            place = model.queue.get(run) or Place(0.0, next(self.numbers))
            place.here, place.out, place.turn, place.late = True, False, False, False
            place.again, place.owed = self.again[run], False
            if not had_place:
                model.enter(run, place)
        return Parked if parks else Conflict

    def _holds(self, run: str, fence: int) -> None:
        """Nobody who has its own ticket was overtaken by one with its own ticket."""
        ticket = self.model.holder[2]
        assert (fence == self.sent.get(run)) == bool(ticket), (run, fence, ticket)
        if ticket:
            assert fence == ticket
            assert all(each.ticket >= ticket or not each.ticket
                       for each in self.model.queue.values())  # fmt: skip
            assert not [r for r, p in self.model.queue.items() if p.ticket and p.ticket < ticket]

    def _look(self, revoked: tuple[str, ...] = ()) -> None:
        self.desk.all_due()
        found = self.desk.backend.resume("h", "by" + self._new(), revoked)
        for run in list(self.model.queue):
            self.model.send_owed(run)
        owed = len(self.model.out)
        self.model.serve()
        assert [each.execution_id for each in found.passed] == self.model.passed
        self.model.passed.clear()
        self.desk._out += found.messages
        self._compare(owed)

    def _compare(self, owed: int = 0) -> None:
        """`owed`: so many messages come first in a look, the longest owed first of all. The model
        has no clock."""
        assert self.desk.waiters(NAME) == list(self.model.queue)
        out, expected = self.desk.out(), self.model.out
        assert sorted(out[:owed]) == sorted(expected[:owed])
        assert out[owed:] == expected[owed:]
        self.model.out.clear()
        assert self.desk.holders(NAME) == ([self.model.holder[0]] if self.model.holder else [])

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        try:
            for _ in range(200):
                if not self.model.queue and not self.model.holder:
                    break
                if self.model.holder:
                    self.end("execution")
                for run, place in list(self.model.queue.items()):
                    if place.at_lock:
                        self.its_lock_is_free_and_its_message_comes()
                    elif place.out:
                        self._come(run)
                    elif not place.here:
                        self.a_call_is_withdrawn(list(self.model.queue).index(run))
                    break
                self._look()
            assert not self.model.queue
            assert not self.model.holder
            self._look()  # who was passed over by the last to come is not told of before
            self.desk.release("another", names=(LOCK,))
            self.desk.fence("last", names=(NAME,))  # clears away what has lapsed
            self.desk.release("last", names=(NAME,))
            assert self.desk.left() == []
        finally:
            self.desk.wipe()
            self.desk.close()
