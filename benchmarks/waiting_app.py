"""The worker's side of `waiting.py`: one contended task in several forms, and an unrelated one."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import redis
from celery.signals import task_prerun

from celery_relock import LockedTask
from tests.support import make_app

app = make_app(__name__)
client = redis.Redis.from_url(os.environ["RELOCK_TEST_URL"])
WORK = float(os.environ.get("RELOCK_BENCH_WORK", "0.01"))


def note(run: str, kind: str, number: int, sent: float) -> None:
    client.rpush(f"bench:{run}:{kind}", f"{number} {sent} {time.time()}")


def work(run: str, number: int, sent: float) -> None:
    note(run, "in", number, sent)
    time.sleep(WORK)
    note(run, "out", number, sent)


@task_prerun.connect
def count(args: Any = (), **_: Any) -> None:
    client.hincrby("bench:deliveries", args[0])


@app.task(ignore_result=True)
def unrelated(run: str, number: int, sent: float) -> None:
    note(run, "unrelated", number, sent)


@app.task
def free(run: str, number: int, sent: float) -> None:
    work(run, number, sent)


@app.task(base=LockedTask, lock_key="hot:{run}", lock_on_conflict="wait")
def wait(run: str, number: int, sent: float) -> None:
    work(run, number, sent)


@app.task(base=LockedTask, lock_key="hot:{run}", lock_on_conflict="block", lock_max_wait=600)
def block(run: str, number: int, sent: float) -> None:
    work(run, number, sent)


@app.task(base=LockedTask, lock_key="hot:{run}", lock_on_conflict="retry")
def retry(run: str, number: int, sent: float) -> None:
    work(run, number, sent)


@app.task(bind=True, max_retries=None)
def poll(self: Any, run: str, number: int, sent: float) -> None:
    """A lock as people write it by hand: SET NX, else try again in about half a second."""
    if not client.set(f"bench:lock:{run}", self.request.id, nx=True, px=30_000):
        raise self.retry(countdown=random.uniform(0.25, 0.75))
    try:
        work(run, number, sent)
    finally:
        client.delete(f"bench:lock:{run}")
