"""Tasks that run in a context of their own, as Celery resets none between two tasks."""

from __future__ import annotations

import contextvars
from typing import Any

from celery import Task

from celery_relock import LockedTask
from tests.support import Journal, make_app

app = make_app(__name__)
journal = Journal.from_env()


class Isolated:
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return contextvars.copy_context().run(super().__call__, *args, **kwargs)


class Plain(Isolated, Task):
    abstract = True


class Lingers(Isolated, Task):
    """Its message is over when the one that comes next has begun."""

    abstract = True

    def after_return(self, status, retval, task_id, args, kwargs, einfo):
        account, number = args
        is_next = {"account": account, "number": number + 1}
        journal.wait_for(lambda events: any(e.data == is_next for e in events), 20)


class Locked(Isolated, LockedTask):
    abstract = True
    lock_key = "account:{account}"
    lock_ttl = 60


RETRIED = {
    "base": Locked,
    "bind": True,
    "autoretry_for": (ValueError,),
    "max_retries": 1,
    "retry_backoff": False,
    "default_retry_delay": 0.5,
}


def fails_once(self: Any, account: str) -> tuple[int, bool]:
    if not self.request.retries:
        raise ValueError(account)
    return self.request.retries, self.lock.continuous


@app.task(lock_keep_on_retry=True, **RETRIED)
def keeps(self, account):
    return fails_once(self, account)


@app.task(lock_dedup="until_done", **RETRIED)
def is_marked(self, account):
    return fails_once(self, account)


@app.task(lock_order="sent", **RETRIED)
def has_its_turn(self, account):
    return fails_once(self, account)


@app.task(base=Locked, bind=True, lock_keep_on_retry=True)
def retries_itself(self, account):
    if not self.request.retries:
        raise self.retry(countdown=0.2)
    return self.request.retries, self.lock.continuous


@app.task(base=Plain)
def plain_step(account):
    return account


@app.task(base=Lingers)
def lingers(account, number):
    journal.add("began", account=account, number=number)


@app.task
def is_last(account, number):
    journal.add("began", account=account, number=number)


@app.task(base=Locked, bind=True)
def locked_step(self, account):
    return self.lock.continuous


@app.task(base=Locked, bind=True, lock_hold="workflow")
def holds(self, account):
    return self.lock.continuous
