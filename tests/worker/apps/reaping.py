"""Tasks whose processes are killed while they hold a lock of a long lease."""

from __future__ import annotations

import time
from typing import Any

from celery_relock import Lock, LockedTask
from tests.support import Journal, make_app

app = make_app(__name__)
LONG = 120


@app.task(bind=True, base=LockedTask, lock_key="account:{account}", lock_ttl=LONG)
def hold(self: Any, account: str, inner: str = "") -> None:
    """Hold the lock, and an inner one if asked, until the process is killed."""
    journal = Journal.from_env()
    journal.add("holding", account=account, fence=self.lock.fence)
    if inner:
        conf = app.conf
        with Lock(conf.relock_url, inner, timeout=LONG, namespace=conf.relock_namespace):
            journal.add("inner")
            time.sleep(60)
    time.sleep(60)


@app.task(bind=True, base=LockedTask, lock_key="account:{account}", lock_on_conflict="block")
def follow(self: Any, account: str) -> float:
    """Tell when it was let in."""
    now = time.time()
    Journal.from_env().add("followed", account=account, at=now, fence=self.lock.fence)
    return now
