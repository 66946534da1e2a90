"""What a backend is asked, and what it can answer: plain values, each verb with its own; and the
verbs themselves, each atomic and safe to send twice.

"Held by somebody else" is an answer here. Only a store that cannot answer raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias


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

    execution_id: str
    attempt_id: str
    owner: str
    names: tuple[str, ...]
    limits: tuple[int, ...]
    lease: float
    label: str = ""
    by_owner: bool = False
    ancestors: tuple[str, ...] = ()
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


class Conflict(NamedTuple):
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
    label: str
    waiting: int
    parked: bool = False
    repeated: bool = False


class Duplicate(NamedTuple):
    """Another attempt of the same run lives, for `remaining` seconds more unless it is renewed."""

    remaining: float
    label: str
    repeated: bool = False


class Ended(NamedTuple):
    """The run has ended already; this is a late copy of it."""


class Deadlocked(NamedTuple):
    """To wait would never end.

    `path`: a lock, for people who has it, the lock that this one waits for, and so on in turns, to
    a lock that is held on the asking run's own call stack.
    """

    path: tuple[str, ...]


Answer: TypeAlias = Held | Queued | Conflict | Duplicate | Ended | Deadlocked
Outcome: TypeAlias = Held | Conflict | Duplicate | Ended | Deadlocked


class ParkRequest(NamedTuple):
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

    execution_id: str
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


class Successor(NamedTuple):
    """The runs that a hold is kept for, in its entry and under the nonce `KEPT`.

    Attributes:
        run: the one that is to come; several with spaces between. One that is in the entry already,
            or over, needs nothing.
        keep: seconds after which they end if it has not come; nothing makes them longer.
    """

    execution_id: str
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


class Renewal(NamedTuple):
    """One line of a renewal or heartbeat: a run's share of one lock. `wait` is 0 for a hold."""

    name: str
    execution_id: str
    attempt_id: str
    lease: float
    wait: float = 0.0


class Notice(NamedTuple):
    """A message in a process's inbox: `kind` is "granted" (with a fence) or "lost"; in the inbox of
    all that can send, "parked", with the message's home for a nonce."""

    kind: str
    execution_id: str
    attempt_id: str
    fence: int = 0


class HoldInfo(NamedTuple):
    """A live hold as `inspect` tells it. `remaining` in seconds; the fence is its µs of entry."""

    execution_id: str
    remaining: float
    fence: int
    attempt_id: str
    owner: str
    label: str


class WaiterInfo(NamedTuple):
    """A live waiter as `inspect` tells it, first in line first. A parked one needs no life."""

    execution_id: str
    remaining: float
    attempt_id: str
    owner: str
    label: str
    parked: bool = False


class LockState(NamedTuple):
    """A lock as it is now. `waiting` counts the whole queue, `waiters` may be cut short."""

    holds: tuple[HoldInfo, ...]
    waiters: tuple[WaiterInfo, ...]
    waiting: int


class Backend(Protocol):
    """Where locks live. Every verb raises LockUnavailable when the server cannot be asked and
    LockConfigError when it must not be (somebody else's key, an old server, no permission)."""

    @property
    def id(self) -> str:
        """The same in every process that has the same locks; tells no address and no password."""

    @property
    def replicated(self) -> bool:
        """Holds count when replicas have them: one that a message told of, when it is renewed."""

    def route(self, names: Sequence[str]) -> object:
        """What renewals of these locks share: those with another route are sent by another call,
        which does not fail with this one."""

    def acquire(self, claim: Claim, wait: float = 0.0, inbox: str = "-") -> Answer:
        """Take all locks of the claim, or none. With `wait` seconds > 0 queue for them: the place
        lives that long without a heartbeat, and the grant is announced to `inbox`, as a loss of
        the hold will be."""

    def park(
        self, claim: Claim, park_request: ParkRequest, inbox: str = "-"
    ) -> Held | Parked | Full | Duplicate | Deadlocked | Ended:
        """As `acquire`, but leave a message in the queue. A copy of a run that is in is parked
        behind it."""

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
        """Give back what the attempt has, or its places.

        `ended` is "", "run" or "attempt": what shall count as ended for `remember` seconds;
        "killed" is an attempt that leaves the message that it parked.
        `home`: parked messages of this broker that may go on are handed out to the caller.
        `heir`: the run that is to go on with the holds."""

    def resume(self, home: str, by: str, tasks: Sequence[str] = ()) -> Resumed:
        """The parked messages of a broker that are to be sent on now; `tasks` (short ids) in any
        case. `by` is the id of this call, for its repetition."""

    def withdraw(self, execution_id: str, remember: float, home: str = "") -> Released:
        """Take a parked message out of its queues for good; the run counts as ended."""

    def renew(self, renewals: Sequence[Renewal], *, within: float | None = None) -> list[bool]:
        """Extend holds; False for each that is lost. `within`: the keep-alive thread calls, and
        waits so many seconds for an answer at the most."""

    def heartbeat(
        self, renewals: Sequence[Renewal], *, within: float | None = None
    ) -> list[Held | Queued | None]:
        """Keep places in queues and find grants; None for each that is neither queued nor holding.
        `within` as for `renew`."""

    def inspect(self, name: str, most: int = 100) -> LockState:
        """Who holds a lock and who waits for it."""

    def force_release(self, name: str, execution_id: str = "") -> tuple[HoldInfo, ...]:
        """Take the lock from its holders, or from one run, and tell them. Returns those holds."""

    def dangers(self) -> list[str]:
        """What of the server's settings could lose parked messages, a sentence each."""

    def listen(self, inbox: str, ready: Callable[[], None], hear: Callable[[Notice], None]) -> None:
        """Hear the inbox's notices for ever. `ready` is called at each (re)connection, because what
        was sent meanwhile is gone. Returns only by an exception."""


class Sender(Protocol):
    """Sends parked messages to one broker."""

    @property
    def home(self) -> str:
        """Which broker, without its password."""

    def send(self, message: Message) -> None:
        """Send it on. Raises whatever the broker's client raises."""
