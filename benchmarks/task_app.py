"""The worker's side of `task.py`: one empty task under the locks of several libraries."""

from __future__ import annotations

import os

import redis
from celery_once import QueueOnce
from celery_singleton import Singleton

from celery_relock import LockedTask
from tests.support import make_app

URL = os.environ["RELOCK_TEST_URL"]
app = make_app(
    __name__,
    ONCE={"backend": "celery_once.backends.Redis", "settings": {"url": URL, "default_timeout": 60}},
    singleton_backend_url=URL,
    singleton_lock_expiry=60,
    worker_prefetch_multiplier=8,
)
client = redis.Redis.from_url(URL)


@app.task(ignore_result=True)
def plain(account: str) -> None:
    pass


@app.task(base=LockedTask, lock_key="account:{account}", ignore_result=True)
def locked(account: str) -> None:
    pass


@app.task(
    base=LockedTask, lock_key="account:{account}", lock_dedup="until_start", ignore_result=True
)
def dedup(account: str) -> None:
    pass


@app.task(base=LockedTask, lock_key="account:{account}", lock_order="sent", ignore_result=True)
def ordered(account: str) -> None:
    pass


@app.task(ignore_result=True)
def by_hand(account: str) -> None:
    with client.lock(f"bench:account:{account}", timeout=30):
        pass


@app.task(base=QueueOnce, ignore_result=True)
def once(account: str) -> None:
    pass


@app.task(base=Singleton, ignore_result=True)
def singleton(account: str) -> None:
    pass


@app.task(ignore_result=True)
def say(key: str) -> None:
    client.rpush(key, "done")
