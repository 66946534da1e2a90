"""Tasks whose bodies fork, and what says by which connection a process publishes."""

from __future__ import annotations

import os
from typing import Any

from celery_relock import Lock, LockedTask, signals
from celery_relock.worker.broker import producer_of
from tests.support import Journal, make_app

app = make_app(__name__)
journal = Journal.from_env()


@signals.lock_resumed.connect
def resumed(names: tuple[str, ...] = (), **_: Any) -> None:
    journal.add("resumed", names=list(names))


@app.task(base=LockedTask, lock_key="account:{account}")
def takes(account: str) -> str:
    return account


@app.task
def forks(account: str) -> int:
    """The process that it forks holds the lock until the test says that it may go."""
    with producer_of(app) as producer:
        producer.connection.ensure_connection()
    child = os.fork()
    if child == 0:
        try:
            with Lock(
                app.conf.relock_url, f"account:{account}", namespace=app.conf.relock_namespace
            ):
                journal.add("held", account=account)
                journal.wait_for(f"free {account}", 30)
        finally:
            os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@app.task
def publishes_twice() -> tuple[int, bool]:
    """Its process, and whether it publishes by one and the same connection."""
    with producer_of(app) as producer:
        before = producer.connection
    with producer_of(app) as producer:
        return os.getpid(), producer.connection is before
