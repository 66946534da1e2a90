"""Tasks whose messages can end before their bodies are reached: the last argument says how."""

from __future__ import annotations

from typing import Any

import celery
from celery.exceptions import Ignore

from celery_relock import LockedTask
from tests.support import Journal, make_app

KEY = "account:{account}"

app = make_app(__name__, worker_prefetch_multiplier=8)
journal = Journal.from_env()


def end_early(task: celery.Task, account: str, how: str) -> None:
    if how == "error":
        raise ValueError("gone")
    if how == "ignore":
        raise Ignore
    if how == "retry" and not task.request.retries:
        raise task.retry(countdown=0.1)
    if how == "stay":
        journal.add("stays", account=account)
        journal.wait_for("never", 60)


class BeforeStart(LockedTask):
    abstract = True
    lock_key = KEY

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        if self.name != keeps.name or self.request.retries:
            end_early(self, *args)


class OwnCall(LockedTask):
    abstract = True
    lock_key = KEY

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        end_early(self, *args)
        return super().__call__(*args, **kwargs)


class PlainOwnCall(celery.Task):
    abstract = True

    def __call__(self, account: str, how: str) -> Any:
        if how == "skip later":
            journal.add("stays", account=account)
            journal.wait_for(f"skip {account}", 30)
        if how == "skip beside another app":
            celery.Celery("another")  # it is the current one from now on
        return "skipped" if how.startswith("skip") else super().__call__(account, how)

    def after_return(self, *_: Any) -> None:
        app.set_current()


def enter(task: celery.Task, account: str) -> None:
    journal.add("inside", account=account, task=task.name.rpartition(".")[2])


@app.task(bind=True, base=BeforeStart, lock_dedup="until_done", ignore_result=True)
def once(self, account, how):
    enter(self, account)


@app.task(bind=True, base=OwnCall, lock_dedup="until_start", ignore_result=True)
def once_by_own_call(self, account, how):
    enter(self, account)


@app.task(bind=True, base=BeforeStart, lock_order="sent")
def in_order(self, account, how):
    journal.add("inside", account=account, task=f"in_order {how}")


@app.task(bind=True, base=BeforeStart, lock_keep_on_retry=True, lock_gap_ttl=60, max_retries=3)
def keeps(self, account, how):
    """Its retry ends by `how`."""
    enter(self, account)
    # Not sooner: as long as the worker has not noticed the end of this one, whose id it has, Celery
    # forgets the retry then, and finds nothing to terminate.
    raise self.retry(args=(account, how), countdown=1)


@app.task(bind=True, base=BeforeStart)
def step(self, account, how):
    enter(self, account)


@app.task(bind=True, base=PlainOwnCall)
def plain(self, account, how):
    enter(self, account)


@app.task(bind=True, base=PlainOwnCall)
def last(self, account, how):
    enter(self, account)
    journal.wait_for(f"go {account}", 30)
    journal.add("outside", account=account)
