"""Random histories of executions whose locks change between their attempts, as a callable or a
deploy can name others: Redis and memory answer, send and keep the same, nobody holds a lock that
nobody knows of, and everybody who was parked runs in the end.

`machine.py` knows more of each command, of executions that always want the same locks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from celery_relock.engine.protocol import Conflict, Ended, Full, Held, Parked, Queued
from tests.support.desk import Desk
from tests.support.memory_desk import MemoryDesk

NAMES = ("a", "b", "c")
RUNS = tuple(f"r{i}" for i in range(4))
some_names = st.sampled_from(
    [("a",), ("b",), ("c",), *itertools.permutations(NAMES, 2), NAMES, NAMES[::-1]]
)
runs, picks = st.sampled_from(RUNS), st.integers(0, 30)

somebody_holds = precondition(lambda self: self.held)
somebody_waits = precondition(lambda self: self.waiting)


class TwoBackends(RuleBasedStateMachine):
    """Each command goes to both.

    Attributes:
        open_desk: opens the one in Redis, empty.
        held, waiting: by execution its attempt and the locks of it, as a process was told.
    """

    open_desk: Callable[[], Desk]

    @initialize(
        limits=st.tuples(*[st.sampled_from([1, 1, 2])] * len(NAMES)),
        wants=st.tuples(*[some_names] * len(RUNS)),
    )
    def begin(self, limits: Any, wants: Any) -> None:
        self.limits = dict(zip(NAMES, limits, strict=True))
        self.desks = self.open_desk(), MemoryDesk()
        self.inboxes = [desk.listen("p") for desk in self.desks]
        self.held: dict[str, tuple[str, tuple[str, ...]]] = {}
        self.waiting: dict[str, tuple[str, tuple[str, ...]]] = {}
        self.attempts = (f"n{number}" for number in itertools.count())
        for name in NAMES:
            self.acquire(f"holds-{name}", (name,), "ask", "", False)
        for run, names in zip(RUNS, wants, strict=True):
            self.acquire(run, names, "park", "", False)

    @rule(
        run=runs,
        names=some_names,
        how=st.sampled_from(["ask", "wait", "park", "park"]),
        owner=st.sampled_from(["", "", "o"]),
        by_owner=st.booleans(),
    )
    def acquire(
        self, run: str, names: tuple[str, ...], how: str, owner: str, by_owner: bool
    ) -> None:
        if run in self.held:
            return
        if run in self.waiting:
            before, of = self.waiting.pop(run)
            self._both(lambda desk: desk.release(run, before, names=of, ended="attempt"))
        if len(names) == 1 and any(self._wants(run, name) not in ((), names) for name in NAMES):
            return  # the short way looks at no other lock
        attempt = next(self.attempts)
        claim = {"names": names, "limits": tuple(self.limits[name] for name in names)}
        claim |= {"owner": owner or run, "by_owner": by_owner and bool(owner)}
        if how == "park":
            answer = self._both(lambda desk: desk.leave(run, attempt, **claim))
        else:
            claim |= {"wait": 6.0, "inbox": "p"} if how == "wait" else {}
            answer = self._both(lambda desk: desk.acquire(run, attempt, **claim))
        if isinstance(answer, Held):
            self.held[run] = attempt, names
        elif isinstance(answer, Queued):
            self.waiting[run] = attempt, names
        elif isinstance(answer, Ended):
            self._forget(run)
        self._look()

    @precondition(lambda self: self._parked())
    @rule(
        pick=picks,
        names=st.one_of(st.none(), some_names),
        how=st.sampled_from(["ask", "wait", "park"]),
        by_owner=st.booleans(),
    )
    def come_back(self, pick: int, names: tuple[str, ...] | None, how: str, by_owner: bool) -> None:
        parked = self._parked()
        run = sorted(parked)[pick % len(parked)]
        self.acquire(run, names or parked[run], how, "o", by_owner)

    @somebody_holds
    @rule(pick=picks, ended=st.sampled_from(["", "execution"]))
    def release(self, pick: int, ended: str) -> None:
        run, (attempt, names) = self._taken(self.held, pick)
        self._both(lambda desk: desk.release(run, attempt, names=names, ended=ended))
        self._forget(run)
        self._look()

    @somebody_holds
    @rule(pick=picks)
    def a_holder_dies(self, pick: int) -> None:
        run, (_, names) = self._taken(self.held, pick)
        for desk, name in itertools.product(self.desks, names):
            desk.lapse(run, name)
        self._look()

    @somebody_waits
    @rule(pick=picks)
    def heartbeat(self, pick: int) -> None:
        run = sorted(self.waiting)[pick % len(self.waiting)]
        attempt, names = self.waiting[run]
        for name in names:
            self._both(lambda desk, name=name: desk.beat(run, attempt, name=name))
        self._look()

    @rule(run=runs)
    def withdraw(self, run: str) -> None:
        self._both(lambda desk: desk.withdraw(run, home="h"))
        self._forget(run)
        self._look()

    @rule()
    def messages_are_late(self) -> None:
        for name in NAMES:
            for run in self.desks[0].waiters(name):
                if self.desks[0].place(run, name).get("back"):
                    for desk in self.desks:
                        desk.lapse_place(run, name, back=1)
        self._look()

    @rule()
    def resume(self) -> None:
        self._resumed()

    def _resumed(self) -> list[str]:
        for desk in self.desks:
            desk.all_due()
        sent = self._both(lambda desk: sorted(desk.resume()))
        self._look()
        return list(dict.fromkeys(sent))

    def teardown(self) -> None:
        if not hasattr(self, "desks"):
            return
        try:
            self._everybody_who_is_parked_runs()
        finally:
            for desk in self.desks:
                desk.wipe()
                desk.close()

    def _everybody_who_is_parked_runs(self) -> None:
        while self.waiting:
            run, (attempt, names) = self._taken(self.waiting, 0)
            self._both(lambda desk: desk.release(run, attempt, names=names, ended="attempt"))  # noqa: B023
            self._look()
        for _ in range(4 * len(RUNS)):
            while self.held:
                self.release(0, "execution")
            if not any(self.desks[0].waiters(name) for name in NAMES):
                break
            self.messages_are_late()
            for run in self._resumed():
                if run in (parked := self._parked()):
                    self.acquire(run, parked[run], "ask", "", False)
        assert [self.desks[0].waiters(name) for name in NAMES] == [[]] * len(NAMES)
        desk = self.desks[0]
        assert [key for key in desk.left() if desk.client.pttl(key) == -1] == []

    def _parked(self) -> dict[str, tuple[str, ...]]:
        """Who is parked and holds nothing, with the locks that its place is for."""
        here = {
            run: self._wants(run, name) for name in NAMES for run in self.desks[0].waiters(name)
        }
        return {run: names for run, names in here.items() if run not in self.held | self.waiting}

    def _wants(self, run: str, name: str) -> tuple[str, ...]:
        """The locks that a place in the queue of this lock is for; none if there is no place."""
        if run not in self.desks[0].waiters(name):
            return ()
        return tuple(self.desks[0].place(run, name).get("names") or (name,))

    def _taken(self, among: dict[str, Any], pick: int) -> tuple[str, Any]:
        run = sorted(among)[pick % len(among)]
        return run, among.pop(run)

    def _forget(self, run: str) -> None:
        for desk in self.desks:
            desk.forget(run)

    def _both(self, command: Callable[[Desk], Any]) -> Any:
        answer, other = (command(desk) for desk in self.desks)
        assert _facts(answer) == _facts(other)
        return answer

    def _look(self) -> None:
        """Both have sent and kept the same, and who holds was told so."""
        sent, others = (sorted(desk.out()) for desk in self.desks)
        assert sent == others
        heard, others = (
            sorted(word.split()[:3] for word in inbox.heard()) for inbox in self.inboxes
        )
        assert heard == others
        for kind, run, attempt in heard:
            if kind == "granted" and self.waiting.get(run, ("",))[0] == attempt:
                self.held[run] = self.waiting.pop(run)
        for name in NAMES:
            holders, waiters = self.desks[0].holders(name), self.desks[0].waiters(name)
            assert (holders, waiters) == (self.desks[1].holders(name), self.desks[1].waiters(name))
            for run in holders:
                known = self.held.get(run) or self.waiting.get(run)
                assert known is not None, f"{run} holds {name}, and nobody knows"
                assert name in known[1], f"{run} holds {name}, which it did not ask for"


def _facts(answer: Any) -> Any:
    """What does not depend on the clock."""
    kind = type(answer).__name__
    if isinstance(answer, Held):
        return kind, answer.reentered
    if isinstance(answer, Parked | Queued):
        return kind, answer.rank
    if isinstance(answer, Conflict):
        return kind, answer.name, answer.parked, answer.waiting
    if isinstance(answer, Full):
        return kind, answer.name
    return answer if isinstance(answer, bool | list) else kind
