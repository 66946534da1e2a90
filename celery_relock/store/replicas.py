"""Answers that count only when replicas have what they say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import redis
from redis.exceptions import NoScriptError

from ..errors import LockConfigError
from . import wire
from .connection import PATIENCE, Connections
from .faults import TooFewReplicas
from .scripts import Script
from .sentinel import Following
from .wire import Call

# A give-back is none: lost with a master, it lets the lease end the hold.
_PROMISES = ("acquire", "renew", "heartbeat")


class Replicas(NamedTuple):
    """How many replicas have to have a hold before it counts, and how many seconds they have."""

    needed: int = 0
    timeout: float = 1.0


NONE = Replicas()


def checked(needed: Any, timeout: float) -> Replicas:
    """Both, looked at.

    Raises:
        LockConfigError: they cannot be used.
    """
    if isinstance(needed, bool) or not isinstance(needed, int) or needed < 0:
        raise LockConfigError(f"min_replicas={needed!r}: give their number, 0 for none")
    return Replicas(needed, timeout)


class Replicated(Connections):
    """As `Connections`; a hold, its renewal and a parked message are repeated until enough replicas
    have acknowledged them, or refused."""

    def __init__(self, *args: Any, replicas: Replicas, **options: Any) -> None:
        super().__init__(*args, **options)
        self._replicas = replicas

    def run(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[str],
        send: wire.Send = wire.one,
    ) -> Any:
        if script.name not in _PROMISES:
            return super().run(script, keys, args, send)
        packed = wire.pack(script, keys, args)
        return self._repeat(self._one_kept, (packed, script, keys, args), script.name)

    def run_all(
        self, script: Script, calls: Sequence[Call], within: float | None = None
    ) -> list[Any]:
        if script.name not in _PROMISES:
            return super().run_all(script, calls, within)
        what = script, calls
        replies: list[Any] = self._repeat(self._several_kept, what, script.name, within)[0]
        return replies

    def _one_kept(
        self, link: Any, packed: bytes, script: Script, keys: Sequence[str], args: Sequence[str]
    ) -> Any:
        # WAIT counts what was written on its own connection.
        link.send_packed_command([packed, self._wait(link)], check_health=False)
        reply, kept = wire.read(link), wire.read(link)
        if isinstance(reply, NoScriptError):
            reply = wire.evaluate(link, script, keys, args)
            kept = self._ask(link)
        if isinstance(reply, Exception):
            raise reply
        if reply[0] in (b"HELD", b"PARKED"):
            self._require(kept)
        return reply

    def _several_kept(self, link: Any, script: Script, calls: Sequence[Call]) -> list[Any]:
        replies = wire.several(link, script, calls)
        if any(_promises(answer) for reply in replies for answer in reply):
            self._require(self._ask(link))
        return replies

    def _ask(self, link: Any) -> Any:
        link.send_packed_command([self._wait(link)], check_health=False)
        return wire.read(link)

    def _wait(self, link: Any) -> bytes:
        seconds = min(self._replicas.timeout, (link.socket_timeout or 5.0) / 2)
        count, ms = str(self._replicas.needed), str(max(round(seconds * 1000), 1))
        parts = ("WAIT", count, ms)
        return "".join(["*3\r\n", *[f"${len(p)}\r\n{p}\r\n" for p in parts]]).encode()

    def _require(self, kept: Any) -> None:
        if isinstance(kept, Exception):
            raise kept
        if kept < self._replicas.needed:
            raise TooFewReplicas(
                f"{kept} of {self._replicas.needed} replicas within {self._replicas.timeout:g} s"
            )


def _promises(answer: Any) -> bool:
    return answer == 1 or (isinstance(answer, list) and answer[0] == b"HELD")


class _FollowingReplicated(Following, Replicated):
    pass


def connections(
    pool: redis.ConnectionPool,
    check: Callable[[Any], None] | None = None,
    patience: float = PATIENCE,
    replicas: Replicas = NONE,
) -> Connections:
    """Connections as a place needs them: a plain server costs nothing of the rest."""
    follows = "finder" in pool.connection_kwargs
    if replicas.needed:
        kind = _FollowingReplicated if follows else Replicated
        return kind(pool, check, patience, replicas=replicas)
    return (Following if follows else Connections)(pool, check, patience)
