"""A task whose `lock_order` or `lock_dedup` a deploy takes off, turns on, or changes."""

from __future__ import annotations

import os
from typing import Any

from celery_relock import LockedTask
from tests.support import Journal, make_app

app = make_app(__name__)
journal = Journal.from_env()
KEY = os.environ.get("RELOCK_TEST_KEY", "account:{account}")
DEDUP = os.environ.get("RELOCK_TEST_DEDUP", "")


@app.task(
    base=LockedTask,
    bind=True,
    lock_key=KEY,
    lock_order=os.environ.get("RELOCK_TEST_ORDER"),
    lock_dedup=float(DEDUP) if DEDUP.isdigit() else DEDUP or None,
)
def charge(self: Any, account: str, number: int) -> None:
    journal.add("charged", account=account, number=number, in_order=self.lock.in_order)
