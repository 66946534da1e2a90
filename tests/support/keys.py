"""The keys of a test in Redis, and which of them it left there."""

from __future__ import annotations

import uuid

import redis

#: Keys of the test bench itself (journal, broker, results) start with this.
BENCH_PREFIX = "test-bench:"


def new_namespace() -> str:
    """A prefix of keys that no other test has."""
    return f"ns{uuid.uuid4().hex[:12]}"


def leftovers(client: redis.Redis, namespace: str) -> list[str]:
    """Every key that carries the namespace, sorted; the test bench's own keys excepted."""
    found = (key.decode() for key in client.scan_iter(match=f"*{namespace}*", count=1000))
    return sorted(key for key in found if not key.startswith(BENCH_PREFIX))
