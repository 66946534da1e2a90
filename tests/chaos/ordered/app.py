"""The workers' and the senders' side of a campaign: tasks whose calls run in order."""

from __future__ import annotations

import json
import os
import random
import time
from typing import Any

import redis
from celery.signals import task_received

from celery_relock import LockedTask
from tests.chaos.parked.settings import Settings

#: Where a campaign says how long a late call holds up those behind it, in seconds.
GAP = "RELOCK_CHAOS_GAP"
BEGUN, RECEIVED = "ordered:begun", "ordered:received"

settings = Settings.from_environment()
app = settings.app()
resource = redis.Redis.from_url(settings.resource)


def _declared(name: str, **options: Any) -> Any:
    gap = float(os.environ[GAP])
    how = {"lock_key": "{key}", "lock_order": "sent", "lock_order_gap": gap, **options}
    return app.task(name=name, base=LockedTask, bind=True, lock_on_unavailable="retry", **how)


def _run(self: Any, key: str, retried: bool, *, own_place: bool) -> None:
    attempt = self.request.retries
    of = {"id": self.request.id, "key": key, "retries": attempt}
    told = {**of, "pid": os.getpid(), "in_order": self.lock.in_order}
    _tell("begun", **told)
    if retried and not attempt:
        countdown = random.uniform(0, 0.3)
        _tell("retrying", **told, at=_due(countdown, own_place))
        retry = self.retry(countdown=countdown, throw=False)
        _tell("retried", **told, at=_due(countdown, own_place))
        raise retry
    # A retry is to be found, and killed.
    time.sleep(random.uniform(0, 0.1 if attempt else 0.004))
    _tell("ended", **told)


def _due(countdown: float, own_place: bool) -> int:
    """The time by which a retry has its place, in ns; 0 if it keeps that of its call."""
    return time.monotonic_ns() + round(countdown * 1e9) if own_place else 0


def _tell(what: str, **told: Any) -> None:
    resource.rpush(BEGUN, json.dumps({"what": what, **told}))


@_declared("chaos.update")
def update(self: Any, key: str, retried: bool = False) -> None:
    """Its retry keeps the place of its call."""
    _run(self, key, retried, own_place=False)


@_declared("chaos.lets_pass", lock_order_retry="end")
def lets_pass(self: Any, key: str, retried: bool = False) -> None:
    """Its retry goes behind the calls that were sent before it is due."""
    _run(self, key, retried, own_place=True)


@task_received.connect
def _received(request: Any, **_: Any) -> None:
    resource.sadd(RECEIVED, f"{request.id} {request.request_dict['retries']}")
