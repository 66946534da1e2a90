"""The backend in the memory of this process, for tests; and the rules of the scripts in `lua/`,
written in Python: without keys, lifetimes of keys, indexes, lost replies, or a clock that is set
back.

State: a lock is its live holds and its queue. A *permit* is all holds with one fencing token. A
*place* is where an execution stands in the queues of all the locks that it wants. The execution
waits in a process, which sends heartbeats, or it is *parked*: its message is kept here.

    _Command    one verb from its look at the clock to its answer: holds, turns, parked messages
    _Acquire    the verb that decides: refuse, join, hold, wait or park
    MemoryBackend   the verbs (`engine.protocol.Backend`), one after another under one mutex
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from threading import Event
from typing import Any, TypeAlias, TypeVar

from ..engine import ids
from ..engine.platform import Guard
from ..engine.protocol import (
    COMES_AGAIN,
    COOLDOWN,
    DEBOUNCE,
    KEPT,
    LINE,
    MOST_INSPECTED,
    PAUSE,
    REMEMBER_CALL,
    SHARED,
    STILL_WANTED,
    Answer,
    Burst,
    Claim,
    Conflict,
    Deadlocked,
    Debounce,
    Downgraded,
    Ended,
    Full,
    Held,
    HoldInfo,
    Listener,
    LockState,
    Message,
    Notice,
    OtherAttempt,
    ParkAnswer,
    Parked,
    ParkRequest,
    Passed,
    PlaceRequest,
    Queued,
    Release,
    Released,
    Renewal,
    Resumed,
    Successor,
)
from ..errors import LockConfigError

# Seconds, as in `lua/lib/parked.lua`. A message that was handed out counts as on its way for _TRIP,
# each further time for twice as long, up to _LONGEST. It holds up waiters in a process for _TRIP,
# and parked waiters for _OVERDUE. A lock with parked waiters is looked at every _LOOK.
_TRIP, _LONGEST, _OVERDUE, _LOOK = 5.0, 600.0, 60.0, 10.0
# So often a copy for one worker is handed out.
_COPY_TRIPS = 5
_DAY = 86_400.0
# The most messages in a reply; the others are owed.
_MOST = 100

# How many permits messages on their way will need: `exclusive` and `shared` ones.
_Promised: TypeAlias = "Counter[str]"

_guard = Guard()
_started = time.time() - time.monotonic()


def _now() -> float:
    """Seconds since the epoch, by a clock that is never set back."""
    return _started + time.monotonic()


@dataclass(frozen=True, slots=True)
class _Past:
    """What is remembered of an execution, or of a debounced call.

    Attributes:
        over: it has ended for good; `replaced`: before it had begun; `retried`: with its retry.
        attempts: else, those that have ended: a copy of any of them can be on its way; and whether
            the last one was `killed`.
        refused: the call was refused: a copy of it is refused, too.
    """

    over: bool = False
    replaced: bool = False
    retried: bool = False
    attempts: tuple[str, ...] = ()
    killed: bool = False
    refused: bool = False


_NOTHING, _OVER, _REFUSED = _Past(), _Past(over=True), _Past(refused=True)
# How an execution can have ended with a release, whatever it had; see `protocol.EndedAs`.
_FOR_GOOD = ("execution", "unacknowledged", "retried")


@dataclass(slots=True)
class _Hold:
    """An execution's leased share of a lock."""

    attempt_id: str
    owner: str
    fence: int
    expiry: float
    inbox: str
    label: str
    shared: bool


@dataclass(slots=True, eq=False)
class _InLine:
    """What a call of a line has together with its place.

    Attributes:
        call: the call.
        due, ends: its message is late no earlier than `due`; and the place ends then, whatever
            becomes of the call.
        expires: when the broker drops its message.
        published: of a retry, whose place is older than its message, when that was published; 0
            of others. `seen` is the newest older ticket whose message has come since.
    """

    call: PlaceRequest
    due: float = 0.0
    ends: float = 0.0
    expires: float = inf
    published: float = 0.0
    seen: int = 0

    def live_on(self, until: float) -> None:
        """No longer than its call."""
        self.ends = min(max(self.ends, until), self.expires)


@dataclass(slots=True, eq=False)
class _Place:
    """Where an execution stands in the queues of all its locks.

    Attributes:
        claim: of the attempt that has it.
        limits: the locks that it wants, each with the limit of permits that it goes by, or
            `SHARED`.
        life, expiry: unless parked, how long the place lives without a heartbeat, and when it ends.
        unheard: when its turn came first while nobody listened at its inbox; 0 before.
        request: the parked message; None for a place that waits in a process.
        arrived: whether the message came back too early, so that its attempt has this place now.
        first, back: when the message was first handed out, and until when it is on its way; 0
            before.
        sent, by: how often the message was handed out, and by which command last.
        untold: whether the message still has to be handed to a process that can publish it.
        call: the task id of a burst of debounced calls.
        ticket: in a line, its ticket; 0 elsewhere.
        in_line: of a call that has this place before its message has come; None for other places.
        turn, later: when its turn came while its message was awaited; and the ticket of a call
            behind it that was here by then.
    """

    claim: Claim
    inbox: str
    limits: dict[str, int]
    life: float
    expiry: float
    unheard: float = 0.0
    request: ParkRequest | None = None
    arrived: bool = False
    first: float = 0.0
    back: float = 0.0
    sent: int = 0
    by: str | None = None
    untold: bool = False
    call: str = ""
    ticket: int = 0
    in_line: _InLine | None = None
    turn: float | None = None
    later: int = 0

    @property
    def execution_id(self) -> str:
        return self.claim.execution_id

    @property
    def parked(self) -> bool:
        """Whether its execution has no process: the message is kept here, or is awaited."""
        return self.request is not None or self.awaited is not None

    @property
    def awaited(self) -> _InLine | None:
        """What its call has, if the message of that has not come."""
        return self.in_line if self.request is None and self.life == 0 else None


@dataclass(slots=True, eq=False)
class _Lock:
    """`holds` by execution; `queue` by execution, in the order of their turns."""

    name: str
    holds: dict[str, _Hold] = field(default_factory=dict)
    queue: dict[str, _Place] = field(default_factory=dict)

    @property
    def messages(self) -> list[str]:
        """The executions in the queue that are parked."""
        return [each for each, place in self.queue.items() if place.request is not None]

    @property
    def is_line(self) -> bool:
        """Whether its waiters are calls, in the order in which they were sent."""
        return self.name.startswith(LINE)

    @property
    def is_burst(self) -> bool:
        """Whether its waiters are bursts of debounced calls."""
        return self.name.startswith(DEBOUNCE)

    @property
    def permits(self) -> int:
        return len({hold.fence for hold in self.holds.values()})

    @property
    def readers(self) -> int | None:
        """The token of the permit of all sharers. A shared lock has no other permit."""
        any_hold = next(iter(self.holds.values()), None)
        return any_hold.fence if any_hold is not None and any_hold.shared else None

    def is_idle(self) -> bool:
        return not self.holds and not self.queue

    def is_full(self, limit: int, promised: _Promised | None = None) -> bool:
        """Whether a claim with this limit has to wait, given the permits `promised` to executions
        ahead of it."""
        promised = promised or Counter()
        if limit == SHARED:
            return bool(promised["exclusive"] or (self.permits and not self.readers))
        is_shared = promised["shared"] > 0 or self.readers is not None
        return is_shared or self.permits + promised["exclusive"] >= limit

    def write(self, execution_id: str, hold: _Hold) -> None:
        """Write a hold. A hold that joins a permit gets the permit's mode: a shared claim that
        re-enters is as exclusive as its caller."""
        if any(each.fence == hold.fence for each in self.holds.values()):
            hold.shared = hold.shared and self.readers is not None
        self.holds[execution_id] = hold

    def kept(self, execution_id: str) -> _Hold | None:
        """The hold that is kept for an execution that has not come yet."""
        hold = self.holds.get(execution_id)
        return hold if hold is not None and hold.attempt_id == KEPT else None

    def claim_kept(self, execution_id: str, limit: int) -> None:
        """Adapt a shared hold that is kept for an execution with an exclusive claim, which would
        otherwise wait for its own hold. The hold becomes exclusive, or ends if others share it."""
        kept = self.kept(execution_id)
        if kept is None or not kept.shared or limit == SHARED:
            return
        if len(self.holds) > 1:
            del self.holds[execution_id]
        else:
            kept.shared = False

    def has(self, execution_id: str) -> bool:
        """Whether an execution holds the lock. A hold that is kept for it does not count."""
        return execution_id in self.holds and self.kept(execution_id) is None

    def rank(self, execution_id: str) -> int:
        return list(self.queue).index(execution_id)


@dataclass(slots=True)
class _Ahead:
    """What a look along a queue has found: the permits that messages on their way will need
    (`promised`), of these the ones of messages that are not late (`soon`), and when to look
    again."""

    promised: _Promised = field(default_factory=Counter)
    soon: _Promised = field(default_factory=Counter)
    look: float = inf


