"""Tasks whose broker can be taken away: the test sits between them and it. Locks and results are
on the Redis behind."""

from __future__ import annotations

import os

from celery_relock import LockedTask
from tests.celery.apps.private import make_app
from tests.support import Journal

app = make_app(
    __name__,
    broker_url=os.environ["RELOCK_TEST_BROKER"],
    task_publish_retry_policy={"max_retries": 1, "interval_start": 0.05},
    worker_prefetch_multiplier=8,
)
journal = Journal.from_env()


class Arrives(LockedTask):
    """Asks for its lock when the test says so."""

    lock_key = "account:{account}"
    lock_ttl = 2.0

    def before_start(self, task_id, args, kwargs):
        journal.add("arrived", account=args[0])
        journal.wait_for(lambda events: any(e.name == f"ask {args[0]}" for e in events), 30)


def work(self, account):
    journal.add("ran", account=account, retries=self.request.retries)
    return self.request.id


@app.task(base=Arrives, bind=True, lock_on_conflict="retry", max_retries=0)
def comes_back(self, account):
    return work(self, account)


@app.task(base=Arrives, bind=True, lock_on_conflict="retry", max_retries=0, acks_late=True)
def comes_back_late(self, account):
    return work(self, account)


@app.task(base=Arrives, bind=True)
def parked(self, account):
    return work(self, account)


@app.task(base=Arrives, bind=True, acks_late=True)
def parked_late(self, account):
    return work(self, account)


@app.task
def note(value, account):
    journal.add("noted", account=account, value=value)
    return value


@app.task
def ping():
    return "pong"
