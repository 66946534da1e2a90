"""Which keys a test left in Redis."""

from __future__ import annotations

import redis

#: Keys of the test bench itself (journal, broker, results) start with this.
BENCH_PREFIX = "test-bench:"


def leftovers(client: redis.Redis, namespace: str) -> list[str]:
    """Every key that carries the namespace, sorted; the test bench's own keys excepted."""
    found = (key.decode() for key in client.scan_iter(match=f"*{namespace}*", count=1000))
    return sorted(key for key in found if not key.startswith(BENCH_PREFIX))