@dataclass(slots=True, eq=False)
class _Ear:
    """A listener of an inbox."""

    heard: deque[Notice] = field(default_factory=deque)
    bell: Event = field(default_factory=Event)


@dataclass(slots=True)
class _State:
    """The whole state.

    Attributes:
        parked: the places of parked executions.
        of_task: by task id, the execution that was parked last.
        look_at: when to look at a lock; `resume_at`: when to resume an execution.
        owed: by home, the executions whose turn came when nobody could publish, and since when.
        past: what is remembered of an execution, and until when.
        live: by channel, the workers that consume it, and until when they count.
        ears: by inbox, its listeners.
        sent: the places in lines, by execution; `sent_of`: by task.
        passed: calls that were passed over and not yet reported.
        fence: the last fencing token.
        parked_bytes: the size of all parked messages.
        opened: the locks to look at for idle ones when a command ends.
    """

    locks: dict[str, _Lock] = field(default_factory=dict)
    parked: dict[str, _Place] = field(default_factory=dict)
    of_task: dict[str, str] = field(default_factory=dict)
    look_at: dict[str, float] = field(default_factory=dict)
    resume_at: dict[str, float] = field(default_factory=dict)
    owed: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    past: dict[str, tuple[_Past, float]] = field(default_factory=dict)
    live: dict[str, dict[str, float]] = field(default_factory=dict)
    ears: dict[str, list[_Ear]] = field(default_factory=lambda: defaultdict(list))
    sent: dict[str, _Place] = field(default_factory=dict)
    sent_of: dict[str, _Place] = field(default_factory=dict)
    passed: list[Passed] = field(default_factory=list)
    fence: int = 0
    parked_bytes: int = 0
    opened: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Search:
    """The search for a deadlock.

    Attributes:
        waits: by hold, the places that must get their locks before it can end.
        mine: the holds of the execution that asks; `joins`: by lock, the permits that it may join.
        passes: it asks whom to pass.
        seen: of the holds that were visited, what was found; `open`: which are still visited.
        visited: places for several locks that are.
        asks: the execution that asks.
        line: in which it has its turn, if somebody waits for that.
    """

    waits: Mapping[str, Iterable[_Place]]
    mine: frozenset[str]
    joins: Mapping[str, int | None]
    passes: bool
    seen: dict[str, tuple[str, ...] | None] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)
    visited: set[_Place] = field(default_factory=set)
    asks: str = ""
    line: _Lock | None = None


