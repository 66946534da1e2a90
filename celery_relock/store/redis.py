"""A LockStore in Redis: each verb is one script call, its reply decoded here and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import redis

from ..engine import ids
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
    Notice,
    Parked,
    ParkRequest,
    Queued,
    Released,
    Renewal,
    Resumed,
    Successor,
)
from . import layout, replies, wire
from .clients import address_of
from .connection import Connections
from .durability import dangers
from .keyspace import Keyspace
from .line import Line
from .replicas import NONE, Replicas, connections
from .scripts import Script, scripts, with_replicas
from .wire import Call

# The knee of the curve: within a tenth of the best use of a core, and no call stalls the server
# for a millisecond (`benchmarks/renewal.py`).
BATCH = 100


class RedisBackend:
    """Locks in one Redis.

    Args:
        pool, keyspace: how to connect, by connections of its own, and where the keys are.
        replicas: how many have to have a hold before it counts.
    """

    def __init__(
        self, pool: redis.ConnectionPool, keyspace: Keyspace, replicas: Replicas = NONE
    ) -> None:
        self._pool = pool
        self._keys = keyspace
        self._agreed = False
        self._work = connections(pool, self._agree, replicas=replicas)
        # The keep-alive thread has its own: under gevent a socket belongs to the thread that made
        # it. It repeats by itself, so it is told of a failure at once.
        self._beats = connections(pool, patience=0.0, replicas=replicas)
        self._replicas, self.replicated = replicas, replicas.needed > 0
        self._scripts = with_replicas() if "finder" in pool.connection_kwargs else scripts()
        self._place = (*address_of(pool), keyspace.namespace)

    @property
    def id(self) -> str:
        return ids.digest(repr(self._place).encode())

    # What a caller holds by way of a client of its own, the task that it calls may enter by way of
    # the app's URL: two stores of one place have the same locks.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, RedisBackend) and self._place == other._place

    def __hash__(self) -> int:
        return hash(self._place)

    def route(self, names: Sequence[str]) -> object:
        return None  # one server has them all

    def acquire(
        self, claim: Claim, wait: float = 0.0, inbox: str = "-", channel: str = ""
    ) -> Answer:
        # In this order: the script knows the usual wait by it.
        place = {"wait": _ms(wait), "channel": channel or inbox} if wait > 0 else {}
        return replies.answer(claim, *self._ask(claim, place, inbox))

    def park(
        self, claim: Claim, park_request: ParkRequest, inbox: str = "-"
    ) -> Held | Parked | Full | Duplicate | Deadlocked | Ended:
        place: dict[str, Any] = {
            "message": park_request.message,
            "home": park_request.home,
            "task": park_request.task,
            "most": park_request.most,
        }
        if park_request.patience is not None:
            place["patience"] = max(_ms(park_request.patience), 0)
        return replies.parked(claim, *self._ask(claim, place, inbox))

    def _ask(
        self, claim: Claim, place: dict[str, Any], inbox: str
    ) -> tuple[Any, bool, float]:
        if place and claim.stuck:
            place["stuck"] = claim.stuck
        keys = self._keys.claim(claim.names, claim.execution_id)
        args = [
            claim.execution_id,
            claim.attempt_id,
            claim.owner,
            _text(claim.lease),
            json.dumps(place, ensure_ascii=False) if place else "",
            inbox,
            claim.label,
            "1" if claim.by_owner else "0",
            " ".join(claim.ancestors),
            *map(str, claim.limits),
        ]
        send = wire.one if place else wire.one_eagerly
        reply, sent = self._work.run(self._scripts["acquire"], keys, args, send)
        return reply, sent > 1, getattr(sent, "at", 0.0)

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
        keys, to = self._keys.claim(names, execution_id), successor or Successor("", 0.0)
        args = [
            execution_id,
            attempt_id,
            ended,
            _text(remember),
            home,
            to.execution_id,
            _text(to.keep),
        ]
        send = wire.one_last if waited else wire.one_eagerly
        reply, sent = self._work.run(self._scripts["release"], keys, args, send)
        return replies.released(reply, sent > 1)

    def resume(self, home: str, by: str, tasks: Sequence[str] = ()) -> Resumed:
        keys = [self._keys.meta(), self._keys.due()]
        args = [home, by, str(BATCH), " ".join(tasks)]
        reply, _ = self._work.run(self._scripts["resume"], keys, args)
        return Resumed(replies.messages(reply[1:]), None if reply[0] < 0 else reply[0] / 1000)

    def withdraw(self, execution_id: str, remember: float, home: str = "") -> Released:
        keys = [self._keys.meta(), self._keys.tombstone(execution_id)]
        args = [execution_id, _text(remember), home]
        reply, sent = self._work.run(self._scripts["withdraw"], keys, args)
        return replies.withdrawn(reply, sent > 1)

    def renew(self, renewals: Sequence[Renewal], *, within: float | None = None) -> list[bool]:
        calls: list[Call] = []
        for part in _batches(renewals):
            keys = [self._keys.lock(beat.name) for beat in part]
            args = [
                x
                for b in part
                for x in (b.execution_id, b.attempt_id, _text(b.lease), str(int(b.longer)))
            ]
            calls.append((keys, args))
        lines = self._lane(within).run_all(self._scripts["renew"], calls, within)
        return [kept == 1 for reply in lines for kept in reply]

    def heartbeat(
        self, renewals: Sequence[Renewal], *, within: float | None = None
    ) -> list[Held | Queued | None]:
        calls: list[Call] = []
        for part in _batches(renewals):
            keys = [self._keys.meta(), *(self._keys.lock(beat.name) for beat in part)]
            args = [
                x
                for b in part
                for x in (b.execution_id, b.attempt_id, _text(b.wait), _text(b.lease))
            ]
            calls.append((keys, args))
        lines = self._lane(within).run_all(self._scripts["heartbeat"], calls, within)
        return [replies.beat(answer) for reply in lines for answer in reply]

    def inspect(self, name: str, most: int = 100) -> LockState:
        keys = [self._keys.lock(name), self._keys.queue(name), self._keys.waiters(name)]
        reply, _ = self._work.run(self._scripts["inspect"], keys, [str(most)])
        return replies.state(reply)

    def force_release(self, name: str, execution_id: str = "") -> tuple[HoldInfo, ...]:
        keys = [self._keys.meta(self._keys.bucket(name)), self._keys.lock(name)]
        taken, _ = self._work.run(self._scripts["force_release"], keys, [execution_id])
        return tuple(
            replies.hold(execution_id, 0, fence, b"", owner, label)
            for execution_id, fence, owner, label in taken
        )

    def dangers(self) -> list[str]:
        return dangers(redis.Redis(connection_pool=self._pool), self._replicas.needed)

    def listen(self, inbox: str, ready: Callable[[], None], hear: Callable[[Notice], None]) -> None:
        line = Line(self._work.make(), self._keys.inbox(inbox))
        try:
            ready()
            while True:
                if (notice := line.hear(5.0)) is not None:
                    hear(notice)
        finally:
            line.close()

    def line(self, channel: str) -> Line | None:
        return Line(self._work.make(), self._keys.inbox(channel))

    def close(self) -> None:
        """Close the idle connections. The store can still be used."""
        self._work.close()
        self._beats.close()

    def _lane(self, within: float | None) -> Connections:
        return self._work if within is None else self._beats

    def _agree(self, link: Any) -> None:
        """Before this process's first command: is the server new enough, and the layout ours?"""
        if self._agreed:
            return
        layout.see_version(link)
        link.send_command(*self._eval_open(self._scripts["open"]), check_health=False)
        layout.agree(self._keys, link.read_response(disable_decoding=True))
        layout.see_channels(link, self._keys.inbox("-"))
        self._agreed = True

    def _eval_open(self, script: Script) -> tuple[Any, ...]:
        return ("EVAL", script.source, 1, self._keys.meta(), *layout.arguments(self._keys))


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


@lru_cache  # few lengths of leases
def _text(seconds: float) -> str:
    """Whole milliseconds, as an argument of a script."""
    return str(round(seconds * 1000))


def _batches(renewals: Sequence[Renewal]) -> list[Sequence[Renewal]]:
    return [renewals[start : start + BATCH] for start in range(0, len(renewals), BATCH)]
