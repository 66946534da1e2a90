"""A task whose `lock_order` a deploy takes off."""

from __future__ import annotations

import os

from celery_relock import LockedTask
from tests.support import Journal, make_app

app = make_app(__name__)
journal = Journal.from_env()
KEY = os.environ.get("RELOCK_TEST_KEY", "account:{account}")


@app.task(base=LockedTask, lock_key=KEY, lock_order=os.environ.get("RELOCK_TEST_ORDER"))
def charge(account: str, number: int) -> None:
    journal.add("charged", account=account, number=number)