class _Command:
    """One verb. `homes` are the brokers that the caller can publish to. `by` identifies the command
    at the messages handed to it: a repeated command gets the same messages."""

    def __init__(self, state: _State, now: float, homes: str = "", by: str = "") -> None:
        self.state = state
        self.now = now
        self.homes = homes.split()
        self.by = by
        self.messages: list[Message] = []
        self._given: set[str] = set()
        self._opened: dict[str, _Lock] = {}
        # Where waiters for several locks have left.
        self._to_promote: deque[_Lock] = deque()
        # The execution of this command, if it is to leave its place for another.
        self._leaving = ""
        self._ahead: dict[str, _Ahead] = defaultdict(_Ahead)

    # --- holds ------------------------------------------------------------------------------------

    def lock(self, name: str) -> _Lock:
        """A lock, without the holds whose leases have ended."""
        if name not in self._opened:
            self.state.opened.add(name)
            lock = self._opened[name] = self.state.locks.setdefault(name, _Lock(name))
            for execution_id, hold in list(lock.holds.items()):
                if hold.expiry <= self.now:
                    del lock.holds[execution_id]
        return self._opened[name]

    def tidy(self) -> None:
        """Remove the locks that are idle, also those that signal handlers have opened meanwhile."""
        locks, opened = self.state.locks, self.state.opened
        while opened:
            lock = locks.get(name := opened.pop())
            if lock is not None and lock.is_idle():
                del locks[name]
                if not lock.is_idle():
                    locks[name] = lock  # a signal handler has acquired it on the line before

    def next_fence(self) -> int:
        self.state.fence = max(self.state.fence + 1, int(self.now * 1e6))
        return self.state.fence

    def permit_of(self, lock: _Lock, claim: Claim, limit: int) -> int | None:
        """The token of the newest permit that an execution can join without waiting. An exclusive
        claim cannot join a shared permit: the other sharers rely on what they read."""
        fence = self._of_kin(lock, claim)
        return None if limit != SHARED and lock.readers else fence

    def is_reentered(self, lock: _Lock, claim: Claim) -> bool:
        """Whether a holder joined the permit of its kin; also for a repeated command."""
        hold = lock.holds[claim.execution_id]
        if not hold.shared:
            return sum(each.fence == hold.fence for each in lock.holds.values()) > 1
        return self._of_kin(lock, claim) is not None

    def _of_kin(self, lock: _Lock, claim: Claim) -> int | None:
        """The permit that is kept for the execution; else the newest permit of its owner, or of an
        ancestor that has a live hold and the same owner."""
        if kept := lock.kept(claim.execution_id):
            return kept.fence
        among = [*lock.holds] if claim.by_owner else [*claim.ancestors]
        among = [each for each in among if each != claim.execution_id and each in lock.holds]
        holds = map(lock.holds.__getitem__, among)
        return max((hold.fence for hold in holds if hold.owner == claim.owner), default=None)

    def next_lapse(self, lock: _Lock) -> float:
        """Seconds until the next lease ends; 0 without a hold."""
        return min((hold.expiry - self.now for hold in lock.holds.values()), default=0.0)

    def past(self, execution_id: str) -> _Past:
        past, until = self.state.past.get(execution_id, (_NOTHING, 0.0))
        return past if until > self.now else _NOTHING

    def remember(self, execution_id: str, past: _Past, seconds: float) -> None:
        known = self.state.past
        known.pop(execution_id, None)
        known[execution_id] = past, self.now + seconds
        for oldest in list(islice(known, 3)):  # keeps it bounded
            if known[oldest][1] <= self.now:
                del known[oldest]

    def remember_end(self, execution_id: str, attempt_id: str, ended: str, seconds: float) -> None:
        """An execution that has ended stays ended."""
        before = self.past(execution_id)
        if ended in _FOR_GOOD:
            self.remember(execution_id, _Past(over=True, retried=ended == "retried"), seconds)
        elif ended == "replaced" and not before.over:
            self.remember(execution_id, _Past(over=True, replaced=True), seconds)
        elif not before.over:
            attempts = *before.attempts, attempt_id
            past = _Past(attempts=attempts, killed=ended == "killed")
            self.remember(execution_id, past, seconds)

    def renew(self, renewal: Renewal) -> bool:
        hold = self.lock(renewal.name).holds.get(renewal.execution_id)
        if hold is None or hold.attempt_id != renewal.attempt_id:
            return False
        expiry = self.now + renewal.lease
        # A renewal that was on its way when the holder extended the lease must not shorten it
        # again.
        hold.expiry = max(hold.expiry, expiry) if renewal.longer else expiry
        return True

    def leave_to(self, lock: _Lock, hold: _Hold, execution_id: str, successor: Successor) -> None:
        """Keep a hold for its successors. One can have been quicker: it has joined the permit."""
        for each in self._successors(execution_id, successor):
            if each not in lock.holds:
                # A cooldown keeps everybody out, its own workflow too: nobody else has such an
                # owner.
                owner = each if each.startswith(COOLDOWN) else hold.owner
                kept_until = self.now + successor.keep
                kept = replace(hold, attempt_id=KEPT, owner=owner, expiry=kept_until)
                lock.write(each, kept)

    def _successors(self, execution_id: str, successor: Successor) -> Iterator[str]:
        """The successors that can still come. One can have been quicker, and has ended or was
        killed. Who has ended an attempt otherwise comes again. An execution that is its own
        successor lives, whatever happened to an earlier attempt."""
        for each in successor.execution_id.split():
            past = self.past(each)
            if not past.over and not (past.killed and each != execution_id):
                yield each

    # --- places -----------------------------------------------------------------------------------

    def wanted(self, place: _Place) -> list[_Lock]:
        return [self.lock(name) for name in place.limits]

    def is_gone(self, place: _Place) -> bool:
        return not place.parked and place.expiry <= self.now

    def leave(self, place: _Place) -> None:
        """Remove a place from all its queues, and its message."""
        self.unpark(place)
        for lock in self.wanted(place):
            if lock.queue.get(place.execution_id) is place:
                del lock.queue[place.execution_id]
            if len(place.limits) > 1:
                self._to_promote.append(lock)  # it can have held up others there
            if lock.is_line and not lock.queue:
                self.state.look_at.pop(lock.name, None)
        if place.in_line is not None:
            sent, sent_of = self.state.sent, self.state.sent_of
            for places, key in ((sent, place.execution_id), (sent_of, place.in_line.call.task)):
                if places.get(key) is place:
                    del places[key]

    def unpark(self, place: _Place) -> None:
        """Forget a parked message. Its place stays."""
        request, execution_id, state = place.request, place.execution_id, self.state
        if request is None:
            return
        place.request = None
        for lock in self.wanted(place):
            if not lock.messages:
                state.look_at.pop(lock.name, None)
        del state.parked[execution_id]
        state.parked_bytes -= len(request.message.encode())
        # Another execution of the task can be parked by now: a retry, while this is an old copy.
        if state.of_task.get(request.task) == execution_id:
            del state.of_task[request.task]
        state.resume_at.pop(execution_id, None)
        state.owed[request.home].pop(execution_id, None)

    def stands_behind_itself(self, place: _Place) -> bool:
        """Whether a parked message is a copy of an execution that holds the lock. Its turn comes if
        that execution dies."""
        return place.parked and any(lock.has(place.execution_id) for lock in self.wanted(place))

    def withdraw(self, execution_id: str) -> bool:
        """Remove a parked execution, or the place of a call whose message is awaited, for good, and
        let the waiters behind it move up. False if there is none."""
        place = self.state.parked.get(execution_id) or self.state.sent.get(execution_id)
        if place is None:
            return False
        lock = self.wanted(place)[0]
        # Not if it runs: its message can come again.
        if place.awaited and lock.has(execution_id):
            return False
        self.leave(place)
        if lock.is_burst and not lock.queue:
            lock.holds.pop(PAUSE, None)  # no burst is left
        self.promote(lock)
        return True

    def keep_place(self, beat: Renewal) -> _Place | None:
        place = self.lock(beat.name).queue.get(beat.execution_id)
        # A parked execution has no process: a late heartbeat must not acquire the lock for nobody.
        if place is None or place.parked or self.is_gone(place):
            return None
        if place.claim.attempt_id != beat.attempt_id:
            return None
        place.life, place.expiry = beat.waiter_lease, self.now + beat.waiter_lease
        return place

    # --- parked messages --------------------------------------------------------------------------

    def is_on_its_way(self, place: _Place) -> bool:
        return place.parked and place.back > self.now

    def promise(self, lock: _Lock, place: _Place) -> _Promised:
        """The permits that a message on its way will need: one or none."""
        limit, is_early = place.limits[lock.name], self.now - place.first < _OVERDUE
        # Older arguments must not run after newer ones while somebody can publish them.
        is_early = is_early or (lock.is_burst and not place.untold)
        if not is_early or self.permit_of(lock, place.claim, limit) is not None:
            return Counter()
        return Counter(shared=1) if limit == SHARED else Counter(exclusive=1)

    def can_send(self, place: _Place) -> bool:
        has_room = len(self.messages) < _MOST
        return has_room and place.request is not None and place.request.home in self.homes

    def is_owed(self, place: _Place) -> bool:
        """Whether to hand a message on its way to this caller again: the reply to its command was
        lost, or nobody could publish the message so far."""
        is_here = place.request is not None and place.request.home in self.homes
        mine = place.by == self.by or (place.untold and is_here)
        return mine and place.execution_id not in self._given

    def hand_out(self, place: _Place) -> None:
        """Hand a message to the caller if it can publish the message; else notify a process that
        can. The message stays until its execution has the lock: its publisher can die. A copy for a
        worker that seems to be gone leaves."""
        request, execution_id = place.request, place.execution_id
        assert request is not None
        if request.is_copy and place.sent >= _COPY_TRIPS:
            self.leave(place)
            return
        place.first = place.first or self.now
        if self.can_send(place):
            place.sent += 1
            place.by, place.untold = self.by, False
            self.state.owed[request.home].pop(execution_id, None)
            self._given.add(execution_id)
            self.messages.append(Message(execution_id, next(iter(place.limits)), request.message))
        else:
            place.untold = True
            self.state.owed[request.home].setdefault(execution_id, self.now)
            self.tell("parked", Notice("parked", execution_id, request.home))
        # A burst is published, not executed: without a report the broker cannot be reached.
        is_burst = next(iter(place.limits)).startswith(DEBOUNCE)
        longest = 2 * _TRIP if is_burst else _LONGEST
        place.back = self.now + min(_TRIP * 2 ** max(place.sent - 1, 0), longest)

    def send(self, place: _Place) -> None:
        """Hand out a message, unless it is on its way already and not owed to this caller."""
        if not self.is_on_its_way(place) or self.is_owed(place):
            self.hand_out(place)

    def may_look_behind(self, lock: _Lock, place: _Place, caller: str) -> bool:
        """Whether the places behind a parked place can have a turn: its message is on its way."""
        if self.stands_behind_itself(place):
            return True
        if place.execution_id == caller or not self.is_on_its_way(place):
            return False
        self.send(place)
        self.count(lock, place, self._ahead[lock.name])
        return True

    def count(self, lock: _Lock, place: _Place, ahead: _Ahead) -> None:
        if place.parked:
            promise = self.promise(lock, place)
            ahead.promised += promise
            # A late message can need the worker slot in which an execution behind it waits, so it
            # holds up parked executions alone.
            if self.now < place.first + _TRIP:
                ahead.soon += promise
            ahead.look = min(ahead.look, place.back)

    def schedule(self, lock: _Lock) -> None:
        """Set when this lock has to be looked at for parked messages."""
        if lock.messages:
            lapse = self.next_lapse(lock)
            soon = self.now + min(lapse + 0.001 if lapse > 0 else _LOOK, _LOOK)
            self.state.look_at[lock.name] = min(self._ahead[lock.name].look, soon)
        elif lock.is_line and lock.queue:
            soon = self.now + _DAY
            self.state.look_at[lock.name] = min(self._ahead[lock.name].look, soon)

    def resume(self, execution_id: str) -> None:
        """Hand out a message, whether its locks are free or not, and look again when it is
        overdue."""
        place = self.state.parked.get(execution_id)
        if place is not None:
            self.send(place)
            if not self.follow(place):
                self.state.resume_at[execution_id] = place.back

    def follow(self, place: _Place) -> bool:
        """If a message was given up, let those behind it have their turn. True if it was."""
        if is_gone := place.request is None:
            self.promote(self.wanted(place)[0])
        return is_gone

    def serve_what_is_due(self) -> None:
        """Look at the locks, and resume the executions, whose time has come."""
        looks = [(at, False, name) for name, at in self.state.look_at.items()]
        resumes = [(at, True, each) for each, at in self.state.resume_at.items()]
        for at, is_resume, what in sorted([*looks, *resumes]):
            if at <= self.now and is_resume:
                self.resume(what)
            elif at <= self.now:
                # `schedule` sets the next look while anything is parked there.
                self.state.look_at.pop(what, None)
                self.promote(self.lock(what))

    # --- turns ------------------------------------------------------------------------------------

    def promised_ahead(self, lock: _Lock, execution_id: str) -> _Ahead | None:
        """The permits that the places ahead in the queue will need; None if one of them cannot be
        passed."""
        ahead = _Ahead()
        for place in lock.queue.values():
            if place.execution_id == execution_id:
                return ahead
            if place.execution_id != self._leaving and not self.stands_behind_itself(place):
                if not self.is_on_its_way(place):
                    return None
                self.count(lock, place, ahead)
        return None

    def admission(self, place: _Place, head: _Lock | None = None) -> dict[str, int | None] | None:
        """What a place can have now: for each lock the permit to join, or None for a new permit.
        None while not all of its locks are free. To get a new permit, or to share a lock that it
        has not joined before, a place must be first in the queue; at the lock `head` the caller
        has made sure of that."""
        fences: dict[str, int | None] = {}
        for lock in self.wanted(place):
            limit = place.limits[lock.name]
            fences[lock.name] = self.permit_of(lock, place.claim, limit)
            if fences[lock.name] is None:
                ahead = (
                    self._ahead[lock.name]
                    if lock is head
                    else self.promised_ahead(lock, place.execution_id)
                )
                if ahead is None or self._is_full(lock, place, limit, ahead):
                    return None
                fences[lock.name] = lock.readers if limit == SHARED else None
        return fences

    def _is_full(self, lock: _Lock, place: _Place, limit: int, ahead: _Ahead) -> bool:
        if lock.is_burst and place.sent:
            # Its own pause is over: the one that is there is a newer burst's.
            return ahead.promised["exclusive"] > 0
        # A late execution can be passed while the lock is free; but not by sharers, which could
        # come one after another.
        waits_for_late = place.parked or (limit == SHARED and lock.readers)
        return lock.is_full(limit, ahead.promised if waits_for_late else ahead.soon)

    def grant(self, place: _Place, fences: dict[str, int | None], caller: str) -> bool:
        """Grant a place its locks, with their whole lease from now. False if nobody listens at its
        inbox: it keeps its place. The caller gets the reply, and no message. A waiter that lives
        and cannot be reached is passed over for the life of its place, and then has the lock until
        its next heartbeat finds it, or for as long again."""
        execution_id, limits, new = place.execution_id, place.limits, None
        lease = place.claim.lease
        for name, fence in fences.items():
            new = self.next_fence() if fence is None and new is None else new
            fences[name] = new if fence is None else fence
        told = tuple(fence for fence in fences.values() if fence is not None)
        granted = Notice("granted", execution_id, place.claim.attempt_id, told[0])
        if execution_id != caller and not self.tell(place.inbox, granted):
            place.unheard = place.unheard or self.now
            if self.now - place.unheard < place.life:
                return False
            lease = place.life
        self.leave(place)
        expiry = self.now + lease
        for lock, fence in zip(self.wanted(place), told, strict=True):
            shared = limits[lock.name] == SHARED
            lock.write(execution_id, _hold_of(place.claim, place.inbox, fence, expiry, shared))
        return True

    def enter_or_send(
        self, place: _Place, fences: dict[str, int | None] | None, caller: str
    ) -> bool:
        """Let a place in, or hand out its message. True if it no longer needs its place."""
        if fences is None:
            return False
        if not place.parked or place.execution_id == caller:
            return self.grant(place, fences, caller)
        self.send(place)
        return False

    def join(self, lock: _Lock, owner: str, caller: str) -> None:
        """Let waiters of an owner that has just acquired the lock join its permit."""
        for place in list(lock.queue.values()):
            joins = place.claim.by_owner and place.claim.owner == owner
            if joins and place.execution_id != self._leaving:
                self.serve_one(lock, place, caller)

    def serve_one(self, lock: _Lock, place: _Place, caller: str) -> None:
        """Serve a waiter that may be in a permit by now, wherever it stands in the queue."""
        if not self.is_gone(place) and not self.stands_behind_itself(place):
            lock.claim_kept(place.execution_id, place.limits[lock.name])
            self.enter_or_send(place, self.admission(place), caller)

    def promote(self, lock: _Lock, caller: str = "") -> bool:
        """Grant the lock to the first in the queue, or hand out its message, and so on. True if the
        caller has to wait: somebody whose turn comes before the caller's still waits."""
        is_ahead = self._promote(lock, caller)
        self.promote_others(caller)
        return is_ahead

    def promote_others(self, caller: str = "") -> None:
        """Promote where waiters for several locks have left."""
        while self._to_promote:
            self._promote(self._to_promote.popleft(), caller)

    def _promote(self, lock: _Lock, caller: str) -> bool:
        self._ahead[lock.name] = _Ahead()
        is_ahead = (self._serve_line if lock.is_line else self._serve)(lock, caller)
        self.schedule(lock)
        return is_ahead

    def _serve(self, lock: _Lock, caller: str) -> bool:
        is_ahead = False
        for execution_id, place in list(lock.queue.items()):
            if lock.queue.get(execution_id) is not place or execution_id == self._leaving:
                continue  # it has joined its owner's permit just now, or is to leave this place
            if self.is_gone(place):
                self.leave(place)
            elif place.parked and self.may_look_behind(lock, place, caller):
                continue
            elif (fences := self.admission(place, lock)) is None:
                if not self._may_be_passed(lock, place, caller):
                    return execution_id != caller
                is_ahead = True
            elif not self.enter_or_send(place, fences, caller):
                self.count(lock, place, self._ahead[lock.name])
            elif place.claim.by_owner:
                for each in self.wanted(place):
                    self.join(each, place.claim.owner, caller)
        return is_ahead

    def _may_be_passed(self, lock: _Lock, place: _Place, caller: str) -> bool:
        """Whether nobody holds the lock and a resumed execution is late: then a waiter in a process
        behind this place can have the lock."""
        ahead, is_other = self._ahead[lock.name], place.execution_id != caller
        is_one_late = ahead.promised != ahead.soon
        return place.parked and is_other and is_one_late and not lock.holds

    def get_in(self, lock: _Lock, place: _Place) -> None:
        me = place.execution_id
        if not lock.has(me):
            self.promote(lock, me)
        # `join` let in only waiters that could be notified, and only beside a holder that also
        # re-enters by owner.
        if not lock.has(me) and (place.claim.by_owner or lock.kept(me)):
            self.serve_one(lock, place, me)
            self.promote_others(me)

    def beat_answer(self, beat: Renewal, place: _Place | None) -> Held | Queued | None:
        lock = self.lock(beat.name)
        hold = lock.holds.get(beat.execution_id)
        if hold is not None and hold.attempt_id == beat.attempt_id:
            hold.expiry = max(hold.expiry, self.now + beat.lease)
            return Held((hold.fence,), (False,))
        if place is None:
            return None
        return Queued(lock.rank(beat.execution_id), self.next_lapse(lock))

    # --- lines (lock_order) -----------------------------------------------------------------------

    def _serve_line(self, lock: _Lock, caller: str) -> bool:
        """`_serve` for a line, where only a call whose message is late is passed over."""
        while lock.queue:
            execution_id, place = next(iter(lock.queue.items()))
            is_caller = execution_id == caller
            if lock.holds:
                return not is_caller
            if self.is_gone(place):
                self.leave(place)
            elif is_caller or not place.parked:
                self._let_into_line(lock, place, caller)
                return not is_caller
            elif (in_line := place.awaited) is None:
                self.send(place)
                self._ahead[lock.name].look = min(self._ahead[lock.name].look, place.back)
                return True
            elif caller and caller not in lock.queue and in_line.due > self.now:
                return False  # without a place it goes before one that is not due yet
            elif self._await(lock, place, in_line, caller):
                return True
        return False

    def _let_into_line(self, lock: _Lock, place: _Place, caller: str) -> None:
        """Let in a call whose turn has come. Its fencing token is its ticket, which proves that no
        later call overtook it. If its message can come again, its place stays in front."""
        claim, fence = place.claim, place.ticket or self.next_fence()
        granted = Notice("granted", claim.execution_id, claim.attempt_id, fence)
        if claim.execution_id != caller and not self.tell(place.inbox, granted):
            return  # its next heartbeat asks
        hold = _hold_of(claim, place.inbox, fence, self.now + claim.lease, shared=False)
        lock.write(claim.execution_id, hold)
        if place.in_line is None or not claim.owner.startswith(COMES_AGAIN):
            self.leave(place)
            return
        self.unpark(place)
        place.life, place.turn, place.first, place.back = 0.0, None, 0.0, 0.0
        place.arrived, place.sent, place.by, place.untold = True, 0, None, False
        # It can have stood here for longer than its place was to live.
        place.in_line.live_on(self.now + _DAY)

    def _await(self, lock: _Lock, place: _Place, in_line: _InLine, caller: str) -> bool:
        """The message of the first place in a line is awaited. True if the calls behind it wait for
        the message. Its time counts from when the first of these calls has come."""
        ahead = self._ahead[lock.name]
        self._mind_the_broker(lock, place, in_line, caller)
        is_waited_for = bool(caller or lock.messages) or (
            place.turn is not None and self._one_has_come(lock)
        )
        late = max(place.turn or self.now, in_line.due) + in_line.call.gap
        is_over = self.past(place.execution_id).over
        if not is_over and place.execution_id in self.state.parked:
            # It came, and is parked for its lock.
            place.turn = None
            in_line.live_on(self.now + 2 * _DAY)
            return True
        if in_line.ends <= self.now or is_over:
            self.leave(place)
            return False
        if is_waited_for and place.turn is not None and late <= self.now:
            waited = self.now - place.turn
            passed = Passed(lock.name, place.execution_id, place.claim.label, waited)
            self.state.passed.append(passed)
            self.leave(place)
            self._pass_on_turn(lock, place)
            return False
        if not is_waited_for:
            place.turn = None
        elif place.turn is None:
            place.turn, place.later = self.now, self._ticket_of_later(lock, caller)
        ahead.look = min(ahead.look, in_line.ends, late if is_waited_for else in_line.ends)
        return True

    def _one_has_come(self, lock: _Lock) -> bool:
        """Whether a call behind the first place in the line waits in its process, or its message
        comes again: it came, and is too large to be parked."""
        behind = islice(lock.queue.values(), 1, None)
        return any(each.claim.attempt_id != KEPT and not self.is_gone(each) for each in behind)

    def _ticket_of_later(self, lock: _Lock, caller: str) -> int:
        """The ticket of a call that is here while the first place in the line keeps it waiting."""
        if not caller:
            return lock.queue[lock.messages[0]].ticket
        # Without a place it gets one behind all those that are due.
        return lock.queue[caller].ticket if caller in lock.queue else self.next_fence()

    def _pass_on_turn(self, lock: _Lock, passed: _Place) -> None:
        """Messages that are missing side by side wait for one gap: the next one has been missing
        for as long, if a call behind it was here by then. Not that of a retry, which has its own
        time, nor one that had come: it comes again."""
        place = next(iter(lock.queue.values()), None)
        if place is None or place.claim.attempt_id != KEPT or place.in_line is None:
            return
        if not place.in_line.published and place.ticket < passed.later:
            place.turn, place.later = passed.turn, passed.later

    def _mind_the_broker(self, lock: _Lock, place: _Place, in_line: _InLine, caller: str) -> None:
        """Until messages have come that were sent before that of a retry, the broker can be behind.
        A message that comes a second time proves nothing."""
        comes = lock.queue.get(caller)
        ticket = 0 if comes is None or comes.in_line is None else comes.ticket
        if in_line.seen < ticket < in_line.published * 1e6:
            in_line.seen, place.turn = ticket, None

    def leave_line(self, lock: _Lock, execution_id: str) -> _Place | None:
        """Remove the place of a call whose message is to come, or comes again. If it comes, it runs
        out of order."""
        place = lock.queue.get(execution_id)
        # Not if it is parked for its lock.
        if place is None or not place.awaited or execution_id in self.state.parked:
            return None
        self.leave(place)
        return place

    def leave_place(
        self, lock: _Lock, hold: _Hold, execution_id: str, successor: Successor
    ) -> None:
        """Leave a hold's place in a line to its successors: the calls behind it wait for their
        messages as for any other."""
        for each in self._successors(execution_id, successor):
            task = hold.owner.removeprefix(COMES_AGAIN)
            call = PlaceRequest(lock.name, each, task, hold.label, successor.keep, 0.0, 0.0, 0.0)
            # The retry can have been quicker, and wait behind all others.
            before = lock.queue.pop(each, None)
            known = None if before is None else before.in_line
            in_line = _InLine(call, expires=known.expires if known else inf, published=self.now)
            in_line.live_on(self.now + successor.keep + _DAY)
            place = before or _awaited(in_line)
            place.in_line, place.turn = in_line, None
            _put(lock, place, hold.fence)
            self.state.sent[each] = self.state.sent_of[task] = place

    # --- deadlocks --------------------------------------------------------------------------------

    def deadlock(
        self, claim: Claim, wanted: Mapping[_Lock, int]
    ) -> tuple[tuple[str, ...], _Lock | None]:
        """The cycle, if waiting for these locks would never end: a lock, the label of the execution
        that must run before its holder can end, the lock that this execution waits for, and so on
        to a hold of `claim.stuck`; else (). If that hold is its own turn in a line, also this
        line."""
        for lock, limit in wanted.items() if claim.stuck else ():
            search = self._search(claim.stuck)
            search.asks = claim.execution_id
            if path := self._from_lock(search, lock, claim.execution_id, limit):
                is_own = search.line is not None and search.line.name == path[-1]
                return path, search.line if is_own else None
        return (), None

    def _search(
        self, stuck: Sequence[str], joins: Mapping[str, int | None] | None = None
    ) -> _Search:
        waits: dict[str, dict[_Place, None]] = defaultdict(dict)
        for lock in self.state.locks.values():
            for place in lock.queue.values():
                for hold in () if self.is_gone(place) else place.claim.stuck:
                    waits[hold][place] = None
        return _Search(waits, frozenset(stuck), joins or {}, passes=joins is not None)

    def is_behind_itself(
        self, claim: Claim, lock: _Lock, limit: int, joins: Mapping[str, int | None]
    ) -> bool:
        """Whether an execution that is behind others in a queue is among those whom they wait for,
        or may join them."""
        search = self._search(claim.stuck, joins)
        return bool(self._from_place(search, lock, claim, limit))

    def _keep_out(self, lock: _Lock, execution_id: str, limit: int) -> bool:
        """Whether the holders of a lock keep a waiter out. Sharers keep out another sharer if an
        exclusive waiter ahead of it waits for them. (A copy of a holder waits for that holder
        alone.)"""
        if limit != SHARED or not lock.readers:
            return lock.permits > 0 and lock.is_full(limit)
        for place in lock.queue.values():
            if place.execution_id == execution_id:
                return False
            is_copy = lock.has(place.execution_id)
            if place.limits[lock.name] != SHARED and not is_copy and not self.is_gone(place):
                return True
        return False

    def _from_lock(
        self, search: _Search, lock: _Lock, execution_id: str, limit: int
    ) -> tuple[str, ...]:
        """A lock is stuck if its holders are. A line has one holder. If nobody holds it the first
        place is as good as a hold: its execution can have had its turn, and wait for its lock."""
        path: tuple[str, ...] | None = None
        if lock.is_line:
            first = next(iter([*lock.holds, *lock.queue]), execution_id)
            if first != execution_id and first in search.mine:
                path, search.line = (), lock if first == search.asks else None
            elif first != execution_id:
                path = self._from_hold(search, first)
        elif self._keep_out(lock, execution_id, limit):
            path = self._from_holders(search, lock)
        return () if path is None else (lock.name, *path)

    def _from_holders(self, search: _Search, lock: _Lock) -> tuple[str, ...] | None:
        """Each of the permits has to be stuck, by at least one of the holds in the permit."""
        # First the own permits, and those that it may join.
        own = [hold.fence for each, hold in lock.holds.items() if each in search.mine]
        joins = search.joins.get(lock.name)
        stuck: dict[int, tuple[str, ...]]
        stuck = dict.fromkeys(own if joins is None else [*own, joins], ())
        for holder, hold in lock.holds.items():
            path = None if hold.fence in stuck else self._from_hold(search, holder)
            if path is not None:
                stuck[hold.fence] = path
        return None if len(stuck) < lock.permits else next(iter(stuck.values()))

    def _from_hold(self, search: _Search, execution_id: str) -> tuple[str, ...] | None:
        """The rest of the cycle from a hold; None if the hold can end without the execution that
        asks."""
        if execution_id in search.seen:
            return search.seen[execution_id]
        # While it is visited it counts as stuck: a ring of several permits closes at any of its
        # holds.
        search.seen[execution_id] = ()
        search.open.add(execution_id)
        found = None
        for place in search.waits.get(execution_id, ()):
            if path := self._from_claim(search, place):
                found = (place.claim.label, *path)
                break
        search.open.discard(execution_id)
        if found is None:  # what was found stuck meanwhile can have relied on this hold
            for each in [e for e, path in search.seen.items() if path and e not in search.open]:
                del search.seen[each]
        search.seen[execution_id] = found
        return found

    def _from_claim(
        self, search: _Search, place: _Place, but: _Lock | None = None
    ) -> tuple[str, ...]:
        """The rest of the cycle from a place, by the first of its locks that is stuck."""
        for lock in self.wanted(place):
            if lock is not but:
                path = self._from_place(search, lock, place.claim, place.limits[lock.name])
                if path:
                    return path
        return ()

    def _from_place(
        self, search: _Search, lock: _Lock, claim: Claim, limit: int
    ) -> tuple[str, ...]:
        """A place is stuck if its lock is; or if somebody ahead is, who waits for other locks as
        well. Who waits with a bound is passed, but no reason to give up: only a parked execution
        can wait for several locks without one. Where an execution may join a permit it waits for
        nobody."""
        if self.permit_of(lock, claim, limit) is not None:
            return ()
        if path := self._from_lock(search, lock, claim.execution_id, limit):
            return path
        for place in lock.queue.values():
            if place.execution_id == claim.execution_id:
                return ()
            without_bound = place.request is not None and place.request.patience is None
            if (
                len(place.limits) > 1
                and (search.passes or without_bound)
                and place not in search.visited
                and place.execution_id not in lock.holds
                and not self.is_gone(place)
                and not place.back
            ):
                search.visited.add(place)
                path = self._from_claim(search, place, lock)
                search.visited.discard(place)
                if path:
                    return (lock.name, place.claim.label, *path)
        return ()

    # --- inboxes ----------------------------------------------------------------------------------

    def tell(self, inbox: str, notice: Notice) -> bool:
        """Put a notice into an inbox. False if nobody listens there."""
        ears = self.state.ears.get(inbox, ())
        for ear in ears:
            ear.heard.append(notice)
            ear.bell.set()
        return bool(ears)


