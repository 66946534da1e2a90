"""Tasks whose locks are behind a client that cannot be made before the test says so."""

from __future__ import annotations

import os
import time
from pathlib import Path

from redis import Redis

from celery_relock import LockedTask
from tests.support import Journal, make_app

journal = Journal.from_env()
GATE, URL = Path(os.environ["RELOCK_TEST_GATE"]), os.environ["RELOCK_TEST_URL"]
KEY = "account:{account}"


def locks():
    if not GATE.exists():
        raise ConnectionError("the vault is not up yet")
    return Redis.from_url(URL)


app = make_app(__name__, relock_url=locks)


@app.task(base=LockedTask, lock_key=KEY)
def raises(account):
    return account


@app.task(base=LockedTask, lock_key=KEY, lock_on_unavailable="retry", max_retries=0)
def comes_back(account):
    return account


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_on_unavailable="run")
def runs_all_the_same(self, account):
    return self.lock.protected


@app.task(base=LockedTask, lock_key=KEY, lock_order="sent", lock_on_unavailable="retry")
def in_order(account):
    return account


@app.task(base=LockedTask, lock_key=KEY, lock_debounce=0.2, lock_on_unavailable="retry")
def debounced(account):
    return account


@app.task(base=LockedTask, lock_key=KEY, lock_ttl=120, lock_on_unavailable="retry")
def holds(account):
    journal.add("holding", account=account)
    time.sleep(60)
