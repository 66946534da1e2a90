"""The contenders: each returns a lock object with `acquire` and `release`, used as it is meant to
be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import redis

from benchmarks import redisson
from celery_relock.engine import ids
from celery_relock.engine.protocol import Claim, Release
from celery_relock.engines import NAMESPACE, engine_for
from celery_relock.lock import Lock

LEASE = 30


class Held(Protocol):
    """What every contender can do."""

    def acquire(self) -> Any: ...
    def release(self) -> Any: ...


Make = Callable[[redis.Redis, str], Held]
"""Client and lock name to a lock. Each process makes its own, before the clock starts."""


class TwoNoOps:
    """Two empty scripts through redis-py's pooled client: the least cost of a lock in Lua that is
    written in the usual way."""

    def __init__(self, client: redis.Redis, name: str) -> None:
        self._client = client
        self._sha = client.script_load("return 1")
        self._name = name

    def acquire(self) -> None:
        self._client.evalsha(self._sha, 1, self._name, "owner", LEASE)

    release = acquire


class KeptNoOps:
    """Two empty scripts through one kept connection of redis-py: what a lock can save by that."""

    def __init__(self, client: redis.Redis, name: str) -> None:
        pool = client.connection_pool
        self._link = pool.connection_class(**pool.connection_kwargs)
        self._command = ("EVALSHA", client.script_load("return 1"), 1, name, "owner", LEASE)

    def acquire(self) -> None:
        self._link.send_command(*self._command)
        self._link.read_response()

    release = acquire


class Commands:
    """The commands that our `Lock` sends, without the care of a lease."""

    def __init__(self, client: redis.Redis, name: str) -> None:
        self._store = engine_for(client, NAMESPACE).backend
        self._claim = Claim(
            ids.new_id(), ids.new_attempt_id(), "owner", (f"{name}-bare",), (1,), LEASE, "bench"
        )

    def acquire(self) -> None:
        self._store.acquire(self._claim)

    def release(self) -> None:
        of = self._claim
        self._store.release(Release(of.names, of.execution_id, of.attempt_id))


class TokenRing:
    """A token in a list. Redis serves blocked clients in turn, so this is a FIFO lock without any
    safety: the fastest hand-over from one holder to the next that Redis allows."""

    def __init__(self, client: redis.Redis, name: str) -> None:
        self._client = client
        self._key = f"ring:{name}"

    def lay_out(self) -> None:
        self._client.delete(self._key)
        self.release()

    def acquire(self) -> None:
        self._client.blpop([self._key])

    def release(self) -> None:
        self._client.lpush(self._key, "token")


def ours(client: redis.Redis, name: str) -> Held:
    return Lock(client, name, timeout=LEASE)


def redis_py(client: redis.Redis, name: str) -> Held:
    return client.lock(f"redis-py:{name}", timeout=LEASE)


def redis_py_fast(client: redis.Redis, name: str) -> Held:
    return client.lock(f"redis-py:{name}", timeout=LEASE, sleep=0.01)


def python_redis_lock(client: redis.Redis, name: str) -> Held:
    import redis_lock

    return redis_lock.Lock(client, name, expire=LEASE)


def pottery_redlock(client: redis.Redis, name: str) -> Held:
    import pottery

    return pottery.Redlock(key=name, masters={client}, auto_release_time=LEASE)


LIMIT = "two no-op EVALSHA"
KEPT = "the same, connection kept"
COMMANDS = "celery-relock, its two commands"
RING = "token ring"
OURS = "celery-relock `Lock`"

UNCONTENDED: dict[str, Make] = {
    LIMIT: TwoNoOps,
    KEPT: KeptNoOps,
    COMMANDS: Commands,
    OURS: ours,
    "redis-py `Lock`": redis_py,
    "python-redis-lock": python_redis_lock,
    "hash with broadcast": redisson.HashLock,
    "pottery `Redlock`": pottery_redlock,
}

CONTENDED: dict[str, Make] = {
    RING: TokenRing,
    OURS: ours,
    "redis-py `Lock`": redis_py,
    "redis-py `Lock`, 10 ms poll": redis_py_fast,
    "python-redis-lock": python_redis_lock,
    "hash with broadcast": redisson.HashLock,
}
