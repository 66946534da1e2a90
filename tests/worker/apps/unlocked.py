"""Tasks whose locks a deploy takes away, or whose parked messages fail after it."""

from __future__ import annotations

import json
import os
import time

from kombu.serialization import register

from celery_relock import LockedTask
from celery_relock.signals import lock_acquired
from tests.support import Journal, make_app

# The code after the deploy.
deployed = bool(os.environ.get("RELOCK_TEST_DEPLOYED"))

app = make_app(__name__, worker_prefetch_multiplier=8)
app.conf.accept_content = ["json", "brittle"] if deployed else ["json", "brittle", "pickle"]
journal = Journal.from_env()


lock_acquired.connect(
    lambda names, **_: journal.add("acquired", names=[*names]), weak=False, dispatch_uid=__name__
)


def body(self, account):
    journal.add("inside", task=self.request.id)
    time.sleep(0.2 * deployed)
    return "after" if deployed else "before"


def fails(*_, **__):
    raise LookupError("after the deploy")


def fits_no_more(self, account, country):
    return body(self, account)


# As pickle, where a deploy takes away a class.
register("brittle", json.dumps, fails if deployed else json.loads, "application/x-brittle", "utf-8")


class NotStarted(LockedTask):
    def before_start(self, task_id, args, kwargs):
        if deployed:
            fails()


LOCK = {"base": LockedTask, "lock_key": "{account}"}
OFF = {"base": LockedTask, "lock_key": False}


def declare(name, after, do=body, base=LockedTask, **options):
    how = {**LOCK, **options, "base": base}
    app.task(name=name, bind=True, **(after if deployed else how))(do)


declare("off", OFF)
declare("plain", {})
if not deployed:
    declare("gone", {})
    app.task(name="step", bind=True)(body)
declare("names nothing", {**LOCK, "lock_key": fails})
declare("has no limit", {**LOCK, "lock_limit": fails})
declare("has no owner", {**LOCK, "lock_owner": fails})
declare("is not started", {**LOCK, "base": NotStarted}, base=NotStarted)
declare("fits no more", LOCK, fits_no_more if deployed else body)
declare("debounced", {}, lock_debounce=5)
declare("ordered", OFF, lock_order="sent", lock_order_gap=600)
declare("dedup", OFF, lock_dedup="until_done")
declare("unreadable", LOCK, serializer="pickle")
declare("undecodable", LOCK, serializer="brittle")
declare("still locked", LOCK, serializer="json")


def retried(self, account):
    if not self.request.retries:
        raise self.retry(countdown=5)
    return body(self, account)


declare("kept", {}, retried, lock_keep_on_retry=True)
