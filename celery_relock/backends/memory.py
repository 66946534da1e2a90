"""The backend in the memory of this process, for tests; and the rules of the scripts in `lua/`,
written down in Python: without keys, lifetimes of keys, indexes, replies that get lost, or a clock
that is set back.

State: a lock is its live holds and its queue. A *permit* is all holds with one fencing token. A
*place* is where an execution stands in the queues of all the locks that it wants; it waits in a
process, which sends heartbeats, or it is *parked*: its message is kept here.

    _Command    one verb from its look at the clock to its answer: holds, turns, parked messages
    _Acquire    the verb that decides: refuse, join, hold, wait or park
    MemoryBackend   the verbs (`engine.protocol.Backend`), one after another under one mutex
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from threading import Event
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ..engine import ids, platform
from ..engine.platform import Guard
from ..engine.protocol import (
    COMES_AGAIN,
    COOLDOWN,
    DEBOUNCE,
    KEPT,
    LINE,
    PAUSE,
    SHARED,
    Answer,
    Burst,
    Claim,
    Conflict,
    Deadlocked,
    Debounce,
    Downgraded,
    Duplicate,
    Ended,
    Full,
    Held,
    HoldInfo,
    LockState,
    Message,
    Notice,
    Parked,
    ParkRequest,
    Passed,
    PlaceRequest,
    Queued,
    Released,
    Renewal,
    Resumed,
    Successor,
    WaiterInfo,
)
from ..errors import LockConfigError

# Seconds, as in `lua/lib/parked.lua`. A message that was handed out counts as on its way for _TRIP,
# each further time for twice as long, up to _LONGEST. It holds up those who wait in a process for
# _TRIP, and those who are parked for _OVERDUE. Somebody looks at a lock where somebody is parked
# every _LOOK.
_TRIP, _LONGEST, _OVERDUE, _LOOK = 5.0, 600.0, 60.0, 10.0
_DAY = 86_400.0
# No reply has more messages than this; the others are owed.
_MOST = 100
# For how long a repeated debounced call is known, in seconds.
_REPEATED = 60.0
# How often a listener looks whether it is still wanted, in seconds.
_STILL_WANTED = 2.0

_guard = Guard()
_started = time.time() - time.monotonic()


def _now() -> float:
    """Seconds since the epoch, by a clock that is never set back."""
    return _started + time.monotonic()


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
class _Place:
    """Where an execution stands in the queues of all its locks.

    Attributes:
        limits: the locks that it wants, and for each how many permits it takes for full, or
            `SHARED`.
        lease: of the hold that it is to get.
        life, expiry: how long the place lives without a heartbeat, and when it ends; for a place
            that is not parked.
        stuck: the executions whose holds cannot end before this one has its locks.
        request: the parked message; None for a place that waits in a process.
        arrived: the message came back too early, and its attempt has this place now.
        first, back: when the message was first handed out, and until when it is on its way.
        sent, by: how often it was handed out, and by which command last.
        untold: it was not handed out yet, and is owed to a process that can publish it.
        call: the task id of a burst of debounced calls.
        ordered: in a line, the call whose place it is; its `ticket`, and when its `turn` came while
            its message was awaited.
    """

    execution_id: str
    attempt_id: str
    owner: str
    inbox: str
    label: str
    by_owner: bool
    limits: dict[str, int]
    lease: float
    life: float
    expiry: float
    stuck: tuple[str, ...] = ()
    ancestors: tuple[str, ...] = ()
    request: ParkRequest | None = None
    arrived: bool = False
    first: float | None = None
    back: float = 0.0
    sent: int = 0
    by: str | None = None
    untold: bool = False
    call: str = ""
    ordered: PlaceRequest | None = None
    due: float = 0.0
    ticket: int = 0
    turn: float | None = None

    @property
    def parked(self) -> bool:
        """Whether a message is to come: it is kept here, or was sent and is awaited."""
        return self.request is not None or self.awaited

    @property
    def awaited(self) -> bool:
        return self.ordered is not None and self.request is None and self.life == 0


@dataclass(slots=True, eq=False)
class _Lock:
    """`holds` by execution; `queue` by execution, in the order of the turns; `messages`: who of
    them is parked."""

    name: str
    holds: dict[str, _Hold] = field(default_factory=dict)
    queue: dict[str, _Place] = field(default_factory=dict)
    messages: set[str] = field(default_factory=set)

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
        """The token of the permit of all who share the lock, which has no other permit then."""
        any_hold = next(iter(self.holds.values()), None)
        return any_hold.fence if any_hold is not None and any_hold.shared else None

    def is_full(self, limit: int, promised: _Promised | None = None) -> bool:
        """Whether a claim with this limit has to wait, while those ahead are about to need these
        permits."""
        promised = promised or _NOTHING
        if limit == SHARED:
            return bool(promised.exclusive or (self.permits and not self.readers))
        is_shared = promised.shared > 0 or self.readers is not None
        return is_shared or self.permits + promised.exclusive >= limit

    def hold(
        self, execution_id: str, attempt_id: str, owner: str, fence: int, expiry: float,
        inbox: str, label: str, shared: bool,
    ) -> None:  # fmt: skip
        """Write a hold. Who joins a permit takes over its mode: a shared claim that re-enters is
        as exclusive as its caller."""
        if any(each.fence == fence for each in self.holds.values()):
            shared = shared and self.readers is not None
        of = attempt_id, owner, fence, expiry, inbox, label, shared
        self.holds[execution_id] = _Hold(*of)

    def kept(self, execution_id: str) -> _Hold | None:
        """The hold that is kept for an execution which is still to come."""
        hold = self.holds.get(execution_id)
        return hold if hold is not None and hold.attempt_id == KEPT else None

    def claim_kept(self, execution_id: str, limit: int) -> None:
        """What is kept for an execution may be shared, while it comes to be alone: then nobody else
        shares the permit, which becomes its own, or it would wait for its own hold."""
        kept = self.kept(execution_id)
        if kept is None or not kept.shared or limit == SHARED:
            return
        if len(self.holds) > 1:
            del self.holds[execution_id]
        else:
            kept.shared = False

    def has(self, execution_id: str) -> bool:
        """Whether an execution holds the lock; a hold that is kept for it does not count."""
        return execution_id in self.holds and self.kept(execution_id) is None

    def rank(self, execution_id: str) -> int:
        return list(self.queue).index(execution_id)


class _Promised(NamedTuple):
    """How many permits messages on their way will need."""

    exclusive: int = 0
    shared: int = 0

    def __add__(self, other: tuple[Any, ...]) -> _Promised:
        return _Promised(*map(sum, zip(self, other, strict=True)))


_NOTHING = _Promised()


@dataclass(slots=True)
class _Ahead:
    """What a look along a queue has found: permits that messages on their way will need
    (`promised`), those that will be here soon and how many are late, and when to look again."""

    promised: _Promised = _NOTHING
    soon: _Promised = _NOTHING
    late: int = 0
    look: float = float("inf")


# Kind, execution, attempt, and a fencing token for each lock, as in a `Notice`.
_Words: TypeAlias = tuple[str, str, str, tuple[int, ...]]


class _Ear:
    """A listener of an inbox."""

    __slots__ = ("bell", "heard")

    def __init__(self) -> None:
        self.heard: deque[_Words] = deque()
        self.bell = Event()


@dataclass(slots=True)
class _State:
    """All that is kept.

    Attributes:
        parked: the places of parked executions; `of_task` the one parked last of each task.
        due: when to look at a lock ("l", name), and when to resume an execution ("r", id).
        owed: by home, the executions whose turn came when nobody was there to send, and since when.
        ended: how an execution ended ("*", or the attempts that did), and until when that is known.
        live: by channel, the workers that consume it, and until when they count.
        sent: the places in lines, by execution, and by the task with a `#` before it.
        passed: calls that were passed over, and of which nobody has told yet.
        parked_bytes: the size of all parked messages.
    """

    locks: dict[str, _Lock] = field(default_factory=dict)
    parked: dict[str, _Place] = field(default_factory=dict)
    of_task: dict[str, str] = field(default_factory=dict)
    due: dict[tuple[str, str], float] = field(default_factory=dict)
    owed: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    ended: dict[str, tuple[str, float]] = field(default_factory=dict)
    live: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    ears: dict[str, list[_Ear]] = field(default_factory=lambda: defaultdict(list))
    sent: dict[str, _Place] = field(default_factory=dict)
    passed: list[Passed] = field(default_factory=list)
    fence: int = 0
    parked_bytes: int = 0


class _Search(NamedTuple):
    """For a deadlock: who waits so that a hold can end, the holds of the execution that asks, and
    the holds that were looked at."""

    waits: Mapping[str, Iterable[_Place]]
    mine: frozenset[str]
    seen: set[str]


class _Command:
    """One verb. `homes` are the brokers that the caller can send to, `by` is its name for what it
    was given: sent again, it is given the same."""

    def __init__(self, state: _State, now: float, homes: str = "", by: str = "") -> None:
        self.state = state
        self.now = now
        self.homes = homes.split()
        self.by = by
        self.messages: list[Message] = []
        self._given: set[str] = set()
        self._untold: list[_Place] = []
        self._opened: dict[str, _Lock] = {}
        self._ahead: dict[str, _Ahead] = {}

    # --- holds ------------------------------------------------------------------------------------

    def lock(self, name: str) -> _Lock:
        """A lock, without the holds whose leases have ended: nobody needs to have noticed."""
        if name not in self._opened:
            lock = self._opened[name] = self.state.locks.setdefault(name, _Lock(name))
            for execution_id, hold in list(lock.holds.items()):
                if hold.expiry <= self.now:
                    del lock.holds[execution_id]
        return self._opened[name]

    def tidy(self) -> None:
        """Of an idle lock nothing is left."""
        for name, lock in self._opened.items():
            if not lock.holds and not lock.queue:
                self.state.locks.pop(name, None)

    def next_fence(self) -> int:
        self.state.fence = max(self.state.fence + 1, int(self.now * 1e6))
        return self.state.fence

    def permit_of(
        self, lock: _Lock, execution_id: str, asks: Claim | _Place, limit: int
    ) -> int | None:
        """The token of the newest permit that an execution may join without waiting. A shared
        permit becomes nobody's own: the others in it rely on what they read."""
        fence = self._of_kin(lock, execution_id, asks)
        return None if limit != SHARED and lock.readers else fence

    def is_reentered(self, lock: _Lock, execution_id: str, asks: Claim) -> bool:
        """Whether a holder came in by its kin. True for a repeat of the command as well."""
        hold = lock.holds[execution_id]
        if not hold.shared:
            return sum(each.fence == hold.fence for each in lock.holds.values()) > 1
        return self._of_kin(lock, execution_id, asks) is not None

    def _of_kin(self, lock: _Lock, execution_id: str, asks: Claim | _Place) -> int | None:
        """The permit that is kept for it, or else the newest one of its owner, or of an ancestor
        which has a live hold and the same owner."""
        if kept := lock.kept(execution_id):
            return kept.fence
        among = [*lock.holds] if asks.by_owner else [*asks.ancestors]
        among = [each for each in among if each != execution_id and each in lock.holds]
        holds = map(lock.holds.__getitem__, among)
        return max((hold.fence for hold in holds if hold.owner == asks.owner), default=None)

    def next_lapse(self, lock: _Lock) -> float:
        """In how many seconds the next lease ends; 0 if none does."""
        return min((hold.expiry - self.now for hold in lock.holds.values()), default=0.0)

    def ended(self, execution_id: str) -> str:
        """How an execution has ended: "*", or " attempt attempt … "; "" if nothing is known."""
        how, until = self.state.ended.get(execution_id, ("", 0.0))
        return how if until > self.now else ""

    def remember(self, execution_id: str, how: str, seconds: float) -> None:
        ended = self.state.ended
        ended.pop(execution_id, None)
        ended[execution_id] = how, self.now + seconds
        for oldest in list(islice(ended, 3)):  # so that it does not grow without end
            if ended[oldest][1] <= self.now:
                del ended[oldest]

    # --- places -----------------------------------------------------------------------------------

    def wanted(self, place: _Place) -> list[_Lock]:
        return [self.lock(name) for name in place.limits]

    def is_gone(self, place: _Place) -> bool:
        return not place.parked and place.expiry <= self.now

    def leave(self, place: _Place) -> None:
        """Out of all its queues; its message goes, too."""
        self.unpark(place)
        for lock in self.wanted(place):
            if lock.queue.get(place.execution_id) is place:
                del lock.queue[place.execution_id]
            if lock.is_line and not lock.queue:
                self.state.due.pop(("l", lock.name), None)
        if place.ordered is not None:
            for key in (place.execution_id, "#" + place.ordered.task):
                if self.state.sent.get(key) is place:
                    del self.state.sent[key]

    def unpark(self, place: _Place) -> None:
        """The message goes, the place stays."""
        request, execution_id, state = place.request, place.execution_id, self.state
        if request is None:
            return
        place.request = None
        for lock in self.wanted(place):
            lock.messages.discard(execution_id)
            if not lock.messages:
                state.due.pop(("l", lock.name), None)
        del state.parked[execution_id]
        state.parked_bytes -= len(request.message.encode())
        # Another execution of the task may be parked by now: a retry, while a copy still lies here.
        if state.of_task.get(request.task) == execution_id:
            del state.of_task[request.task]
        state.due.pop(("r", execution_id), None)
        state.owed[request.home].pop(execution_id, None)

    def stands_behind_itself(self, place: _Place) -> bool:
        """Whether a parked message is a copy of an execution that holds the lock: its turn comes if
        that one dies."""
        return place.parked and any(lock.has(place.execution_id) for lock in self.wanted(place))

    def withdraw(self, execution_id: str) -> bool:
        """A parked execution leaves for good, and those behind move up."""
        place = self.state.parked.get(execution_id) or self.state.sent.get(execution_id)
        if place is None:
            return False
        self.leave(place)
        for lock in self.wanted(place):
            if lock.is_burst and not lock.queue:
                lock.holds.pop(PAUSE, None)  # nobody is left for whom it was
            self.promote(lock)
        return True

    # --- parked messages --------------------------------------------------------------------------

    def is_on_its_way(self, place: _Place) -> bool:
        return place.parked and place.back > self.now

    def promise(self, lock: _Lock, place: _Place) -> _Promised:
        """How many permits a message on its way will need: one or none."""
        limit, is_early = place.limits[lock.name], False
        if place.first is not None:
            is_early = self.now - place.first < _OVERDUE
            # Older arguments after newer ones: never, as long as somebody can send them.
            is_early = is_early or (lock.is_burst and not place.untold)
        if not is_early or self.permit_of(lock, place.execution_id, place, limit) is not None:
            return _NOTHING
        return _Promised(shared=1) if limit == SHARED else _Promised(exclusive=1)

    def can_send(self, place: _Place) -> bool:
        has_room = len(self.messages) < _MOST
        return has_room and place.request is not None and place.request.home in self.homes

    def is_owed(self, place: _Place) -> bool:
        """Whether a message on its way is this caller's all the same: the reply to its command was
        lost, or nobody could send the message so far."""
        is_here = place.request is not None and place.request.home in self.homes
        mine = place.by == self.by or (place.untold and is_here)
        return mine and place.execution_id not in self._given

    def hand_out(self, place: _Place) -> None:
        """To the caller if it can publish the message, or else to a process that can, which is
        called. The message stays until its execution has the lock: its publisher may die."""
        request, execution_id = place.request, place.execution_id
        assert request is not None
        place.first = self.now if place.first is None else place.first
        if self.can_send(place):
            place.sent += 1
            place.by, place.untold = self.by, False
            self.state.owed[request.home].pop(execution_id, None)
            self._given.add(execution_id)
            self.messages.append(Message(execution_id, next(iter(place.limits)), request.message))
        else:
            place.untold = True
            self.state.owed[request.home].setdefault(execution_id, self.now)
            self.tell("parked", ("parked", execution_id, request.home, ()))
            self._untold.append(place)
        # A burst is no task that may run for long: if nobody says that it was sent, the broker is
        # away.
        is_burst = next(iter(place.limits)).startswith(DEBOUNCE)
        longest = 2 * _TRIP if is_burst else _LONGEST
        place.back = self.now + min(_TRIP * 2 ** max(place.sent - 1, 0), longest)

    def settle(self, homes: str) -> None:
        """What this command owes to those who can send to these homes, its caller gets."""
        self.homes = homes.split()
        for place in self._untold:
            if self.can_send(place) and place.execution_id not in self._given:
                self.hand_out(place)

    def may_look_behind(self, lock: _Lock, place: _Place, caller: str) -> bool:
        """Whether those behind a parked place may be looked at: its message is on its way."""
        if self.stands_behind_itself(place):
            return True
        if place.execution_id == caller or not self.is_on_its_way(place):
            return False
        if self.is_owed(place):
            self.hand_out(place)
        self.count(lock, place)
        return True

    def count(self, lock: _Lock, place: _Place) -> None:
        if place.parked and place.first is not None:
            ahead, promise = self._ahead[lock.name], self.promise(lock, place)
            ahead.promised += promise
            # A late message may need the very worker slot in which somebody behind it waits, so it
            # holds up only those that are parked themselves.
            if self.now >= place.first + _TRIP:
                ahead.late += sum(promise)
            else:
                ahead.soon += promise
            ahead.look = min(ahead.look, place.back)

    def schedule(self, lock: _Lock) -> None:
        """When somebody who looks for parked messages is to look at this lock next."""
        if lock.messages:
            lapse = self.next_lapse(lock)
            soon = self.now + min(lapse + 0.001 if lapse > 0 else _LOOK, _LOOK)
            self.state.due["l", lock.name] = min(self._ahead[lock.name].look, soon)
        elif lock.is_line and lock.queue:
            soon = self.now + _DAY
            self.state.due["l", lock.name] = min(self._ahead[lock.name].look, soon)

    # --- turns ------------------------------------------------------------------------------------

    def promised_ahead(self, lock: _Lock, execution_id: str) -> _Promised | None:
        """How many permits those ahead in the queue are about to need; None if one of them lets
        nobody pass."""
        promised = _NOTHING
        for place in lock.queue.values():
            if place.execution_id == execution_id:
                return promised
            if not self.stands_behind_itself(place):
                if not self.is_on_its_way(place):
                    return None
                promised += self.promise(lock, place)
        return None

    def admission(self, place: _Place, head: _Lock | None = None) -> dict[str, int | None] | None:
        """What a place may have now: for each lock the permit to join, or None for a new one. None
        while not all of its locks are free. For a new permit, and to join those who share the
        lock, it has to be first in the queue, which the caller has seen to at the lock `head`."""
        fences: dict[str, int | None] = {}
        for lock in self.wanted(place):
            limit = place.limits[lock.name]
            fences[lock.name] = self.permit_of(lock, place.execution_id, place, limit)
            if fences[lock.name] is None:
                if lock is head:
                    ahead = self._ahead[lock.name]
                    # Who is late may be passed where the lock is free. Those who share it would
                    # come one after another.
                    waits_for_late = place.parked or (limit == SHARED and lock.readers)
                    promised: _Promised | None = ahead.promised if waits_for_late else ahead.soon
                else:
                    promised = self.promised_ahead(lock, place.execution_id)
                if promised is None or lock.is_full(limit, promised):
                    return None
                fences[lock.name] = lock.readers if limit == SHARED else None
        return fences

    def let_in(self, place: _Place, fences: dict[str, int | None], caller: str) -> bool:
        """Grant a place its locks, with their whole lease from now. False: nobody hears of it
        there, so it keeps its place. The caller needs no message: the reply tells it."""
        execution_id, limits, new = place.execution_id, place.limits, None
        for name, fence in fences.items():
            new = self.next_fence() if fence is None and new is None else new
            fences[name] = new if fence is None else fence
        told = tuple(fence for fence in fences.values() if fence is not None)
        granted = ("granted", execution_id, place.attempt_id, told)
        if execution_id != caller and not self.tell(place.inbox, granted):
            return False
        self.leave(place)
        for lock, fence in zip(self.wanted(place), told, strict=True):
            expiry = self.now + place.lease
            of = place.attempt_id, place.owner, fence, expiry, place.inbox, place.label
            lock.hold(execution_id, *of, limits[lock.name] == SHARED)
        return True

    def enter_or_send(
        self, place: _Place, fences: dict[str, int | None] | None, caller: str
    ) -> bool:
        """Let a place in, or hand out its message. True: it needs its place no longer."""
        if fences is None:
            return False
        if not place.parked or place.execution_id == caller:
            return self.let_in(place, fences, caller)
        if not self.is_on_its_way(place):
            self.hand_out(place)
        return False

    def join(self, lock: _Lock, owner: str, caller: str) -> None:
        """Waiters of an owner that has just got the lock join its permit, if they may."""
        for place in list(lock.queue.values()):
            joins = place.by_owner and place.owner == owner and not self.is_gone(place)
            if joins and not self.stands_behind_itself(place):
                self.enter_or_send(place, self.admission(place), caller)

    def inherit(self, lock: _Lock, execution_id: str) -> None:
        """A successor that waits already was quicker than its predecessor."""
        place = lock.queue.get(execution_id)
        if place is not None and not self.is_gone(place):
            lock.claim_kept(execution_id, place.limits[lock.name])
            self.enter_or_send(place, self.admission(place), "")

    def promote(self, lock: _Lock, caller: str = "") -> bool:
        """Grant the lock to the first in the queue, or hand out its message, and so on. True:
        somebody whose turn comes before the caller's still waits, so the caller has to."""
        self._ahead[lock.name] = _Ahead()
        is_ahead = (self._serve_line if lock.is_line else self._serve)(lock, caller)
        self.schedule(lock)
        return is_ahead

    def _serve(self, lock: _Lock, caller: str) -> bool:
        is_ahead = False
        for execution_id, place in list(lock.queue.items()):
            if lock.queue.get(execution_id) is not place:
                continue  # it has joined its owner's permit just now
            if self.is_gone(place):
                self.leave(place)
            elif place.parked and self.may_look_behind(lock, place, caller):
                continue
            elif (fences := self.admission(place, lock)) is None:
                if not self._may_be_passed(lock, place, caller):
                    return execution_id != caller
                is_ahead = True
            elif not self.enter_or_send(place, fences, caller):
                self.count(lock, place)
            elif place.by_owner:
                for each in self.wanted(place):
                    self.join(each, place.owner, caller)
        return is_ahead

    def _may_be_passed(self, lock: _Lock, place: _Place, caller: str) -> bool:
        """Nobody holds the lock, and the resumed execution does not come: perhaps a waiter in a
        process behind this place is here."""
        late = self._ahead[lock.name].late
        is_other = place.parked and place.execution_id != caller
        return is_other and late > 0 and not lock.holds

    # --- lines (lock_order) -----------------------------------------------------------------------

    def _serve_line(self, lock: _Lock, caller: str) -> bool:
        """As `_serve`, of a line: nobody is passed by but who is late."""
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
            elif not place.awaited:
                if not self.is_on_its_way(place) or self.is_owed(place):
                    self.hand_out(place)
                self._ahead[lock.name].look = min(self._ahead[lock.name].look, place.back)
                return True
            elif self._await(lock, place, caller):
                return True
        return False

    def _let_into_line(self, lock: _Lock, place: _Place, caller: str) -> None:
        """A call's turn has come. By its fencing token, which is its ticket, it sees that nobody
        overtook it. If its message may come again, its place stays in front."""
        fence = place.ticket or self.next_fence()
        granted = ("granted", place.execution_id, place.attempt_id, (fence,))
        if place.execution_id != caller and not self.tell(place.inbox, granted):
            return  # its next heartbeat asks
        of = place.attempt_id, place.owner, fence, self.now + place.lease
        lock.hold(place.execution_id, *of, place.inbox, place.label, shared=False)
        if place.ordered is None or place.owner != COMES_AGAIN:
            self.leave(place)
            return
        self.unpark(place)
        place.life, place.turn, place.first, place.back = 0.0, None, None, 0.0
        place.arrived, place.sent, place.by, place.untold = True, 0, None, False

    def _await(self, lock: _Lock, place: _Place, caller: str) -> bool:
        """The message of the first of a line is awaited. True: those behind wait for it, too. Its
        time counts from when one of them was here."""
        call, ahead = place.ordered, self._ahead[lock.name]
        assert call is not None
        is_waited_for = bool(caller or lock.messages)
        late = max(place.turn or self.now, place.due) + call.gap
        ends, is_over = place.due + call.life, self.ended(place.execution_id) == "*"
        if not is_over and place.execution_id in self.state.parked:
            place.turn = None  # it came, and is parked for its lock
            place.ordered = call._replace(life=max(call.life, self.now - place.due + 2 * 86_400.0))
            return True
        if ends <= self.now or is_over:
            self.leave(place)
            return False
        if is_waited_for and place.turn is not None and late <= self.now:
            waited = self.now - place.turn
            self.state.passed.append(Passed(lock.name, place.execution_id, place.label, waited))
            self.leave(place)
            return False
        place.turn = (place.turn or self.now) if is_waited_for else None
        ahead.look = min(ahead.look, ends, late if is_waited_for else ends)
        return True

    # --- deadlocks --------------------------------------------------------------------------------

    def deadlock(
        self, execution_id: str, wanted: dict[str, int], stuck: Sequence[str]
    ) -> tuple[str, ...]:
        """The way round if waiting for these locks would never end: a lock, the label of the
        execution that its holder waits by, the lock that this one waits for, and so on to a
        hold of `stuck`."""
        if not stuck:
            return ()
        waits: dict[str, dict[_Place, None]] = defaultdict(dict)
        for lock in self.state.locks.values():
            for place in lock.queue.values():
                for hold in () if self.is_gone(place) else place.stuck:
                    waits[hold][place] = None
        for name, limit in wanted.items():
            search = _Search(waits, frozenset(stuck), set())
            if path := self._from_lock(search, self.lock(name), execution_id, limit):
                return path
        return ()

    def _keep_out(self, lock: _Lock, execution_id: str, limit: int) -> bool:
        """Whether the holders of a lock keep a waiter out. Those who share a lock keep out another
        one that does if an exclusive waiter ahead of it waits for them. A copy of one of them
        waits for itself alone."""
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
        """A lock is stuck if each of its permits is, by at least one of the permit's holds."""
        stuck: dict[int, tuple[str, ...]] = {}
        if self._keep_out(lock, execution_id, limit):
            for execution_id, hold in lock.holds.items():
                path = None if hold.fence in stuck else self._from_hold(search, execution_id)
                if path is not None:
                    stuck[hold.fence] = path
        if not stuck or len(stuck) < lock.permits:
            return ()
        return (lock.name, *next(iter(stuck.values())))

    def _from_hold(self, search: _Search, execution_id: str) -> tuple[str, ...] | None:
        """From a hold on; None if it ends without the execution that asks."""
        if execution_id in search.mine:
            return ()
        if execution_id in search.seen:
            return None
        search.seen.add(execution_id)
        for place in search.waits.get(execution_id, ()):
            for lock in self.wanted(place):
                of = place.execution_id, place.limits[lock.name]
                if path := self._from_lock(search, lock, *of):
                    return (place.label, *path)
        return None

    # --- inboxes ----------------------------------------------------------------------------------

    def tell(self, inbox: str, words: _Words) -> bool:
        """Put words into an inbox. False: nobody listens there."""
        ears = self.state.ears.get(inbox, ())
        for ear in ears:
            ear.heard.append(words)
            ear.bell.set()
        return bool(ears)


