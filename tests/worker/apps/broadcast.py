"""A locked task that every worker receives."""

from __future__ import annotations

from typing import Any

from kombu.common import Broadcast

from celery_relock import LockedTask
from tests.support import Journal, make_app
from tests.support.permits import holding

app = make_app(__name__)
NAME = f"all-{app.conf.relock_namespace}"
app.conf.task_queues = [Broadcast(NAME)]
journal = Journal.from_env()


def task(**options: Any) -> Any:
    return app.task(
        base=LockedTask, bind=True, lock_key="cache:{account}", ignore_result=True, **options
    )


def clear(self: Any, account: str) -> None:
    with holding(journal, self.lock):
        journal.add("cleared", account=account, worker=self.request.hostname)


@task()
def clears_the_cache(self: Any, account: str) -> None:
    clear(self, account)


@task(lock_dedup="until_start")
def clears_until_start(self: Any, account: str) -> None:
    clear(self, account)


@task(lock_dedup="until_done")
def clears_until_done(self: Any, account: str) -> None:
    clear(self, account)
