"""Tasks whose locks, messages and results are in different places, each from the environment."""

from __future__ import annotations

import json
import os
from typing import Any

import redis

from celery_relock import LockedTask
from tests.support import Journal, make_app

URL = os.environ["RELOCK_TEST_LOCKS"]
TLS = json.loads(os.environ.get("RELOCK_TEST_TLS", "null"))


def locks() -> redis.Redis:
    return redis.Redis.from_url(URL, client_name="made-by-a-function", **TLS)


app = make_app(__name__, relock_url=locks if TLS else URL)
journal = Journal.from_env()


@app.task(base=LockedTask, bind=True, lock_key="{lock}")
def takes(self: Any, lock: str) -> None:
    journal.add("took", lock=lock, fence=self.lock.fence)


@app.task(base=LockedTask, bind=True, lock_key="{lock}", lock_ttl=3)
def stays(self: Any, lock: str) -> None:
    journal.add("in", lock=lock)
    journal.wait_for("free", 15, lock=lock)
    self.lock.check()
    journal.add("still in", lock=lock)


@app.task
def note(lock: str) -> None:
    journal.add("noted", lock=lock)
