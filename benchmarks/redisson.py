"""The classic reentrant lock in Redis, written from its description (Redisson made it well known):
a hash of owner → count, and a message to everybody when it becomes free."""

from __future__ import annotations

import time
import uuid

import redis

_LEASE_MS = 30_000

_ACQUIRE = """
if redis.call('exists', KEYS[1]) == 0 or redis.call('hexists', KEYS[1], ARGV[1]) == 1 then
  redis.call('hincrby', KEYS[1], ARGV[1], 1)
  redis.call('pexpire', KEYS[1], ARGV[2])
  return -1
end
return redis.call('pttl', KEYS[1])
"""
_RELEASE = """
if redis.call('hexists', KEYS[1], ARGV[1]) == 0 then
  return 0
end
if redis.call('hincrby', KEYS[1], ARGV[1], -1) > 0 then
  redis.call('pexpire', KEYS[1], ARGV[2])
else
  redis.call('del', KEYS[1])
  redis.call('publish', KEYS[2], 'free')
end
return 1
"""


class HashLock:
    """Every waiter is notified that the lock is free, and all of them try again."""

    def __init__(self, client: redis.Redis, name: str) -> None:
        self._client = client
        self._key, self._channel = f"hash:{name}", f"hash:{name}:free"
        self._owner = f"{uuid.uuid4()}:1"
        self._acquire = self._client.register_script(_ACQUIRE)
        self._release = self._client.register_script(_RELEASE)

    def acquire(self) -> None:
        if self._try() < 0:
            return
        with self._client.pubsub(ignore_subscribe_messages=True) as listener:
            listener.subscribe(self._channel)
            while (left := self._try()) >= 0:
                _wait_for_message(listener, left / 1000)

    def release(self) -> None:
        self._release(keys=[self._key, self._channel], args=[self._owner, _LEASE_MS])

    def _try(self) -> int:
        return int(self._acquire(keys=[self._key], args=[self._owner, _LEASE_MS]))


def _wait_for_message(listener: redis.client.PubSub, seconds: float) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if listener.get_message(timeout=left) is not None:
            return
