"""Commands to the masters of a cluster: each goes to the node that serves its bucket.

While a slot moves or a replica takes over, a command is refused or its answer is lost. Every verb
can be sent twice, so it is sent again, there or elsewhere. redis-py's RedisCluster repeats without
a bound in time, gives up on a slot that moves, and sends WAIT to any node.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from redis.crc import key_slot
from redis.exceptions import AskError, ConnectionError, MovedError  # noqa: A004

from ...engine import ids
from ...engine.platform import Solo, anew_in_a_child
from ...engine.protocol import Listener
from ...errors import LockConfigError, RelockError
from .connections import (
    IDLE_FOR,
    NONE,
    Call,
    Channel,
    Command,
    Connections,
    Effort,
    Replicas,
    Transport,
)
from .errors import FAULTS, TooFewReplicas, translate
from .keys import CLUSTER_BUCKETS, absent, bucket_of
from .scripts import Script
from .subscription import ClusterInbox

# Seconds for which a command is repeated while its node cannot be reached and the cluster can: with
# the default cluster-node-timeout of 15 s a replica takes over after about 20 s.
FAILOVER = 30.0
# Seconds that one node has to answer which node serves which slot, as there are others to ask; and
# after a silent node, which has used up the time of the keep-alive thread, perhaps.
_BRIEF, _BRIEFLY = 1.0, 0.2
# For how many seconds a node that was silent gets no more than that one second where all nodes are
# asked, as the answers of the others wait for its own.
_SHUN = 10.0
# So many silent nodes end a look: thirty nodes must not cost thirty times as much as a server.
_SILENT = 5
# Seconds for which the answer is not asked for again.
_NEWS = 0.05
# How many redirections a command follows before they count as a circle.
_HOPS = 6
# The host of a node without a name, where the cluster prefers names; it has an address.
_NAMELESS = "?"


class Node(NamedTuple):
    """The address of a node."""

    host: str
    port: int


Remap: TypeAlias = "Callable[[tuple[str, int]], tuple[str, int]]"
# Sends a command over these connections, and returns its answer. The flag: its slot moves there.
Again: TypeAlias = "Callable[[Connections, bool], Any]"


class Map:
    """The master of each bucket, learnt from any node that answers, and corrected by redirections.
    It needs no mutex: if two threads ask at the same time, either answer will do.

    Args:
        seeds: the nodes to ask first.
        connect: returns a connection to a node, with a timeout in seconds.
        buckets: the number of buckets.
        remap: translates the address of a node in the cluster into its address from here.
    """

    def __init__(
        self,
        seeds: Sequence[Node],
        connect: Callable[[Node, float], Any],
        buckets: int,
        remap: Remap | None,
    ) -> None:
        self._seeds = tuple(seeds)
        self._connect = connect
        self._remap = remap
        self._slots = [key_slot(f"{{{bucket}}}".encode()) for bucket in range(buckets)]
        self._serving: dict[int, Node] = {}
        self._known: tuple[Node, ...] = ()
        self._silent: dict[Node, float] = {}
        self._looked_at = -math.inf

    def serving(self, bucket: int) -> Node:
        """The master that serves a bucket.

        Raises:
            RedisError, OSError: no node answers, or no node serves the bucket.
            LockConfigError: the server that answers is not in a cluster.
        """
        node = self._serving.get(bucket) or self.look().get(bucket)
        if node is None:
            raise ConnectionError(
                f"no node of the Redis Cluster serves slot {self._slots[bucket]}: see CLUSTER INFO"
            )
        return node

    def known(self, bucket: int) -> Node | None:
        """The master of a bucket, if no node has to be asked for it."""
        return self._serving.get(bucket)

    @property
    def knows_any(self) -> bool:
        """Whether the master of any bucket is known."""
        return bool(self._serving)

    def masters(self) -> dict[Node, list[int]]:
        """Every master that serves a bucket, with its buckets. Raises as `serving` does."""
        found: dict[Node, list[int]] = {}
        for bucket, node in sorted((self._serving or self.look()).items()):
            found.setdefault(node, []).append(bucket)
        if not found:
            raise ConnectionError("no node of the Redis Cluster serves a slot: see CLUSTER INFO")
        return found

    def told(self, by: Node, error: Any) -> Node:
        """The node to which the node `by` redirects a command. MOVED is remembered, ASK is not."""
        # A redirection without a host means the host of the node that redirects.
        node = self._from_here(error.host or by.host, int(error.port))
        if isinstance(error, MovedError):
            there = (b for b, slot in enumerate(self._slots) if slot == error.slot_id)
            self._serving = {**self._serving, **dict.fromkeys(there, node)}
        return node

    def silent(self, node: Node) -> None:
        """Remember that a node did not answer, so that the others are asked before it."""
        self._silent[node] = time.monotonic()

    def was_silent(self, node: Node) -> bool:
        """Whether a node did not answer lately."""
        return time.monotonic() - self._silent.get(node, -math.inf) < _SHUN

    def refresh(self) -> None:
        """Look again if what is known can be out of date; it stays if no node answers. For who only
        reads: nothing redirects it to a new master, nor from one that is gone. Raises
        LockConfigError as `serving` does."""
        if self._serving:
            with suppress(*FAULTS):
                self.look()

    def look(self, within: float = _BRIEF) -> dict[int, Node]:
        """Ask which node serves which slot: `_SILENT` nodes at most, each for `within` seconds.
        Slots that the answer leaves out keep their node. Raises as `serving` does."""
        if time.monotonic() - self._looked_at < _NEWS and self._serving:
            return self._serving
        # In random order: the first node's view can be outdated.
        nodes = ids.chance.sample(self._known, len(self._known))
        nodes += [seed for seed in self._seeds if seed not in nodes]
        nodes.sort(key=lambda node: self._silent.get(node, 0.0))
        failure: Exception | None = None
        until = time.monotonic() + (_SILENT - 0.5) * within
        for node in nodes:
            try:
                self._learn(node, self._ranges_of(node, within))
            except FAULTS as error:
                if "cluster support disabled" in str(error).lower():
                    raise LockConfigError(
                        f"{node.host}:{node.port} is not a node of a Redis Cluster: set "
                        "relock_url to redis://host:port/database for a single Redis"
                    ) from error
                failure = error
                self.silent(node)
                if time.monotonic() > until:
                    break
            else:
                self._silent.pop(node, None)
                return self._serving
        assert failure is not None, "a cluster has a node"
        raise failure

    def _ranges_of(self, node: Node, within: float) -> list[Any]:
        link = self._connect(node, within)
        try:
            link.send_command("CLUSTER", "SLOTS", check_health=False)
            ranges: list[Any] = link.read_response(disable_decoding=True)
            if not ranges:  # it was removed, and left running and in the URL
                raise ConnectionError(
                    f"no node of the Redis Cluster serves a slot, says {node.host}:{node.port}: "
                    "see CLUSTER INFO"
                )
            return ranges
        finally:
            link.disconnect()

    def _learn(self, teller: Node, ranges: Sequence[Sequence[Any]]) -> None:
        serving, known = dict(self._serving), set()
        for first, last, *nodes in ranges:
            # A missing host means the host of the node that was asked.
            there = [self._from_here(_host(node) or teller.host, node[1]) for node in nodes]
            known.update(there)
            for bucket, slot in enumerate(self._slots):
                if first <= slot <= last:
                    serving[bucket] = there[0]
        self._looked_at = time.monotonic()
        self._known = tuple(known)
        self._serving = serving

    def _from_here(self, host: str, port: int) -> Node:
        return Node(*self._remap((host, port))) if self._remap else Node(host, port)


class Cluster(Transport):
    """A Redis Cluster.

    Args:
        failover: for how many seconds to wait for a failover. The others are as for a `Map` and for
            `Connections`; the `options` have no address.
    """

    variant = "cluster"

    def __init__(
        self,
        seeds: Sequence[Node],
        kind: type[Any],
        options: Mapping[str, Any],
        remap: Remap | None = None,
        replicas: Replicas = NONE,
        failover: float = FAILOVER,
        buckets: int = CLUSTER_BUCKETS,
    ) -> None:
        super().__init__(seeds, replicas)
        self.buckets = buckets
        self.map = Map(seeds, lambda node, within: self._at(node).make(within), buckets, remap)
        self.made = (kind, options)
        self._failover = failover
        # For commands, and for the keep-alive thread.
        self._nodes: dict[tuple[Node, bool], Connections] = {}
        self._closed_at = {False: 0.0, True: 0.0}
        anew_in_a_child(self)

    def _reset(self) -> None:
        # For the keep-alive thread, as the lookup of a node's name can hang.
        self._looking = Solo(self._look_briefly)

    def run_each(self, script: Script, calls: Sequence[Call], effort: Effort) -> list[Any]:
        self._close_old(effort.renewing)
        there: dict[Node, list[int]] = {}
        outcomes: list[Any] = [None] * len(calls)
        calls = [(whole(script, keys), args) for keys, args in calls]
        for index, (keys, _) in enumerate(calls):
            try:
                there.setdefault(self.map.serving(bucket_of(keys[0])), []).append(index)
            except FAULTS as error:
                if not self.map.knows_any:  # the look for the next would take as long
                    return [error] * len(calls)
                outcomes[index] = error
        for node, indexes in there.items():
            part = [calls[index] for index in indexes]
            replies = self._call_at(node, script, part, effort)
            for index, reply in zip(indexes, replies, strict=True):
                again = partial(_called, script, calls[index], effort)
                outcomes[index] = self.followed(node, reply, again, effort.renewing)
        return outcomes

    def _call_at(
        self, node: Node, script: Script, calls: Sequence[Call], effort: Effort
    ) -> list[Any]:
        """The outcome of each call at a node."""
        if effort.everywhere:
            effort.within = _BRIEF if self.map.was_silent(node) else None
        try:
            return self._at(node, effort.renewing).call(script, calls, effort)
        except FAULTS as error:
            if not (effort.everywhere and effort.within):  # now and then it gets its whole time
                self.map.silent(node)
            if effort.renewing:
                with suppress(RuntimeError):  # no thread to spare: the next failure tries again
                    self._looking.start()
            else:
                self._look_briefly()
            return [error] * len(calls)

    def _look_briefly(self) -> None:
        with suppress(*FAULTS, RelockError):  # for the next call
            self.map.look(_BRIEFLY)

    def at(self, key: str) -> Connections:
        self.map.refresh()
        try:
            return self._at(self.map.serving(bucket_of(key)))
        except FAULTS as error:
            raise translate(error) from error

    def masters(self, keys: Sequence[str] = ()) -> list[tuple[Connections, list[int]]]:
        self.map.refresh()
        try:
            for node, buckets in self.map.masters().items() if keys else ():
                there: list[Command] = [("EXISTS", k) for k in keys if bucket_of(k) in buckets]
                self._at(node).answers(*there)  # whoever serves one no more redirects it
            return [(self._at(node), buckets) for node, buckets in self.map.masters().items()]
        except FAULTS as error:
            raise translate(error) from error

    def route(self, bucket: int) -> object:
        return self.map.known(bucket)

    def listen(self, channel: Channel, listener: Listener) -> None:
        def connect(node: Node) -> Any:
            return self._at(node).make(_BRIEF)

        ClusterInbox(self.map, connect, channel, listener).listen()

    def _at(self, node: Node, renewing: bool = False) -> Connections:
        key = node, renewing
        if key not in self._nodes:
            self._nodes[key] = _ToNode(self, node, _BRIEF if renewing else None)
        return self._nodes[key]

    def _close_old(self, renewing: bool) -> None:
        """Close what was idle for a minute at any node: one that serves no bucket any more is never
        used again. The keep-alive thread closes its own."""
        if (now := time.monotonic()) - self._closed_at[renewing] > IDLE_FOR:
            self._closed_at[renewing] = now
            for (_, of_renewals), links in self._nodes.copy().items():
                if of_renewals == renewing:
                    links.close(IDLE_FOR)

    def followed(self, node: Node, said: Any, again: Again, renewing: bool = False) -> Any:
        """The outcome of a command that a node has answered, after any redirections."""
        for _ in range(_HOPS):
            if not isinstance(said, AskError):  # MOVED is one, too
                return said
            node, asking = self.map.told(node, said), type(said) is AskError
            try:
                said = again(self._at(node, renewing), asking)
            except FAULTS as error:
                return error
        return _circle(said) if isinstance(said, AskError) else said

    def patience(self, error: Exception) -> float:
        """For how many seconds to repeat a command. First asks which node serves which slot now."""
        if isinstance(error, TooFewReplicas):
            return self.PATIENCE  # a failover would not bring more replicas
        try:
            self.map.look()
        except FAULTS:
            return min(self.PATIENCE, self._failover)  # no node is there to take over
        return self._failover


class _ToNode(Connections):
    """Connections to a node. What is asked of it is asked of the node to which it redirects."""

    def __init__(self, cluster: Cluster, node: Node, limit: float | None) -> None:
        kind, options = cluster.made
        address = {"host": node.host, "port": node.port}
        super().__init__(kind, {**options, **address}, cluster.replicas, limit)
        self._cluster, self._node = cluster, node

    def answers(self, *commands: Command) -> list[Any]:
        return [
            self._cluster.followed(self._node, said, partial(_asked, command))
            for command, said in zip(commands, super().answers(*commands), strict=True)
        ]


def _host(node: Sequence[Any]) -> str:
    """The host of a node in CLUSTER SLOTS, "" if there is none."""
    host, *_, more = node
    if host == _NAMELESS.encode() and isinstance(more, list):
        host = dict(zip(more[::2], more[1::2], strict=True)).get(b"ip")
    return (host or b"").decode()


def _called(script: Script, call: Call, effort: Effort, links: Connections, asking: bool) -> Any:
    (said,) = links.call(script, [call], effort, asking)
    return said


def _asked(command: Command, links: Connections, asking: bool) -> Any:
    said = links.exchange([("ASKING",), command] if asking else [command], Effort())
    return said[0] if isinstance(said[0], Exception) else said[-1]


def _circle(said: Exception) -> ConnectionError:
    """The error for a command that was redirected too often."""
    return ConnectionError(
        "the nodes of the Redis Cluster do not agree on which node serves this slot: see CLUSTER "
        f"NODES at each node ({said})"
    )


def whole(script: Script, keys: Sequence[str]) -> Sequence[str]:
    """The keys of a call, so that it is executed as a whole or not at all while its slot moves."""
    # A server checks only the keys that a call names. A script that finds other keys would be
    # stopped halfway while its slot moves. With a key that never exists it is refused before it
    # begins, until the slot has moved.
    return [*keys, absent(keys[0])] if script.finds_keys else keys
