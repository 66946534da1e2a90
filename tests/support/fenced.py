"""The resource that the locks of the ending tests protect: a register that remembers every touch.

A body touches it with its fence, over and over. A touch with a lower fence than one before it is an
overlap: somebody was in the lock after somebody else had come in.
"""

from __future__ import annotations

import os

import redis

from tests.support.keys import BENCH_PREFIX


class Fenced:
    """Registers of one test namespace, one for each account, and gates beside them. What a body
    sends is text alone, as in `Journal.add`: signals strike here."""

    def __init__(self, url: str, namespace: str) -> None:
        # redis-py 8 gives up after five seconds by itself, `wait_for_go` waits for longer.
        self._client = redis.Redis.from_url(url, decode_responses=True, socket_timeout=None)
        self._prefix = f"{BENCH_PREFIX}fenced:{namespace}:"

    @classmethod
    def from_env(cls) -> Fenced:
        """That of the test that started this worker."""
        return cls(os.environ["RELOCK_TEST_URL"], os.environ["RELOCK_TEST_NAMESPACE"])

    def touch(self, account: str, fence: int) -> None:
        self._client.rpush(f"{self._prefix}{account}", str(fence))

    def touches(self, account: str) -> list[int]:
        """All fences, in the order in which the server saw them."""
        return [int(fence) for fence in self._client.lrange(f"{self._prefix}{account}", 0, -1)]

    def begun(self, account: str) -> int:
        """One more body of the account has begun; how many have by now."""
        return int(self._client.execute_command("INCR", f"{self._prefix}begun:{account}"))

    def let_go(self, account: str, times: int = 1) -> None:
        """Let so many bodies of the account go on."""
        self._client.rpush(f"{self._prefix}go:{account}", *["go"] * times)

    def wait_for_go(self, account: str) -> None:
        self._client.execute_command("BLPOP", f"{self._prefix}go:{account}", "30")

    def may_go(self, account: str) -> bool:
        return bool(self._client.exists(f"{self._prefix}go:{account}"))

    def now(self) -> float:
        """The server's time in seconds."""
        seconds, micros = self._client.time()
        return float(seconds + micros / 1e6)

    def close(self) -> None:
        self._client.close()
