"""Tasks that retry themselves, with and without keeping their lock for it."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Any

from celery import current_task
from celery.exceptions import Retry

from celery_relock import LockedTask
from tests.support import Journal, make_app

KEY = "account:{account}"

app = make_app(__name__, worker_prefetch_multiplier=8, worker_lost_wait=1.0)
journal = Journal.from_env()


def enter(self: Any, account: str) -> None:
    hold = self.lock
    journal.add(
        "inside",
        account=account,
        task=self.name.rpartition(".")[2],
        retries=self.request.retries,
        fence=hold.fence,
        continuous=hold.continuous,
        reentered=hold.reentered,
    )


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_ttl=1.0, max_retries=2)
def gives_back(self, account, countdown):
    enter(self, account)
    if not self.request.retries:
        raise self.retry(countdown=countdown)


@app.task(base=LockedTask, bind=True, lock_key=KEY, max_retries=1)
def retries_inside(self, account, inside=False):
    if self.request.retries:
        return "retried"
    if not inside:
        return self(account, inside=True)
    raise self.retry(countdown=0)


class Keeps(LockedTask):
    lock_key = KEY
    lock_ttl = 2.0
    lock_keep_on_retry = True


@app.task(base=Keeps, bind=True, max_retries=2)
def keeps(self, account, countdown, times=1):
    enter(self, account)
    if self.request.retries < times:
        raise self.retry(countdown=countdown)


@app.task(
    base=Keeps,
    bind=True,
    autoretry_for=(ValueError,),
    retry_backoff=2,
    retry_jitter=False,
    max_retries=1,
)
def keeps_by_itself(self, account):
    enter(self, account)
    if not self.request.retries:
        raise ValueError(account)


class KeepsAsRegistered(Keeps):
    name = "keeps_as_registered"

    def run(self, account):
        enter(self, account)
        if not self.request.retries:
            raise ValueError(account)


keeps_as_registered = app.register_task(
    KeepsAsRegistered(), autoretry_for=(ValueError,), retry_kwargs={"countdown": 0.2}
)


class Tells(Keeps):
    def on_failure(self, exc, task_id, args, kwargs, einfo):
        is_free = self.lock_for(*args).acquire(blocking=False)
        journal.add("failed", account=args[0], free=is_free)


@app.task(base=Tells, bind=True, autoretry_for=(ValueError,), retry_kwargs={"max_retries": 0})
def gives_up_by_itself(self, account):
    enter(self, account)
    raise ValueError(account)


def name_of_the_first_try(account):
    if current_task and current_task.request.retries:
        raise KeyError(account)
    return f"account:{account}"


@app.task(base=Keeps, bind=True, lock_key=name_of_the_first_try)
def forgets_its_lock(self, account):
    enter(self, account)
    raise self.retry(countdown=0.5)


@app.task(base=LockedTask, bind=True, lock_key=KEY)
def called_with_the_same(self, account):
    enter(self, account)


@app.task(base=LockedTask, bind=True, lock_key=[KEY, "more:{account}"])
def called_with_one_more(self, account):
    enter(self, account)


@app.task(base=LockedTask, bind=True, lock_key="another:{account}")
def called_with_another(self, account):
    enter(self, account)


@app.task(base=Keeps, bind=True, max_retries=1)
def keeps_and_calls(self, account, countdown):
    enter(self, account)
    if not self.request.retries:
        raise self.retry(countdown=countdown)
    for each in (called_with_the_same, called_with_one_more, called_with_another):
        each(account)


@app.task(base=Keeps, bind=True, lock_gap_ttl=1.0)
def keeps_briefly(self, account, countdown):
    enter(self, account)
    if not self.request.retries:
        raise self.retry(countdown=countdown)


@app.task(base=Keeps, bind=True, max_retries=1)
def gives_up(self, account):
    enter(self, account)
    raise self.retry(countdown=0.1)


def lingers(self: Any, account: str) -> None:
    enter(self, account)
    if not self.request.retries:
        try:
            raise self.retry(countdown=0)
        finally:
            time.sleep(1.0)
            journal.add("over", account=account)


@app.task(base=Keeps, bind=True)
def lingers_parked(self, account):
    lingers(self, account)


@app.task(base=Keeps, bind=True, lock_on_conflict="block")
def lingers_blocked(self, account):
    lingers(self, account)


@app.task(base=Keeps, bind=True, lock_on_conflict="retry")
def lingers_sent_again(self, account):
    lingers(self, account)


@app.task(base=Keeps, bind=True, lock_on_conflict="raise")
def lingers_refused(self, account):
    lingers(self, account)


class OneOfTwo(LockedTask):
    lock_key = KEY
    lock_limit = 2


@app.task(base=OneOfTwo, bind=True, lock_keep_on_retry=True)
def lingers_and_keeps(self, account):
    lingers(self, account)


@app.task(base=OneOfTwo, bind=True, lock_hold="workflow")
def lingers_and_holds(self, account):
    lingers(self, account)


@app.task(base=OneOfTwo, bind=True)
def lingers_as_a_step(self, account):
    lingers(self, account)


class StoresLate(LockedTask):
    """Time passes between the end of the lock and the state RETRY."""

    def __call__(self, account):
        try:
            return super().__call__(account)
        except Retry:
            time.sleep(1.0)
            journal.add("over", account=account)
            raise


class RetriesOutside(Keeps):
    """Sends its retry when its body has ended, and has its lock no more."""

    abstract = True

    def __call__(self, account):
        with suppress(ValueError):
            super().__call__(account)
        if not self.request.retries:
            raise self.retry(countdown=0)


@app.task(base=RetriesOutside, bind=True)
def succeeds_and_retries_outside(self, account):
    enter(self, account)


@app.task(base=RetriesOutside, bind=True)
def fails_and_retries_outside(self, account):
    enter(self, account)
    raise ValueError(account)


def retries_at_once(self: Any, account: str) -> None:
    enter(self, account)
    if not self.request.retries:
        raise self.retry(countdown=0)


@app.task(base=StoresLate, bind=True, lock_key=KEY, lock_keep_on_retry=True)
def stores_late_and_keeps(self, account):
    retries_at_once(self, account)


@app.task(base=StoresLate, bind=True, lock_key=KEY, lock_hold="workflow")
def stores_late_and_holds(self, account):
    retries_at_once(self, account)


@app.task(base=StoresLate, bind=True, lock_key=KEY, lock_order="sent")
def stores_late_in_order(self, account):
    retries_at_once(self, account)


def stays_after_its_retry(self: Any, account: str, countdown: float) -> None:
    enter(self, account)
    if not self.request.retries:
        try:
            raise self.retry(countdown=countdown)
        finally:
            time.sleep(60)


@app.task(base=Keeps, bind=True, lock_ttl=30)
def stays_and_keeps(self, account, countdown):
    stays_after_its_retry(self, account, countdown)


@app.task(base=OneOfTwo, bind=True, lock_keep_on_retry=True)
def stays_as_one_of_two(self, account, countdown):
    stays_after_its_retry(self, account, countdown)


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_order="sent")
def stays_in_order(self, account, countdown):
    stays_after_its_retry(self, account, countdown)


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_dedup="until_done")
def stays_marked(self, account, countdown):
    stays_after_its_retry(self, account, countdown)


def sends_its_retry(self: Any, account: str) -> None:
    enter(self, account)
    if not self.request.retries:
        self.retry(countdown=0.5, throw=False)


@app.task(base=Keeps, bind=True)
def goes_on(self, account):
    sends_its_retry(self, account)


@app.task(base=Keeps, bind=True, lock_cooldown=0.1)
def goes_on_and_cools_down(self, account):
    sends_its_retry(self, account)


@app.task(base=Keeps, bind=True)
def goes_on_and_fails(self, account):
    sends_its_retry(self, account)
    raise ValueError(account)


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_on_conflict="block")
def stranger(self, account):
    enter(self, account)


@app.task(
    base=LockedTask,
    bind=True,
    lock_key=["account:{account}", "account:{second}"],
    lock_keep_on_retry=True,
)
def moves_on(self, account, second, third, fourth=""):
    """Its retry needs other locks than it has: the last two."""
    journal.add("moves", account=account, names=list(self.lock.names), retries=self.request.retries)
    if not self.request.retries:
        args = (third, fourth, "") if fourth else (second, third, "")
        raise self.retry(args=args, kwargs={}, countdown=2, max_retries=1)
    return list(self.lock.names)


@app.task(
    base=LockedTask,
    bind=True,
    lock_key=["account:{account}", "account:{second}"],
    lock_hold="workflow",
    lock_keep_on_retry=True,
)
def holds_both(self, account, second):
    """Its retry needs the first lock alone, a step behind it the second."""
    enter(self, account)
    if not self.request.retries:
        raise self.retry(args=(account, account), kwargs={}, countdown=1, max_retries=1)


@app.task(
    base=LockedTask, bind=True, lock_key=KEY, retry_on_worker_lost=True, default_retry_delay=0.1
)
def is_killed_at_first(self, account):
    if not self.request.retries:
        os.kill(os.getpid(), signal.SIGKILL)
    return self.lock.name, self.request.relock["options"]
