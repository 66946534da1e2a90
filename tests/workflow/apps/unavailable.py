"""A workflow whose locks are in another Redis than its messages."""

from __future__ import annotations

import os

from celery import chain

from celery_relock import LockedTask, locked
from tests.support import Journal, make_app

app = make_app(
    __name__,
    relock_url=os.environ["RELOCK_TEST_LOCKS"],
    relock_transport_options={"patience": 0.2},
    relock_on_unavailable="retry",
)
journal = Journal.from_env()


@app.task
def first(key):
    journal.add(f"first {key}")
    journal.wait_for(lambda events: any(e.name == f"go on {key}" for e in events), 30)


@app.task(base=LockedTask, bind=True, lock_key="workflow:{key}")
def second(self, key):
    journal.add("second", unbroken=self.lock.continuous)
    return "done"


def workflow(key, **options):
    return locked(chain(first.si(key), second.si(key)), key=f"workflow:{key}", **options)
