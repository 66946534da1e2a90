"""Which node of a cluster serves which bucket, as far as this process knows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from redis.crc import key_slot
from redis.exceptions import RedisError

from ..engine import ids
from ..errors import LockConfigError, LockUnavailable
from .clients import own_pool
from .faults import translate

Remap: TypeAlias = Callable[[tuple[str, int]], tuple[str, int]]

# How long one node may take to tell, in seconds: there are others to ask.
_BRIEF = 1.0
# What was asked for so short a time ago, in seconds, is not asked for again.
_NEWS = 0.05


class Node(NamedTuple):
    """Where a node listens."""

    host: str
    port: int


class Topology:
    """The masters of one cluster, each with its buckets.

    It is learnt from whichever node answers, and corrected by the nodes themselves: one that does
    not serve a slot says who does. Nothing is locked: a look that another one crosses is as good.

    Args:
        seeds: nodes to ask at first.
        options: how to connect to a node, without its host and port.
        buckets: how many there are.
        remap: from the address that a node has in the cluster to the one it has from here.

    Attributes:
        version: another number after each change.
    """

    def __init__(
        self,
        seeds: Sequence[Node],
        options: Mapping[str, Any],
        buckets: int,
        remap: Remap | None = None,
    ) -> None:
        self.options = options
        self.version = 0
        self._seeds = tuple(seeds)
        self._remap = remap
        self._slots = [key_slot(f"{{{bucket}}}".encode()) for bucket in range(buckets)]
        self._serving: dict[int, Node] = {}
        self._known: tuple[Node, ...] = ()
        self._silent: Node | None = None
        self._looked_at = -1e9

    def serving(self, bucket: int) -> Node:
        """The master that has a bucket.

        Raises:
            LockUnavailable: no node can be asked, or nobody has it.
            LockConfigError: what answers is no cluster.
        """
        node = self._serving.get(bucket) or self.look().get(bucket)
        if node is None:
            raise LockUnavailable(
                f"nobody in the Redis cluster serves slot {self._slots[bucket]}: see CLUSTER INFO"
            )
        return node

    def known(self, bucket: int) -> Node | None:
        """What `serving` returns if nobody has to be asked."""
        return self._serving.get(bucket)

    def masters(self) -> dict[Node, list[int]]:
        """Every master that has a bucket, with its buckets. Raises as `serving` does."""
        found: dict[Node, list[int]] = {}
        for bucket, node in sorted((self._serving or self.look()).items()):
            found.setdefault(node, []).append(bucket)
        return found

    def moved(self, bucket: int, node: Node) -> None:
        """A node said so."""
        if self._serving.get(bucket) != node:
            self._serving = {**self._serving, bucket: node}
            self.version += 1

    def silent(self, node: Node) -> None:
        """It did not answer: the others are asked before it."""
        self._silent = node

    def seen_from_here(self, host: str, port: int) -> Node:
        """The address of a node that the cluster knows by this one."""
        return Node(*self._remap((host, port))) if self._remap else Node(host, port)

    def look(self, within: float = _BRIEF) -> dict[int, Node]:
        """Ask who serves what; what it was before stays where nobody tells.

        Args:
            within: seconds for each node that is asked.

        Raises: as `serving` does.
        """
        if time.monotonic() - self._looked_at < _NEWS and self._serving:
            return self._serving
        # Not always the same first: its view may be old.
        nodes = ids.chance.sample(self._known, len(self._known)) or list(self._seeds)
        nodes += [seed for seed in self._seeds if seed not in nodes]
        nodes.sort(key=lambda node: node == self._silent)
        error: Exception | None = None
        for node in nodes:
            try:
                ranges = self._ask(node, min(within, _BRIEF))
            except (RedisError, OSError) as problem:
                if "cluster support disabled" in str(problem).lower():
                    raise LockConfigError(
                        f"{node.host}:{node.port} is no node of a Redis Cluster: set relock_url to "
                        "redis://host:port/database for a single Redis"
                    ) from problem
                error = problem
            else:
                self._learn(node, ranges)
                return self._serving
        assert error is not None, "a cluster has a node"
        raise translate(error, where="cluster slots") from error

    def _ask(self, node: Node, within: float) -> list[Any]:
        options = {**self.options, "socket_timeout": within, "socket_connect_timeout": within}
        pool = own_pool({**options, "host": node.host, "port": node.port})
        link: Any = pool.connection_class(**pool.connection_kwargs)
        try:
            link.send_command("CLUSTER", "SLOTS", check_health=False)
            ranges: list[Any] = link.read_response(disable_decoding=True)
            return ranges
        finally:
            link.disconnect()

    def _learn(self, teller: Node, ranges: Sequence[Sequence[Any]]) -> None:
        serving, known = dict(self._serving), set()
        for first, last, *nodes in ranges:
            # A host that it does not know, or leaves out, is the one that was asked.
            there = [
                self.seen_from_here(_text(host) or teller.host, port) for host, port, *_ in nodes
            ]
            known.update(there)
            for bucket, slot in enumerate(self._slots):
                if first <= slot <= last:
                    serving[bucket] = there[0]
        self._looked_at = time.monotonic()
        self._known = tuple(sorted(known))
        if serving != self._serving:
            self._serving = serving
            self.version += 1


def _text(value: bytes | str | None) -> str:
    text = value.decode() if isinstance(value, bytes) else value or ""
    return "" if text == "?" else text
