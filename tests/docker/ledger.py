"""What the tasks of the smoke suite leave behind in Redis, and how the test lets them go on.

An account is the resource that the locks protect: it refuses whoever comes with a fence lower than
one that it has seen. Of the standard library and redis-py alone: containers have no more.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

import redis

T = TypeVar("T")

_WRITE = """
if tonumber(ARGV[1]) < tonumber(redis.call('GET', KEYS[1]) or 0) then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1])
return 1
"""


class Ledger:
    """All accounts of a test. Nothing of it raises because Redis is away: it tries again."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(
            url, decode_responses=True, socket_timeout=2, socket_connect_timeout=2
        )

    def write(self, account: str, fence: int) -> bool:
        """Whether the account takes a write of this fence."""
        return bool(self._stubborn(lambda: self._client.eval(_WRITE, 1, f"l:{account}", fence)))

    def tell(self, name: str, account: str, **data: Any) -> None:
        """Something happened."""
        text = json.dumps({"name": name, "account": account, **data})
        self._stubborn(lambda: self._client.rpush("l:events", text))

    def events(self, name: str = "", account: str = "") -> list[dict[str, Any]]:
        """What happened, in the order in which Redis heard of it."""
        found = self._stubborn(lambda: self._client.lrange("l:events", 0, -1))
        every = [json.loads(text) for text in found]
        return [
            event
            for event in every
            if name in ("", event["name"]) and account in ("", event["account"])
        ]

    def wait_for(
        self, name: str, account: str, count: int = 1, timeout: float = 60.0
    ) -> list[dict[str, Any]]:
        """Wait for so many events of a name; AssertionError if they do not come."""
        deadline = time.monotonic() + timeout
        while len(found := self.events(name, account)) < count:
            assert time.monotonic() < deadline, f"no {name} of {account}, but {self.events()}"
            time.sleep(0.05)
        return found

    def let_go(self, account: str) -> None:
        """Let the bodies that wait at the account's gate go on, now and from now on."""
        self._stubborn(lambda: self._client.set(f"l:go:{account}", 1))

    def wait_at_gate(self, account: str) -> None:
        while not self._stubborn(lambda: self._client.exists(f"l:go:{account}")):
            time.sleep(0.05)

    def keys(self) -> set[str]:
        """Every key of the server."""
        return set(self._stubborn(lambda: list(self._client.scan_iter(count=1000))))

    def close(self) -> None:
        self._client.close()

    def _stubborn(self, call: Callable[[], T], patience: float = 60.0) -> Any:
        deadline = time.monotonic() + patience
        while True:
            try:
                return call()
            except (redis.ConnectionError, redis.TimeoutError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
