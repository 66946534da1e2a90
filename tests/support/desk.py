"""The counter at which tests hand in commands: one store, its keys, and a hand on the clock."""

from __future__ import annotations

import json
from typing import Any

import redis

from celery_relock.core.answers import Answer, Beat, Claim, Held, Queued
from celery_relock.store.keyspace import Keyspace
from celery_relock.store.redis import RedisStore
from celery_relock.store.scripts import scripts
from tests.support.waiting import wait_for


class Inbox:
    """A process that hears of grants: a real subscriber."""

    def __init__(self, client: redis.Redis, channel: str):
        self._listener = client.pubsub()
        self._listener.subscribe(channel)
        wait_for(lambda: self._next() == "subscribe", what="the subscription")

    def heard(self) -> list[str]:
        """All messages since the last call. The server answers the PING after what it published."""
        self._listener.ping()
        found = []
        while (message := self._listener.get_message(timeout=5.0)) is not None:
            if message["type"] == "pong":
                return found
            found.append(message["data"].decode())
        raise AssertionError("the server did not answer the inbox")

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
    """Short names for the verbs of a RedisStore, for claims of which most is the same.

    A claim is for lock "a", of an owner called as the run, with limit 1 and a lease of 30 s.
    """

    def __init__(self, url: str, namespace: str, pool: redis.ConnectionPool | None = None):
        self.client = (
            redis.Redis.from_url(url) if pool is None else redis.Redis(connection_pool=pool)
        )
        self.keys = Keyspace(namespace)
        self.store = RedisStore(pool or redis.ConnectionPool.from_url(url), self.keys)
        self._inboxes: list[Inbox] = []

    def take(
        self,
        run: str,
        nonce: str = "n",
        *,
        names: tuple[str, ...] = ("a",),
        limit: int = 1,
        wait: float = 0.0,
        inbox: str = "-",
        lease: float = 30.0,
        **more: Any,
    ) -> Answer:
        more.setdefault("owner", run)
        more.setdefault("limits", (limit,) * len(names))
        return self.store.acquire(Claim(run, nonce, names=names, lease=lease, **more), wait, inbox)

    def fence(self, run: str, nonce: str = "n", **more: Any) -> int:
        """Take one lock that must be free, or open to this run; returns its fence."""
        answer = self.take(run, nonce, **more)
        assert isinstance(answer, Held), answer
        return answer.fences[0]

    def queue(self, run: str, nonce: str = "n", **more: Any) -> int:
        """Take a place in the queue of a lock that must not be free; returns the rank."""
        answer = self.take(run, nonce, **{"wait": 6.0, **more})
        assert isinstance(answer, Queued), answer
        return answer.rank

    def give_back(
        self,
        run: str,
        nonce: str = "n",
        *,
        names: tuple[str, ...] = ("a",),
        ended: str = "",
        remember: float = 60.0,
    ) -> bool:
        return self.store.release(names, run, nonce, ended=ended, remember=remember)

    def renew(self, run: str, nonce: str = "n", name: str = "a", lease: float = 30.0) -> bool:
        return self.store.renew([Beat(name, run, nonce, lease)])[0]

    def beat(
        self, run: str, nonce: str = "n", name: str = "a", wait: float = 6.0, lease: float = 30.0
    ) -> Held | Queued | None:
        return self.store.heartbeat([Beat(name, run, nonce, lease, wait)])[0]

    def holders(self, name: str = "a") -> list[str]:
        """The runs that hold a lock, sorted."""
        return sorted(hold.run for hold in self.store.inspect(name).holds)

    def waiters(self, name: str = "a") -> list[str]:
        """The runs in the queue of a lock, dead ones too, in order."""
        return [run.decode() for run in self.client.zrange(self.keys.queue(name), 0, -1)]

    def raw(self, verb: str, keys: list[str], args: list[Any]) -> Any:
        """Run a script as it is; strings in the reply are text."""
        return _text(self.client.eval(scripts()[verb].source, len(keys), *keys, *args))

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

    def lapse(self, run: str, name: str = "a") -> None:
        """Turn the clock for one hold: its lease ended long ago, and nobody has looked yet."""
        record = self.client.hget(self.keys.lock(name), run)
        assert record is not None, f"{run} does not hold {name}"
        self.client.hset(self.keys.lock(name), run, b"1 " + record.split(b" ", 1)[1])

    def lapse_place(self, run: str, name: str = "a") -> None:
        """Turn the clock for one waiter, in each queue where it has its place."""
        record = self.client.hget(self.keys.waiters(name), run)
        assert record is not None, f"{run} does not wait for {name}"
        waiter = json.loads(record)
        for each in waiter.get("names", [name]):
            self.client.hset(self.keys.waiters(each), run, json.dumps({**waiter, "expiry": 1}))

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.close()
        self.store.close()


def _text(reply: Any) -> Any:
    if isinstance(reply, list):
        return [_text(part) for part in reply]
    return reply.decode() if isinstance(reply, bytes) else reply
