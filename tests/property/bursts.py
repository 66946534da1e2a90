"""Random histories of debounced calls whose commands come twice, of publishers that die or cannot
reach their broker, and of callers that hear no answer: Redis and memory answer, hand out and keep
the same, no call that was told to wait is lost or sent again, none is merged into a message that
was handed out, and no older message comes out after a newer one.

The text of a message is the calls that are merged in it (`lock_debounce_reduce`), or the last.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from celery_relock.engine.protocol import (
    DEBOUNCE,
    PAUSE,
    REMEMBER_ATTEMPT,
    Burst,
    Debounce,
    Message,
    Parked,
    ParkRequest,
    Release,
)
from tests.property import snapshot
from tests.property.both import Beside
from tests.support.desk import Desk
from tests.support.memory_desk import MemoryDesk

NAMES = f"{DEBOUNCE}task\ta", f"{DEBOUNCE}task\tb"
names, picks = st.sampled_from(NAMES), st.integers(0, 30)
twice = st.booleans()  # the client sends it again: a copy can come late


class Caller(NamedTuple):
    """A call, the burst that it knows of, and whether it is merged into exactly that."""

    name: str
    call: str
    burst: Burst | None
    exactly: bool


@dataclass
class Known:
    """A burst, as a plain model has it: its calls in order, and whether its message was handed
    out."""

    name: str
    calls: list[str] = field(default_factory=list)
    is_out: bool = False


class BurstMachine(Beside):
    """Attributes:
    callers: have asked for the burst of their name, and have no answer of their own yet.
    bursts: by id, in the order in which they began.
    on_its_way: messages that were handed out, whose publisher has not said what became of them.
    late: commands of which a copy can come.
    """

    @initialize()
    def begin(self) -> None:
        self.desks = self.open_desk(), MemoryDesk()
        self.numbers = itertools.count()
        self.callers: list[Caller] = []
        self.bursts: dict[str, Known] = {}
        self.on_its_way: list[Message] = []
        self.late: list[Callable[[Desk], Any]] = []

    @rule(name=names, exactly=st.booleans())
    def a_call_asks(self, name: str, exactly: bool) -> None:
        burst = self._both(lambda desk: desk.backend.burst(name, exactly))
        self.callers.append(Caller(name, self._new("c"), burst, exactly))
        self._look()

    @precondition(lambda self: self.callers)
    @rule(
        pick=picks,
        twice=twice,
        heard=st.sampled_from([True, True, True, False]),
        most=st.sampled_from([100, 100, 1]),
    )
    def it_is_merged(self, pick: int, twice: bool, heard: bool, most: int) -> None:
        caller = self.callers.pop(pick % len(self.callers))
        name, call, burst, exactly = caller
        calls = f"{burst.message} {call}" if burst and exactly else call
        task = burst.task_id if burst else f"task-{call}"
        debounce = Debounce(call, burst, exactly, 60.0, 600.0, task, f"shop.index {task}")
        request = ParkRequest(calls, "h", task, most_in_all=most)
        answer = self._send(lambda desk: desk.backend.debounce(name, debounce, request), twice)
        if isinstance(answer, Parked):
            self._merged(caller, calls)
        if not heard:
            if burst is None:
                self._take_back(caller)
        elif isinstance(answer, Burst) or answer is None:
            self.callers.append(caller._replace(call=self._new("c"), burst=answer))
        self._look()

    def _merged(self, caller: Caller, calls: str) -> None:
        burst_id = caller.burst.burst_id if caller.burst else caller.call
        known = self.bursts.setdefault(burst_id, Known(caller.name))
        assert not known.is_out, f"{caller.call} was merged into what was handed out"
        known.calls = [*known.calls, caller.call] if caller.exactly else [caller.call]
        assert not caller.exactly or known.calls[-len(calls.split()) :] == calls.split()

    def _take_back(self, caller: Caller) -> None:
        """It was told that Redis is not there, and may have begun a burst all the same."""
        release = Release((caller.name,), caller.call, caller.call, "attempt", REMEMBER_ATTEMPT)
        had = self._both(lambda desk: desk.backend.release(release)).had
        if had:
            del self.bursts[caller.call]

    @rule(name=names)
    def no_more_of_them_come(self, name: str) -> None:
        if PAUSE in snapshot.read(self.desks[1], (name,))[name].holds:
            for desk in self.desks:
                desk.lapse(PAUSE, name)

    @rule(name=names)
    def somebody_ends_the_pause(self, name: str) -> None:
        self._both(lambda desk: len(desk.backend.force_release(name, PAUSE)))
        self._look()

    @rule(twice=twice)
    def a_worker_looks(self, twice: bool) -> None:
        for desk in self.desks:
            desk.all_due()
        self._resume("h", (), twice)

    @precondition(lambda self: self.bursts)
    @rule(pick=picks, twice=twice)
    def it_is_revoked(self, pick: int, twice: bool) -> None:
        """Its message is handed out at once, to be discarded by a worker."""
        burst_id = list(self.bursts)[pick % len(self.bursts)]
        place = self._places().get(burst_id)
        self._resume("h", (place.task,) if place else (), twice)

    @rule()
    def a_process_without_a_broker_looks(self) -> None:
        for desk in self.desks:
            desk.all_due()
        self._resume("other", (), False)

    def _resume(self, home: str, tasks: tuple[str, ...], twice: bool) -> None:
        by = self._new("w")
        found = self._send(lambda desk: list(desk.backend.resume(home, by, tasks).messages), twice)
        for message in found:
            self._handed_out(message)
        self._look()

    def _handed_out(self, message: Message) -> None:
        known = self.bursts[message.execution_id]
        assert message.text.split() == known.calls, "these calls are in it"
        if not known.is_out:
            earlier = itertools.takewhile(lambda burst: burst is not known, self.bursts.values())
            before = [each for each in earlier if each.name == known.name and not each.is_out]
            assert not before, "an older one is still to come"
        known.is_out = True
        self.on_its_way.append(message)

    @precondition(lambda self: self.on_its_way)
    @rule(pick=picks, twice=twice)
    def it_is_published(self, pick: int, twice: bool) -> None:
        message = self.on_its_way.pop(pick % len(self.on_its_way))
        self._send(lambda desk: desk.withdraw(message.execution_id, REMEMBER_ATTEMPT), twice)
        self.bursts.pop(message.execution_id, None)
        self._look()

    @precondition(lambda self: self.on_its_way)
    @rule(pick=picks)
    def it_is_not_published(self, pick: int) -> None:
        """The broker is not there, or the publisher dies."""
        self.on_its_way.pop(pick % len(self.on_its_way))

    @rule(name=names)
    def messages_are_late(self, name: str) -> None:
        for run in self.desks[1].waiters(name):
            if self.desks[1].place(run, name).get("back"):
                for desk in self.desks:
                    desk.lapse_place(run, name, back=1)

    @precondition(lambda self: self.late)
    @rule(pick=picks)
    def a_copy_comes_late(self, pick: int) -> None:
        """Its answer, and the messages in it, reach nobody."""
        answer = self._both(self.late[-1 - pick % len(self.late)])
        if isinstance(answer, list):
            for message in answer:
                self._handed_out(message)
                self.on_its_way.pop()
        self._look()

    def teardown(self) -> None:
        if not hasattr(self, "desks"):
            return
        try:
            for _ in range(3 * len(self.bursts) + 1):
                for name in NAMES:
                    self.no_more_of_them_come(name)
                    self.messages_are_late(name)
                self.a_worker_looks(False)
                while self.on_its_way:
                    self.it_is_published(0, False)
            assert not self.bursts, "these calls are lost"
            while self.late:
                self.a_copy_comes_late(0)
                self.late.pop()
            assert not self.bursts, "these calls come again"
            for name in NAMES:
                for desk in self.desks:
                    desk.backend.force_release(name)
            self.a_worker_looks(False)  # clears away what is due
            for desk in self.desks:
                assert desk.left() == []
        finally:
            for desk in self.desks:
                desk.wipe()
                desk.close()

    def _new(self, letter: str) -> str:
        return f"{letter}{next(self.numbers)}"

    def _places(self) -> dict[str, Any]:
        """In memory, where looking costs nothing."""
        state = self.desks[1].backend.state
        return {run: place.request for run, place in state.parked.items()}

    def _send(self, command: Callable[[Desk], Any], twice: bool) -> Any:
        if twice:
            self.late.append(command)
        return self._both(command)

    def _look(self) -> None:
        """Both keep the same."""
        locks, in_memory = (snapshot.read(desk, NAMES) for desk in self.desks)
        assert {name: _shown(lock) for name, lock in locks.items()} == {
            name: _shown(lock) for name, lock in in_memory.items()
        }
        parking, in_memory = (snapshot.read_parking(desk, ("h", "other")) for desk in self.desks)
        assert parking == in_memory
        for burst_id, known in self.bursts.items():
            kept = locks[known.name].messages.get(burst_id)
            assert kept is not None, f"{known} is lost"
            assert kept.split() == known.calls


def _shown(lock: Any) -> tuple[Any, ...]:
    """What does not depend on the clock."""
    return (
        sorted(lock.holds),
        [(run, facts["attempt"]) for run, facts in lock.queue.items()],
        lock.messages,
    )
