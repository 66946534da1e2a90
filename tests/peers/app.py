"""One task, made unique by the library that RELOCK_TEST_PEER names.

It has no options but those that every one of them has. What a run does is looked up when it begins,
so a call can be repeated with the same arguments after one that ended badly.
"""

from __future__ import annotations

import os
import time
from typing import Any

import redis
from celery.exceptions import Ignore

from tests.support import Journal, make_app
from tests.support.keys import BENCH_PREFIX

PEER = os.environ["RELOCK_TEST_PEER"]
URL = os.environ["RELOCK_TEST_URL"]

app = make_app(
    __name__,
    ONCE={"backend": "celery_once.backends.Redis", "settings": {"url": URL}},
    singleton_backend_url=URL,
    singleton_key_prefix=f"{os.environ['RELOCK_TEST_NAMESPACE']}-",
    heimdall_lock_prefix=f"{os.environ['RELOCK_TEST_NAMESPACE']}-",
    worker_prefetch_multiplier=1,
)
journal = Journal.from_env()
client = redis.Redis.from_url(URL)


def unique(seconds: float | None = None, *, errors: bool = False) -> dict[str, Any]:
    """The options of a unique task whose lock lives for so many seconds."""
    if PEER == "celery-once":
        from celery_once import QueueOnce

        once = {"graceful": not errors} | ({"timeout": int(seconds)} if seconds else {})
        return {"base": QueueOnce, "once": once}
    if PEER == "celery-singleton":
        from celery_singleton import Singleton

        return {
            "base": Singleton,
            "lock_expiry": seconds and int(seconds),
            "raise_on_duplicate": errors,
        }
    if PEER == "celery-heimdall":
        from celery_heimdall import HeimdallTask

        told = {
            "unique": True,
            "unique_raises": errors,
            "lock_prefix": app.conf.heimdall_lock_prefix,
        }
        return {
            "base": HeimdallTask,
            "heimdall": told | ({"unique_timeout": int(seconds)} if seconds else {}),
        }
    from celery_relock import LockedTask

    ours = {"lock_dedup": "until_done", "lock_on_duplicate": "raise" if errors else "existing"}
    return {"base": LockedTask, **ours, **({"lock_ttl": seconds} if seconds else {})}


def run(self: Any, name: str) -> str:
    how = (client.get(f"{BENCH_PREFIX}how:{name}") or b"").decode()
    first = not client.getset(f"{BENCH_PREFIX}first:{self.request.id}", "no")
    header = (self.request.headers or {}).get("relock")
    journal.add("began", task=name, id=self.request.id, header=header)
    try:
        return act(self, name, how, first)
    finally:
        journal.add("ended", task=name, id=self.request.id)


def act(self: Any, name: str, how: str, first: bool) -> str:
    word, _, rest = how.partition(" ")
    if word == "raise" or (word == "fail" and first):
        raise ValueError(name)
    if word == "ignore":
        raise Ignore
    if word == "replace":
        raise self.replace(plain.si(name))
    if word == "retry" and self.request.retries < 2:
        raise self.retry(countdown=0.5, max_retries=5)
    if word == "sleep" or (word == "first" and first):
        time.sleep(float(rest))
    return name


@app.task(bind=True, **unique())
def task(self, name, size=0):
    return run(self, name)


@app.task(bind=True, acks_late=True, reject_on_worker_lost=True, **unique())
def late(self, name):
    return run(self, name)


@app.task(bind=True, **unique(3))
def short(self, name):
    return run(self, name)


@app.task(
    bind=True,
    autoretry_for=(ValueError,),
    retry_kwargs={"countdown": 0.5, "max_retries": 2},
    **unique(errors=True),
)
def strict(self, name):
    return run(self, name)


@app.task
def plain(name):
    return name


@app.task
def total(names):
    return len(names)
