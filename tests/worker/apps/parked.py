"""Tasks that are parked while their lock is held."""

from __future__ import annotations

import os
import time
from typing import Any

from celery.signals import celeryd_init

from celery_relock import LockedTask
from celery_relock.worker import resuming
from tests.support import Journal, make_app
from tests.support.permits import holding

KEY = "account:{account}"

app = make_app(
    __name__,
    accept_content=["json", "pickle"],
    result_accept_content=["json", "pickle"],
    worker_prefetch_multiplier=1,
)
journal = Journal.from_env()


@celeryd_init.connect(weak=False)
def looks(**_: Any) -> None:
    """How often this worker looks for what is to be resumed, in seconds."""
    resuming.LOOK_EVERY = float(os.environ.get("RELOCK_TEST_LOOKS", resuming.LOOK_EVERY))


@app.task(base=LockedTask, bind=True, lock_key=KEY)
def hold(self, account):
    """Holds the lock until the test says that it may go."""
    with holding(journal, self.lock):
        journal.add("held", account=account)
        journal.wait_for(f"free {account}", 30)


def take(self: Any, account: str, seconds: float = 0.0) -> str:
    with holding(journal, self.lock):
        run = self.request.headers["relock"]["execution_id"] if self.request.headers else ""
        journal.add("took", account=account, id=self.request.id, execution_id=run)
        time.sleep(seconds)
        return str(self.request.id)


@app.task(base=LockedTask, bind=True, lock_key=KEY)
def takes(self, account, seconds=0.0):
    return take(self, account, seconds)


@app.task(base=LockedTask, bind=True, lock_key=KEY)
def takes_long(self, account):
    """Is inside until the test lets it go."""
    with holding(journal, self.lock):
        journal.add("took", account=account, id=self.request.id)
        journal.wait_for(f"free {account}", 30)


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_max_wait=1.0)
def takes_soon(self, account):
    return take(self, account)


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_max_parked=2)
def takes_with_few(self, account):
    return take(self, account)


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_limit=2)
def takes_with_another(self, account):
    journal.add("took", account=account, id=self.request.id)
    journal.wait_for(f"free {account}", 30)


@app.task(base=LockedTask, bind=True, lock_key=["account:{one}", "account:{other}"])
def takes_both(self, one, other):
    return take(self, one)


@app.task(base=LockedTask, bind=True, lock_key=KEY, max_retries=1)
def retries_once(self, account):
    take(self, account)
    if not self.request.retries:
        raise self.retry(countdown=0)
    return self.request.retries


@app.task(
    base=LockedTask,
    bind=True,
    lock_key=KEY,
    autoretry_for=(ValueError,),
    retry_backoff=False,
    default_retry_delay=0,
    max_retries=2,
)
def retries_by_itself(self, account):
    take(self, account)
    if self.request.retries < 2:
        raise ValueError("not yet")
    return self.request.retries


@app.task(bind=True)
def calls_inline(self, account):
    return takes(account)


@app.task(bind=True)
def applies_inline(self, account):
    return takes.apply((account,)).get(disable_sync_subtasks=False)


@app.task
def works_beside(value=None):
    return value


@app.task
def note(value, account):
    journal.add("noted", account=account)


@app.task(base=LockedTask, bind=True, lock_key="account:{content.account}")
def takes_pickled(self, content, *, also=()):
    return take(self, content.account), sorted(also)
