"""What waits for a lock of a worker's app, looked at from the test."""

from __future__ import annotations

from typing import Any

from celery_relock import Lock, engines
from celery_relock.engine.protocol import LockState
from tests.support.waiting import wait_for


def state_of(worker: Any, name: str) -> LockState:
    """Holds and waiters of a lock."""
    conf = worker.module.app.conf
    return engines.engine_for_url(conf.relock_url, conf.relock_namespace).inspect(name)


def wait_until_parked(worker: Any, name: str, count: int = 1) -> None:
    """Wait until so many messages are parked for a lock, none of them on its way."""
    wait_for(
        lambda: len([w for w in state_of(worker, name).waiters if w.parked]) == count,
        what=f"{count} parked for {name}",
    )


def lock_of(worker: Any, name: str, **options: Any) -> Lock:
    """A plain `Lock` with this name in the test's own process, which can send no message."""
    conf = worker.module.app.conf
    return Lock(conf.relock_url, name, namespace=conf.relock_namespace, **options)
