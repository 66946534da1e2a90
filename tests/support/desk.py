"""The counter at which tests hand in commands: one store, its keys, and a hand on the clock."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis

from celery_relock.backends.redis.backend import RedisBackend
from celery_relock.backends.redis.keys import Keys
from celery_relock.backends.redis.scripts import scripts
from celery_relock.backends.redis.urls import transport_for_client
from celery_relock.engine import ids
from celery_relock.engine.protocol import (
    Answer,
    Claim,
    Held,
    Message,
    Parked,
    ParkRequest,
    Queued,
    Release,
    Renewal,
)
from tests.support.backends import close
from tests.support.keys import leftovers
from tests.support.waiting import wait_for


class Inbox:
    """A process that hears of grants: a real subscriber."""

    def __init__(self, client: redis.Redis, channel: str):
        self._listener = client.pubsub()
        self._listener.subscribe(channel)
        wait_for(lambda: self._next() == "subscribe", what="the subscription")

    def heard(self) -> list[str]:
        """All messages since the last call."""
        return [message["data"].decode() for message in heard_by(self._listener)]

    def leave(self) -> None:
        """Be unreachable from now on; returns when the server knows."""
        self._listener.unsubscribe()
        wait_for(lambda: self._next() == "unsubscribe", what="the end of the subscription")
        self.close()

    def close(self) -> None:
        self._listener.close()

    def _next(self) -> str:
        message = self._listener.get_message(timeout=1.0)
        return message["type"] if message else ""


class Desk:
    """Short names for the verbs of a RedisBackend, for claims of which most is the same.

    A claim is for lock "a", of an owner called as the execution, with limit 1 and a lease of 30 s.
    """

    def __init__(self, url: str, namespace: str, pool: redis.ConnectionPool | None = None):
        self.client = (
            redis.Redis.from_url(url) if pool is None else redis.Redis(connection_pool=pool)
        )
        self.keys = Keys(namespace)
        self.backend = RedisBackend(transport_for_client(self.client), namespace)
        self._inboxes: list[Inbox] = []
        self._out: list[Message] = []
        self.recheck: float | None = None

    def acquire(
        self,
        run: str,
        attempt_id: str = "n",
        *,
        names: tuple[str, ...] = ("a",),
        limit: int = 1,
        wait: float = 0.0,
        inbox: str = "-",
        lease: float = 30.0,
        **more: Any,
    ) -> Answer:
        claim = _claim(run, attempt_id, names=names, limit=limit, lease=lease, **more)
        answer = self.backend.acquire(claim, wait, inbox)
        # Without the time, so that the answers to a command and to its repetition are equal.
        return answer._replace(sent=0.0) if isinstance(answer, Held) else answer

    def fence(self, run: str, attempt_id: str = "n", **more: Any) -> int:
        """Acquire one lock that must be free, or open to this execution; returns its fence."""
        answer = self.acquire(run, attempt_id, **more)
        assert isinstance(answer, Held), answer
        return answer.fences[0]

    def queue(self, run: str, attempt_id: str = "n", **more: Any) -> int:
        """Take a place in the queue of a lock that must not be free; returns the rank."""
        answer = self.acquire(run, attempt_id, **{"wait": 6.0, **more})
        assert isinstance(answer, Queued), answer
        return answer.rank

    def leave(
        self,
        run: str,
        attempt_id: str = "n",
        *,
        text: str = "",
        home: str = "h",
        task: str = "",
        patience: float | None = None,
        most: int = 10_000,
        most_in_all: int = 1_000_000,
        most_bytes: int = 1_000_000_000,
        is_copy: bool = False,
        **more: Any,
    ) -> Any:
        """Acquire the locks, or park a message (`text`, or the execution's name) for them."""
        park_request = ParkRequest(
            text or f"text of {run}",
            *(home, task or f"t-{run}", patience, most, most_in_all, most_bytes, is_copy),
        )
        return self.backend.park(_claim(run, attempt_id, **more), park_request)

    def park(self, run: str, attempt_id: str = "n", **more: Any) -> int:
        """Leave a message for a lock that must not be free; returns the rank."""
        answer = self.leave(run, attempt_id, **more)
        assert isinstance(answer, Parked), answer
        return answer.rank

    def resume(self, home: str = "h", by: str = "", tasks: tuple[str, ...] = ()) -> list[str]:
        """Look for what is to be resumed; returns the executions whose messages it gave."""
        found = self.backend.resume(home, by or ids.new_attempt_id(), tasks)
        self.recheck = found.recheck
        return [message.execution_id for message in found.messages]

    def withdraw(self, run: str, remember: float = 60.0, attempt_id: str = "") -> bool:
        return self.backend.withdraw(run, remember, attempt_id)

    def take_messages(self, messages: tuple[Message, ...]) -> None:
        """Messages that came from a verb which has no short name here."""
        self._out += messages

    def out(self) -> list[str]:
        """Whose messages were resumed since the last call, but for those that `resume` gave."""
        return [message.execution_id for message in self.messages()]

    def messages(self) -> list[Message]:
        """As `out`, whole."""
        found, self._out = self._out, []
        return found

    def release(
        self,
        run: str,
        attempt_id: str = "n",
        *,
        names: tuple[str, ...] = ("a",),
        ended: str = "",
        remember: float = 60.0,
        home: str = "h",
    ) -> bool:
        """Release, in a process that can send the messages of a home."""
        had, messages = self.backend.release(
            Release(names, run, attempt_id, ended=ended, remember=remember, homes=home)
        )
        self._out += messages
        return had

    def renew(self, run: str, attempt_id: str = "n", name: str = "a", lease: float = 30.0) -> bool:
        return self.backend.renew([Renewal(name, run, attempt_id, lease)])[0]

    def beat(
        self,
        run: str,
        attempt_id: str = "n",
        name: str = "a",
        wait: float = 6.0,
        lease: float = 30.0,
    ) -> Held | Queued | None:
        return self.backend.heartbeat([Renewal(name, run, attempt_id, lease, wait)])[0]

    def holders(self, name: str = "a") -> list[str]:
        """The runs that hold a lock, sorted."""
        return sorted(hold.execution_id for hold in self.backend.inspect(name, most=10_000).holds)

    def waiters(self, name: str = "a") -> list[str]:
        """The runs in the queue of a lock, dead ones too, in order."""
        return [run.decode() for run in self.client.zrange(self.keys.of_lock("q", name), 0, -1)]

    def raw(self, verb: str, keys: list[str], args: list[Any]) -> Any:
        """Run a script as it is. Strings in the reply are text, and a line is its words."""
        return self.evaluated(scripts()[verb].source, keys, args)

    def evaluated(self, source: str, keys: list[str], args: list[Any]) -> Any:
        reply = as_text(self.client.eval(source, len(keys), *keys, *args))
        return reply.split(" ") if isinstance(reply, str) else reply

    def listen(self, process: str) -> Inbox:
        self._inboxes.append(Inbox(self.client, self.keys.inbox(process)))
        return self._inboxes[-1]

    def now_ms(self) -> float:
        """The server's clock."""
        seconds, micros = self.client.time()
        return seconds * 1000 + micros / 1000

    def wait_ms(self, milliseconds: float) -> None:
        """Let the server's clock go on."""
        until = self.now_ms() + milliseconds
        wait_for(lambda: self.now_ms() > until, what=f"{milliseconds} ms")

    def go_by(self, seconds: float) -> None:
        """Turn the clock for the lives of all keys, as if this time went by and nobody came."""
        for key in leftovers(self.client, self.keys.namespace):
            if (left := self.client.pttl(key)) >= 0:
                self.client.pexpire(key, left - int(seconds * 1000))

    def lapse(self, run: str, name: str = "a") -> None:
        """Turn the clock for one hold: its lease ended long ago, and nobody has looked yet."""
        record = self.client.hget(self.keys.lock(name), run)
        assert record is not None, f"{run} does not hold {name}"
        self.client.hset(self.keys.lock(name), run, b"1 " + record.split(b" ", 1)[1])

    def lapse_place(self, run: str, name: str = "a", **facts: Any) -> None:
        """Turn the clock for one waiter, in each queue where it has its place.

        Args:
            facts: what changes, else its life: `back=1` for a message that has not arrived in time,
                `first=1` for one that has been on its way for very long.
        """
        place = self.place(run, name)
        text = json.dumps({**place, **(facts or {"expiry": 1})}, separators=(",", ":"))
        stored = [f"{self.keys.prefix(0)}w:{each}" for each in place.get("names", ())]
        for key in stored or [self.keys.of_lock("w", name)]:
            self.client.hset(key, run, text)

    def place(self, run: str, name: str = "a") -> dict[str, Any]:
        """What is known of a waiter."""
        record = self.client.hget(self.keys.of_lock("w", name), run)
        assert record is not None, f"{run} does not wait for {name}"
        return json.loads(record)

    def age_call(self, run: str, name: str, *, waited_for: bool = True) -> None:
        """Turn the clock for a call in a line: it was due long ago; and those behind it have waited
        as long."""
        record = self.place(run, name)
        record["line"]["due"] = 1
        self.lapse_place(run, name, line=record["line"], **({"turn": 1} if waited_for else {}))

    def all_due(self) -> None:
        """Turn the clock for everything that is to be looked at later."""
        due = self.keys.due()
        if later := self.client.zrange(due, 0, -1):
            self.client.zadd(due, dict.fromkeys(later, 1), xx=True)

    def forget(self, run: str) -> None:
        """Let the time go by for which the end of an execution is remembered."""
        self.client.delete(self.keys.tombstone(run))

    def stranger(self, name: str, *, goes: bool = False) -> None:
        """Somebody else's key comes to where a lock's would be, or goes."""
        key = self.keys.lock(name)
        self.client.delete(key) if goes else self.client.set(key, "somebody else's")

    @contextmanager
    def out_of_memory(self) -> Iterator[None]:
        """The server has none left for the time being."""
        self.client.config_set("maxmemory", 1)
        try:
            yield
        finally:
            self.client.config_set("maxmemory", 0)

    def inbox_of(self, run: str, name: str = "a") -> str:
        """Where the holder of a lock hears of a loss."""
        return self.client.hget(self.keys.lock(name), f"@{run}").decode().split(" ")[0]

    def left(self) -> list[str]:
        """What has no end, the layout excepted."""
        found = (key for key in leftovers(self.client, self.keys.namespace))
        ends = (key for key in found if key != self.keys.meta())
        return [key for key in ends if ":d:" not in key or self.client.pttl(key) <= 0]

    def traces(self, word: str) -> list[str]:
        """The keys that have this word in their name, or in what they keep."""
        reads = {"string": "GET", "hash": "HGETALL", "zset": "ZRANGE"}

        def kept(key: str) -> str:
            kind = self.client.type(key).decode()
            span = (0, -1) if kind == "zset" else ()
            return repr(self.client.execute_command(reads[kind], key, *span))

        keys = leftovers(self.client, self.keys.namespace)
        return [key for key in keys if word in key or word in kept(key)]

    def wipe(self) -> None:
        """Delete everything."""
        for key in leftovers(self.client, self.keys.namespace):
            self.client.delete(key)

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.close()
        close(self.backend.transport)


def _claim(
    run: str,
    attempt_id: str,
    *,
    names: tuple[str, ...] = ("a",),
    limit: int = 1,
    lease: float = 30.0,
    **more: Any,
) -> Claim:
    more.setdefault("owner", run)
    more.setdefault("limits", (limit,) * len(names))
    return Claim(run, attempt_id, names=names, lease=lease, **more)


def heard_by(listener: Any) -> Iterator[dict[str, Any]]:
    """All messages since the last call. The server answers the PING after what it published."""
    listener.ping()
    while (message := listener.get_message(timeout=5.0)) is not None:
        if message["type"] == "pong":
            return
        is_message = message["type"] in ("message", "smessage")
        if is_message and message["data"]:  # an empty one asks who listens
            yield message
    raise AssertionError("the server did not answer the inbox")


def as_text(reply: Any) -> Any:
    """What a server replied, with text instead of bytes."""
    if isinstance(reply, dict):
        return {as_text(key): as_text(value) for key, value in reply.items()}
    if isinstance(reply, (list, tuple)):
        return type(reply)(as_text(part) for part in reply)
    return reply.decode() if isinstance(reply, bytes) else reply
