"""What a worker on Amazon's SQS runs: tasks that end when the test says so."""

from __future__ import annotations

import json
import os
from typing import Any

from celery import Task

from celery_relock import LockedTask
from tests.support.apps import make_app
from tests.support.journal import Journal

app = make_app(
    __name__,
    broker_transport_options=json.loads(os.environ["RELOCK_TEST_SQS"]),
    worker_enable_remote_control=False,
    task_acks_late=True,
    worker_prefetch_multiplier=1,
)
journal = Journal.from_env()


def _run(task: Any, account: str) -> None:
    journal.add("begin", id=task.request.id, account=account)
    journal.wait_for(f"free {account}", 60)
    journal.add("end", id=task.request.id, account=account)


@app.task(base=LockedTask, bind=True, lock_key="{account}")
def work(self: Task, account: str) -> None:
    _run(self, account)


@app.task(base=LockedTask, bind=True, lock_key="{account}", lock_on_conflict="retry")
def again(self: Task, account: str) -> None:
    _run(self, account)
