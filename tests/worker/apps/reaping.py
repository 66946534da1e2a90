"""Tasks whose processes are killed while they hold a lock of a long lease."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from celery_relock import Lock, LockedTask
from celery_relock.asyncio import Lock as CoroutineLock
from tests.support import Journal, make_app

app = make_app(__name__)
LONG = 120


@app.task(bind=True, base=LockedTask, lock_key="account:{account}", lock_ttl=LONG)
def hold(self: Any, account: str, inner: str = "") -> None:
    """Hold the lock, and if asked an inner one and a coroutine's, until the process is killed."""
    journal = Journal.from_env()
    journal.add("holding", account=account, fence=self.lock.fence)
    if inner:
        url, options = app.conf.relock_url, {"namespace": app.conf.relock_namespace}

        async def in_a_coroutine() -> None:
            async with CoroutineLock(url, f"{inner} coroutine", timeout=LONG, **options):
                journal.add("inner")
                time.sleep(60)

        with Lock(url, inner, timeout=LONG, **options):
            asyncio.run(in_a_coroutine())
    time.sleep(60)


@app.task(bind=True, base=LockedTask, lock_key="account:{account}", lock_on_conflict="block")
def follow(self: Any, account: str) -> float:
    """Tell when it was let in."""
    now = time.time()
    Journal.from_env().add("followed", account=account, at=now, fence=self.lock.fence)
    return now
