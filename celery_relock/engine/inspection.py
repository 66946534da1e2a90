"""What people ask of a backend, and no task does: which locks there are, who holds them and who
waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from .examination import Examination
from .protocol import HoldInfo


class Place(NamedTuple):
    """A waiter's place in the queue of a lock.

    Attributes:
        position: 1 for the first.
        since: the server's time when it came, in seconds since the epoch.
        state: "waiting" in a process; "parked"; "resumed", its message is on its way to a worker;
            "awaited", it has a place in a line (`lock_order`), and its message is to come.
        task: short id of its task; "" for one that waits in a process.
        names: all the locks that it waits for.
        shared: whether it is to share this lock.
    """

    execution_id: str
    position: int
    since: float
    state: str
    owner: str
    label: str
    task: str
    names: tuple[str, ...]
    shared: bool = False


class Survey(NamedTuple):
    """A lock as it is now.

    Attributes:
        key: what the backend calls it.
        name: of a name that was too long to be kept whole, what is kept.
        at: the server's time, in seconds since the epoch.
        held, waiting, parked: how many holds, places in the queue, and parked messages there are;
            parked ones have a place, too.
        holds, places: the first of them.
        foreign: what is kept there is not a lock: somebody else wrote it.
    """

    key: str
    name: str
    at: float
    held: int = 0
    waiting: int = 0
    parked: int = 0
    holds: tuple[HoldInfo, ...] = ()
    places: tuple[Place, ...] = ()
    foreign: bool = False


class ParkedMessage(NamedTuple):
    """A parked message, and its place in the queue of its (first) lock. `at` as for a survey; the
    `text` is "" of a message that is awaited in a line."""

    name: str
    at: float
    place: Place
    text: str


class Inspection(Protocol):
    """The questions. All read only. They raise what `Backend` raises."""

    def has_layout(self) -> bool:
        """Whether a process has begun to use this namespace since its server was last emptied.
        Processes that had begun before go on without. Raises LockConfigError if its layout is
        another one."""

    def keys(self, pattern: str) -> Iterator[list[str]]:
        """The keys of all locks whose names match a glob-style pattern of Redis, some at a time.
        A key may come twice; and one that is made or goes meanwhile, or not."""

    def keys_of(self, name: str) -> list[str]:
        """Where a lock of this name is, if there is one."""

    def survey(self, keys: Sequence[str], holds: int, places: int) -> list[Survey]:
        """What there is at some keys, with so many of the first holds and places of each."""

    def parked(self, task: str) -> ParkedMessage | None:
        """The message of a task that is parked, or awaited in a line, by the task's short id."""

    def messages(self) -> Iterator[list[str]]:
        """The texts of all parked messages, some at a time. One that comes or goes meanwhile may
        be told of twice, or not."""

    def force_release(self, key: str, execution_id: str = "") -> tuple[HoldInfo, ...]:
        """As `Backend.force_release`, by a lock's key."""


@runtime_checkable
class Inspectable(Protocol):
    """A backend that people and the doctor can ask."""

    def inspection(self) -> Inspection:
        """Whom people ask."""

    def examination(self) -> Examination:
        """Whom the doctor asks; see `examination`."""
