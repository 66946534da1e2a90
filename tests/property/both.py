"""Random histories of executions whose locks change between their attempts, as a callable or a
deploy can name others, that ask for them inside of a holder, as its descendant or on their own,
that get one before their message is sent, as a dedup marker, and whose commands come twice: Redis
and memory answer, send and keep the same, nobody holds a lock that nobody knows of, nobody loses a
lock or a message, and everybody who was parked runs in the end.

A client that hears no answer sends its command again, on another connection. So a copy can come
after whatever the client does next; its answer, and the messages in it, reach nobody. It comes
while the end of its attempt is remembered; that of a process that died unseen, while its lease
lasts: later, it could take the message of another copy of its execution along.

`machine.py` knows more of each command, of executions that always want the same locks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from celery_relock.engine.protocol import (
    KEPT,
    SHARED,
    Burst,
    Conflict,
    Deadlocked,
    Ended,
    Full,
    Held,
    HoldInfo,
    OtherAttempt,
    Parked,
    Queued,
    Release,
    Renewal,
    Successor,
)
from tests.property import snapshot
from tests.property.snapshot import RealLock
from tests.support.desk import Desk
from tests.support.memory_desk import MemoryDesk

NAMES = ("a", "b", "c")
RUNS = tuple(f"r{i}" for i in range(4))
MARKER = "m"
MARKED = "m0", "m1", "m2"  # as these, executions hold their markers; nobody waits for one
LOCKS = (*NAMES, MARKER)
some_names = st.sampled_from(
    [("a",), ("b",), ("c",), *itertools.permutations(NAMES, 2), NAMES, NAMES[::-1]]
)
runs, marked, picks = st.sampled_from(RUNS), st.sampled_from(MARKED), st.integers(0, 30)
shared = st.sampled_from([False, False, True])
twice = st.booleans()  # the client sends it again: a copy can come late
COOLS = "cooldown.c"  # what a lock is left to that nobody is to have for a while
# Of which holder an execution is a descendant, or inside: that one cannot end before it has its
# locks.
holders = st.one_of(st.none(), picks)
patience = st.sampled_from([None, None, 50.0])

somebody_holds = precondition(lambda self: self.held)
somebody_waits = precondition(lambda self: self.waiting)


class Beside(RuleBasedStateMachine):
    """Redis, and memory beside it: each command goes to both.

    Attributes:
        open_desk: opens the one in Redis, empty.
        desks: these two.
    """

    open_desk: Callable[[], Desk]
    desks: tuple[Desk, Desk]

    def _both(self, command: Callable[[Desk], Any]) -> Any:
        answer, other = (command(desk) for desk in self.desks)
        assert _facts(answer) == _facts(other)
        return answer


class TwoBackends(Beside):
    """Attributes:
    held, waiting: by execution its attempt and the locks of it, as a process was told.
    kept: the executions that a lock is kept for.
    marks: the commands that got one for an execution before its message was sent.
    over: the executions that have ended, or were replaced, as far as that is remembered.
    parked: the executions whose message is kept.
    to_note: of these the attempts that parked them by a command that was sent twice. Their end
        is remembered for that before the execution goes on.
    late: commands of which a copy can come, and the execution of each.
    doubtful: attempts with such a command; their end is remembered, as by an engine.
    dead: by attempt the execution, of processes that died unseen: what it has, or what a copy
        acquires for it, lasts for a lease.
    """

    @initialize(
        limits=st.tuples(*[st.sampled_from([1, 1, 2])] * len(NAMES)),
        wants=st.tuples(*[some_names] * len(RUNS)),
    )
    def begin(self, limits: Any, wants: Any) -> None:
        self.limits = dict(zip(LOCKS, (*limits, 1), strict=True))
        self.desks = self.open_desk(), MemoryDesk()
        self.inboxes = [desk.listen("p") for desk in self.desks]
        self.held: dict[str, tuple[str, tuple[str, ...]]] = {}
        self.waiting: dict[str, tuple[str, tuple[str, ...]]] = {}
        self.kept: set[str] = set()
        self.marks: list[Callable[[Desk], Any]] = []
        self.over: set[str] = set()
        self.parked: set[str] = set()
        self.to_note: dict[str, tuple[str, tuple[str, ...]]] = {}
        self.late: list[tuple[str, Callable[[Desk], Any]]] = []
        self.doubtful: set[str] = set()
        self.dead: dict[str, str] = {}
        self.attempts = (f"n{number}" for number in itertools.count())
        for name in NAMES:
            self.acquire(f"holds-{name}", (name,), "ask")
        for run, names in zip(RUNS, wants, strict=True):
            self.acquire(run, names, "park")

    @rule(
        run=runs,
        names=some_names,
        how=st.sampled_from(["ask", "wait", "park", "park"]),
        owner=st.sampled_from(["", "", "o"]),
        by_owner=st.booleans(),
        shared=shared,
        twice=twice,
        heard=st.sampled_from([True, True, True, False]),
        inside=holders,
        below=holders,
        patience=patience,
    )
    def acquire(
        self,
        run: str,
        names: tuple[str, ...],
        how: str,
        owner: str = "",
        by_owner: bool = False,
        shared: bool = False,
        twice: bool = False,
        heard: bool = True,
        inside: int | None = None,
        below: int | None = None,
        patience: float | None = None,
    ) -> None:
        names = self._end_what_was_before(run) or names
        if len(names) == 1 and any(self._wants(run, each) not in ((), names) for each in NAMES):
            return  # the short way looks at no other lock
        attempt = next(self.attempts)
        limits = tuple(SHARED if shared else self.limits[name] for name in names)
        claim: dict[str, Any] = {"names": names, "limits": limits}
        claim |= {"owner": owner or run, "by_owner": by_owner and bool(owner)}
        others = sorted(self.held.keys() - {run})
        if others and inside is not None:
            claim["stuck"] = (others[inside % len(others)],)
        if others and below is not None:
            ancestor = others[below % len(others)]
            claim |= {"owner": self._owner_of(ancestor), "by_owner": False}
            claim["ancestors"] = (ancestor,)
        asks = claim | ({"wait": 6.0, "inbox": "p"} if how == "wait" else {})
        answer = None
        if how != "park" or twice:  # as a worker does before it parks
            answer = self._send(run, lambda desk: desk.acquire(run, attempt, **asks), twice)
        if how == "park" and (answer is None or isinstance(answer, Conflict | OtherAttempt)):
            answer = self._send(
                run, lambda desk: desk.leave(run, attempt, patience=patience, **claim), twice
            )
        if not isinstance(answer, Conflict | OtherAttempt):
            self.parked.discard(run)
        if twice or not heard:
            self.doubtful.add(attempt)
        if heard:
            self._go_on(run, attempt, names, answer)
        else:
            self._give_up(run, attempt, names)
            # If its message is not kept, its worker has it.
            self.parked &= self.desks[1].backend.state.parked.keys()
        self._look()

    def _end_what_was_before(self, run: str) -> tuple[str, ...]:
        """The locks of an attempt that goes on, while a second copy of its message comes."""
        if run in self.to_note:
            self._give_up(run, *self.to_note.pop(run), "parked")
        if run in self.waiting:
            self._give_up(run, *self.waiting.pop(run))
        return self.held[run][1] if run in self.held else ()

    def _go_on(self, run: str, attempt: str, names: tuple[str, ...], answer: Any) -> None:
        if isinstance(answer, Held):
            self.held[run] = attempt, names
        elif isinstance(answer, Queued):
            self.waiting[run] = attempt, names
        elif isinstance(answer, Parked):
            self.parked.add(run)
            if attempt in self.doubtful:
                self.to_note[run] = attempt, names
        elif attempt in self.doubtful:
            self._give_up(run, attempt, names)
        if isinstance(answer, Ended):
            self.no_copy_comes_any_more(run)

    @precondition(lambda self: self._parked())
    @rule(
        pick=picks,
        names=st.one_of(st.none(), some_names),
        how=st.sampled_from(["ask", "wait", "park"]),
        by_owner=st.booleans(),
        shared=shared,
        twice=twice,
        inside=holders,
        below=holders,
        patience=patience,
    )
    def come_back(self, pick: int, names: tuple[str, ...] | None, how: str, **more: Any) -> None:
        parked = self._parked()
        run = sorted(parked)[pick % len(parked)]
        self.acquire(run, names or parked[run], how, "o", **more)

    @somebody_holds
    @rule(pick=picks, ended=st.sampled_from(["", "execution", "retried"]), twice=twice)
    def release(self, pick: int, ended: str, twice: bool) -> None:
        run, (attempt, names) = self._taken(self.held, pick)
        self._give_up(run, attempt, names, ended or "attempt" * (attempt in self.doubtful), twice)
        self._forget(run)
        self._look()

    @somebody_holds
    @rule(pick=picks, to=st.sampled_from(RUNS + MARKED), twice=twice)
    def leave(self, pick: int, to: str, twice: bool) -> None:
        """To a retry or a next step, which may wait already."""
        if to not in self.held:
            run, (attempt, names) = self._taken(self.held, pick)
            self.kept.add(to)
            self._give_up(run, attempt, names, "execution", twice, Successor(to, 60.0))
            self._forget(run)
            self._look()

    @somebody_holds
    @rule(pick=picks, twice=twice)
    def leave_to_cool_down(self, pick: int, twice: bool) -> None:
        run, (attempt, names) = self._taken(self.held, pick)
        self.kept.add(COOLS)
        self._give_up(run, attempt, names, "execution", twice, Successor(COOLS, 60.0))
        self._forget(run)
        self._look()

    @rule()
    def it_has_cooled_down(self) -> None:
        self._lapse(COOLS, KEPT)
        self._look()

    @rule(name=st.sampled_from(LOCKS), pick=holders)
    def force_release(self, name: str, pick: int | None) -> None:
        """One hold of a lock, or all."""
        holds = sorted(snapshot.read(self.desks[1], (name,))[name].holds)
        if not holds or not self.waiting.keys().isdisjoint(holds):
            return
        only = "" if pick is None else holds[pick % len(holds)]
        for run in [only] if only else holds:
            # A copy of its command could acquire the lock again, for a process that has lost it.
            self.late = [each for each in self.late if each[0] != run]
            attempt, names = self.held.pop(run, ("", ()))
            if rest := tuple(each for each in names if each != name):
                self.held[run] = attempt, rest
        self._both(lambda desk: _executions(desk.backend.force_release(name, only)))
        self._look()

    @rule(run=marked, twice=twice)
    def mark(self, run: str, twice: bool) -> None:
        """A call that is to be sent gets its dedup marker, unless another one has it."""
        claim = {"names": (MARKER,), "lease": 60.0}
        mark = lambda desk: desk.acquire(run, KEPT, **claim)  # noqa: E731
        self.marks.append(mark)
        answer = self._send(run, mark, twice)
        if isinstance(answer, Held):
            self.kept.add(run)
        elif twice:  # it is not sent, and a copy could mark it all the same
            self._give_up(run, KEPT, (MARKER,), "execution")
        self._look()

    @rule(run=marked, twice=twice)
    def its_message_is_sent(self, run: str, twice: bool) -> None:
        """From now on its marker lasts for longer."""
        renewal = Renewal(MARKER, run, KEPT, 86_400.0, longer=True)
        self._send(run, lambda desk: desk.backend.renew([renewal]), twice)
        self._look()

    @rule(run=marked, ended=st.sampled_from(["execution", "retried", "replaced"]), twice=twice)
    def unmark(self, run: str, ended: str, twice: bool) -> None:
        """A call is not sent; or another one is sent in its place, also when it has come."""
        if run in snapshot.read(self.desks[0], (MARKER,))[MARKER].lapsed:
            return  # a release does not look whether the lease has lapsed unseen
        attempt = KEPT
        if ended == "replaced" and run in self.held:
            attempt, _ = self.held.pop(run)
        self._give_up(run, attempt, (MARKER,), ended, twice)
        self._look()

    @rule(run=marked, twice=twice, heard=st.booleans())
    def what_is_marked_begins(self, run: str, twice: bool, heard: bool) -> None:
        self.acquire(run, (MARKER,), "ask", twice=twice, heard=heard)

    @rule(run=st.sampled_from(RUNS + MARKED))
    def it_does_not_come(self, run: str) -> None:
        self._lapse(run, KEPT)
        self.late = [each for each in self.late if each[0] != run or each[1] not in self.marks]
        self._look()

    @precondition(lambda self: self.held or self.waiting)
    @rule(pick=picks, is_seen=st.booleans(), twice=twice)
    def a_process_dies(self, pick: int, is_seen: bool, twice: bool) -> None:
        """Another one frees what it had, or that lapses some time."""
        run, (attempt, names) = self._taken(self.held | self.waiting, pick)
        self.held.pop(run, None)
        self.waiting.pop(run, None)
        if is_seen:
            self._give_up(run, attempt, names, "killed", twice)
        else:
            self.dead[attempt] = run
        self._look()

    @precondition(lambda self: self.dead)
    @rule(pick=picks)
    def what_it_had_lapses(self, pick: int) -> None:
        attempt, run = self._taken(self.dead, pick)
        self._lapse(run, attempt)
        self.no_copy_comes_any_more(run)
        self._look()

    @precondition(lambda self: self.late)
    @rule(pick=picks)
    def a_copy_comes_late(self, pick: int) -> None:
        self._comes_late(*self.late[-1 - pick % len(self.late)])

    def _comes_late(self, run: str, command: Callable[[Desk], Any]) -> None:
        before = self._ends()
        answer = self._both(command)
        for hold, end in self._ends().items():
            assert end >= before.get(hold, 0), f"the lease of {hold} is shorter"
        if command in self.marks and isinstance(answer, Held):
            assert run not in self.over, f"{run} is marked again"
            self.kept.add(run)  # its sender has not heard that it has come; that lapses
        self._look()

    @rule(run=st.sampled_from(RUNS + MARKED))
    def no_copy_comes_any_more(self, run: str) -> None:
        self.late = [each for each in self.late if each[0] != run]
        self._forget(run)

    @somebody_waits
    @rule(pick=picks, twice=twice)
    def heartbeat(self, pick: int, twice: bool) -> None:
        run = sorted(self.waiting)[pick % len(self.waiting)]
        attempt, names = self.waiting[run]
        answers = [
            self._send(run, lambda desk, name=name: desk.beat(run, attempt, name=name), twice)
            for name in names
        ]
        if all(isinstance(answer, Held) for answer in answers):
            self.held[run] = self.waiting.pop(run)
        self._look()

    @rule(run=runs, twice=twice)
    def withdraw(self, run: str, twice: bool) -> None:
        self.parked.discard(run)
        withdraw = lambda desk: desk.withdraw(run)  # noqa: E731
        if self._both(withdraw) and twice:  # else it may be parked when a copy comes
            self.late.append((run, withdraw))
        self._forget(run)
        self._look()

    @rule(run=runs, by_another=st.booleans())
    def an_attempt_withdraws_its_message(self, run: str, by_another: bool) -> None:
        """Late, and its message may come again: what another one has parked since stays."""
        places = [self._place(run, name) for name in NAMES]
        place = next((each for each in places if each.get("parked")), {})
        attempt = "another" if by_another else place.get("attempt", "n")
        had = self._both(lambda desk: desk.withdraw(run, 0, attempt))
        assert had == bool(place and (not by_another or place.get("sent")))
        if had:
            self.parked.discard(run)
        if had and run in self.to_note:
            of, _ = self.to_note.pop(run)
            self.dead[of] = run  # its end is not remembered by that
        self._look()

    @rule()
    def messages_are_late(self) -> None:
        for name in NAMES:
            for run in self.desks[1].waiters(name):
                if self._place(run, name).get("back"):
                    for desk in self.desks:
                        desk.lapse_place(run, name, back=1)
        self._look()

    @rule(twice=twice)
    def resume(self, twice: bool) -> None:
        self._resumed(twice)

    def _resumed(self, twice: bool = False) -> list[str]:
        for desk in self.desks:
            desk.all_due()
        by = next(self.attempts)
        sent = self._send("", lambda desk: sorted(desk.resume(by=by)), twice)
        self._look()
        return list(dict.fromkeys(sent))

    def teardown(self) -> None:
        if not hasattr(self, "desks"):
            return
        try:
            self._everybody_who_is_parked_runs()
            self._copies_of_all_come_last()
        finally:
            for desk in self.desks:
                desk.wipe()
                desk.close()

    def _everybody_who_is_parked_runs(self) -> None:
        while self.waiting:
            run, (attempt, names) = self._taken(self.waiting, 0)
            self._give_up(run, attempt, names)
            self._look()
        for _ in range(4 * len(RUNS)):
            while self.held:
                self.release(0, "execution", False)
            while self.dead:
                self.what_it_had_lapses(0)
            for run in RUNS + MARKED:
                self.it_does_not_come(run)
            self.it_has_cooled_down()
            if not self.parked:
                break
            self.messages_are_late()
            for run in self._resumed():
                if run in (parked := self._parked()):
                    self.acquire(run, parked[run], "ask")
        assert not self.parked
        self._nothing_is_left()

    def _copies_of_all_come_last(self) -> None:
        for each in self.late:
            self._comes_late(*each)
        for run in MARKED:
            self.it_does_not_come(run)
        self._nothing_is_left()

    def _nothing_is_left(self) -> None:
        for desk in self.desks:
            desk.fence("last", names=LOCKS)  # clears away what has lapsed
            desk.release("last", names=LOCKS)
            assert desk.left() == []

    def _parked(self) -> dict[str, tuple[str, ...]]:
        """Who is parked and holds nothing, with the locks that its place is for."""
        waiters = {run for name in NAMES for run in self.desks[1].waiters(name)}
        return {
            run: next(filter(None, (self._wants(run, name) for name in NAMES)))
            for run in waiters - self.held.keys() - self.waiting.keys()
        }

    def _wants(self, run: str, name: str) -> tuple[str, ...]:
        """The locks that a place in the queue of this lock is for; none if there is no place."""
        place = self._place(run, name)
        return tuple(place.get("names") or (name,)) if place else ()

    def _ends(self) -> dict[tuple[str, str, str], int]:
        """When each attempt's hold of each lock ends."""
        locks = snapshot.read(self.desks[0], LOCKS).items()
        return {
            (name, run, hold.attempt_id): lock.ends[run]
            for name, lock in locks
            for run, hold in lock.holds.items()
        }

    def _owner_of(self, run: str) -> str:
        locks = snapshot.read(self.desks[1], LOCKS).values()
        return next(lock.holds[run].owner for lock in locks if run in lock.holds)

    def _taken(self, among: dict[str, Any], pick: int) -> tuple[str, Any]:
        run = sorted(among)[pick % len(among)]
        return run, among.pop(run)

    def _give_up(
        self,
        run: str,
        attempt: str,
        names: tuple[str, ...],
        ended: str = "attempt",
        twice: bool = False,
        successor: Successor | None = None,
    ) -> None:
        def release(desk: Desk) -> bool:
            back = desk.backend.release(Release(names, run, attempt, ended, 60.0, "h", successor))
            desk.take_messages(back.messages)
            return back.had

        over = ended in ("execution", "retried")
        if over:
            self.parked.discard(run)
        had = self._send(run, release, twice)
        if over or (ended == "replaced" and had):
            self.over.add(run)

    def _lapse(self, run: str, attempt: str) -> None:
        for name in LOCKS:
            holds = snapshot.read(self.desks[1], (name,))[name].holds
            waits = self._place(run, name).get("attempt") == attempt
            for desk in self.desks:
                if run in holds and holds[run].attempt_id == attempt:
                    desk.lapse(run, name)
                if waits:
                    desk.lapse_place(run, name)

    def _forget(self, run: str) -> None:
        if all(of != run for of, _ in self.late):
            self.over.discard(run)
            for desk in self.desks:
                desk.forget(run)

    def _send(self, run: str, command: Callable[[Desk], Any], twice: bool) -> Any:
        if twice:
            self.late.append((run, command))
        return self._both(command)

    def _look(self) -> None:
        """Both have sent and kept the same, and what a process was told is so."""
        sent, others = (sorted(desk.out()) for desk in self.desks)
        assert sent == others
        heard, others = (
            sorted(word.split()[:3] for word in inbox.heard()) for inbox in self.inboxes
        )
        assert heard == others
        for kind, run, attempt in heard:
            if kind == "granted" and self.waiting.get(run, ("",))[0] == attempt:
                self.held[run] = self.waiting.pop(run)
        locks, in_memory = (snapshot.read(desk, LOCKS) for desk in self.desks)
        assert {name: _shown(lock) for name, lock in locks.items()} == {
            name: _shown(lock) for name, lock in in_memory.items()
        }
        parking, in_memory = (snapshot.read_parking(desk, ("h",)) for desk in self.desks)
        assert parking == in_memory
        for name, lock in locks.items():
            assert len(lock.fences) <= self.limits[name]
            self._those_hold_who_were_told_so(name, lock)
        self.kept = {run for each in locks.values() for run, hold in each.holds.items()
                     if hold.attempt_id == KEPT}  # fmt: skip
        for run in self.parked:
            assert run in parking.index, f"the message of {run} is lost"

    def _those_hold_who_were_told_so(self, name: str, lock: RealLock) -> None:
        known = self.held | self.waiting
        for run, hold in lock.holds.items():
            attempt, names = known.get(run, ("", ()))
            if hold.attempt_id == KEPT:
                assert run in self.kept, f"{name} is kept for {run} by nobody"
            elif hold.attempt_id not in self.dead:
                assert hold.attempt_id == attempt, f"{run} holds {name}, and nobody knows: {hold}"
                assert name in names, f"{run} holds {name}, which it did not ask for"
        for run, (_, names) in known.items():
            is_here = run in lock.holds or (run in self.waiting and run in lock.queue)
            assert is_here or name not in names, f"{run} has lost {name}"

    def _place(self, run: str, name: str) -> dict[str, Any]:
        """In memory, where looking costs nothing."""
        desk = self.desks[1]
        return desk.place(run, name) if run in desk.waiters(name) else {}


def _executions(holds: tuple[HoldInfo, ...]) -> list[str]:
    return sorted(hold.execution_id for hold in holds)


def _shown(lock: RealLock) -> tuple[Any, ...]:
    """What does not depend on the clock."""
    holds = {run: hold.attempt_id for run, hold in lock.holds.items()}
    facts = lock.queue.items()
    places = [(run, of["attempt"], of.get("parked", False), of.get("names")) for run, of in facts]
    return holds, places, lock.messages


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
    if isinstance(answer, Deadlocked):
        return kind, answer.path
    return answer if isinstance(answer, bool | int | list | Burst) else kind
