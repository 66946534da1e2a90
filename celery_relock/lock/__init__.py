"""A lock outside of tasks, or anywhere in one: a context manager, and a redis-py citizen.

with Lock("redis://localhost", "account:42") as lock:
    write(fence=lock.fence)

client.lock("account:42", timeout=30, lock_class=Lock)
"""

from __future__ import annotations

from .errors import LockNotAcquired, LockNotOwned, LockNotTaken
from .lock import Lock

__all__ = ["Lock", "LockNotAcquired", "LockNotOwned", "LockNotTaken"]
