"""Whether a Redis keeps what is parked there."""

from __future__ import annotations

from typing import Any

import redis

from .faults import translate


def dangers(client: redis.Redis, needed: int = 0) -> list[str]:
    """What of the server's settings could lose parked messages, a sentence each. What the server
    does not tell is not complained of.

    Args:
        needed: how many replicas have to have a hold before it counts.

    Raises:
        LockUnavailable, LockConfigError: translated from what redis-py raises.
    """
    try:
        memory, persistence = _info(client, "memory"), _info(client, "persistence")
        save = _setting(client, "save")
        replicas = _info(client, "replication").get("connected_slaves", needed) if needed else 0
    except redis.RedisError as error:
        raise translate(error, where="info") from error
    found = []
    policy = memory.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        found.append(
            f"the Redis of the locks may throw away locks and parked runs when its memory is full: "
            f"maxmemory-policy is {policy}, and should be noeviction"
        )
    if persistence.get("aof_enabled") == 0 and save == "":
        found.append(
            "the Redis of the locks keeps nothing on disk: parked runs are gone when it restarts. "
            "Turn appendonly on, or use lock_on_conflict='retry', which leaves them to the broker"
        )
    if replicas < needed:
        found.append(
            f"the Redis of the locks has {replicas} replicas, and relock_min_replicas is {needed}: "
            "while that is so, no lock can be taken"
        )
    return found


def _info(client: redis.Redis, section: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = client.info(section)
    except redis.ResponseError:
        return {}  # not allowed to ask
    return found


def _setting(client: redis.Redis, name: str) -> str | None:
    try:
        found: dict[Any, Any] = client.config_get(name)
    except redis.ResponseError:
        return None
    return next((_text(value) for key, value in found.items() if _text(key) == name), None)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
