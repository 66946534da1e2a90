"""The resource that the locks of the ending tests protect: a register that remembers every touch.

A body touches it with its fence, over and over. A touch with a lower fence than one before it is an
overlap: somebody was in the lock after somebody else had come in.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import redis

from tests.support.journal import Event
from tests.support.keys import BENCH_PREFIX


class Fenced:
    """Registers of one test namespace, one for each account; gates and events beside them."""

    def __init__(self, url: str, namespace: str) -> None:
        # redis-py 8 gives up after five seconds by itself, `wait_for_go` waits for longer.
        self._client = redis.Redis.from_url(url, decode_responses=True, socket_timeout=None)
        self._prefix = f"{BENCH_PREFIX}fenced:{namespace}:"

    @classmethod
    def from_env(cls) -> Fenced:
        """That of the test that started this worker."""
        return cls(os.environ["RELOCK_TEST_URL"], os.environ["RELOCK_TEST_NAMESPACE"])

    def touch(self, account: str, fence: int) -> None:
        self._client.rpush(f"{self._prefix}{account}", fence)

    def touches(self, account: str) -> list[int]:
        """All fences, in the order in which the server saw them."""
        return [int(fence) for fence in self._client.lrange(f"{self._prefix}{account}", 0, -1)]

    def begun(self, account: str) -> int:
        """One more body of the account has begun; how many have by now."""
        return int(self._client.incr(f"{self._prefix}begun:{account}"))

    def let_go(self, account: str, times: int = 1) -> None:
        """Let so many bodies of the account go on."""
        self._client.rpush(f"{self._prefix}go:{account}", *["go"] * times)

    def wait_for_go(self, account: str, timeout: float = 30.0) -> None:
        self._client.blpop([f"{self._prefix}go:{account}"], timeout=timeout)

    def may_go(self, account: str) -> bool:
        return bool(self._client.exists(f"{self._prefix}go:{account}"))

    def tell(self, account: str, name: str, **data: Any) -> None:
        """Something happened."""
        fields = {"name": name, "pid": os.getpid(), "data": json.dumps(data)}
        self._client.xadd(f"{self._prefix}events:{account}", fields)

    def events(self, account: str, name: str) -> list[Event]:
        """What happened by that name, in order, with the server's time."""
        found = self._client.xrange(f"{self._prefix}events:{account}")
        return [
            Event(name, int(told["pid"]), int(stamp.split("-")[0]) / 1000, json.loads(told["data"]))
            for stamp, told in found
            if told["name"] == name
        ]

    def wait_for(
        self, account: str, name: str, count: int = 1, timeout: float = 30.0
    ) -> list[Event]:
        """Wait until so many events of a name are there; AssertionError if they do not come."""
        deadline = time.monotonic() + timeout
        key = f"{self._prefix}events:{account}"
        while True:
            seen = self._client.xinfo_stream(key)["last-generated-id"] if self._has(key) else "0"
            found = self.events(account, name)
            if len(found) >= count:
                return found
            left = deadline - time.monotonic()
            if left <= 0:
                names = [told["name"] for _, told in self._client.xrange(key)]
                raise AssertionError(f"{account}: no {name} in {timeout} s, but {names}")
            self._client.xread({key: seen}, count=1, block=max(1, int(min(left, 1) * 1000)))

    def now(self) -> float:
        """The server's time in seconds."""
        seconds, micros = self._client.time()
        return float(seconds + micros / 1e6)

    def _has(self, key: str) -> bool:
        return bool(self._client.exists(key))

    def close(self) -> None:
        self._client.close()
