"""Every way in which a body can end, and bodies that outlive their lease or are killed in it."""

from __future__ import annotations

import sys
import time

from celery.exceptions import Ignore, Reject
from celery.signals import task_postrun

from celery_relock import LockedTask
from tests.celery.apps.private import make_app
from tests.support import Journal
from tests.support.sections import section

KEY = "account:{account}"

app = make_app(__name__, worker_prefetch_multiplier=1)
journal = Journal.from_env()


def begin(self, account):
    journal.add("inside", account=account, fence=self.lock.fence, reentered=self.lock.reentered)


@app.task(base=LockedTask, bind=True, lock_key=KEY)
def returns(self, account):
    begin(self, account)
    return account


@app.task(base=LockedTask, bind=True, lock_key=KEY)
def raises(self, account):
    begin(self, account)
    raise ValueError(account)


@app.task(base=LockedTask, bind=True, lock_key=KEY, max_retries=1)
def retries(self, account):
    begin(self, account)
    if self.request.retries:
        return "after a retry"
    raise self.retry(countdown=2)


@app.task(base=LockedTask, bind=True, lock_key=KEY)
def ignores(self, account):
    begin(self, account)
    raise Ignore


@app.task(base=LockedTask, bind=True, lock_key=KEY)
def rejects(self, account):
    begin(self, account)
    raise Reject("not wanted", requeue=False)


@app.task(base=LockedTask, bind=True, lock_key=KEY, acks_late=True)
def goes_back_to_the_queue(self, account):
    begin(self, account)
    times = [e for e in journal.events("inside") if e["account"] == account]
    if len(times) == 1:
        raise Reject("come again", requeue=True)
    return len(times)


@app.task(base=LockedTask, bind=True, lock_key=KEY, soft_time_limit=1)
def runs_into_its_soft_limit(self, account):
    begin(self, account)
    time.sleep(20)


@app.task(base=LockedTask, bind=True, lock_key=KEY)
def is_terminated(self, account):
    begin(self, account)
    time.sleep(20)


@app.task(base=LockedTask, bind=True, lock_key=KEY)
def exits(self, account):
    begin(self, account)
    sys.exit(3)


@app.task(base=LockedTask, bind=True, lock_key=KEY)
def is_replaced(self, account):
    begin(self, account)
    raise self.replace(other.si("from the other"))


@app.task
def other(value):
    return value


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_ttl=1.5, lock_on_conflict="block")
def outlives_its_lease(self, account, seconds):
    with section(journal, self.lock):
        begin(self, account)
        remaining = []
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.25)
            self.lock.check()
            remaining.append(self.lock.remaining)
        return min(remaining)


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_ttl=1.5)
def is_killed(self, account):
    begin(self, account)
    time.sleep(20)


@task_postrun.connect
def over(task_id=None, args=(), **_):
    """Fires in the child at once after the body, whatever it raised."""
    journal.add("over", account=args[0] if args else None)
