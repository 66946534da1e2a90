"""An app whose every task is a LockedTask, with an option of all its tasks."""

from __future__ import annotations

import json
import os

from celery import Celery

from celery_relock import LockedTask
from tests.support import make_app

app: Celery = make_app(__name__, **json.loads(os.environ.get("RELOCK_TEST_SETTINGS", "{}")))
app.task_cls = LockedTask


@app.task(lock_key="account:{account}")
def double(account, number=1):
    return 2 * number


@app.task(lock_key=False)
def total(numbers):
    return sum(numbers)
