"""The workers' side of `ordering.py`: one task, in the order of its calls or in none."""

from __future__ import annotations

import os
import time

import redis

from celery_relock import LockedTask
from tests.support import make_app

app = make_app(__name__)
client = redis.Redis.from_url(os.environ["RELOCK_TEST_URL"])


def work(run: str, key: int, number: int, seconds: float) -> None:
    client.rpush(f"bench:{run}:{key}", number)
    time.sleep(seconds)
    client.rpush(f"bench:{run}", time.time())


@app.task(ignore_result=True)
def plain(run: str, key: int, number: int, seconds: float) -> None:
    work(run, key, number, seconds)


@app.task(base=LockedTask, lock_key="key:{key}", lock_order="sent", ignore_result=True)
def ordered(run: str, key: int, number: int, seconds: float) -> None:
    work(run, key, number, seconds)
