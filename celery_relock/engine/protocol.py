"""What a backend is asked and what it answers: the verbs, each atomic and safe to send twice, and
below them the plain values.

"Held by somebody else" is an answer here. Only a backend that cannot answer raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

#: The limit of a claim that shares the lock: beside every other claim that does, and beside nobody
#: else. All who share a lock at the same time are one permit, with one fencing token.
SHARED = 0
#: The longest lease, and the longest time that an option may have: ten years, in seconds.
LONGEST = 315_360_000.0
#: The modes of a lock, as users name them.
MODES = ("exclusive", "shared")
#: How many holds `inspect` tells of if it is not asked for more, or for certain ones.
MOST_INSPECTED = 10


class Backend(Protocol):
    """Where locks live. Every verb raises LockUnavailable when the server cannot be asked and
    LockConfigError when it must not be (somebody else's key, an old server, no permission)."""

    @property
    def id(self) -> str:
        """The same in every process that has the same locks; tells no address and no password."""

    @property
    def replicated(self) -> bool:
        """Whether a hold counts only when replicas have it."""

    def route(self, names: Sequence[str]) -> object:
        """What renewals of these locks share. Renewals with another route are sent by another call,
        which does not fail with this call."""

    def acquire(self, claim: Claim, waiter_lease: float = 0.0, inbox: str = "-") -> Answer:
        """Acquire all locks of the claim, or none. With `waiter_lease` > 0 queue for them: the
        place lives for so many seconds without a heartbeat, and `inbox` hears of the grant, and
        later of a forced release."""

    def park(self, claim: Claim, park_request: ParkRequest, inbox: str = "-") -> ParkAnswer:
        """As `acquire`, but leave a message in the queue. A copy of an execution that holds the
        lock is parked behind that execution."""

    def release(self, request: Release) -> Released:
        """Release what the attempt has."""

    def downgrade(self, names: Sequence[str], execution_id: str, attempt_id: str) -> Downgraded:
        """Let others share the locks that an attempt holds alone."""

    def resume(self, homes: str, by: str, tasks: Sequence[str] = ()) -> Resumed:
        """The parked messages of a broker that are to be resumed now; those of `tasks` (short ids)
        in any case. `by` is the id of this call, for its repetition."""

    def place(self, request: PlaceRequest) -> int | Conflict:
        """Take a place in a line. Returns its ticket, which is the fencing token of the line when
        the turn of the place has come; 0 if the execution has begun, or ended, already. Conflict:
        another call has the marker, and there is no place."""

    def withdraw(self, execution_id: str, remember: float, attempt_id: str = "") -> bool:
        """Take a parked message, or the place of a call whose message has not come, out of its
        queues for good; the execution counts as ended, unless `remember` is `MAY_COME`. False if
        there is none. With `attempt_id` this is for that attempt alone: a message that another one
        has parked, and that was not handed out since, stays."""

    def arrived(self, execution_ids: Sequence[str], seconds: float) -> None:
        """A worker has received these messages, which were parked, and has no slot for them yet:
        they are not handed out again for `seconds` from now."""

    def announce(self, channels: Sequence[str], worker: str, seconds: float) -> None:
        """A worker consumes these channels, for `seconds` from now or until it says so again; with
        0 it consumes them no longer. `worker` is an id, another id for each start."""

    def consumed(self, channel: str) -> bool:
        """Whether a worker consumes a channel now."""

    def burst(self, name: str, whole: bool) -> Burst | None:
        """The burst of a debounced call's lock that calls can still be merged into; with its
        message if it is wanted `whole`."""

    def debounce(
        self, name: str, call: Debounce, park_request: ParkRequest
    ) -> Parked | Burst | Full | None:
        """Park the message of a call at the lock of its burst, in the place of the one before it.
        Burst: it is another one than the call knows, with its message if `exactly`. None: the burst
        that the call knows is over."""

    def renew(
        self, renewals: Sequence[Renewal], *, within: float | None = None, once: bool = False
    ) -> list[bool]:
        """Renew holds; False for each that is lost. `within`: the keep-alive thread calls, and
        waits so many seconds for an answer at the most. A lock that cannot be renewed (somebody
        else's key) hurts no other renewal. `once`: nothing is sent a second time, by no caller."""

    def heartbeat(
        self, renewals: Sequence[Renewal], *, within: float | None = None
    ) -> list[Held | Queued | None]:
        """Keep places in queues and find grants; None for each that neither waits nor holds.
        `within`, and other people's keys, as for `renew`."""

    def inspect(self, name: str, only: Sequence[str] = (), most: int = MOST_INSPECTED) -> LockState:
        """Who holds a lock, and how many wait for it. A lock can have thousands of holds: these are
        the first, or those of the executions in `only`."""

    def force_release(self, name: str, execution_id: str = "") -> tuple[HoldInfo, ...]:
        """Release the lock of its holders, or of one execution, by force, and tell them. Returns
        their holds. A line that nobody holds goes on without the message that it waits for: the
        place is returned, as a hold of the owner `KEPT`."""

    def listen(self, inbox: str, listener: Listener) -> None:
        """Hear the inbox's notices. Returns some seconds after the listener is not `wanted` any
        more; else only by an exception."""


class Claim(NamedTuple):
    """What an execution asks for. Ids have at most 22 characters and no space (see `ids`).

    Attributes:
        execution_id: the execution of one message.
        attempt_id: this attempt to execute the message.
        owner: who may re-enter.
        names: the lock names, sorted; all are acquired or none.
        limits: permits at the same time, one number for each name; or `SHARED`.
        lease: seconds that a hold lives without renewal.
        label: the holder for people.
        by_owner: whether every execution of the owner may re-enter.
        ancestors: the executions whose holds this execution may re-enter.
        stuck: the executions whose holds cannot end before this execution has its locks.
        parked_at: the lock for which its message was parked before; "" for none.
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
    parked_at: str = ""


class Held(NamedTuple):
    """The execution holds all locks. One fencing token and one flag for each name of the claim.

    Attributes:
        repeated: the command was sent more than once, so a copy of the command may still come.
        sent: `platform.clock()` just before the try was sent that the server answered. The lease
            counts from then. 0 if the backend does not tell.
        resumed: its message was parked until now: it has not begun since that was parked.
    """

    fences: tuple[int, ...]
    reentered: tuple[bool, ...]
    repeated: bool = False
    sent: float = 0.0
    resumed: bool = False


class Queued(NamedTuple):
    """The execution waits: `rank` others are ahead, and in `recheck` seconds the next lease ends (0
    if none does)."""

    rank: int
    recheck: float
    repeated: bool = False


class Conflict(NamedTuple):
    """Somebody else holds a lock.

    Attributes:
        name: the lock in the way.
        remaining: seconds until the holder's lease ends if nothing renews it; 0 if unknown.
        fence: the fencing token of the oldest permit: the server's time in µs when the permit
            began. 0 if unknown.
        owner: of that permit, "" if unknown.
        label: the holder for people, "" if unknown.
        waiting: how many executions are in the queue.
        parked: whether this execution's message is in the queue.
        repeated: as for `Held`.
        shared: the lock is shared: the permit has several holders perhaps, and `owner` and `label`
            are of one of them.
        outranked: it is shared, and the claim is to share it, too: an exclusive execution waits
            ahead.
        kept: the hold is kept for an execution that has not come, or cools down: no process has it.
    """

    name: str
    remaining: float
    fence: int
    owner: str
    label: str
    waiting: int
    parked: bool = False
    repeated: bool = False
    shared: bool = False
    outranked: bool = False
    kept: bool = False


class OtherAttempt(NamedTuple):
    """Another attempt of the same execution lives, for `remaining` seconds more without renewal."""

    remaining: float
    label: str
    repeated: bool = False


class Ended(NamedTuple):
    """The execution has ended already; this is a late copy of its message. Or it was `replaced`
    before it had begun, and will not begin. `retried`: it has sent its retry, which goes on."""

    replaced: bool = False
    retried: bool = False


#: For how many seconds an execution that has ended is remembered. An app may say otherwise.
REMEMBER = 4200.0
#: For how many seconds an execution is remembered that ends here, and whose message may come again.
MAY_COME = 0.0
#: For how many seconds an attempt stays refused after it ended, when a copy of its claim may still
#: come.
REMEMBER_ATTEMPT = 60.0
#: For how many seconds a repeated debounced call is recognised: longer than a call is tried.
REMEMBER_CALL = 60.0
#: How many messages, of how many bytes, may be parked at all locks. An app may say otherwise.
MOST_PARKED = 1_000_000, 1_000_000_000


class Deadlocked(NamedTuple):
    """To wait would never end.

    Attributes:
        path: a lock, the label of its holder, the lock that this holder waits for, and so on in
            turns, to a lock that the asking execution's own call stack holds.
        repeated: as for `Held`.
    """

    path: tuple[str, ...]
    repeated: bool = False


Answer: TypeAlias = Held | Queued | Conflict | OtherAttempt | Ended | Deadlocked
Outcome: TypeAlias = Held | Conflict | OtherAttempt | Ended | Deadlocked


class ParkRequest(NamedTuple):
    """A message that is to be parked, and what the queue needs to know about the message.

    Attributes:
        message: text that a sender for `home` can publish.
        home: the broker that the message is to be sent to; tells no password.
        task: short id of the task, which a revoke names.
        patience: seconds after which the message is resumed, lock or not; None without end.
        most: how many messages may be parked at one lock.
        most_in_all, most_bytes: how many messages, of how many bytes, may be parked at all locks
            together; in a cluster, of one bucket.
        is_copy: whether it is the copy of one worker, which can be gone for good: then it ends some
            minutes after its turn came.
    """

    message: str
    home: str
    task: str
    patience: float | None = None
    most: int = 10_000
    most_in_all: int = MOST_PARKED[0]
    most_bytes: int = MOST_PARKED[1]
    is_copy: bool = False


class Message(NamedTuple):
    """A parked message that its receiver has to resume. It stays parked until its execution has the
    lock."""

    execution_id: str
    name: str
    text: str


class Parked(NamedTuple):
    """The message is in the queue, `rank` others are ahead. `repeated` as for `Held`."""

    rank: int
    repeated: bool = False


class Full(NamedTuple):
    """Nothing was parked: there are `parked` messages at this lock already. With the name "" there
    are so many at all locks together, of `size` bytes. `repeated` as for `Held`."""

    name: str
    parked: int
    size: int = 0
    repeated: bool = False


#: What `Backend.park` answers.
ParkAnswer: TypeAlias = Held | Parked | Full | OtherAttempt | Deadlocked | Ended


class Successor(NamedTuple):
    """The executions that a hold is left to: kept for them, in the same permit, as attempt `KEPT`.

    Attributes:
        execution_id: the execution that is to come; several with spaces between. Nothing is kept
            for an execution that is in the permit already, or over.
        keep: seconds after which a kept hold ends if nobody came; nothing makes it longer. Of a
            line no hold is kept, but the place: so long those behind wait for it.
    """

    execution_id: str
    keep: float


#: The attempt of what is kept for an execution whose message has not come. No attempt has this id.
KEPT = "-"
#: How the id begins that a hold is left to for `lock_cooldown`: no execution comes for it, and as
#: its owner is this id too, nobody re-enters.
COOLDOWN = "cooldown."


#: How the name of a dedup marker begins; the name of its task and those of its locks follow.
MARKER = "dedup\t"
#: How the name begins of a lock for which the messages of debounced calls are parked. Such a
#: message is over when it has been published: its execution needs other locks.
DEBOUNCE = "debounce\t"
#: The one hold of such a lock: until it ends, calls are merged into the burst.
PAUSE = "pause"


class Burst(NamedTuple):
    """Calls that were merged and wait to be published as one message.

    Attributes:
        burst_id: stays until the message is handed out.
        call_id: of the last call that was merged.
        task_id: of the message: all calls have it.
        message: the text that is parked, if it was asked for.
    """

    burst_id: str
    call_id: str
    task_id: str
    message: str = ""


class Debounce(NamedTuple):
    """A call that is to be merged into a burst, or to begin one.

    Attributes:
        call_id: of this call.
        burst: the one that it is merged into; None begins one.
        exactly: whether it is merged only if no other call was, since `burst` was asked for.
        pause: seconds without a call after which the burst is over.
        most: seconds from its first call after which the burst is over in any case.
        task_id, label: of the call, for a burst that begins.
    """

    call_id: str
    burst: Burst | None
    exactly: bool
    pause: float
    most: float
    task_id: str
    label: str = ""


#: What has ended with a release, and is remembered:
#:
#:     ""         nothing
#:     execution  a late copy of its message is told so, and one that is parked is removed
#:     unacknowledged  the same, but a parked copy asks: the process may end before the result is
#:                stored, and no other message need be left
#:     retried    as execution, and that it has sent its retry
#:     attempt    this attempt alone: a late copy of its command is refused
#:     killed     the same, as its process died: a message that it has parked stays where it is, and
#:                nothing is left to its execution any more
#:     parked     the same, as it has parked its message, which stays where it is
#:     replaced   the execution, as another one takes its place before it has begun (`lock_dedup`);
#:                remembered only if it had something to release
EndedAs: TypeAlias = Literal[
    "", "execution", "unacknowledged", "retried", "attempt", "killed", "parked", "replaced"
]


class Release(NamedTuple):
    """What an attempt releases: its holds or its places.

    Attributes:
        ended: what counts as ended for `remember` seconds, see `EndedAs`.
        homes: the caller can resume parked messages of these brokers (with spaces between), and
            gets those whose turn has come.
        successor: the execution that the holds are left to.
        waited: the holds were waited for. Others probably wait for them now, and they should hear
            before the caller does.
    """

    names: Sequence[str]
    execution_id: str
    attempt_id: str
    ended: EndedAs = ""
    remember: float = 0.0
    homes: str = ""
    successor: Successor | None = None
    waited: bool = False


class Released(NamedTuple):
    """What was released: whether the attempt had anything, and the messages to resume."""

    had: bool
    messages: tuple[Message, ...] = ()


#: How the name of a line begins. No lock name has a tab.
LINE = "order\t"


def lock_names(name: str) -> tuple[str, ...]:
    """The lock names that the name of a dedup marker, a burst or a line is made of; or the name of
    a lock itself."""
    if name.startswith(LINE):
        return (name.removeprefix(LINE),)
    return tuple(name.split("\t")[2:]) if name.startswith((MARKER, DEBOUNCE)) else (name,)


#: A claim to a line has the short id of its task as its owner: a place that is left to a retry is
#: found by it when the task is revoked. The owner begins with this if the message comes again when
#: its process dies: its place stays in front until then. No short id has a plus.
COMES_AGAIN = "again+"


class PlaceRequest(NamedTuple):
    """A call that is about to be sent and is to have its place in a line, which is a lock whose
    waiters are calls in the order in which they are sent.

    Attributes:
        line: the name of that lock.
        execution_id: of the message.
        task: short id of the task, which a revoke names.
        label: the call for people.
        gap: for how many seconds those behind wait for the message when it is late.
        delay: seconds from now to when the call is due.
        moment: when it is due, in seconds since the epoch; 0 says nothing.
        life: seconds from when the call is due to the end of its place, whatever becomes of it.
        marker: a lock that is acquired in the same step, for the call's dedup: the place is taken
            only if the call gets it.
    """

    line: str
    execution_id: str
    task: str
    label: str
    gap: float
    delay: float
    moment: float
    life: float
    marker: Claim | None = None


class Passed(NamedTuple):
    """A call that was passed over in a line, and after how many seconds."""

    line: str
    execution_id: str
    label: str
    waited: float


class Downgraded(NamedTuple):
    """What became of holds that others are to share.

    Attributes:
        held: False if the attempt does not hold all of the locks. Nothing has changed then.
        joined: a lock that others hold as well and rely on, "" if there is none. Nothing has
            changed then.
        repeated: as for `Held`.
    """

    held: bool = True
    joined: str = ""
    repeated: bool = False


class Resumed(NamedTuple):
    """The messages to resume now, in how many seconds (or None) to look again, and the calls that
    were passed over since somebody asked last."""

    messages: tuple[Message, ...]
    recheck: float | None
    passed: tuple[Passed, ...] = ()


class Renewal(NamedTuple):
    """One line of a renewal or heartbeat: an execution's share of one lock.

    Attributes:
        waiter_lease: seconds that a place lives; 0 for a hold.
        longer: whether the lease is only ever made longer, never shorter.
    """

    name: str
    execution_id: str
    attempt_id: str
    lease: float
    waiter_lease: float = 0.0
    longer: bool = False


class Notice(NamedTuple):
    """A message in a process's inbox: `kind` is "granted" (with a fencing token) or "lost"; in the
    inbox of all that can send, "parked", with the home of the parked message as attempt."""

    kind: str
    execution_id: str
    attempt_id: str
    fence: int = 0


class Listener(NamedTuple):
    """Who hears of an inbox.

    Attributes:
        ready: is called at each (re)connection, because what was sent meanwhile is gone.
        hear: is called with each notice.
        wanted: whether it is to go on.
    """

    ready: Callable[[], None]
    hear: Callable[[Notice], None]
    wanted: Callable[[], bool] = lambda: True


class HoldInfo(NamedTuple):
    """A live hold as `inspect` tells it. `remaining` in seconds; the fencing token is the time in
    µs when the permit began; `shared`: whether others that share the lock may join."""

    execution_id: str
    remaining: float
    fence: int
    attempt_id: str
    owner: str
    label: str
    shared: bool = False


class LockState(NamedTuple):
    """A lock as it is now: its first holds, by their fencing tokens, or those that were asked for.
    `waiting` counts the whole queue."""

    holds: tuple[HoldInfo, ...]
    waiting: int


#: Seconds after which a listener looks whether it is still wanted.
STILL_WANTED = 2.0
