"""A task with an option that does not exist: a worker must not start with it."""

from __future__ import annotations

from celery_relock import LockedTask
from tests.support import make_app

app = make_app(__name__)


@app.task(base=LockedTask, lock_key="account:{account}", lock_tll=5)
def charge(account):
    return account
