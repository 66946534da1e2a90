"""Tasks whose message is delivered more than once while it is parked, or while it runs."""

from __future__ import annotations

import os
import signal
from typing import Any

from celery.signals import task_failure, task_postrun, worker_init

from celery_relock import LockedTask
from celery_relock.engine.engine import Engine
from celery_relock.signals import lock_released
from tests.support import Journal, make_app
from tests.support.permits import holding

app = make_app(__name__)
journal = Journal.from_env()


def wait_or_return(conflict):
    journal.add("asked", of=conflict.name)
    return "wait"


def works(self, account):
    """Is inside until the test lets it go."""
    with holding(journal, self.lock):
        told = bool(self.request.delivery_info.get("redelivered"))
        journal.add("inside", account=account, redelivered=told)
        journal.wait_for(f"free {account}", 30)
        return f"run {len(journal.events('inside', account=account))}"


options = {"base": LockedTask, "bind": True, "lock_key": "account:{account}", "lock_ttl": 1.5}
tasks = {
    "early": app.task(name="early", **options)(works),
    "late": app.task(name="late", acks_late=True, reject_on_worker_lost=True, **options)(works),
    "dies": app.task(name="dies", acks_late=True, **options)(works),
    "chosen": app.task(name="chosen", lock_on_conflict=wait_or_return, **options)(works),
    "blocks": app.task(name="blocks", lock_on_conflict=lambda _: "block", **options)(works),
}
_park = Engine.park


def _stops_before_it_parks(self: Engine, lease: Any, park_request: Any) -> Any:
    account = lease.claim.names[0].partition(":")[2]
    if account.startswith("gated"):
        journal.add("parks", account=account)
        journal.wait_for(f"park {account}", 30)
    return _park(self, lease, park_request)


@worker_init.connect
def _put_up_the_gate(**_: Any) -> None:
    Engine.park = _stops_before_it_parks  # type: ignore[method-assign]


@lock_released.connect
def _die_before_the_result_is_stored(task_name="", **_):
    """Once, with the whole worker."""
    if task_name == "dies" and not journal.events("dies"):
        journal.add("dies")
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


@app.task(base=LockedTask, lock_key="account:{two}")
def inner(two):
    return two


@app.task(base=LockedTask, lock_key="account:{one}")
def crosses(one, two):
    """Holds one lock and calls for another, when both have their first."""
    journal.add("has one", account=one)
    journal.wait_for("has one", 20, count=2)
    return inner(two)


@task_postrun.connect
def over(args=(), state=None, **_):
    """At the end of each delivery, also of one whose body did not run."""
    journal.add("over", account=args[0], state=state)


@task_failure.connect
def failed(args=(), **_):
    """Its state is stored."""
    journal.add("failed", account=args[0])
