"""Tasks for children that have only what Celery hands on, and what they import."""

from __future__ import annotations

import time
from typing import Any

from celery_relock import Lock, LockedTask
from tests.support import Journal, make_app

app = make_app(__name__)
journal = Journal.from_env()


class EndsBeforeItsBody(LockedTask):
    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        journal.add("ends", account=args[0])
        raise ValueError


@app.task(base=LockedTask, lock_key="account:{account}", lock_ttl=120)
def is_killed(account):
    journal.add("holding", account=account)
    time.sleep(60)


@app.task(base=LockedTask, bind=True, lock_key="account:{account}")
def works(self, account):
    return self.lock.fence


@app.task(
    base=EndsBeforeItsBody,
    lock_key="account:{account}",
    lock_dedup="until_done",
    ignore_result=True,
)
def ends_early(account):
    pass


@app.task
def step(name):
    """Whether it runs under a lock, which it re-enters."""
    conf = app.conf
    lock = Lock(conf.relock_url, name, namespace=conf.relock_namespace)
    if entered := lock.acquire(blocking=False):
        lock.release()
    return entered
