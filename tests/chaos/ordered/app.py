"""The workers' and the senders' side of a campaign: one task, whose calls run in order."""

from __future__ import annotations

import json
import os
import random
import time
from typing import Any

import redis

from celery_relock import LockedTask
from tests.chaos.parked.settings import Settings

#: Where a campaign says how long a late call holds up those behind it, in seconds.
GAP = "RELOCK_CHAOS_GAP"
BEGUN = "ordered:begun"

settings = Settings.from_environment()
app = settings.app()
resource = redis.Redis.from_url(settings.resource)


@app.task(
    name="chaos.update",
    base=LockedTask,
    bind=True,
    lock_key="{key}",
    lock_order="sent",
    lock_order_gap=float(os.environ[GAP]),
    lock_on_unavailable="retry",
)
def update(self: Any, key: str) -> None:
    told = {"id": self.request.id, "key": key, "pid": os.getpid(), "in_order": self.lock.in_order}
    resource.rpush(BEGUN, json.dumps({"what": "begun", **told}))
    time.sleep(random.uniform(0, 0.004))
    resource.rpush(BEGUN, json.dumps({"what": "ended", **told}))