class _Acquire(_Command):
    """Acquire all locks of a claim, or none. If they are not free: wait (`waiter_lease`), park
    (`request`), or return the conflict."""

    def __init__(
        self,
        state: _State,
        now: float,
        claim: Claim,
        inbox: str,
        waiter_lease: float = 0.0,
        request: ParkRequest | None = None,
    ) -> None:
        super().__init__(state, now)
        self.claim = claim
        self.me = claim.execution_id
        self.inbox = inbox
        self.waiter_lease = waiter_lease
        self.request = request
        self.holds = self.passes = False
        self.was_parked = self.me in state.parked
        self.limits = dict(zip(claim.names, claim.limits, strict=True))
        self.locks = [self.lock(name) for name in claim.names]

    def answer(self) -> Answer | Parked | Full:
        found = self._answer()
        # Only now: what this execution has left must be free to others, and what it has acquired
        # must not.
        self.promote_others()
        return found

    def _answer(self) -> Answer | Parked | Full:
        refused = self._refusal()
        if refused is not None:
            return refused
        # Only now: a refused attempt must not leave a place behind.
        for lock in self.locks:
            lock.claim_kept(self.me, self.limits[lock.name])
        self._take_over_places()
        ahead = {lock.name: self.promote(lock, self.me) for lock in self.locks}
        joined, blocked = self._sort_out(ahead)
        if blocked is not None:
            waits = self.waiter_lease > 0 or self.request is not None
            barred = {lock: self.limits[lock.name] for lock in joined if joined[lock] is None}
            path, line = self.deadlock(self.claim, barred) if waits else ((), None)
            if line is not None:
                self._ask_again(line)
            elif path:
                self._leave_other_places({})
                return Deadlocked(path)
            else:
                self._pass(ahead, {lock.name: fence for lock, fence in joined.items()})
            if self.passes:
                joined, blocked = self._sort_out(ahead)
            if blocked is not None and not waits:
                return self._busy(blocked)
        if blocked is None:
            self._leave_other_places({})
            return self._held(joined)
        wanted = self._missing()
        if self.request is not None:
            return self._full(wanted) or self._park(wanted, blocked)
        return self._wait(wanted, blocked)

    def _ask_again(self, line: _Lock) -> None:
        """Let all ask once more whom others can wait for, though their turns have not come: they
        are told then. Without the one whose turn it is they would wait for each other all the
        same."""
        for place in list(line.queue.values()):
            if place.request is not None and place.claim.stuck:
                self.send(place)

    def _pass(self, ahead: dict[str, bool], joins: Mapping[str, int | None]) -> None:
        """Who waits for a hold that cannot end before this execution has the lock would wait for
        ever ahead of it. So does, perhaps, who waits for a permit that it may join: whose that is
        can wait for it. In a line nobody is passed: what those ahead wait for, this execution would
        wait for next."""
        can_pass = (self.claim.stuck or any(joins.values())) and not self.locks[0].is_line
        for lock in self.locks if can_pass else ():
            limit = self.limits[lock.name]
            if ahead[lock.name] and self.is_behind_itself(self.claim, lock, limit, joins):
                ahead[lock.name], self.passes = False, True

    def _wait(self, wanted: dict[str, int], blocked: _Lock) -> Queued:
        self._leave_other_places(wanted)
        self._enqueue(self._place(wanted), before_all=self.passes)
        return Queued(blocked.rank(self.me), self.next_lapse(blocked))

    def _refusal(self) -> Answer | Parked | None:
        """The answer to an execution, or an attempt, that must not go on."""
        past = self.past(self.me)
        if past.over:
            self.withdraw(self.me)  # its parked message has no purpose any more
        if past.over or self.claim.attempt_id in past.attempts:
            return Ended(past.replaced, past.retried)
        other = self._other_attempt()
        if other is None:
            return self._refusal_of_a_late_copy()
        left, label, holds = other
        if holds and self.request is not None:
            self._leave_other_places(self.limits)
            return self._park(self.limits, self.locks[0], before_all=True)
        return OtherAttempt(left, label)

    def _refusal_of_a_late_copy(self) -> Conflict | Parked | None:
        """If this very attempt has parked its message, and the message has not come back since,
        what asks now is a late copy of the attempt's command. It must acquire nothing, as nobody
        hears the answer."""
        mine = self.claim.attempt_id
        for lock in self.locks:
            place = lock.queue.get(self.me)
            if place and place.parked and place.claim.attempt_id == mine and not place.arrived:
                return self._busy(lock) if self.request is None else self._parked_before(lock)
        return None

    def _parked_before(self, at: _Lock) -> Parked:
        """The answer is given again: it was lost, perhaps."""
        for lock in self.locks:
            self.promote(lock)
        return Parked(at.rank(self.me) if self.me in at.queue else 0)

    def _other_attempt(self) -> tuple[float, str, bool] | None:
        """Another live attempt of this execution: for how many seconds it lives, its label, and
        whether it holds the lock rather than waits."""
        mine, found = self.claim.attempt_id, None
        for lock in self.locks:
            hold, place = lock.holds.get(self.me), lock.queue.get(self.me)
            if hold and hold.attempt_id not in (mine, KEPT) and found is None:
                found = hold.expiry - self.now, hold.label, True
            waits = place is not None and not place.parked and place.expiry > self.now
            if place is not None and waits and place.claim.attempt_id != mine:
                return place.expiry - self.now, place.claim.label, False
        return found

    def _take_over_places(self) -> None:
        """Give this attempt the place of an attempt that died, or of its message that has arrived,
        before dead places are removed from the queue."""
        claim = self.claim
        # If this attempt holds the lock already, a parked message is a copy of its own.
        self.holds = any(lock.has(self.me) for lock in self.locks)
        parked = self.state.parked.get(self.me)
        if parked and not self._is_in_line(parked) and not self._is_for_this(parked):
            self._leaving = self.me
        asks = self.waiter_lease > 0 or self.request is not None
        for lock in self.locks:
            place = lock.queue.get(self.me)
            if place is None or not self._is_for_this(place):
                continue
            is_its_message = place.claim.attempt_id != claim.attempt_id
            if is_its_message if place.parked else asks and place.expiry <= self.now:
                place.claim = claim._replace(stuck=place.claim.stuck)
                place.inbox = self.inbox
                # The declaration of the task can have changed since: the limits are those of this
                # attempt.
                place.limits = self._missing()
                if not place.awaited:
                    place.life = self.waiter_lease or claim.lease
                    place.expiry = self.now + place.life
                # The attempt that comes with a message is another than the one that parked it.
                place.arrived = place.parked

    def _is_in_line(self, place: _Place) -> bool:
        """Whether the place or this claim is in a line: an execution can have a place in a line and
        another in the queue of a lock."""
        return self.locks[0].is_line or any(lock.is_line for lock in self.wanted(place))

    def _missing(self) -> dict[str, int]:
        """The locks that this attempt does not hold, with the limit of each."""
        return {lock.name: self.limits[lock.name] for lock in self.locks if not lock.has(self.me)}

    def _is_for_this(self, place: _Place) -> bool:
        """Whether a place is for the locks that this attempt wants: a callable can name others than
        before, and so can a deploy."""
        return list(place.limits) == list(self._missing())

    def _sort_out(self, ahead: Mapping[str, bool]) -> tuple[dict[_Lock, int | None], _Lock | None]:
        """The locks that this attempt does not hold, with the permits that it may join there now;
        and the first lock that is not free. `ahead`: where somebody is ahead in the queue."""
        joined: dict[_Lock, int | None] = {}
        blocked: _Lock | None = None
        # Only now: what the queues let in can hold any of these locks, or be this execution.
        for name, limit in self._missing().items():
            lock = self.lock(name)
            joined[lock] = self.permit_of(lock, self.claim, limit)
            is_free = not ahead[name] and not lock.is_full(limit, self._ahead[name].promised)
            if joined[lock] is None and not is_free:
                blocked = blocked or lock
        return joined, blocked

    def _held(self, joined: dict[_Lock, int | None]) -> Held:
        new = None
        for lock, fence in joined.items():
            if fence is None and self.limits[lock.name] == SHARED:
                fence = lock.readers
            if fence is None:
                fence = new = new or self.next_fence()
            self._hold(lock, fence)
        fences, reentered = [], []
        for lock in self.locks:
            hold = lock.holds[self.me]
            # A repeated command renews the lease: this answer promises the whole of it.
            hold.expiry = max(hold.expiry, self.now + self.claim.lease)
            fences.append(hold.fence)
            reentered.append(self.is_reentered(lock, self.claim))
        return Held(tuple(fences), tuple(reentered), resumed=self.was_parked)

    def _hold(self, lock: _Lock, fence: int) -> None:
        expiry, shared = self.now + self.claim.lease, self.limits[lock.name] == SHARED
        before = lock.holds.get(self.me)
        if before is not None and before.attempt_id == self.claim.attempt_id:
            # A copy must not shorten what the client has extended since: a dedup marker, by the
            # sender of the call.
            expiry = max(expiry, before.expiry)
        lock.write(self.me, _hold_of(self.claim, self.inbox, fence, expiry, shared))

    def _busy(self, lock: _Lock) -> Conflict:
        is_parked, waiting = self.me in lock.messages, len(lock.queue)
        if not lock.holds:
            return Conflict(lock.name, 0.0, 0, "", "", waiting, is_parked)
        oldest = lock.holds[min(lock.holds, key=lambda each: (lock.holds[each].fence, each))]
        return Conflict(
            lock.name,
            oldest.expiry - self.now,
            oldest.fence,
            oldest.owner,
            oldest.label,
            waiting,
            is_parked,
            shared=oldest.shared,
            outranked=oldest.shared and self.limits[lock.name] == SHARED,
            kept=oldest.attempt_id == KEPT,
        )

    def _leave_other_places(self, wanted: dict[str, int]) -> None:
        """Leave the places for another set of locks than the wanted one, with the messages parked
        there. The copy of an execution that holds the lock stays, unless the execution has to wait
        again."""
        for place in (self.state.parked.get(self.me), *(x.queue.get(self.me) for x in self.locks)):
            if place is None or list(place.limits) == list(wanted):
                continue
            if self._is_in_line(place):
                continue
            if not (place.parked and self.holds and not wanted):
                self.leave(place)
                self._to_promote.append(self.wanted(place)[0])

    def _place(self, wanted: dict[str, int]) -> _Place:
        life = self.waiter_lease or self.claim.lease
        return _Place(self.claim, self.inbox, dict(wanted), life, self.now + life)

    def _enqueue(self, place: _Place, before_all: bool = False) -> None:
        """Enter a place into the queues of all its locks at once. So the order is the same in all
        queues, and two executions that want the same locks cannot wait for each other. An execution
        that is in a queue already keeps its turn."""
        # An older parked message can be for another broker, or its patience can be over.
        if before := self.state.parked.get(self.me):
            self.unpark(before)
        for lock in self.wanted(place):
            if lock.is_line and (self.me in lock.queue or not before_all):
                self._enqueue_in_line(lock, place)
            elif before_all and self.me not in lock.queue:
                lock.queue = {self.me: place, **lock.queue}
            else:
                lock.queue[self.me] = place

    def _enqueue_in_line(self, lock: _Lock, place: _Place) -> None:
        """Enter an execution whose message has come into a line: at the place reserved for it, or
        at a new place in front of those that are due later."""
        before = lock.queue.get(self.me)
        if before is not None:
            place.in_line, place.ticket = before.in_line, before.ticket
            if before.in_line is not None:
                self.state.sent[self.me] = self.state.sent_of[before.in_line.call.task] = place
            lock.queue[self.me] = place
        else:
            _put(lock, place, self.next_fence())

    def _full(self, wanted: dict[str, int]) -> Full | None:
        """Where there is no room for another message: at one of these locks, or in all."""
        request, state, found = self.request, self.state, None
        assert request is not None
        for lock in map(self.lock, wanted):
            if len(lock.messages) >= request.most and self.me not in lock.messages:
                found = found or Full(lock.name, len(lock.messages))
        size = state.parked_bytes + len(request.message.encode())
        is_over = len(state.parked) >= request.most_in_all or size > request.most_bytes
        if found is None and is_over and self.me not in state.parked:
            found = Full("", len(state.parked), state.parked_bytes)
        self._leave_other_places(wanted if found is None else {})
        return found

    def _park(self, wanted: dict[str, int], at: _Lock, before_all: bool = False) -> Parked:
        """Park the message. A parked execution has no process, so it joins no permit before all its
        locks are free. A copy of an execution that holds the lock stands before all waiters."""
        request, state = self.request, self.state
        assert request is not None
        place = self._place(wanted)
        self._enqueue(place, before_all=before_all or self.passes)
        place.request = request
        state.parked[self.me], state.of_task[request.task] = place, self.me
        state.parked_bytes += len(request.message.encode())
        if request.patience is not None:
            state.resume_at[self.me] = self.now + max(request.patience, 0.0)
        for lock in self.wanted(place):
            self.schedule(lock)
        return Parked(at.rank(self.me))

    def debounce(self, call: Debounce) -> Parked | Burst | Full | None:
        """Park the message of a debounced call: it replaces the message of its burst, or begins a
        new burst. The caller of a refused one goes on with another: no copy is merged later."""
        past = self.past(call.call_id)
        if past not in (_NOTHING, _REFUSED):
            return Parked(0)  # a repetition
        answer = self._merge(call, was_refused=past.refused)
        past = _OVER if isinstance(answer, Parked) else _REFUSED
        self.remember(call.call_id, past, REMEMBER_CALL)
        return answer

    def _merge(self, call: Debounce, was_refused: bool) -> Parked | Burst | Full | None:
        (lock,), now, place = self.locks, self.now, _open_burst(self.locks[0])
        if place is None and (call.burst is not None or was_refused):
            return None
        if place is not None:
            is_last = not call.exactly or (
                call.burst and place.claim.attempt_id == call.burst.call_id
            )
            if call.burst is None or place.execution_id != self.me or not is_last:
                return _told(place, call.exactly)
        if full := self._full(self.limits):
            return full
        # Without the pause the burst is over, and only waits for a process that can publish it.
        pause = lock.holds.get(PAUSE)
        if pause is not None or place is None:
            fence = pause.fence if pause is not None and place is not None else self.next_fence()
            first = now if place is None else fence / 1e6
            expiry = min(now + call.pause, first + call.most)
            lock.write(PAUSE, _Hold(KEPT, PAUSE, fence, expiry, "-", "a burst of calls", False))
        self._park(self.limits, lock)
        lock.queue[self.me].call = call.task_id if place is None else place.call
        if place is None and self.request is not None:
            self.tell("parked", Notice("parked", self.me, self.request.home))
        elif pause is None:
            self.state.look_at[lock.name] = now
        return Parked(0)


