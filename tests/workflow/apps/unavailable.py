"""Tasks and workflows whose locks are in another Redis than their messages."""

from __future__ import annotations

from celery import chain

from celery_relock import LockedTask, locked
from celery_relock.errors import LockUnavailable
from tests.support import Journal, make_app

app = make_app(__name__, relock_on_unavailable="retry")
journal = Journal.from_env()


@app.task
def first(key):
    journal.add(f"first {key}")
    journal.wait_for(f"go on {key}", 30)


@app.task(base=LockedTask, bind=True, lock_key="workflow:{key}")
def second(self, key):
    journal.add("second", unbroken=self.lock.continuous)
    return "done"


def workflow(key, countdown=0.0, **options):
    steps = chain(first.si(key), second.si(key).set(countdown=countdown))
    return locked(steps, key=f"workflow:{key}", **options)


RAISES = {"base": LockedTask, "lock_key": "workflow:{key}", "lock_on_unavailable": "raise"}


@app.task(**RAISES, bind=True, lock_keep_on_retry=True)
def keeps(self, key):
    if self.request.retries == 0:
        journal.add(f"first {key}")
        raise self.retry(countdown=1.5)


@app.task(**RAISES, bind=True, lock_keep_on_retry=True)
def runs_unprotected(self, key):
    if self.request.retries == 0:
        journal.add(f"first {key}")
        raise self.retry(countdown=1.5, lock_on_unavailable="run")


@app.task(
    **RAISES,
    bind=True,
    lock_keep_on_retry=True,
    lock_order="sent",
    autoretry_for=(LockUnavailable,),
    retry_kwargs={"countdown": 1, "max_retries": 5},
)
def tries_again(self, key):
    if self.request.retries == 0:
        journal.add(f"first {key}")
        raise self.retry(countdown=1.5)
    return self.lock.continuous


@app.task(**RAISES, lock_dedup="until_start", ignore_result=True)
def sent_once(key):
    """Is never executed."""
