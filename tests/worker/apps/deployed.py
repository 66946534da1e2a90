"""A task whose lock options a deploy changes: the environment has those of each version."""

from __future__ import annotations

import json
import os
from typing import Any

from celery_relock import LockedTask
from tests.support import Journal, make_app

app = make_app(__name__)
journal = Journal.from_env()
options = {"lock_key": "account:{account}", **json.loads(os.environ["RELOCK_TEST_OPTIONS"])}


@app.task(base=LockedTask, bind=True, **options)
def charge(self: Any, account: str, countdown: float = 0) -> None:
    if countdown and not self.request.retries:
        raise self.retry(countdown=countdown)
    journal.add("charged", account=account)