_C = TypeVar("_C", bound=_Command)


class MemoryBackend:
    """Locks in the memory of this process; see `engine.protocol.Backend`. A forked child does not
    share them: each verb raises LockConfigError there.

    Args:
        clock: returns seconds since the epoch, and is never set back.
    """

    replicated = False

    def __init__(self, clock: Callable[[], float] = _now) -> None:
        self.id = ids.new_id()
        self.clock = clock
        self.state = _State()
        self._pid = os.getpid()

    def clear(self) -> None:
        """Forget every lock. Listeners stay. A forked child makes the backend its own."""
        with _guard.lock:
            kept = _State(fence=self.state.fence)
            if self._pid == os.getpid():
                kept.ears = self.state.ears
            self.state, self._pid = kept, os.getpid()

    def route(self, names: Sequence[str]) -> object:
        return None

    def acquire(self, claim: Claim, waiter_lease: float = 0.0, inbox: str = "-") -> Answer:
        with self._executes(_Acquire, claim, inbox, waiter_lease) as command:
            answer = command.answer()
            assert not isinstance(answer, Parked | Full), answer
            return answer

    def park(self, claim: Claim, park_request: ParkRequest, inbox: str = "-") -> ParkAnswer:
        with self._executes(_Acquire, claim, inbox, 0.0, park_request) as command:
            answer = command.answer()
            assert not isinstance(answer, Queued | Conflict), answer
            return answer

    def release(self, request: Release) -> Released:
        names, execution_id, attempt_id, ended, remember, homes, successor, _ = request
        successors = [] if successor is None else successor.execution_id.split()
        with self._executes(_Command, homes, f"{execution_id} {attempt_id}") as command:
            locks, had = [command.lock(name) for name in names], False
            for lock in locks:
                hold, place = lock.holds.get(execution_id), lock.queue.get(execution_id)
                held = hold if hold is not None and hold.attempt_id == attempt_id else None
                if held is not None:
                    had = True
                    del lock.holds[execution_id]
                if place is not None and _takes_back(place, attempt_id, ended):
                    had = True
                    command.leave(place)
                if held is not None and successor is not None:
                    leave_to = command.leave_place if lock.is_line else command.leave_to
                    leave_to(lock, held, execution_id, successor)
            # After all releases: a waiter for several of these locks must find all of them free.
            for lock in locks:
                command.promote(lock)
                for each in () if lock.is_line else successors:
                    # If it waits already, it was quicker: it has a hold by now.
                    if each in lock.queue:
                        command.serve_one(lock, lock.queue[each], "")
                        command.promote_others()
            if ended and (had or ended != "replaced"):
                command.remember_end(execution_id, attempt_id, ended, remember)
            return Released(had, tuple(command.messages))

    def downgrade(self, names: Sequence[str], execution_id: str, attempt_id: str) -> Downgraded:
        with self._executes(_Command) as command:
            holds: list[_Hold] = []
            for lock in map(command.lock, names):
                hold = lock.holds.get(execution_id)
                if hold is None or hold.attempt_id != attempt_id:
                    return Downgraded(False)
                if not hold.shared and len(lock.holds) > 1:
                    return Downgraded(joined=lock.name)
                holds.append(hold)
            for hold in holds:
                hold.shared = True
            for lock in map(command.lock, names):
                command.promote(lock)
            return Downgraded()

    def resume(self, homes: str, by: str, tasks: Sequence[str] = ()) -> Resumed:
        with self._executes(_Command, homes, by) as command:
            state = self.state
            for each in command.homes:
                owed = sorted(state.owed[each].items(), key=lambda item: item[::-1])
                for execution_id, _ in owed[:_MOST]:
                    # A message that is no longer on its way is found by its queue.
                    del state.owed[each][execution_id]
                    place = state.parked.get(execution_id)
                    if place is not None and command.is_on_its_way(place):
                        command.hand_out(place)
                        command.follow(place)
            for task in tasks:
                if task in state.of_task:
                    command.resume(state.of_task[task])
                elif (awaited := state.sent_of.get(task)) is not None:
                    command.withdraw(awaited.execution_id)
            command.serve_what_is_due()
            due = [*state.look_at.values(), *state.resume_at.values()]
            recheck = max(min(due) - command.now, 0.0) if due else None
            if any(state.owed[each] for each in command.homes):
                recheck = 0.0
            passed, state.passed = tuple(state.passed), []
            return Resumed(tuple(command.messages), recheck, passed)

    def place(self, request: PlaceRequest) -> int | Conflict:
        with self._executes(_Command) as command:
            lock, me = command.lock(request.line), request.execution_id
            if me in lock.queue:
                return lock.queue[me].ticket
            if command.past(me) != _NOTHING or me in lock.holds:
                return 0
            if request.marker is not None:
                marked = _Acquire(self.state, command.now, request.marker, "-").answer()
                if isinstance(marked, Conflict):
                    return marked
            due = max(command.now + request.delay, request.moment)
            is_later, ends = due > command.now, due + request.life
            expires = ends if request.life < _DAY else inf
            place = _awaited(_InLine(request, due if is_later else 0.0, ends, expires))
            _put(lock, place, _ticket_at(lock, due) if is_later else command.next_fence())
            self.state.sent[me] = self.state.sent_of[request.task] = place
            self.state.look_at.setdefault(lock.name, ends)
            return place.ticket

    def withdraw(self, execution_id: str, remember: float, attempt_id: str = "") -> bool:
        with self._executes(_Command) as command:
            place = self.state.parked.get(execution_id)
            # One that was handed out since may be the message that this attempt had.
            if place and not place.sent and attempt_id not in ("", place.claim.attempt_id):
                return False
            had = command.withdraw(execution_id)
            if had and remember > 0:
                command.remember(execution_id, _OVER, remember)
            return had

    def arrived(self, execution_ids: Sequence[str], seconds: float) -> None:
        with self._executes(_Command) as command:
            for each in execution_ids:
                place = self.state.parked.get(each)
                if place is not None and command.is_on_its_way(place):
                    place.back = max(place.back, command.now + seconds)

    def announce(self, channels: Sequence[str], worker: str, seconds: float) -> None:
        with self._executes(_Command) as command:
            for channel in channels:
                before = self.state.live.pop(channel, {}) | {worker: command.now + seconds}
                living = {each: until for each, until in before.items() if until > command.now}
                if living:
                    self.state.live[channel] = living

    def consumed(self, channel: str) -> bool:
        with self._executes(_Command) as command:
            return any(until > command.now for until in self.state.live.get(channel, {}).values())

    def burst(self, name: str, whole: bool) -> Burst | None:
        with self._executes(_Command) as command:
            return _told(_open_burst(command.lock(name)), whole)

    def debounce(
        self, name: str, call: Debounce, park_request: ParkRequest
    ) -> Parked | Burst | Full | None:
        burst_id = call.burst.burst_id if call.burst else call.call_id
        claim = Claim(burst_id, call.call_id, burst_id, (name,), (1,), call.pause, label=call.label)
        with self._executes(_Acquire, claim, "-", 0.0, park_request) as command:
            return command.debounce(call)

    def renew(
        self, renewals: Sequence[Renewal], *, within: float | None = None, once: bool = False
    ) -> list[bool]:
        with self._executes(_Command) as command:
            return [command.renew(each) for each in renewals]

    def heartbeat(
        self, renewals: Sequence[Renewal], *, within: float | None = None
    ) -> list[Held | Queued | None]:
        with self._executes(_Command) as command:
            # Keep all places before any head gets in: else a head of this very call could look
            # dead. Answer last: an execution that wants several locks gets all of them at the last.
            pairs = [(each, command.keep_place(each)) for each in renewals]
            for beat, place in pairs:
                if place is not None:
                    command.get_in(command.lock(beat.name), place)
            return [command.beat_answer(*pair) for pair in pairs]

    def inspect(self, name: str, only: Sequence[str] = (), most: int = MOST_INSPECTED) -> LockState:
        with self._executes(_Command) as command:
            now, lock = command.now, command.lock(name)
            holds = [
                HoldInfo(each, h.expiry - now, h.fence, h.attempt_id, h.owner, h.label, h.shared)
                for each, h in lock.holds.items()
                if not only or each in only
            ]
            holds.sort(key=lambda hold: (hold.fence, hold.execution_id))
            return LockState(tuple(holds if only else holds[:most]), len(lock.queue))

    def waiting(self, name: str) -> int:
        """How many executions wait for a lock, or have come and wait in its order."""
        with self._executes(_Command) as command:
            return len(command.lock(name).queue) + len(command.lock(LINE + name).messages)

    def force_release(self, name: str, execution_id: str = "") -> tuple[HoldInfo, ...]:
        with self._executes(_Command) as command:
            lock, released = command.lock(name), []
            for each, hold in list(lock.holds.items()):
                if execution_id in ("", each):
                    del lock.holds[each]
                    command.tell(hold.inbox, Notice("lost", each, hold.attempt_id))
                    released.append(HoldInfo(each, 0.0, hold.fence, "", hold.owner, hold.label))
                    command.leave_line(lock, each)
            head = next(iter(lock.queue), "")
            is_meant = execution_id == head or (not execution_id and _is_waited_for(lock, head))
            if is_meant and not released and not lock.holds:
                place = command.leave_line(lock, head)
                if place is not None:
                    released.append(HoldInfo(head, 0.0, place.ticket, "", KEPT, place.claim.label))
            command.promote(lock)
            return tuple(released)

    def listen(self, inbox: str, listener: Listener) -> None:
        with self.ear(inbox) as ear:
            listener.ready()
            while listener.wanted():
                ear.bell.wait(STILL_WANTED)
                ear.bell.clear()
                while ear.heard:
                    listener.hear(ear.heard.popleft())

    @contextmanager
    def ear(self, inbox: str) -> Iterator[_Ear]:
        """A listener of an inbox, while the block lasts."""
        self._check_process()
        all_ears, made = self.state.ears, _Ear()
        with _guard.lock:
            all_ears[inbox].append(made)
        try:
            yield made
        finally:
            with _guard.lock:
                all_ears[inbox].remove(made)
                if not all_ears[inbox]:
                    del all_ears[inbox]

    @contextmanager
    def _executes(self, kind: Callable[..., _C], *args: Any) -> Iterator[_C]:
        self._check_process()
        # A signal handler's command runs in the middle of another one of its thread, which may
        # have opened a lock that is idle yet, and goes on to write to it.
        inner = _guard.entered()
        with _guard.lock:
            command = kind(self.state, self.clock(), *args)
            try:
                yield command
            finally:
                if not inner:
                    command.tidy()

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise LockConfigError(
                "relock_url='memory://' keeps the locks in the memory of one process, and this "
                f"process ({os.getpid()}) was forked from it ({self._pid}): a lock held here "
                "would exclude nobody there. Let tests use the threads or the solo pool, or a "
                "Redis. For Django's test --parallel give the test classes "
                '@override_settings(CELERY_RELOCK_NAMESPACE="tests")'
            )