class _Acquire(_Command):
    """Acquire all locks of a claim, or none; else wait (`wait` seconds), park (`request`), or be
    told who is in the way."""

    def __init__(
        self,
        state: _State,
        now: float,
        claim: Claim,
        inbox: str,
        wait: float = 0.0,
        request: ParkRequest | None = None,
    ) -> None:
        super().__init__(state, now, by=f"{claim.execution_id} {claim.attempt_id}")
        self.claim = claim
        self.me = claim.execution_id
        self.inbox = inbox
        self.wait = wait
        self.request = request
        self.holds = False
        self.limits = dict(zip(claim.names, claim.limits, strict=True))
        self.locks = [self.lock(name) for name in claim.names]

    def answer(self) -> Answer | Parked | Full:
        refused = self._refusal()
        if refused is not None:
            return refused
        # Only now: an attempt that is turned away must not leave a place behind.
        for lock in self.locks:
            lock.claim_kept(self.me, self.limits[lock.name])
        self._take_over_places()
        joined, wanted, blocked = self._sort_out()
        if blocked is None:
            self._leave_other_places({})
            return self._held(joined, wanted)
        if not self.wait and self.request is None:
            return self._busy(blocked)
        if path := self.deadlock(self.me, wanted, self.claim.stuck):
            self._leave_other_places({})
            return Deadlocked(path)
        if self.request is not None:
            return self._full(wanted) or self._park(wanted, blocked)
        self._leave_other_places(wanted)
        for lock, fence in joined.items():
            self._hold(lock, fence)
        self._enter(self._place(wanted))
        return Queued(blocked.rank(self.me), self.next_lapse(blocked))

    def _refusal(self) -> Answer | Parked | None:
        """For an execution, or an attempt, that is not to go on."""
        ended = self.ended(self.me)
        if ended == "*":
            self.withdraw(self.me)  # when it is over, so is its message
        if ended == "*" or f" {self.claim.attempt_id} " in ended:
            return Ended()
        other = self._other_attempt()
        if other is None:
            return None
        left, label, holds = other
        if holds and self.request is not None:
            self._leave_other_places(self.limits)
            return self._park(self.limits, self.locks[0], is_copy=True)
        return Duplicate(left, label)

    def _other_attempt(self) -> tuple[float, str, bool] | None:
        """Another attempt of this execution that lives: for how long, who it is, and whether it
        holds the lock (or waits)."""
        mine, found = self.claim.attempt_id, None
        for lock in self.locks:
            hold, place = lock.holds.get(self.me), lock.queue.get(self.me)
            if hold and hold.attempt_id not in (mine, KEPT) and found is None:
                found = hold.expiry - self.now, hold.label, True
            waits = place is not None and not place.parked and place.expiry > self.now
            if place is not None and waits and place.attempt_id != mine:
                return place.expiry - self.now, place.label, False
        return found

    def _take_over_places(self) -> None:
        """The place of an attempt that died, or of a message that has arrived, goes to this
        attempt, before the queue is cleared of the dead."""
        claim = self.claim
        # If this attempt holds the lock already, a parked message is a copy of its own.
        self.holds = any(lock.has(self.me) for lock in self.locks)
        asks = self.wait > 0 or self.request is not None
        for lock in self.locks:
            place = lock.queue.get(self.me)
            if place is None:
                continue
            if not self.holds if place.parked else asks and place.expiry <= self.now:
                place.attempt_id, place.inbox, place.label = (
                    claim.attempt_id,
                    self.inbox,
                    claim.label,
                )
                place.owner, place.by_owner, place.lease = claim.owner, claim.by_owner, claim.lease
                # What the task declares may have changed since: nobody gets in by a limit that is
                # not its own.
                place.limits = {name: self.limits.get(name, n) for name, n in place.limits.items()}
                if not place.awaited:
                    place.life = self.wait or claim.lease
                    place.expiry = self.now + place.life
                place.ancestors = claim.ancestors if place.parked else ()
                # An attempt that comes with a message is not the attempt that parked the message.
                place.arrived = place.parked

    def _sort_out(self) -> tuple[dict[_Lock, int], dict[str, int], _Lock | None]:
        """The permits to join now; the locks for which a new permit is wanted; and the first lock
        that is not free."""
        ahead = {lock.name: self.promote(lock, self.me) for lock in self.locks if lock.queue}
        joined: dict[_Lock, int] = {}
        wanted: dict[str, int] = {}
        blocked: _Lock | None = None
        # Only now: an execution that one of the queues let in may hold, or be, any of these.
        for lock in self.locks:
            if lock.has(self.me):
                continue
            limit = self.limits[lock.name]
            fence = self.permit_of(lock, self.me, self.claim, limit)
            if fence is not None:
                joined[lock] = fence
                continue
            wanted[lock.name] = limit
            promised = self._ahead[lock.name].promised if lock.name in ahead else None
            if ahead.get(lock.name) or lock.is_full(limit, promised):
                blocked = blocked or lock
        return joined, wanted, blocked

    def _held(self, joined: dict[_Lock, int], wanted: dict[str, int]) -> Held:
        for lock, fence in joined.items():
            self._hold(lock, fence)
        new = None
        for name, limit in wanted.items():
            of = self.lock(name).readers if limit == SHARED else None
            if of is None:
                of = new = new or self.next_fence()
            self._hold(self.lock(name), of)
        fences, reentered = [], []
        for lock in self.locks:
            hold = lock.holds[self.me]
            # Asked again, a lease begins anew: this answer promises the whole lease.
            hold.expiry = max(hold.expiry, self.now + self.claim.lease)
            fences.append(hold.fence)
            reentered.append(self.is_reentered(lock, self.me, self.claim))
        return Held(tuple(fences), tuple(reentered))

    def _hold(self, lock: _Lock, fence: int) -> None:
        claim, expiry = self.claim, self.now + self.claim.lease
        of = claim.attempt_id, claim.owner, fence, expiry, self.inbox, claim.label
        lock.hold(self.me, *of, self.limits[lock.name] == SHARED)

    def _busy(self, lock: _Lock) -> Conflict:
        is_parked, waiting = self.me in lock.messages, len(lock.queue)
        if not lock.holds:
            return Conflict(lock.name, 0.0, 0, "", "", waiting, is_parked)
        oldest = lock.holds[min(lock.holds, key=lambda each: (lock.holds[each].fence, each))]
        left = oldest.expiry - self.now
        of = oldest.fence, oldest.owner, oldest.label
        outranked = oldest.shared and self.limits[lock.name] == SHARED
        how = is_parked, False, oldest.shared, outranked
        return Conflict(lock.name, left, *of, waiting, *how)

    def _leave_other_places(self, wanted: dict[str, int]) -> None:
        """A place is for one set of locks: where another set is wanted now, it goes, and so does a
        message that was parked when the execution held other locks. The copy of an execution that
        holds the lock stays, unless the execution itself has to wait again."""
        for place in (self.state.parked.get(self.me), *(x.queue.get(self.me) for x in self.locks)):
            if place is None or list(place.limits) == list(wanted):
                continue
            # A place in a line, and one in the queue of a lock, are both for one execution.
            if self.locks[0].is_line or any(lock.is_line for lock in self.wanted(place)):
                continue
            if not (place.parked and self.holds and not wanted):
                self.leave(place)

    def _place(self, wanted: dict[str, int]) -> _Place:
        claim, life = self.claim, self.wait or self.claim.lease
        return _Place(
            self.me,
            claim.attempt_id,
            claim.owner,
            self.inbox,
            claim.label,
            claim.by_owner,
            dict(wanted),
            claim.lease,
            life,
            self.now + life,
            claim.stuck,
        )

    def _enter(self, place: _Place, before_all: bool = False) -> None:
        """Into the queues of all its locks at one moment: with one order over all queues the oldest
        execution is first in each of its queues, so two that want the same locks cannot wait for
        each other. An execution that is there already keeps its turn."""
        # A message that is parked already was perhaps for another broker, or its patience is over.
        if before := self.state.parked.get(self.me):
            self.unpark(before)
        for lock in self.wanted(place):
            if lock.is_line and (self.me in lock.queue or not before_all):
                self._enter_line(lock, place)
            elif before_all and self.me not in lock.queue:
                lock.queue = {self.me: place, **lock.queue}
            else:
                lock.queue[self.me] = place

    def _enter_line(self, lock: _Lock, place: _Place) -> None:
        """The message has come to the place that was taken for it, or to one that is taken now, in
        front of those that are due later."""
        before = lock.queue.get(self.me)
        if before is not None:
            place.ordered, place.due, place.ticket = before.ordered, before.due, before.ticket
            if before.ordered is not None:
                self.state.sent[self.me] = self.state.sent["#" + before.ordered.task] = place
            lock.queue[self.me] = place
        else:
            put(lock, place, self.next_fence())

    def _full(self, wanted: dict[str, int]) -> Full | None:
        """Where there is no room for one more message: at one of these locks, or over all."""
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

    def _park(self, wanted: dict[str, int], at: _Lock, is_copy: bool = False) -> Parked:
        """A parked execution has no process, so it joins no permit before all its locks are free.
        A copy of an execution that holds the lock stands before all who wait."""
        request, state = self.request, self.state
        assert request is not None
        place = self._place(wanted)
        self._enter(place, before_all=is_copy)
        place.request, place.ancestors = request, self.claim.ancestors
        state.parked[self.me], state.of_task[request.task] = place, self.me
        state.parked_bytes += len(request.message.encode())
        if request.patience is not None:
            state.due["r", self.me] = self.now + max(request.patience, 0.0)
        for lock in self.wanted(place):
            lock.messages.add(self.me)
            self._ahead.setdefault(lock.name, _Ahead())
            self.schedule(lock)
        self.settle(request.home)
        return Parked(at.rank(self.me), tuple(self.messages))

    def debounce(self, call: Debounce) -> Parked | Burst | Full | None:
        """Park the message in the place of the one of its burst, or as that of a new burst."""
        (lock,), now, place = self.locks, self.now, _open_burst(self.locks[0])
        if self.ended(call.call_id):
            return Parked(0)  # a repetition
        if place is None and call.burst is not None:
            return None
        if place is not None:
            is_last = not call.exactly or (call.burst and place.attempt_id == call.burst.call_id)
            if call.burst is None or place.execution_id != self.me or not is_last:
                return _told(place, call.exactly)
        if full := self._full(self.limits):
            return full
        # Without the pause the burst is over, and only waits for somebody who can publish it.
        pause = lock.holds.get(PAUSE)
        if pause is not None or place is None:
            fence = pause.fence if pause is not None and place is not None else self.next_fence()
            first = now if place is None else fence / 1e6
            expiry = min(now + call.pause, first + call.most)
            of = KEPT, PAUSE, fence, expiry, "-", "a burst of calls"
            lock.hold(PAUSE, *of, shared=False)
        self._park(self.limits, lock)
        lock.queue[self.me].call = call.task_id if place is None else place.call
        self.remember(call.call_id, "*", _REPEATED)
        if place is None and self.request is not None:
            self.tell("parked", ("parked", self.me, self.request.home, ()))
        elif pause is None:
            self.state.due["l", lock.name] = now
        return Parked(0)


