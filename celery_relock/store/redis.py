"""A LockStore in Redis: each verb is one script call, its reply decoded here and nowhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import redis

from ..core import ids
from ..core.answers import (
    Answer,
    Beat,
    Busy,
    Claim,
    Duplicate,
    Ended,
    Held,
    HoldInfo,
    LockState,
    Notice,
    Queued,
    WaiterInfo,
)
from ..errors import LockConfigError, LockUnavailable
from .clients import address_of
from .connection import Call, Connections
from .faults import check_server, translate
from .keyspace import SCHEMA, Keyspace
from .scripts import Script, scripts

# The knee of the curve: within a tenth of the best use of a core, and no call stalls the server
# for a millisecond (`benchmarks/renewal.py`).
BATCH = 100


class RedisStore:
    """Locks in one Redis.

    Args:
        pool: how to connect. The store makes connections of its own from it.
        keyspace: where the keys are.
    """

    def __init__(self, pool: redis.ConnectionPool, keyspace: Keyspace) -> None:
        self._pool = pool
        self._keys = keyspace
        self._agreed = False
        self._work = Connections(pool, self._agree)
        # The keep-alive thread has its own: under gevent a socket belongs to the thread that made
        # it. It repeats by itself, so it is told of a failure at once.
        self._beats = Connections(pool, patience=0.0)
        self._scripts = scripts()
        self._place = (*address_of(pool), keyspace.namespace)

    @property
    def id(self) -> str:
        return ids.digest(repr(self._place).encode())

    # What a caller holds by way of a client of its own, the task that it calls may enter by way of
    # the app's URL: two stores of one place have the same locks.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, RedisStore) and self._place == other._place

    def __hash__(self) -> int:
        return hash(self._place)

    def acquire(self, claim: Claim, wait: float = 0.0, inbox: str = "-") -> Answer:
        keys = self._keys.claim(claim.names, claim.run)
        args: list[str | int] = [
            claim.run,
            claim.nonce,
            claim.owner,
            _ms(claim.lease),
            _ms(wait),
            inbox,
            claim.who,
            int(claim.by_owner),
            " ".join(claim.lineage),
            *claim.limits,
        ]
        reply, sent = self._work.run(self._scripts["acquire"], keys, args)
        return _answer(claim, reply, sent > 1)

    def release(
        self, names: Sequence[str], run: str, nonce: str, *, ended: str = "", remember: float = 0.0
    ) -> bool:
        keys = self._keys.claim(names, run)
        args: list[str | int] = [run, nonce, ended, _ms(remember)]
        reply, sent = self._work.run(self._scripts["release"], keys, args)
        # Sent twice, the first may have done it: then there is nothing left, as there should be.
        return bool(reply[0] == b"RELEASED") or sent > 1

    def renew(self, beats: Sequence[Beat], *, within: float | None = None) -> list[bool]:
        calls: list[Call] = []
        for part in _batches(beats):
            keys = [self._keys.lock(beat.name) for beat in part]
            args = [x for beat in part for x in (beat.run, beat.nonce, _ms(beat.lease))]
            calls.append((keys, args))
        replies = self._lane(within).run_all(self._scripts["renew"], calls, within)
        return [kept == 1 for reply in replies for kept in reply]

    def heartbeat(
        self, beats: Sequence[Beat], *, within: float | None = None
    ) -> list[Held | Queued | None]:
        calls: list[Call] = []
        for part in _batches(beats):
            keys = [self._keys.meta(), *(self._keys.lock(beat.name) for beat in part)]
            args = [x for b in part for x in (b.run, b.nonce, _ms(b.wait), _ms(b.lease))]
            calls.append((keys, args))
        replies = self._lane(within).run_all(self._scripts["heartbeat"], calls, within)
        return [_beat(answer) for reply in replies for answer in reply]

    def inspect(self, name: str, most: int = 100) -> LockState:
        keys = [self._keys.lock(name), self._keys.queue(name), self._keys.waiters(name)]
        (holds, waiters, waiting), _ = self._work.run(self._scripts["inspect"], keys, [most])
        return LockState(
            tuple(_hold(*fields) for fields in holds),
            tuple(
                WaiterInfo(run.decode(), ms / 1000, nonce.decode(), owner.decode(), _who(who))
                for run, ms, nonce, owner, who in waiters
            ),
            waiting,
        )

    def force_release(self, name: str, run: str = "") -> tuple[HoldInfo, ...]:
        keys = [self._keys.meta(self._keys.bucket(name)), self._keys.lock(name)]
        taken, _ = self._work.run(self._scripts["force_release"], keys, [run])
        return tuple(_hold(run, 0, fence, b"", owner, who) for run, fence, owner, who in taken)

    def listen(self, inbox: str, ready: Callable[[], None], hear: Callable[[Notice], None]) -> None:
        client = redis.Redis(connection_pool=self._pool)
        with client.pubsub() as listener:  # type: ignore[no-untyped-call]
            try:
                listener.subscribe(self._keys.inbox(inbox))
                quiet = time.monotonic()
                while True:
                    message = listener.get_message(timeout=5.0)
                    if message is not None:
                        quiet = time.monotonic()
                    if message is None:
                        quiet = _still_there(listener, quiet)
                    elif message["type"] == "subscribe":
                        ready()
                    elif message["type"] == "message":
                        hear(_notice(message["data"]))
            except redis.RedisError as error:
                raise translate(error, where="listen") from error

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
        link.send_command("INFO", "server", check_health=False)
        try:
            info = link.read_response(disable_decoding=True)
        except redis.ResponseError as error:
            if "NOPERM" not in str(error).upper() and "no permissions" not in str(error).lower():
                raise  # not allowed to ask is no reason to stop
        else:
            check_server(_fields(info))
        link.send_command(*self._eval_open(self._scripts["open"]), check_health=False)
        reply = link.read_response(disable_decoding=True)
        if reply[0] != b"OK":
            raise LockConfigError(
                f"relock_namespace={self._keys.namespace!r} holds locks of another layout "
                f"(schema {reply[1].decode()}, {reply[2].decode()} buckets; this is schema "
                f"{SCHEMA}, {self._keys.buckets} buckets): run one version of celery-relock, "
                "or give this one a namespace of its own"
            )
        self._agreed = True

    def _eval_open(self, script: Script) -> tuple[Any, ...]:
        return ("EVAL", script.source, 1, self._keys.meta(), SCHEMA, self._keys.buckets)


def _still_there(listener: Any, quiet: float) -> float:
    """After a while without a message, ask: a connection whose other end is gone stays silent."""
    silent = time.monotonic() - quiet
    if silent > 30.0:
        raise LockUnavailable("the inbox's connection no longer answers")
    if silent > 15.0:
        listener.ping()
    return quiet


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _batches(beats: Sequence[Beat]) -> list[Sequence[Beat]]:
    return [beats[start : start + BATCH] for start in range(0, len(beats), BATCH)]


def _answer(claim: Claim, reply: list[Any], repeated: bool) -> Answer:
    tag = reply[0]
    if tag == b"HELD":
        fences = tuple(int(fence) for fence in reply[1::2])
        return Held(fences, tuple(joined == 1 for joined in reply[2::2]), repeated)
    if tag == b"WAIT":
        return Queued(reply[1], reply[2] / 1000, repeated)
    if tag == b"BUSY":
        _, index, ms, fence, owner, who, waiting = reply
        name = claim.names[index - 1]
        return Busy(name, ms / 1000, int(fence or 0), owner.decode(), _who(who), waiting, repeated)
    if tag == b"DUPLICATE":
        return Duplicate(reply[1] / 1000, _who(reply[2]), repeated)
    return Ended()


def _beat(answer: list[Any]) -> Held | Queued | None:
    if answer[0] == b"HELD":
        return Held((int(answer[1]),), (False,))
    if answer[0] == b"WAIT":
        return Queued(answer[1], answer[2] / 1000)
    return None


def _hold(run: bytes, ms: int, fence: bytes, nonce: bytes, owner: bytes, who: bytes) -> HoldInfo:
    return HoldInfo(run.decode(), ms / 1000, int(fence), nonce.decode(), owner.decode(), _who(who))


def _who(text: bytes) -> str:
    """The part for people; the first word is the holder's inbox."""
    return text.decode(errors="replace").partition(" ")[2]


def _notice(data: bytes | str) -> Notice:
    text = data.decode() if isinstance(data, bytes) else data
    kind, run, nonce, *fence = text.split(" ")
    return Notice(kind, run, nonce, int(fence[0]) if fence else 0)


def _fields(info: bytes | str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(info, dict):
        return info
    text = info.decode() if isinstance(info, bytes) else info
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
