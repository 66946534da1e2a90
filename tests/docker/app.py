"""The app of the smoke suite: the same in a container, in a process, and in the test.

Its settings come from the environment: CELERY_BROKER_URL and CELERY_RESULT_BACKEND, which Celery
itself reads (the locks are where the results are), and SMOKE_VISIBILITY, in seconds.
"""

from __future__ import annotations

import os
import time
from functools import cache, partial
from typing import Any

from celery import Celery

from celery_relock import LockedTask
from tests.docker.ledger import Ledger

app = Celery("smoke")
app.conf.update(
    broker_connection_retry_on_startup=True,
    result_backend_thread_safe=True,  # one for all threads of the test
    worker_hijack_root_logger=False,
    worker_prefetch_multiplier=1,
)
if "SMOKE_VISIBILITY" in os.environ:
    app.conf.broker_transport_options = {
        "visibility_timeout": float(os.environ["SMOKE_VISIBILITY"]),
        # Of its own accord a running worker looks for abandoned messages every 100 s.
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }

account_task = partial(
    # Shared tasks would be those of every app of the test's process.
    app.task,
    shared=False,
    bind=True,
    base=LockedTask,
    lock_key="account:{account}",
)


@cache
def ledger() -> Ledger:
    return Ledger(app.conf.result_backend)


def enter(task: Any, account: str) -> dict[str, Any]:
    """Tell that the body runs; returns who it is."""
    label = {"node": task.request.hostname, "fence": task.lock.fence, "run": task.request.id}
    ledger().tell("in", account, **label)
    return label


def write(task: Any, account: str, label: dict[str, Any]) -> dict[str, Any]:
    """Write into the account, and tell how that went."""
    end = {**label, "written": ledger().write(account, label["fence"]), "lost": task.lock.lost}
    ledger().tell("out", account, **end)
    return end


@account_task(lock_ttl=10)
def book(self: Any, account: str, seconds: float = 0.0) -> dict[str, Any]:
    """Take a moment, and write."""
    label = enter(self, account)
    time.sleep(seconds)
    return write(self, account, label)


def settle(self: Any, account: str) -> dict[str, Any]:
    """Wait at the account's gate, and write."""
    label = enter(self, account)
    ledger().wait_at_gate(account)
    return write(self, account, label)


settle_at_leisure = account_task(settle, name="settle_at_leisure", lock_ttl=30)
settle_soon = account_task(settle, name="settle_soon", lock_ttl=3)
# Delivered again when its worker dies.
settle_surely = account_task(settle, name="settle_surely", lock_ttl=3, acks_late=True)