_C = TypeVar("_C", bound=_Command)


class MemoryBackend:
    """Locks in the memory of this process, see `engine.protocol.Backend`. A forked child does not
    share them: each verb raises LockConfigError there.

    Args:
        clock: tells seconds since the epoch, and is never set back.
    """

    replicated = False

    def __init__(self, clock: Callable[[], float] = _now) -> None:
        self.id = ids.new_id()
        self.clock = clock
        self.state = _State()
        self._pid = platform.pid

    def clear(self) -> None:
        """Forget every lock. Who listens goes on listening. In a forked child it begins anew, as
        that process's own."""
        with _guard.lock:
            kept = _State(fence=self.state.fence)
            if self._pid == platform.pid:
                kept.ears = self.state.ears
            self.state, self._pid = kept, platform.pid

    def route(self, names: Sequence[str]) -> object:
        return None

    def acquire(self, claim: Claim, wait: float = 0.0, inbox: str = "-") -> Answer:
        with self._executes(_Acquire, claim, inbox, wait) as command:
            answer = command.answer()
            assert not isinstance(answer, Parked | Full), answer
            return answer

    def park(
        self, claim: Claim, park_request: ParkRequest, inbox: str = "-"
    ) -> Held | Parked | Full | Duplicate | Deadlocked | Ended:
        with self._executes(_Acquire, claim, inbox, 0.0, park_request) as command:
            answer = command.answer()
            assert not isinstance(answer, Queued | Conflict), answer
            return answer

    def release(
        self,
        names: Sequence[str],
        execution_id: str,
        attempt_id: str,
        ended: str = "",
        remember: float = 0.0,
        home: str = "",
        successor: Successor | None = None,
    ) -> Released:
        successors = [] if successor is None else successor.execution_id.split()
        with self._executes(_Command, home, f"{execution_id} {attempt_id}") as command:
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
                    leave_to = _leave_place if lock.is_line else _leave_to
                    leave_to(command, lock, held, execution_id, successor)
            # After all of them: who waits for several of these locks must find all released.
            for lock in locks:
                command.promote(lock)
                for each in () if lock.is_line else successors:
                    command.inherit(lock, each)
            # An execution that has ended stays so. An attempt adds itself to those that have
            # ended: a copy of any of them may be on its way.
            before = command.ended(execution_id)
            if ended == "execution":
                command.remember(execution_id, "*", remember)
            elif ended and before != "*":
                command.remember(execution_id, f"{before or ' '}{attempt_id} ", remember)
            return Released(had, tuple(command.messages))

    def downgrade(
        self, names: Sequence[str], execution_id: str, attempt_id: str, home: str = ""
    ) -> Downgraded:
        with self._executes(_Command, home, f"{execution_id} {attempt_id}") as command:
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
            return Downgraded(messages=tuple(command.messages))

    def resume(self, home: str, by: str, tasks: Sequence[str] = ()) -> Resumed:
        with self._executes(_Command, home, by) as command:
            state, now = self.state, command.now
            for each in command.homes:
                owed = sorted(state.owed[each].items(), key=lambda item: item[::-1])
                for execution_id, _ in owed[:_MOST]:
                    # What is no longer on its way is found in the queue.
                    del state.owed[each][execution_id]
                    place = state.parked.get(execution_id)
                    if place is not None and command.is_on_its_way(place):
                        command.hand_out(place)
            for task in tasks:
                awaited = state.sent.get("#" + task)
                if task in state.of_task:
                    _resume(command, state.of_task[task])
                elif awaited and not command.wanted(awaited)[0].has(awaited.execution_id):
                    command.withdraw(awaited.execution_id)
            for _, (kind, what) in sorted((at, key) for key, at in state.due.items() if at <= now):
                if kind == "r":
                    _resume(command, what)
                else:
                    # Looked at again as long as somebody is parked there, see `schedule`.
                    state.due.pop((kind, what), None)
                    command.promote(command.lock(what))
            recheck = min((max(at - now, 0.0) for at in state.due.values()), default=None)
            if any(state.owed[each] for each in command.homes):
                recheck = 0.0
            passed, state.passed = tuple(state.passed), []
            return Resumed(tuple(command.messages), recheck, passed)

    def place(self, request: PlaceRequest) -> int | Conflict:
        with self._executes(_Command) as command:
            lock, me = command.lock(request.line), request.execution_id
            if me in lock.queue:
                return lock.queue[me].ticket
            if command.ended(me):
                return 0
            if request.marker is not None:
                marked = _Acquire(self.state, command.now, request.marker, "-").answer()
                if isinstance(marked, Conflict):
                    return marked
            due = max(command.now + request.delay, request.moment)
            place = _Place(
                me, KEPT, KEPT, "-", request.label, False, {request.line: 1}, 0.0, 0.0, 0.0
            )
            place.ordered, place.due = request, due
            put(lock, place, int(due * 1e6) if due > command.now else command.next_fence())
            self.state.sent[me] = self.state.sent["#" + request.task] = place
            self.state.due.setdefault(("l", lock.name), due + request.life)
            return place.ticket

    def withdraw(self, execution_id: str, remember: float, home: str = "") -> Released:
        with self._executes(_Command, home, execution_id) as command:
            had = command.withdraw(execution_id)
            if had:
                command.remember(execution_id, "*", remember)
            return Released(had, tuple(command.messages))

    def arrived(self, execution_ids: Sequence[str], seconds: float) -> None:
        with self._executes(_Command) as command:
            for each in execution_ids:
                place = self.state.parked.get(each)
                if place is not None and command.is_on_its_way(place):
                    place.back = max(place.back, command.now + seconds)

    def announce(self, channels: Sequence[str], worker: str, seconds: float) -> None:
        with self._executes(_Command) as command:
            for channel in channels:
                if seconds > 0:
                    self.state.live[channel][worker] = command.now + seconds
                else:
                    self.state.live[channel].pop(worker, None)

    def consumed(self, channel: str) -> bool:
        with self._executes(_Command) as command:
            return any(until > command.now for until in self.state.live[channel].values())

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
            return [_renew(command, each) for each in renewals]

    def heartbeat(
        self, renewals: Sequence[Renewal], *, within: float | None = None
    ) -> list[Held | Queued | None]:
        with self._executes(_Command) as command:
            # First all places are kept, then the heads get in: else a head of this very call would
            # look dead. Last the answers: an execution that wants several locks may have got the
            # first one with the last.
            places = [_keep_place(command, each) for each in renewals]
            for beat, place in zip(renewals, places, strict=True):
                if place is not None:
                    _get_in(command, command.lock(beat.name), place)
            pairs = zip(renewals, places, strict=True)
            return [_beat_answer(command, beat, place) for beat, place in pairs]

    def inspect(self, name: str, most: int = 100) -> LockState:
        with self._executes(_Command) as command:
            now, lock = command.now, command.lock(name)
            holds = [
                HoldInfo(each, h.expiry - now, h.fence, h.attempt_id, h.owner, h.label, h.shared)
                for each, h in lock.holds.items()
            ]
            waiters = [
                WaiterInfo(each, of.expiry - now, of.attempt_id, of.owner, of.label, of.parked)
                for each, of in islice(lock.queue.items(), most)
                if not command.is_gone(of)
            ]
            return LockState(tuple(holds), tuple(waiters), len(lock.queue))

    def force_release(self, name: str, execution_id: str = "") -> tuple[HoldInfo, ...]:
        with self._executes(_Command) as command:
            lock, released = command.lock(name), []
            for each, hold in list(lock.holds.items()):
                if execution_id in ("", each):
                    del lock.holds[each]
                    command.tell(hold.inbox, ("lost", each, hold.attempt_id, ()))
                    released.append(HoldInfo(each, 0.0, hold.fence, "", hold.owner, hold.label))
            command.promote(lock)
            return tuple(released)

    def dangers(self) -> list[str]:
        return []

    def listen(
        self,
        inbox: str,
        ready: Callable[[], None],
        hear: Callable[[Notice], None],
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        ear = self.ear(inbox)
        try:
            ready()
            while wanted():
                ear.bell.wait(_STILL_WANTED)
                ear.bell.clear()
                while ear.heard:
                    kind, execution_id, attempt_id, fences = ear.heard.popleft()
                    hear(Notice(kind, execution_id, attempt_id, fences[0] if fences else 0))
        finally:
            self.state.ears[inbox].remove(ear)

    def ear(self, inbox: str) -> _Ear:
        """Somebody who listens at an inbox from now on."""
        self._check_process()
        with _guard.lock:
            made = _Ear()
            self.state.ears[inbox].append(made)
            return made

    @contextmanager
    def _executes(self, kind: Callable[..., _C], *args: Any) -> Iterator[_C]:
        self._check_process()
        with _guard.lock:
            command = kind(self.state, self.clock(), *args)
            try:
                yield command
            finally:
                command.tidy()

    def _check_process(self) -> None:
        if self._pid != platform.pid:
            raise LockConfigError(
                "relock_url='memory://' keeps the locks in the memory of one process, and this "
                f"process ({platform.pid}) was forked from it ({self._pid}): nothing that is "
                "locked here would exclude anybody there. Let tests use the threads or the solo "
                "pool, or a Redis"
            )


def put(lock: _Lock, place: _Place, ticket: int) -> None:
    """Into a line, by its ticket."""
    while any(each.ticket == ticket for each in lock.queue.values()):
        ticket += 1
    place.ticket = ticket
    by_ticket = {**lock.queue, place.execution_id: place}
    lock.queue = dict(sorted(by_ticket.items(), key=lambda item: item[1].ticket))


def _successors(command: _Command, execution_id: str, successor: Successor) -> Iterator[str]:
    """Those that come next. One may have been quicker, and is over, or was killed. An execution
    that leaves something to itself lives, whatever became of an attempt before."""
    for each in successor.execution_id.split():
        ended = command.ended(each)
        if not (ended == "*" or (ended and each != execution_id)):
            yield each


def _leave_place(
    command: _Command, lock: _Lock, hold: _Hold, execution_id: str, successor: Successor
) -> None:
    """Of a line the place is left: those behind wait for the message as for any other."""
    for each in _successors(command, execution_id, successor):
        place, life = lock.queue.pop(each, None), successor.keep + 86_400.0
        if place is None:
            place = _Place(each, KEPT, KEPT, "-", hold.label, False, {lock.name: 1}, 0.0, 0.0, 0.0)
        times = successor.keep, 0.0, 0.0, life
        place.ordered = PlaceRequest(lock.name, each, "", hold.label, *times)
        place.due, place.turn = command.now, None
        put(lock, place, hold.fence)
        command.state.sent[each] = place


def _leave_to(
    command: _Command, lock: _Lock, hold: _Hold, execution_id: str, successor: Successor
) -> None:
    """Keep a hold for those that come next. One may have been quicker: it has joined the permit."""
    for each in _successors(command, execution_id, successor):
        if each not in lock.holds:
            # A cooldown keeps everybody out, its own workflow too: nobody else has such an owner.
            owner = each if each.startswith(COOLDOWN) else hold.owner
            expiry = command.now + successor.keep
            of = KEPT, owner, hold.fence, expiry, hold.inbox, hold.label
            lock.hold(each, *of, hold.shared)


def _takes_back(place: _Place, attempt_id: str, ended: str) -> bool:
    """Whether a release takes a place with it. A message outlives the attempt for which it was
    resumed. The attempt that parked the message, and heard no answer, takes it back; unless that
    attempt was killed. With the execution a copy that is parked behind it ends as well. The place
    of a call whose message is awaited is no attempt's."""
    if not place.parked:
        return place.attempt_id == attempt_id
    if attempt_id == KEPT and place.awaited:
        return True
    parked_it = place.attempt_id == attempt_id and not place.arrived
    return (parked_it and ended != "killed") or ended == "execution"


def _open_burst(lock: _Lock) -> _Place | None:
    """The burst whose message nobody has been given yet."""
    last = next(reversed(lock.queue.values()), None)
    return last if last is not None and last.parked and not last.sent else None


def _told(place: _Place | None, whole: bool) -> Burst | None:
    if place is None or place.request is None:
        return None
    message = place.request.message if whole else ""
    return Burst(place.execution_id, place.attempt_id, place.call, message)


def _resume(command: _Command, execution_id: str) -> None:
    """Hand out a message, whether its locks are free or not; look again when it should be back."""
    place = command.state.parked.get(execution_id)
    if place is None:
        command.state.due.pop(("r", execution_id), None)
        return
    if not command.is_on_its_way(place) or command.is_owed(place):
        command.hand_out(place)
    command.state.due["r", execution_id] = place.back


def _renew(command: _Command, renewal: Renewal) -> bool:
    hold = command.lock(renewal.name).holds.get(renewal.execution_id)
    if hold is None or hold.attempt_id != renewal.attempt_id:
        return False
    expiry = command.now + renewal.lease
    # A renewal that was on its way when the holder asked for a longer lease must not undo that.
    hold.expiry = max(hold.expiry, expiry) if renewal.longer else expiry
    return True


def _keep_place(command: _Command, beat: Renewal) -> _Place | None:
    place = command.lock(beat.name).queue.get(beat.execution_id)
    # A parked execution has no process: a beat that comes late must not acquire for nobody.
    if place is None or place.parked or command.is_gone(place):
        return None
    if place.attempt_id != beat.attempt_id:
        return None
    place.life, place.expiry = beat.wait, command.now + beat.wait
    return place


def _get_in(command: _Command, lock: _Lock, place: _Place) -> None:
    me = place.execution_id
    if not lock.has(me):
        command.promote(lock, me)
    # Those who could not be told when their owner got in, or whose owner did not ask for them.
    if not lock.has(me) and (place.by_owner or lock.kept(me)):
        fences = command.admission(place)
        if fences is not None:
            command.let_in(place, fences, me)


def _beat_answer(command: _Command, beat: Renewal, place: _Place | None) -> Held | Queued | None:
    lock = command.lock(beat.name)
    hold = lock.holds.get(beat.execution_id)
    if hold is not None and hold.attempt_id == beat.attempt_id:
        hold.expiry = max(hold.expiry, command.now + beat.lease)
        return Held((hold.fence,), (False,))
    if place is None:
        return None
    return Queued(lock.rank(beat.execution_id), command.next_lapse(lock))
