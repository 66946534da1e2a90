"""Tasks that die, and error callbacks that Celery calls inline in the worker's main process."""

from __future__ import annotations

import time

from celery_relock import LockedTask
from tests.support import Journal, make_app

KEY = "account:{account}"

app = make_app(__name__, worker_prefetch_multiplier=1)
journal = Journal.from_env()


@app.task(base=LockedTask, lock_key=KEY)
def holds(account):
    journal.add("held", account=account)
    journal.wait_for(f"free {account}", 60)


@app.task
def dies(account):
    journal.add("alive", account=account)
    time.sleep(60)


@app.task(time_limit=1)
def overruns(account):
    journal.add("alive", account=account)
    time.sleep(60)


@app.task
def ping():
    return "pong"


def note(request, account, lock):
    journal.add("errback", account=account, of=request.id, fence=lock.fence)


# More than one argument makes Celery call it inline.
@app.task(base=LockedTask, lock_key=KEY)
def waits(request, exc, traceback, account):
    note(request, account, waits.lock)


@app.task(base=LockedTask, lock_key=KEY, lock_on_conflict=lambda conflict: "block")
def chooses(request, exc, traceback, account):
    note(request, account, chooses.lock)


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_on_conflict="raise")
def raises(self, account):
    return self.lock.fence
