"""Locked tasks beside tasks that keep a slot for long. A worker receives one task for a slot."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

from celery.exceptions import WorkerShutdown
from celery.signals import task_received
from celery.worker.control import control_command

from celery_relock import LockedTask
from tests.support import Journal, make_app

ahead = int(os.environ.get("RELOCK_TEST_PREFETCH", "1"))
settings: dict[str, Any] = {"task_acks_late": True, "worker_prefetch_multiplier": ahead}
if "RELOCK_TEST_NO_PREFETCH" in os.environ:
    settings["worker_disable_prefetch"] = True
app = make_app(__name__, **settings)
journal = Journal.from_env()


@control_command(args=[("seconds", float)])
def stick(state: Any, seconds: float) -> None:
    """Keeps the main loop from its turns, though no body runs there."""
    time.sleep(seconds)


@task_received.connect(weak=False)
def received(request: Any, **_: Any) -> None:
    journal.add("received", id=request.id)


@app.task(bind=True)
def stands(self: Any, gate: str, seconds: float = 0.0) -> None:
    """Keeps a slot for so many seconds, or until the test opens the gate."""
    journal.add("stands", gate=gate, host=self.request.hostname)
    time.sleep(seconds)
    if not seconds:
        journal.wait_for(f"open {gate}", 120)


@app.task(base=LockedTask, bind=True, lock_key="account:{account}")
def takes(self: Any, account: str, turn: int = 0) -> str:
    journal.add("took", account=account, turn=turn, host=self.request.hostname)
    return str(self.request.id)


@app.task(acks_late=False)
def ends(how: str) -> None:
    """Ends with what is no `Exception`: Celery's pool of threads would not acknowledge that late,
    and the worker would receive nothing more."""
    if how == "cancelled":
        asyncio.run(_cancelled())
    if how == "shutdown":
        raise WorkerShutdown(0)
    sys.exit(1)


async def _cancelled() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(1)


@app.task
def filler(seconds: float) -> None:
    time.sleep(seconds)


@app.task
def note(name: str) -> None:
    journal.add("noted", name=name)
