"""Tasks whose locks live in another Redis than the broker, one that the test stops and starts."""

from __future__ import annotations

import threading

from celery import Celery

from celery_relock import LockedTask
from celery_relock.signals import lock_released
from tests.support import Journal, make_app
from tests.support.without_broker import WithoutABroker

KEY = "account:{account}"

app: Celery = make_app(__name__, worker_prefetch_multiplier=1)
journal = Journal.from_env()


@lock_released.connect
def told(names=(), **_):
    journal.add("released", account=names[0].partition(":")[2])


def work(self, account):
    hold = self.lock
    journal.add("inside", account=account, fence=hold.fence, protected=hold.protected)
    return {"fence": hold.fence, "protected": hold.protected}


@app.task(base=LockedTask, bind=True, lock_key=KEY)
def raises(self, account):
    return work(self, account)


def raises_in_the_end(conflict):
    account = conflict.name.partition(":")[2]
    journal.add("asked", account=account)
    journal.wait_for(f"free {account}", 30)
    return "raise"


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_on_conflict=raises_in_the_end)
def is_refused(self, account):
    return work(self, account)


@app.task(
    base=LockedTask, bind=True, lock_key=KEY, acks_late=True, acks_on_failure_or_timeout=False
)
def is_rejected(self, account):
    return work(self, account)


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_on_unavailable="retry", max_retries=0)
def comes_back(self, account):
    return {**work(self, account), "retries": self.request.retries}


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_on_unavailable="retry", lock_max_wait=1.0)
def comes_back_briefly(self, account):
    return work(self, account)


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_on_unavailable="run")
def runs_all_the_same(self, account):
    return work(self, account)


@app.task(base=WithoutABroker, bind=True, lock_key=KEY, lock_on_unavailable="retry")
def stays_in_its_slot(self, account):
    return work(self, account)


@app.task(
    base=WithoutABroker,
    bind=True,
    lock_key=KEY,
    lock_on_unavailable="retry",
    lock_max_wait=1.0,
)
def stays_in_its_slot_briefly(self, account):
    return work(self, account)


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_ttl=1.5)
def holds(self, account):
    return _hold(self, account)


def _hold(self, account):
    work(self, account)
    journal.wait_for(f"free {account}", 30)
    return "what the body returned"


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_ttl=300)
def holds_long(self, account):
    return _hold(self, account)


@app.task(
    base=LockedTask,
    bind=True,
    lock_key=KEY,
    lock_keep_on_retry=True,
    lock_on_unavailable="retry",
    max_retries=1,
)
def keeps_it(self, account):
    if self.request.retries:
        return self.lock.continuous
    journal.add("inside", account=account)
    raise self.retry(countdown=1)


def _keeps(self, account):
    if not self.request.retries:
        raise self.retry(countdown=0.1)


for limit in (1, 2):
    options = {"lock_key": KEY, "lock_keep_on_retry": True, "lock_limit": limit}
    app.task(_keeps, name=f"keeps_one_of_{limit}", base=LockedTask, bind=True, **options)


@app.task(base=LockedTask, lock_key=False)
def never_locks(account):
    return account


@app.task(base=LockedTask, bind=True)
def locks_on_its_arguments(self, account):
    return self.lock.name


@app.task
def threads():
    """The names of this process's threads, as far as Python knows them."""
    return sorted(thread.name for thread in threading.enumerate())