def _awaited(in_line: _InLine) -> _Place:
    """The place of a call whose message is to come."""
    call = in_line.call
    claim = Claim(call.execution_id, KEPT, KEPT, (call.line,), (1,), 0.0, call.label)
    return _Place(claim, "-", {call.line: 1}, 0.0, 0.0, in_line=in_line)


def _hold_of(claim: Claim, inbox: str, fence: int, expiry: float, shared: bool) -> _Hold:
    """What an attempt gets of one of its locks."""
    return _Hold(claim.attempt_id, claim.owner, fence, expiry, inbox, claim.label, shared)


def _ticket_at(lock: _Lock, due: float) -> int:
    """The next ticket behind all calls that are due in the same millisecond, into which a thousand
    fit."""
    ticket = int(due * 1000) * 1000
    while True:
        in_it = range(ticket, ticket + 1000)
        taken = (each.ticket for each in lock.queue.values() if each.ticket in in_it)
        if (following := max(taken, default=ticket - 1) + 1) in in_it:
            return following
        ticket += 1000


def _put(lock: _Lock, place: _Place, ticket: int) -> None:
    """Enter a place into a line, in the order of the tickets."""
    place.ticket = ticket
    by_ticket = {**lock.queue, place.execution_id: place}
    lock.queue = dict(sorted(by_ticket.items(), key=lambda item: item[1].ticket))


