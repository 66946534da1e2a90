"""Connections to one node of a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import redis
from redis.exceptions import NoScriptError

from . import wire
from .connection import Connections
from .replicas import _PROMISES, NONE, Replicas, Replicated, _promises
from .scripts import Script
from .wire import Call

# For so many seconds after a failure `Connections` waits only briefly.
_AFTER = 1.0


class NodeConnections(Connections):
    """Connections to one node. An error that is an answer is the outcome of its call alone."""

    def _repeat(
        self,
        send: Callable[..., Any],
        what: tuple[Any, ...],
        name: str,
        within: float | None = None,
    ) -> tuple[Any, int]:
        # A kept connection that is silent is not tried anew: by now another node may have the slot.
        if within is None and time.monotonic() - self._failed_at > _AFTER:
            within = self._pool.connection_kwargs["socket_timeout"]
        return super()._repeat(send, what, name, within)

    def each(self, script: Script, calls: Sequence[Call], within: float | None = None) -> list[Any]:
        """The replies of a script, or errors. Raises as `Connections.run`, for all of them."""
        replies: list[Any] = self._repeat(_each, (script, calls), script.name, within)[0]
        return replies

    def asking(self, script: Script, call: Call, within: float | None = None) -> Any:
        """The reply, or error, of a call whose slot is on its way to this node."""
        return self._repeat(_asking, (script, call), script.name, within)[0]


class _ReplicatedNode(NodeConnections, Replicated):
    """The same; an answer that promises a hold counts when replicas have it."""

    def each(self, script: Script, calls: Sequence[Call], within: float | None = None) -> list[Any]:
        def send(link: Any) -> list[Any]:
            replies = _each(link, script, calls)
            if any(_promise(script, reply) for reply in replies):
                self._require(self._ask(link))
            return replies

        replies: list[Any] = self._repeat(send, (), script.name, within)[0]
        return replies

    def asking(self, script: Script, call: Call, within: float | None = None) -> Any:
        def send(link: Any) -> Any:
            reply = _asking(link, script, call)
            if _promise(script, reply):
                self._require(self._ask(link))
            return reply

        return self._repeat(send, (), script.name, within)[0]


def node_connections(
    pool: redis.ConnectionPool, check: Callable[[Any], None] | None, replicas: Replicas = NONE
) -> NodeConnections:
    """Connections to a node, which return each failure at once."""
    if replicas.needed:
        return _ReplicatedNode(pool, check, patience=0.0, replicas=replicas)
    return NodeConnections(pool, check, patience=0.0)


def _promise(script: Script, reply: Any) -> bool:
    if isinstance(reply, Exception) or script.name not in _PROMISES:
        return False
    if script.name == "acquire":
        return reply[0] in (b"HELD", b"PARKED")
    return any(_promises(answer) for answer in reply)


def _each(link: Any, script: Script, calls: Sequence[Call]) -> list[Any]:
    replies: list[Any] = []
    for start in range(0, len(calls), wire.IN_FLIGHT):
        part = calls[start : start + wire.IN_FLIGHT]
        packed = [wire.pack(script, keys, args) for keys, args in part]
        link.send_packed_command(packed, check_health=False)
        answers = [wire.read(link) for _ in part]
        for (keys, args), answer in zip(part, answers, strict=True):
            known = not isinstance(answer, NoScriptError)
            replies.append(answer if known else wire.evaluate(link, script, keys, args))
    return replies


def _asking(link: Any, script: Script, call: Call) -> Any:
    keys, args = call
    # Only the next command may go where the slot is not yet: so no EVALSHA that could be unknown.
    link.send_command("ASKING", check_health=False)
    wire.read(link)
    return wire.evaluate(link, script, keys, args)
