"""What people and the doctor ask of a backend, and no task does: which locks there are, who holds
them and who waits, how the servers are set up; and the answers, as people see them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from . import ids
from .events import told_by
from .protocol import COOLDOWN, KEPT, MARKER, PAUSE, HoldInfo


@dataclass(frozen=True, slots=True)
class Plain:
    """Base class of what people are told."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Holder(Plain):
    """A live hold.

    Attributes:
        token: the fencing token of its permit. Holders with the same token share the permit.
        owner: who can re-enter, usually the id of the workflow.
        execution_id: the id of the execution.
        task: the task's name; "Lock" for a `Lock`; "" if it is not known.
        task_id: the task's id, also of a `Lock` in its body; "" outside of tasks.
        host: the host of the process; "" if it is not known.
        pid: the id of the process; 0 if it is not known.
        since: when the permit began, in seconds since the epoch, by the server's clock. For a
            shared lock: since when it has been shared without a break, by any holder. In the order
            of a lock (`lock_order`): when its call was sent, or is due; nothing tells since when it
            has its turn.
        lease_left: seconds until the hold ends if nobody renews it.
        kept: whether the hold is kept for the next step, or the retry, of a workflow, and has no
            process yet.
        cooldown: whether the task has ended and the lock stays held for a while (`lock_cooldown`).
        pause: whether it marks the time in which calls are merged into a burst (`lock_debounce`).
        shared: whether others can hold the lock at the same time (`lock_mode="shared"`).
    """

    token: int
    owner: str
    execution_id: str
    task: str
    task_id: str
    host: str
    pid: int
    since: float
    lease_left: float
    kept: bool = False
    cooldown: bool = False
    pause: bool = False
    shared: bool = False

    def __str__(self) -> str:
        return work_of(self.task, self.task_id) or "an unnamed holder"


#: The states of a waiter whose message is in Redis.
PARKED = ("parked", "owed", "resumed")


@dataclass(frozen=True, slots=True)
class Waiter:
    """An execution in the queue of a lock.

    Attributes:
        position: its place in the queue, 1 for the first.
        state: "waiting" in a worker slot, or in another process; "parked", its message is kept in
            Redis; "owed", the same, its turn has come, and no process has published its message;
            "resumed", its message is on its way to a worker; "awaited", it has a place in the order
            of a lock (`lock_order`), and its message has not come, or can come again.
        since: when it began to wait, in seconds since the epoch, by the server's clock. In an order
            a call waits from when its message came; one that is awaited, from when it keeps a later
            call waiting that has come, and until then from this moment.
        names: the names of all the locks that it waits for.
        shared: whether it will share the lock.
        sent: how often its message was given to a process to publish since it was parked.
        due: by which time it has its place, in seconds since the epoch: in an order when its call
            was sent, or is due.

    The others are as for a `Holder`. For a parked execution, `host` and `pid` say which process
    received it.
    """

    position: int
    state: str
    owner: str
    execution_id: str
    task: str
    task_id: str
    host: str
    pid: int
    since: float
    names: tuple[str, ...] = ()
    shared: bool = False
    sent: int = 0
    due: float = 0.0

    def __str__(self) -> str:
        return work_of(self.task, self.task_id) or "an unnamed execution"


@dataclass(frozen=True, slots=True)
class LockInfo(Plain):
    """A lock at one moment.

    Attributes:
        name: the lock name. A name of more than 120 bytes is shortened in Redis and ends with a
            digest. All functions here accept both forms; a lock's order (`lock_order`) is found by
            the whole name alone.
        at: the moment, in seconds since the epoch, by the server's clock.
        held: how many executions hold the lock.
        waiting: how many executions are in its queue. One whose process has died counts, and is not
            among the waiters, until the lock is acquired, awaited or released.
        parked: how many of the waiting executions are parked.
        holders: the oldest holders.
        waiters: the first waiters.
        foreign: whether the key of this name is not a lock, but something of another program.
    """

    name: str
    at: float
    held: int = 0
    waiting: int = 0
    parked: int = 0
    holders: tuple[Holder, ...] = ()
    waiters: tuple[Waiter, ...] = ()
    foreign: bool = False

    @property
    def idle(self) -> bool:
        """Whether nobody holds the lock or waits for it."""
        return not (self.held or self.waiting or self.foreign)


class ParkedMessage(NamedTuple):
    """A parked message, and its execution in the queue of its (first) lock. `at`: the server's
    time, in seconds since the epoch; `text`: "" of a message that is awaited in a line."""

    name: str
    at: float
    waiter: Waiter
    text: str


