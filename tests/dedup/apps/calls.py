"""Tasks of which a second call is a duplicate while the first is queued, or runs."""

from __future__ import annotations

import sys
import time

from celery.exceptions import Reject

from celery_relock import LockedTask
from celery_relock.errors import LockConflict
from tests.support import Journal, make_app

KEY = "account:{account}"

app = make_app(
    __name__,
    worker_prefetch_multiplier=1,
    task_publish_retry=False,
)
journal = Journal.from_env()


def task(**options):
    return app.task(**{"base": LockedTask, "bind": True, "lock_key": KEY, **options})


REPLACE = {"lock_dedup": "until_start", "lock_on_duplicate": "replace"}


def work(self, account, *more):
    """Says that it runs, and goes on when the test says so ("slow" accounts alone)."""
    told = {"account": account, "id": self.request.id, "more": more}
    journal.add("began", retries=self.request.retries, **told)
    if account.startswith("slow"):
        journal.wait_for(f"free {account}", 30)
    journal.add("ended", **told)
    return self.request.id


@task(lock_dedup="until_start")
def starts(self, account, *more):
    return work(self, account, *more)


@task(lock_dedup="until_done")
def done(self, account, *more):
    return work(self, account, *more)


@task(lock_dedup=2)
def for_two_seconds(self, account):
    return work(self, account)


@task(lock_dedup="until_done", lock_on_duplicate="raise")
def raises(self, account):
    return work(self, account)


@task(lock_dedup="until_done", lock_on_duplicate="drop")
def drops(self, account):
    return work(self, account)


@task(**REPLACE)
def replaces(self, account, *more):
    return work(self, account, *more)


@task(lock_dedup="until_done", lock_on_duplicate="replace")
def replaces_until_done(self, account, *more):
    return work(self, account, *more)


@task(lock_dedup=60, lock_on_duplicate="replace")
def once_a_minute(self, account, *more):
    return work(self, account, *more)


@task(lock_order="sent", **REPLACE)
def replaces_in_order(self, account, *more):
    return work(self, account, *more)


@task(acks_late=True, lock_order="sent", **REPLACE)
def replaces_late_in_order(self, account, *more):
    return work(self, account, *more)


@task(lock_order="sent", lock_dedup="until_start")
def in_order_once(self, account, *more):
    return work(self, account, *more)


@task(lock_order="sent")
def in_order(self, account, *more):
    return work(self, account, *more)


@task(max_retries=1, **REPLACE)
def replaces_and_retries(self, account, *more):
    found = work(self, account, *more)
    if more == ("retries",) and not self.request.retries:
        raise self.retry(countdown=1)
    return found


@task(track_started=True, **REPLACE)
def replaces_and_tracks(self, account, *more):
    return work(self, account, *more)


@task(acks_late=True, **REPLACE)
def replaces_late(self, account, *more):
    return work(self, account, *more)


@task()
def without(self, account, *more):
    return work(self, account, *more)


def end(self, account, how):
    """End in one of the ways in which an execution can end."""
    told = {"retries": self.request.retries, "header": self.request.relock}
    journal.add("began", account=account, id=self.request.id, **told)
    if how == "reject":
        raise Reject("not wanted", requeue=False)
    if how == "retry" and self.request.retries < 2:
        raise self.retry(countdown=1)
    if how == "retry and go on" and not self.request.retries:
        self.retry(countdown=1, throw=False)
    first = len(journal.events("began", account=account)) == 1
    if how == "requeue" and first:
        raise Reject("come again", requeue=True)
    if how == "requeue":
        journal.wait_for(f"free {account}", 30)
    if how in ("kill", "limit", "revoke") or (how == "kill once" and first):
        time.sleep(30)
    return account


# Their lease is longer than any test waits: what is free before that was freed.
@task(lock_dedup="until_done")
def ends(self, account, how):
    return end(self, account, how)


def fails(_):
    raise LookupError("it is not known")


@task(lock_dedup="until_done", ignore_result=True, lock_limit=lambda account: fails(account))
def has_no_limit(self, account):
    return account


