"""A LockStore in a Redis Cluster: the verbs of `RedisStore`, each at the node of its bucket."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import redis

from ..engine import ids
from ..engine.events import logger
from ..engine.protocol import (
    Answer,
    Claim,
    Deadlocked,
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
    Queued,
    Released,
    Renewal,
    Resumed,
    Successor,
)
from . import layout, replies
from .clients import own_pool
from .durability import dangers
from .keyspace import Keyspace
from .lines import Lines
from .nodes import FAILOVER, Nodes
from .redirections import translated
from .redis import BATCH, _text
from .replicas import NONE, Replicas
from .routed import Routed, Within, heartbeats, renew_all
from .scripts import sharded
from .spread import Spread
from .topology import Node, Remap, Topology
from .wire import Call

# More than there will be masters, and few enough for a look at all of them.
BUCKETS = 64
# When parked runs are looked for again, in seconds, where a node could not be asked, and at the
# latest in a bucket that had none.
_AGAIN, _IDLE = 1.0, 5.0


class ClusterBackend:
    """Locks in one Redis Cluster.

    Args:
        seeds: some of its nodes.
        options: how to connect to a node, as redis-py's connections take them, without an address.
        keyspace: where the keys are, in `BUCKETS` buckets.
        remap: from a node's address in the cluster to the one that it has from here.
        failover: how many seconds one is waited for.
        replicas: how many of a master's have to have a hold before it counts.
    """

    def __init__(
        self,
        seeds: Sequence[Node],
        options: Mapping[str, Any],
        keyspace: Keyspace,
        remap: Remap | None = None,
        failover: float = FAILOVER,
        replicas: Replicas = NONE,
    ) -> None:
        self._keys = keyspace
        self._scripts = sharded()
        self._topology = Topology(seeds, options, keyspace.buckets, remap)
        self._agreed: set[int] = set()
        self._work = Nodes(self._topology, self._keys, layout.see_version, failover, replicas)
        # The keep-alive thread's own, see `RedisStore`.
        self._beats = Nodes(self._topology, self._keys, failover=0.0, replicas=replicas)
        self.replicated = replicas.needed > 0
        self._one = Routed(self._keys, self._work)
        self._spread = Spread(self._one, self._keys)
        self._places = frozenset(seeds)
        self._idle: dict[tuple[str, int], float] = {}

    @property
    def id(self) -> str:
        return ids.digest(repr((self._keys.namespace, sorted(self._places))).encode())

    # Two lists of seeds may name other nodes of the one cluster; if they name one in common, they
    # are the same.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ClusterBackend) or self._keys.namespace != other._keys.namespace:
            return False
        return not self._places.isdisjoint(other._places)

    def __hash__(self) -> int:
        return hash(self._keys.namespace)

    def route(self, names: Sequence[str]) -> object:
        """Leases of one node are renewed together, and a node that is away keeps no others."""
        return frozenset(self._topology.known(self._keys.bucket(name)) for name in names)

    def acquire(
        self, claim: Claim, wait: float = 0.0, inbox: str = "-", channel: str = ""
    ) -> Answer:
        self._agree(claim.names)
        if self._spread.buckets(claim.names) == 1:
            return self._one.acquire(claim, wait, inbox)
        return self._spread.acquire(claim, wait, inbox)

    def park(
        self, claim: Claim, park_request: ParkRequest, inbox: str = "-"
    ) -> Held | Parked | Full | Duplicate | Deadlocked | Ended:
        self._agree(claim.names)
        if self._spread.buckets(claim.names) == 1:
            return self._one.park(claim, park_request, inbox)
        return self._spread.park(claim, park_request, inbox)

    def release(
        self,
        names: Sequence[str],
        execution_id: str,
        attempt_id: str,
        ended: str = "",
        remember: float = 0.0,
        home: str = "",
        successor: Successor | None = None,
        waited: bool = False,
    ) -> Released:
        if self._spread.buckets(names) == 1:
            return self._one.release(
                names, execution_id, attempt_id, ended, remember, home, successor, waited
            )
        return self._spread.release(
            names, execution_id, attempt_id, ended, remember, home, successor
        )

    def resume(self, home: str, by: str, tasks: Sequence[str] = ()) -> Resumed:
        args, now = [home, by, str(BATCH), " ".join(tasks)], time.monotonic()
        look = [b for b in self._buckets() if tasks or self._idle.get((home, b), 0.0) <= now]
        calls = [([self._keys.meta(b), self._keys.due(b)], args) for b in look]
        outcomes = self._everywhere("resume", calls)
        found = [reply for reply in outcomes if not isinstance(reply, Exception)]
        for bucket, reply in zip(look, outcomes, strict=True):
            idle = not isinstance(reply, Exception) and reply[0] < 0
            # Not all at the same time.
            self._idle[home, bucket] = now + (ids.chance.uniform(_IDLE / 2, _IDLE) if idle else 0.0)
        pauses = [reply[0] / 1000 for reply in found if reply[0] >= 0]
        if len(found) < len(outcomes):
            pauses.append(_AGAIN)
        messages = tuple(each for reply in found for each in replies.messages(reply[1:]))
        return Resumed(messages, min(pauses, default=None))

    def withdraw(self, execution_id: str, remember: float, home: str = "") -> Released:
        args = [execution_id, _text(remember), home]
        calls = [
            ([self._keys.meta(b), self._keys.tombstone(execution_id, b)], args)
            for b in self._buckets()
        ]
        had = False
        messages: list[Message] = []
        outcomes = self._everywhere("withdraw", calls)
        for reply in outcomes:
            if not isinstance(reply, Exception):
                back = replies.withdrawn(reply, False)
                had = had or back.had
                messages += back.messages
        self._raise_first("withdraw", [] if had else outcomes)
        return Released(had, tuple(messages))

    def renew(self, renewals: Sequence[Renewal], *, within: float | None = None) -> list[bool]:
        return renew_all(self._lane(within), self._keys, renewals, within)

    def heartbeat(
        self, renewals: Sequence[Renewal], *, within: float | None = None
    ) -> list[Held | Queued | None]:
        lane = self._lane(within)
        answers = heartbeats(lane, self._keys, renewals, within)
        self._spread.follow(renewals, answers, Routed(self._keys, Within(lane, within)))
        return answers

    def inspect(self, name: str, most: int = 100) -> LockState:
        return self._one.inspect(name, most)

    def force_release(self, name: str, execution_id: str = "") -> tuple[HoldInfo, ...]:
        return self._one.force_release(name, execution_id)

    def dangers(self) -> list[str]:
        found: dict[str, None] = {}
        for node in self._topology.masters():
            pool = own_pool({**self._topology.options, "host": node.host, "port": node.port})
            with redis.Redis(connection_pool=pool) as client:
                found |= dict.fromkeys(dangers(client))
            pool.disconnect()
        return list(found)

    def listen(self, inbox: str, ready: Callable[[], None], hear: Callable[[Notice], None]) -> None:
        def heard(notice: Notice) -> None:
            self._idle.clear()
            hear(notice)

        Lines(self._work, lambda bucket: self._keys.inbox(inbox, bucket)).listen(ready, heard)

    def line(self, channel: str) -> None:
        return None  # it would take one to each node

    def close(self) -> None:
        """Close the idle connections. The store can still be used."""
        self._work.close()
        self._beats.close()

    def _lane(self, within: float | None) -> Nodes:
        return self._work if within is None else self._beats

    def _buckets(self) -> range:
        return range(self._keys.buckets)

    def _agree(self, names: Iterable[str]) -> None:
        """Before this process's first command for a bucket: is its layout ours? And of the first
        bucket: all that have a layout have asked there."""
        new = {0, *map(self._keys.bucket, names)} - self._agreed
        if not new:
            return
        args = layout.arguments(self._keys)
        for reply in self._work.run_all(
            self._scripts["open"], [([self._keys.meta(bucket)], args) for bucket in sorted(new)]
        ):
            layout.agree(self._keys, reply)
        self._agreed |= new

    def _everywhere(self, verb: str, calls: Sequence[Call]) -> list[Any]:
        """The outcomes of a verb in all buckets; raises if all are errors. What the others have
        handed out is not to wait for a node that is away."""
        outcomes = self._work.outcomes(self._scripts[verb], calls, failover=0.0)
        failed = [each for each in outcomes if isinstance(each, Exception)]
        if calls and len(failed) == len(outcomes):
            self._raise_first(verb, failed)
        elif failed:
            logger.debug("%s did not reach all of the cluster: %s", verb, failed[0])
        return outcomes

    def _raise_first(self, verb: str, outcomes: Sequence[Any]) -> None:
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise translated(outcome, self._scripts[verb])
