"""Tasks that pass their hard time limit the first time, after which Celery puts their messages
back."""

from __future__ import annotations

import time

from celery_relock import LockedTask
from tests.support import Journal, make_app

app = make_app(__name__, worker_prefetch_multiplier=1)
journal = Journal.from_env()

PUT_BACK = {
    "bind": True,
    "acks_late": True,
    "acks_on_failure_or_timeout": False,
    "time_limit": 1,
    "ignore_result": True,
}
LOCKED = {**PUT_BACK, "base": LockedTask, "lock_key": "account:{account}"}


def work(self, account, number, **told):
    journal.add("began", account=account, number=number, **told)
    times = [e["number"] for e in journal.events("began", account=account)]
    if number == 1 and times.count(1) == 1 + told.get("retries", 0):
        time.sleep(60)


@app.task(**LOCKED)
def waits_for_its_lock(self, account, number):
    work(self, account, number)


@app.task(lock_order="sent", **LOCKED)
def has_its_turn(self, account, number):
    work(self, account, number, in_order=self.lock.in_order)


@app.task(lock_keep_on_retry=True, max_retries=1, **LOCKED)
def keeps_its_lock(self, account, number):
    if not self.request.retries:
        journal.add("began", account=account, number=number)
        raise self.retry(countdown=0)
    work(self, account, number, retries=self.request.retries)


@app.task(lock_dedup="until_done", **LOCKED)
def is_no_duplicate(self, account, number):
    work(self, account, number, marked=self.marked(account, number) is not None)


@app.task(**PUT_BACK)
def is_a_step(self, account, number):
    work(self, account, number)


@app.task(base=LockedTask, lock_key="account:{account}")
def holds(account):
    journal.add("holds", account=account)
    journal.wait_for(f"free {account}", 30)