@task(lock_dedup="until_done", ignore_result=True, lock_owner=fails)
def has_no_owner(self, account):
    return account


class RetriedInNoTime(LockedTask):
    """Its retry has ended before it is told that there is one."""

    abstract = True

    def __call__(self, account):
        try:
            return super().__call__(account)
        finally:
            if self.request.retries:
                journal.add("gone", account=account)

    def on_retry(self, exc, task_id, args, kwargs, einfo):
        journal.wait_for("gone", account=args[0])


@task(base=RetriedInNoTime, lock_dedup="until_done")
def exits_in_its_retry(self, account):
    if not self.request.retries:
        raise self.retry(countdown=0)
    sys.exit()


@task(lock_dedup="until_done", acks_late=True, reject_on_worker_lost=True)
def ends_late(self, account, how):
    return end(self, account, how)


class Tells(LockedTask):
    def on_failure(self, exc, task_id, args, kwargs, einfo):
        journal.add("failed", account=args[0], marked=self.marked(*args) is not None)


@task(
    base=Tells,
    lock_dedup="until_done",
    autoretry_for=(LookupError,),
    default_retry_delay=1,
    max_retries=2,
)
def fails_first(self, account, how):
    journal.add("began", account=account, id=self.request.id, retries=self.request.retries)
    if how == "always" or not self.request.retries:
        raise LookupError(how)
    return account


CONFLICTS = {
    "lock_on_conflict": "raise",
    "autoretry_for": (LockConflict,),
    "default_retry_delay": 1,
}


def begins_at_last(self, account, how=""):
    journal.add("began", account=account, id=self.request.id, retries=self.request.retries)
    return account


task(name="conflicts_until_start", lock_dedup="until_start", **CONFLICTS)(begins_at_last)
task(name="conflicts_until_done", lock_dedup="until_done", **CONFLICTS)(begins_at_last)
task(name="conflicts_and_is_replaced", **REPLACE, **CONFLICTS)(begins_at_last)


@task(
    lock_dedup="until_done",
    acks_late=True,
    autoretry_for=(Exception,),
    default_retry_delay=1,
    ignore_result=True,
)
def rejects_first(self, account):
    journal.add("began", account=account, id=self.request.id, retries=self.request.retries)
    if not self.request.retries:
        raise Reject("come again", requeue=True)


@task(lock_dedup="until_done", lock_ttl=2)
def ends_by_its_lease(self, account, how):
    return end(self, account, how)


@task(lock_dedup="until_start", max_retries=5)
def tries_again(self, account):
    journal.add("began", account=account, id=self.request.id, retries=self.request.retries)
    if self.request.retries < 2:
        raise self.retry(countdown=0.5)
    return account


@task(lock_on_conflict="block", **REPLACE)
def replaces_in_its_slot(self, account, *more):
    return work(self, account, *more)


@task(ignore_result=True, lock_on_conflict="block", **REPLACE)
def forgets_in_its_slot(self, account, *more):
    return work(self, account, *more)


class _Gate:
    """A result backend that stores BLOCKED when the test says so, and not before."""

    def __init__(self, backend):
        self._backend = backend

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def store_result(self, task_id, result, state, **more):
        if state == "BLOCKED":
            journal.add("at the gate", id=task_id)
            journal.wait_for(f"open {task_id}", 30)
        return self._backend.store_result(task_id, result, state, **more)


class ParksThroughAGate(LockedTask):
    abstract = True

    @property
    def backend(self):
        return _Gate(super().backend)


@task(base=ParksThroughAGate, **REPLACE)
def replaced_at_the_gate(self, account, *more):
    return work(self, account, *more)


@task(base=ParksThroughAGate, acks_late=True, **REPLACE)
def replaced_late_at_the_gate(self, account, *more):
    return work(self, account, *more)


@app.task
def add(x, y=0):
    return x + y


@app.task
def total(numbers):
    return sum(numbers)


@task(lock_dedup="until_done")
def counts(self, account, number=0):
    """A member of a canvas that others wait for."""
    journal.add("began", account=account, id=self.request.id)
    return number