class Inspection(Protocol):
    """The questions. All read only. They raise what `Backend` raises."""

    def has_layout(self) -> bool:
        """Whether a process has begun to use this namespace since its server was last emptied.
        Processes that had begun before go on without. Raises LockConfigError if its layout is
        another one."""

    def keys(self, pattern: str) -> Iterator[list[str]]:
        """The keys of all locks whose names match a glob-style pattern of Redis, some at a time.
        A key may come twice; and one that is made or goes meanwhile, or not. The whole name of a
        lock is such a pattern, also if it is shortened there."""

    def keys_of(self, name: str) -> list[str]:
        """Where a lock of this name is, if there is one."""

    def survey(self, keys: Sequence[str], holders: int, waiters: int) -> list[LockInfo]:
        """The lock at each of some keys, with so many of its first holders and waiters."""

    def parked(self, task: str) -> ParkedMessage | None:
        """The message of a task that is parked, or awaited in a line, by the task's short id."""

    def needed(self, execution_id: str) -> dict[str, str]:
        """What has to be acquired before the holds of an execution can end: the names of locks, by
        the execution that waits. It may have ceased to wait."""

    def messages(self) -> Iterator[list[str]]:
        """The texts of all parked messages, some at a time. One that comes or goes meanwhile may
        be told of twice, or not."""

    def force_release(self, key: str, execution_id: str = "") -> tuple[HoldInfo, ...]:
        """As `Backend.force_release`, by a lock's key."""


class Server(NamedTuple):
    """One server, or one master of a cluster.

    Attributes:
        info: what INFO says; empty where it may not be asked.
        saves: when it saves to its disk (`save`), "" for never, None where nobody may ask.
        clock: seconds by which its clock is ahead of ours, and by how much that may be wrong.
        trips: seconds that some round trips took, the shortest first.
        needed: how many replicas have to have a hold.
        at: its address, if there are several; else "".
    """

    info: Mapping[str, str]
    saves: str | None
    clock: tuple[float, float]
    trips: tuple[float, ...]
    needed: int = 0
    at: str = ""


class Kind(NamedTuple):
    """Keys of one kind, in a sample: how many, and the bytes that each takes on average; 0 where
    the server does not tell."""

    name: str
    keys: int
    bytes_each: float


class Memory(NamedTuple):
    """What a sample of keys tells.

    Attributes:
        keys, seen: how many keys there are, of whomever, and how many the sample has.
        kinds: those of this namespace.
        namespaces: the others that were seen.
    """

    keys: int
    seen: int
    kinds: tuple[Kind, ...]
    namespaces: tuple[str, ...]


class ParkedTask(NamedTuple):
    """A parked message: of which lock, app and broker (`home`), queue and task, and how often it
    was given to a process to publish."""

    lock: str
    home: str
    queue: str
    task: str
    task_id: str
    sent: int = 0


class Owed(NamedTuple):
    """How many messages of a home had their turn when no process could send them, and since when,
    in seconds."""

    home: str
    messages: int
    since: float


class Examination(Protocol):
    """What a doctor asks: how the servers are set up, what may not be done there, what takes up
    memory, what is parked. Facts alone; `celery_relock.doctor` judges them. Raises what `Backend`
    raises, and changes nothing."""

    def servers(self, trips: int) -> list[Server]:
        """Each server that has keys. So many round trips to it are timed; without any its clock is
        not compared."""

    def refused(self) -> list[str]:
        """What the user may not do, as ACL SETUSER writes it: `+hget`, `~relock:*`, `&relock:*`."""

    def memory(self, most: int) -> Memory | None:
        """A sample of about so many keys of each server; None where nobody may look."""

    def parked_tasks(self, most: int) -> list[ParkedTask]:
        """Some parked messages."""

    def owed(self, homes: set[str]) -> list[Owed]:
        """What is owed to these homes."""


@runtime_checkable
class Inspectable(Protocol):
    """A backend that people and the doctor can ask."""

    def inspection(self) -> Inspection:
        """Whom people ask."""

    def examination(self) -> Examination:
        """Whom the doctor asks."""


def holder_of(info: HoldInfo, name: str) -> Holder:
    """The holder, as people see it."""
    told, cools = told_by(info.label), info.execution_id.startswith(COOLDOWN)
    if name.startswith(MARKER):  # its label is for `dedup.marker`: task id, execution id
        told = name.split("\t")[1], info.label.partition("\t")[0].rpartition(" ")[0], "", 0
    pauses = info.execution_id == PAUSE
    return Holder(
        info.fence,
        ids.full(info.owner),
        info.execution_id,
        *told,
        since=info.fence / 1e6,
        lease_left=info.remaining,
        kept=info.attempt_id == KEPT and not cools and not pauses,
        cooldown=cools,
        pause=pauses,
        shared=info.shared,
    )


def work_of(task: str, task_id: str) -> str:
    """`task[id]`, with what is known."""
    if task and task_id:
        return f"{task}[{task_id}]"
    return f"the task {task_id}" if task_id else task
