"""Tasks that have more than their locks: a place in an order, a marker, a hold for their retry."""

from __future__ import annotations

import os
import signal
from typing import Any

import celery
from celery.exceptions import Reject

from celery_relock import LockedTask
from tests.support import Journal, make_app

KEY = "account:{account}"
ORDERED = {"lock_order": "sent", "lock_order_gap": 60}
REJECTED = {"acks_late": True, "acks_on_failure_or_timeout": False}

app = make_app(__name__, worker_prefetch_multiplier=8)
journal = Journal.from_env()
here = {"is_worker": False}


@celery.signals.worker_process_init.connect
def _begins(**_: Any) -> None:
    here["is_worker"] = True


def has_no_name_for_a_worker(account: str, number: int) -> str:
    if here["is_worker"] and number == 1:
        raise LookupError("no such account")
    return f"account:{account}"


def began(task: celery.Task, account: str, number: int = 0) -> None:
    journal.add("began", account=account, number=number, id=task.request.id)


@app.task(bind=True, base=LockedTask, lock_key=KEY, lock_max_parked=1, **ORDERED, **REJECTED)
def finds_no_room(self, account, number):
    began(self, account, number)
    if number == 1:
        journal.wait_for(f"go {account}", 30)


UNNAMED = {"bind": True, "base": LockedTask, "lock_key": has_no_name_for_a_worker, **REJECTED}


@app.task(**UNNAMED, **ORDERED)
def is_not_named_in_order(self, account, number):
    began(self, account, number)


@app.task(**UNNAMED, lock_dedup="until_start", ignore_result=True)
def is_not_named_once(self, account, number):
    began(self, account, number)


def _own_and_other(account: str, both: bool = False) -> list[str]:
    return [f"account:{account}", *([f"other:{account}"] if both else [])]


@app.task(
    bind=True,
    base=LockedTask,
    lock_key=_own_and_other,
    lock_keep_on_retry=True,
    lock_gap_ttl=60,
    lock_on_conflict="raise",
    **REJECTED,
)
def keeps_its_lock(self, account, both=False):
    began(self, account)
    if not both:
        raise self.retry(args=(account, True), countdown=0.1)


@app.task(bind=True, base=LockedTask, lock_key=KEY, acks_late=True)
def comes_late(self, account):
    began(self, account)


# -- at most once in so many seconds --------------------------------------------------------------


def _is_lost(self, account):
    began(self, account)
    os.kill(os.getpid(), signal.SIGKILL)


def _takes_too_long(self, account):
    began(self, account)
    journal.wait_for("never", 20)


LOSES = {"is lost": (_is_lost, {}), "takes too long": (_takes_too_long, {"time_limit": 1})}
loses = {
    (how, dedup): app.task(
        body,
        name=f"{how}, {dedup}",
        bind=True,
        base=LockedTask,
        lock_key=KEY,
        lock_dedup=dedup,
        **options,
    )
    for how, (body, options) in LOSES.items()
    for dedup in (120, "until_done")
}


class PutBackOnce(LockedTask):
    abstract = True
    lock_key = KEY

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        if len(journal.events("began", account=args[0])) < 2:
            raise Reject("once more", requeue=True)


@app.task(bind=True, base=PutBackOnce, lock_dedup=120, acks_late=True)
def is_put_back_once(self, account):
    began(self, account)


class ExitsAtFirst(LockedTask):
    abstract = True
    lock_key = KEY

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        journal.add("came", account=args[0])
        if len(journal.events("came", account=args[0])) == 1:
            raise SystemExit(1)


@app.task(bind=True, base=ExitsAtFirst, **ORDERED)
def exits_at_first(self, account):
    began(self, account)


# -- killed before the body, and retried (Celery >= 5.7) ------------------------------------------


class Killed(LockedTask):
    """Its process is killed when its message comes for the `killed_at`th time."""

    abstract = True
    lock_key = KEY
    acks_late = True
    retry_on_worker_lost = True
    default_retry_delay = 0.1
    killed_at = 1

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        journal.add("came", account=args[0])
        if len(journal.events("came", account=args[0])) == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)


@app.task(bind=True, base=Killed, lock_dedup="until_start", ignore_result=True)
def is_killed_once(self, account):
    began(self, account)


@app.task(bind=True, base=Killed, **ORDERED)
def is_killed_in_order(self, account):
    journal.add("ran", account=account, in_order=self.lock.in_order)
    began(self, account)


@app.task(bind=True, base=Killed, lock_key=False)
def is_killed_in_a_workflow(self, account):
    began(self, account)


@app.task(bind=True, base=Killed, killed_at=2)
def is_killed_after_a_wait(self, account):
    began(self, account)


@app.task(bind=True)
def is_a_step(self, account):
    pass
