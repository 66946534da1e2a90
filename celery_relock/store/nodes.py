"""Commands to the masters of a cluster: each goes to the node that serves its bucket.

While a slot moves or a replica takes over, a command is refused or its answer is lost. Every verb
may be sent twice, so it is sent again, there or elsewhere, within a stated patience.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import ResponseError

from ..errors import LockUnavailable, RelockError
from . import wire
from .clients import own_pool
from .connection import PATIENCE
from .faults import TooFewReplicas, repeatable
from .keyspace import Keyspace
from .node import NodeConnections, node_connections
from .redirections import cause_of, is_unserved, is_unstable, redirection, translated
from .replicas import NONE, Replicas
from .scripts import Script
from .topology import Node, Topology
from .wire import Call

# How long a command is repeated, in seconds, while the cluster is there and the node is not: with
# the default cluster-node-timeout of 15 s a replica takes over after about 20 s.
FAILOVER = 30.0
# Who comes so soon after somebody who has waited in vain, in seconds, does not wait as long again.
_AFTER = 1.0
# How often a command is sent on at once, before it counts as one that goes round in a circle.
_HOPS = 6
_PAUSE = 0.1
# How long the keep-alive thread asks each node who serves what, in seconds: the one that hangs has
# used up the time of the others' renewals, and one more may hang.
_BRIEFLY = 0.2


class Nodes:
    """The `Connections` of a cluster: run scripts wherever the bucket of their keys is.

    Args:
        check: called with each new connection before its first command.
        failover: seconds for which a command is repeated while the cluster is there and the node
            is not. 0: the caller repeats.
        replicas: how many have to have a hold before it counts.
    """

    def __init__(
        self,
        topology: Topology,
        keyspace: Keyspace,
        check: Callable[[Any], None] | None = None,
        failover: float = FAILOVER,
        replicas: Replicas = NONE,
    ) -> None:
        self.topology = topology
        self._keys = keyspace
        self._check = check
        self._failover = failover
        self._replicas = replicas
        self._gave_up_at = -1e9
        self._nodes: dict[Node, NodeConnections] = {}

    def run(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[str],
        send: wire.Send = wire.one,
    ) -> tuple[Any, int]:
        """Run one script. Returns its reply, strings as bytes, and how often it was sent.

        Raises:
            LockUnavailable, LockConfigError: translated from what redis-py raises.
        """
        started = time.monotonic()
        call = (self._whole(script, keys), args)
        bucket = _bucket(keys)
        try:
            reply, sent = self._at(self.topology.serving(bucket)).run(script, *call, send)
        except RelockError as error:
            outcomes: list[Any] = [error]
        else:
            return reply, sent
        sent = 1 + self._settle(script, [call], outcomes, None, started, self._failover)
        if isinstance(outcomes[0], Exception):
            raise translated(outcomes[0], script)
        return outcomes[0], sent

    def run_all(
        self, script: Script, calls: Sequence[Call], within: float | None = None
    ) -> list[Any]:
        """Run one script with many arguments. Raises the first error of all."""
        outcomes = self.outcomes(script, calls, within)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise translated(outcome, script)
        return outcomes

    def outcomes(
        self,
        script: Script,
        calls: Sequence[Call],
        within: float | None = None,
        failover: float | None = None,
    ) -> list[Any]:
        """The reply, or error, of each call; those of one node on one connection, sent ahead.
        `failover` instead of the usual."""
        started = time.monotonic()
        calls = [(self._whole(script, keys), args) for keys, args in calls]
        outcomes: list[Any] = [None] * len(calls)
        self._send(script, calls, outcomes, range(len(calls)), within)
        failover = self._failover if failover is None else failover
        self._settle(script, calls, outcomes, within, started, failover)
        return outcomes

    def make(self, node: Node) -> Any:
        """A connection of redis-py's to a node, of which nobody here keeps account."""
        return self._at(node).make()

    def close(self) -> None:
        """Close what is idle."""
        for node in list(self._nodes.values()):
            node.close()

    def _at(self, node: Node) -> NodeConnections:
        found = self._nodes.get(node)
        if found is None:
            pool = own_pool({**self.topology.options, "host": node.host, "port": node.port})
            made = node_connections(pool, self._check, self._replicas)
            found = self._nodes.setdefault(node, made)
        return found

    def _whole(self, script: Script, keys: Sequence[str]) -> Sequence[str]:
        # A server looks only whether the keys that a call names are there. A script that finds
        # others while its slot moves would be stopped half-way; with a key that never exists it is
        # refused before it begins, until the slot has arrived.
        return [*keys, self._keys.absent(_bucket(keys))] if script.finds_keys else keys

    def _send(
        self,
        script: Script,
        calls: Sequence[Call],
        outcomes: list[Any],
        which: Sequence[int],
        within: float | None,
    ) -> None:
        there: dict[Node, list[int]] = {}
        for index in which:
            try:
                there.setdefault(self.topology.serving(_bucket(calls[index][0])), []).append(index)
            except RelockError as error:
                outcomes[index] = error
        for node, indexes in there.items():
            try:
                replies = self._at(node).each(script, [calls[i] for i in indexes], within)
            except RelockError as error:
                self.topology.silent(node)
                replies = [error] * len(indexes)
            for index, reply in zip(indexes, replies, strict=True):
                outcomes[index] = reply

    def _settle(
        self,
        script: Script,
        calls: Sequence[Call],
        outcomes: list[Any],
        within: float | None,
        started: float,
        failover: float,
    ) -> int:
        """Send again what failed for now. Returns how often one may have been executed unheard."""
        if 0 <= started - self._gave_up_at < _AFTER:
            failover = 0.0
        unheard = hops = 0
        while any(isinstance(each, Exception) for each in outcomes):
            again, pause = [], False
            for index, outcome in enumerate(outcomes):
                if isinstance(outcome, Exception):
                    outcomes[index], resend = self._learn(script, calls[index], outcome, within)
                    again += [index] if resend is not None else []
                    pause = pause or bool(resend)
                    unheard += bool(resend) and not isinstance(cause_of(outcome), ResponseError)
                    if isinstance(cause_of(outcome), TooFewReplicas):
                        failover = min(failover, PATIENCE)  # nothing goes on that would bring more
            hops += 1
            late = pause or hops > _HOPS
            if hops > 2 * _HOPS and not failover:
                break  # they send it round in a circle
            if not again or (late and not self._pauses(started, within, failover)):
                break
            self._send(script, calls, outcomes, again, within)
        return unheard

    def _learn(
        self, script: Script, call: Call, error: Exception, within: float | None
    ) -> tuple[Any, bool | None]:
        """What an error says: the outcome of its call by now, and whether to send it again: at once
        (False), later (True), or not (None)."""
        cause = cause_of(error)
        to = redirection(cause)
        if to is None:
            later = repeatable(cause) or is_unstable(cause) or is_unserved(error)
            return error, True if later else None
        bucket = _bucket(call[0])
        # Without a host it is that of the node that says so.
        host = to.host or self.topology.serving(bucket).host
        node = self.topology.seen_from_here(host, to.port)
        if not to.once:
            self.topology.moved(bucket, node)
            return error, False
        outcome = self._ask(node, script, call, within)
        return outcome, True if isinstance(outcome, Exception) else None

    def _pauses(self, started: float, within: float | None, failover: float) -> bool:
        """Ask the cluster who serves what now, and wait a moment. False if it is too late."""
        before = self.topology.version
        try:
            self.topology.look(*([min(within, _BRIEFLY)] if within else []))
        except LockUnavailable:
            failover = min(failover, PATIENCE)
        if not failover:
            # The same node would keep the caller waiting for as long once more.
            return self.topology.version != before
        if time.monotonic() - started >= failover:
            self._gave_up_at = time.monotonic()
            return False
        time.sleep(_PAUSE)
        return True

    def _ask(self, node: Node, script: Script, call: Call, within: float | None) -> Any:
        try:
            return self._at(node).asking(script, call, within)
        except RelockError as error:
            return error


def _bucket(keys: Sequence[str]) -> int:
    # `<namespace>:{<bucket>}:…`, and a namespace has no braces.
    key = keys[0]
    start = key.index("{") + 1
    return int(key[start : key.index("}", start)])