def _is_waited_for(lock: _Lock, execution_id: str) -> bool:
    """Whether the first place of a line keeps somebody waiting. If not, the broker can simply be
    behind."""
    place = lock.queue.get(execution_id)
    return place is not None and (place.turn is not None or bool(lock.messages))


def _takes_back(place: _Place, attempt_id: str, ended: str) -> bool:
    """Whether a release also removes a place. A parked message outlives the attempt for which it
    was resumed. It goes with the attempt that parked it and heard no answer, unless that attempt
    was killed; and with the end of its execution, of which it is a copy, unless that is not
    acknowledged: then it asks. The place of a call whose message is awaited belongs to no attempt.
    """
    if not place.parked:
        return place.claim.attempt_id == attempt_id
    if attempt_id == KEPT and place.awaited:
        return True
    parked_it = place.claim.attempt_id == attempt_id and not place.arrived
    if ended == "unacknowledged":
        return parked_it or place.awaited is not None
    return (parked_it and ended not in ("killed", "parked")) or ended in _FOR_GOOD


def _open_burst(lock: _Lock) -> _Place | None:
    """The burst whose message was not handed out yet."""
    last = next(reversed(lock.queue.values()), None)
    return last if last is not None and last.parked and not last.sent else None


def _told(place: _Place | None, whole: bool) -> Burst | None:
    if place is None or place.request is None:
        return None
    message = place.request.message if whole else ""
    return Burst(place.execution_id, place.claim.attempt_id, place.call, message)
