"""Tasks whose calls run in the order in which they are sent."""

from __future__ import annotations

import os
import signal
import sys

from celery import current_task
from celery.exceptions import Reject

from celery_relock import LockedTask
from celery_relock.errors import LockConflict
from celery_relock.signals import lock_passed
from tests.support import Journal, make_app

KEY = "account:{account}"

app = make_app(
    __name__,
    worker_prefetch_multiplier=1,
    task_publish_retry=False,
)
journal = Journal.from_env()


class StoredLate:
    """A result that is long in being stored: its call has left the line and the lock by then."""

    def __init__(self, account, number):
        self.account, self.number = account, number

    def __json__(self):
        journal.add("storing", account=self.account)
        journal.wait_for(f"store {self.account}", 30)
        return self.number


def work(self, account, number, how):
    """Says that it runs, and ends in the way that the call wants."""
    told = {"account": account, "number": number, "retries": self.request.retries}
    journal.add("began", in_order=self.lock.in_order, id=self.request.id, **told)
    if how.startswith("slow") or (how == "retry, slow" and self.request.retries):
        journal.wait_for(f"free {account}", 30)
    if how == "retry, slow" and self.request.retries < 1:
        raise self.retry(countdown=0)
    if how == "retry elsewhere" and self.request.retries < 1:
        raise self.retry(args=(f"{account}-else", number, "slow"), countdown=0)
    if how == "slow retry" and self.request.retries < 1:
        raise self.retry(countdown=1)
    if how == "retry in an hour" and self.request.retries < 1:
        raise self.retry(countdown=3600)
    if how == "retry and go on" and self.request.retries < 1:
        self.retry(countdown=1, throw=False)
    if how == "exits":
        sys.exit()
    if how == "slow reject":
        raise Reject("not here", requeue=False)
    if how.endswith("fail") and self.request.retries < 1:
        raise ConnectionError("not this time")
    journal.add("ended", **told)
    return StoredLate(account, number) if how == "stored late" else number


def ordered(**options):
    return app.task(base=LockedTask, bind=True, lock_key=KEY, lock_order="sent", **options)


@lock_passed.connect
def passed(names, task_id, **_):
    journal.add(f"passed {task_id}", names=names)


class Deadly:
    """Kills the process that describes it for a message, which comes before it is sent."""

    def __init__(self, account):
        self.account = account

    def __repr__(self):
        journal.add(f"dies {self.account}")
        os.kill(os.getpid(), signal.SIGKILL)
        return "never"


@app.task
def dies_while_it_sends(account, number):
    update.delay(account, number, Deadly(account))


@ordered()
def update(self, account, number, how=""):
    return work(self, account, number, how)


@ordered(lock_order_gap=1.0)
def hasty(self, account, number, how=""):
    return work(self, account, number, how)


@ordered(acks_late=True, reject_on_worker_lost=True)
def careful(self, account, number, how=""):
    return work(self, account, number, how)


@ordered(acks_late=True)
def lost(self, account, number, how=""):
    return work(self, account, number, how)


@ordered(acks_late=True, time_limit=1)
def limited(self, account, number, how=""):
    return work(self, account, number, how)


@ordered(acks_late=True, acks_on_failure_or_timeout=False)
def refused(self, account, number, how=""):
    return work(self, account, number, how)


class Outside(LockedTask):
    """Sends its retry before its body, or after it, where it has no lock."""

    abstract = True

    def before_start(self, task_id, args, kwargs):
        if args[2] == "before" and not self.request.retries:
            journal.wait_for(f"free {args[0]}", 30)
            raise self.retry(countdown=0.5)

    def __call__(self, account, number, how):
        found = super().__call__(account, number, how)
        if how == "after" and not self.request.retries:
            journal.wait_for(f"free {account}", 30)
            raise self.retry(countdown=0.5)
        return found


@app.task(base=Outside, bind=True, lock_key=KEY, lock_order="sent")
def retries_outside(self, account, number, how=""):
    return work(self, account, number, how)


@ordered(lock_order_retry="end")
def lets_pass(self, account, number, how=""):
    return work(self, account, number, how)


@ordered(autoretry_for=(ConnectionError,), retry_backoff=False, default_retry_delay=1)
def retried(self, account, number, how=""):
    return work(self, account, number, how)


@ordered(
    lock_on_conflict="raise",
    autoretry_for=(LockConflict,),
    retry_backoff=False,
    default_retry_delay=1,
)
def raises(self, account, number, how=""):
    return work(self, account, number, how)


@ordered(lock_dedup="until_start")
def once(self, account, number, how=""):
    return work(self, account, number, how)


@ordered(lock_dedup="until_done", lock_order_retry="end", ignore_result=True)
def once_to_its_end(self, account, number, how=""):
    return work(self, account, number, how)


@ordered(lock_max_wait=1.0, lock_on_conflict="block")
def impatient(self, account, number, how=""):
    return work(self, account, number, how)


@app.task(base=LockedTask, bind=True, lock_key=KEY)
def unordered(self, account, number, how=""):
    return work(self, account, number, how)


def only_where_it_is_sent(account):
    """The lock name; in a worker it cannot be told."""
    if current_task:
        raise KeyError(account)
    return f"account:{account}"


@app.task(
    base=LockedTask,
    lock_key=only_where_it_is_sent,
    lock_order="sent",
    lock_dedup="until_start",
    ignore_result=True,
)
def has_no_name(account):
    raise AssertionError


@ordered(lock_order_retry="end", lock_dedup="until_done", ignore_result=True)
def declared_anew(self, account):
    """Its sender has an older declaration, under which a call may have what it may not here."""
    raise AssertionError


@app.task
def total(numbers):
    return sum(numbers)
