"""What a doctor asks of a backend, and no task does: how its servers are set up, what it may not do
there, what takes up memory, what is parked. Facts alone; `celery_relock.doctor` judges them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol


class Server(NamedTuple):
    """One server, or one master of a cluster.

    Attributes:
        info: what INFO says; empty where it may not be asked.
        saves: when it saves to its disk (`save`), "" for never, None where nobody may ask.
        clock: seconds by which its clock is ahead of ours, and by how much that may be wrong.
        trips: seconds that some round trips took, the shortest first.
        needed: how many replicas have to have a hold.
    """

    info: Mapping[str, str]
    saves: str | None
    clock: tuple[float, float]
    trips: tuple[float, ...]
    needed: int = 0


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
    """The questions. They raise what `Backend` raises, and change nothing."""

    def servers(self, trips: int) -> list[Server]:
        """Each server that has keys. So many round trips to it are timed; without any its clock is
        not compared."""

    def refused(self) -> list[str]:
        """What the user may not do, as ACL SETUSER writes it: `+hget`, `~relock:*`, `&relock:*`."""

    def memory(self, most: int) -> Memory | None:
        """A sample of about so many keys of each server; None where nobody may look."""

    def parked(self, most: int) -> list[ParkedTask]:
        """Some parked messages."""

    def owed(self, homes: set[str]) -> list[Owed]:
        """What is owed to these homes."""
