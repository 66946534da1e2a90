"""Tasks whose broker, results and locks are on one Redis under Sentinels."""

from __future__ import annotations

import os
import time

from celery import Celery

from celery_relock import LockedTask
from tests.support import Journal, make_app

URL = os.environ["RELOCK_TEST_SENTINELS"]
TRANSPORT = {"master_name": os.environ["RELOCK_TEST_SERVICE"]}

app: Celery = make_app(
    __name__,
    broker_url=URL,
    # What a worker had when its connection broke comes back soon. By default kombu looks for that
    # when it connects, which is too early, and then 100 s later.
    broker_transport_options={
        **TRANSPORT,
        "visibility_timeout": 15,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    },
    result_backend=URL,
    result_backend_transport_options=TRANSPORT,
    relock_url=None,  # as the results
    relock_min_replicas=int(os.environ.get("RELOCK_TEST_REPLICAS", "0")),
    relock_ttl=12,
    worker_prefetch_multiplier=1,
    worker_cancel_long_running_tasks_on_connection_loss=False,
)
journal = Journal.from_env()


def body(self, account, seconds=0.3):
    hold = self.lock
    journal.add("in", account=account, fence=hold.fence, task=self.request.id)
    time.sleep(seconds)
    hold.check()
    journal.add("out", account=account, fence=hold.fence, task=self.request.id)


@app.task(base=LockedTask, bind=True, lock_key="account:{account}")
def parks(self, account, seconds=0.3):
    body(self, account, seconds)


@app.task(base=LockedTask, bind=True, lock_key="account:{account}", lock_on_conflict="block")
def blocks(self, account, seconds=0.3):
    body(self, account, seconds)


@app.task(base=LockedTask, bind=True, lock_key="account:{account}", lock_debounce=3)
def merges(self, account):
    body(self, account)


@app.task(base=LockedTask, bind=True, lock_key="account:{account}")
def outer(self, account):
    """A workflow whose steps re-enter."""
    journal.add("in", account=account, fence=self.lock.fence, task=self.request.id)
    inner(account)
    journal.add("out", account=account, fence=self.lock.fence, task=self.request.id)


@app.task(base=LockedTask, bind=True, lock_key="account:{account}")
def inner(self, account):
    assert self.lock.reentered
    time.sleep(0.3)
