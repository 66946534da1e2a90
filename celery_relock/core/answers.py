"""What the store is asked, and what it can answer: plain values, each verb with its own.

"Held by somebody else" is an answer here. Only a store that cannot answer raises.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class Claim(NamedTuple):
    """What a run asks for. Ids have at most 22 characters and no space (see `ids`).

    Attributes:
        run: the execution of one message.
        nonce: this attempt to execute the run.
        owner: who may re-enter.
        names: the lock names, sorted; all are taken or none.
        limits: entries at the same time, one for each name.
        lease: seconds a hold lives without renewal.
        who: the holder for people, at most 55 bytes if memory matters.
        by_owner: whether every run of the owner may re-enter.
        lineage: run ids of holds that this run's ancestors have.
        stuck: run ids of holds that cannot end before this run has got in.
    """

    run: str
    nonce: str
    owner: str
    names: tuple[str, ...]
    limits: tuple[int, ...]
    lease: float
    who: str = ""
    by_owner: bool = False
    lineage: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()


class Held(NamedTuple):
    """The run has all locks. One fence and one flag for each name of the claim.

    `repeated`: the command was sent more than once, so a copy of it may still be on its way.
    """

    fences: tuple[int, ...]
    reentered: tuple[bool, ...]
    repeated: bool = False


class Queued(NamedTuple):
    """The run waits. `rank` counts who is ahead, in `recheck` s the next lease ends (or 0)."""

    rank: int
    recheck: float
    repeated: bool = False


class Busy(NamedTuple):
    """A lock is not to be had now.

    Attributes:
        name: the lock in the way.
        remaining: seconds its holder's lease still lasts if it is not renewed; 0 if unknown.
        fence: of the oldest entry; the server's time in µs when it began. 0 if unknown.
        owner: of that entry, "" if unknown.
        who: that holder for people, "" if unknown.
        waiting: how many runs queue for the lock.
        parked: whether this run's message is in the queue.
        repeated: as for `Held`.
    """

    name: str
    remaining: float
    fence: int
    owner: str
    who: str
    waiting: int
    parked: bool = False
    repeated: bool = False


class Duplicate(NamedTuple):
    """Another attempt of the same run lives, for `remaining` seconds more unless it is renewed."""

    remaining: float
    who: str
    repeated: bool = False


class Ended(NamedTuple):
    """The run has ended already; this is a late copy of it."""


class Deadlocked(NamedTuple):
    """To wait would never end.

    `path`: a lock, for people who has it, the lock that this one waits for, and so on in turns, to
    a lock that is held on the asking run's own call stack.
    """

    path: tuple[str, ...]


Answer: TypeAlias = Held | Queued | Busy | Duplicate | Ended | Deadlocked
Outcome: TypeAlias = Held | Busy | Duplicate | Ended | Deadlocked


class Parcel(NamedTuple):
    """A message that is to be parked, with what the queue needs to know of it.

    Attributes:
        message: text that its `home` can send.
        home: the broker that it is to be sent to; tells no password.
        task: short id of the task, which a revoke names.
        patience: seconds after which it is sent on, lock or not; None without end.
        most: how many may be parked at one lock.
    """

    message: str
    home: str
    task: str
    patience: float | None = None
    most: int = 10_000


class Message(NamedTuple):
    """A parked message that whoever gets it has to send on. It stays parked until its run is in."""

    run: str
    name: str
    text: str


class Parked(NamedTuple):
    """The message is in the queue, `rank` are ahead of it. `messages` are to be sent on."""

    rank: int
    messages: tuple[Message, ...] = ()


class Full(NamedTuple):
    """Nothing was parked: there are `parked` messages at this lock already."""

    name: str
    parked: int


class Heir(NamedTuple):
    """The runs that a hold is kept for, in its entry and under the nonce `KEPT`.

    Attributes:
        run: the one that is to come; several with spaces between. One that is in the entry already,
            or over, needs nothing.
        keep: seconds after which they end if it has not come; nothing makes them longer.
    """

    run: str
    keep: float


KEPT = "-"


class Released(NamedTuple):
    """What was given back: whether the attempt had anything, and the messages to send on."""

    had: bool
    messages: tuple[Message, ...] = ()


class Resumed(NamedTuple):
    """The messages to send on now, and in how many seconds (or None) to look again."""

    messages: tuple[Message, ...]
    recheck: float | None


class Beat(NamedTuple):
    """One line of a renewal or heartbeat: a run's share of one lock. `wait` is 0 for a hold."""

    name: str
    run: str
    nonce: str
    lease: float
    wait: float = 0.0


class Notice(NamedTuple):
    """A message in a process's inbox: `kind` is "granted" (with a fence) or "lost"; in the inbox of
    all that can send, "parked", with the message's home for a nonce."""

    kind: str
    run: str
    nonce: str
    fence: int = 0


class HoldInfo(NamedTuple):
    """A live hold as `inspect` tells it. `remaining` in seconds; the fence is its µs of entry."""

    run: str
    remaining: float
    fence: int
    nonce: str
    owner: str
    who: str


class WaiterInfo(NamedTuple):
    """A live waiter as `inspect` tells it, first in line first. A parked one needs no life."""

    run: str
    remaining: float
    nonce: str
    owner: str
    who: str
    parked: bool = False


class LockState(NamedTuple):
    """A lock as it is now. `waiting` counts the whole queue, `waiters` may be cut short."""

    holds: tuple[HoldInfo, ...]
    waiters: tuple[WaiterInfo, ...]
    waiting: int
