"""An app whose workers a doctor looks at."""

from __future__ import annotations

import os

from celery_relock import LockedTask
from tests.support import make_app

# Another deploy of the same code names its locks otherwise.
is_on = "TEST_WITHOUT_LOCKS" not in os.environ
app = make_app("shop", task_routes={"report": "reports"}, relock_enabled=is_on)


@app.task(base=LockedTask, name="charge", lock_key=os.environ.get("TEST_KEY", "account:{account}"))
def charge(account: str) -> int:
    return 1


@app.task(base=LockedTask, name="report", lock_key="report:{name}")
def report(name: str) -> int:
    return 1


@app.task(
    base=LockedTask, name="index", lock_key="index:{name}", lock_debounce=600, ignore_result=True
)
def index(name: str) -> int:
    return 1


@app.task(name="refund")
def refund(account: str) -> int:
    return 1
