"""The tasks that the demo's worker runs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery
from celery.signals import worker_ready
from celery.worker.control import control_command

from celery_relock import LockedTask
from celery_relock.signals import lock_waiting
from demo.timeline import Timeline

URL = os.environ["DEMO_REDIS_URL"]

app = Celery("demo", broker=URL, backend=URL)
app.conf.broker_connection_retry_on_startup = True
timeline = Timeline(URL)


@worker_ready.connect
def tell_ready(**_: Any) -> None:
    timeline.tell("ready")


@control_command()  # type: ignore[untyped-decorator]
def kill_9(state: Any, pid: int, who: str, lock: str) -> None:
    """Kill a process of this worker, as the system does when memory is short."""
    timeline.tell("killed", who, note=f"kill -9 {pid}", lock=lock)
    os.kill(pid, signal.SIGKILL)


class AccountTask(LockedTask):
    """One lock for each account, whichever task needs it. Tasks wait in their slots: "block"."""

    abstract = True
    lock_key = "account:{account}"
    lock_on_conflict = "block"

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        lock = self.lock_key.format(**kwargs)
        timeline.tell("asks", kwargs["who"], lock=lock, note=self.__name__)


@lock_waiting.connect
def tell_waits(sender: Any, names: tuple[str, ...], **_: Any) -> None:
    who = sender.request.kwargs["who"]
    timeline.tell("waits", who, lock=names[0], note=sender.__name__)


@contextmanager
def at_work(task: Any, who: str) -> Iterator[None]:
    """Tell when the work under the lock begins and how it ends."""
    lock = task.lock
    told = {"lock": lock.name, "fence": lock.fence, "note": task.__name__}
    where = {"pid": os.getpid(), "node": task.request.hostname}
    timeline.tell("in", who, again=lock.reentered, **told, **where)
    try:
        yield
    except Exception as error:
        timeline.tell("fails", who, **{**told, "note": type(error).__name__})
        raise
    timeline.tell("out", who, **told)


@app.task(base=AccountTask, bind=True)
def reserve(self: Any, account: int, who: str) -> None:
    with at_work(self, who):
        time.sleep(0.6)


@app.task(base=AccountTask, bind=True)
def charge(self: Any, account: int, who: str) -> None:
    with at_work(self, who):
        time.sleep(0.6)


@app.task(base=AccountTask, bind=True)
def transfer(self: Any, account: int, who: str, inner: str) -> None:
    with at_work(self, who):
        time.sleep(0.8)
        charge(account, who=inner)
        time.sleep(0.8)


@app.task(base=AccountTask, bind=True)
def audit(self: Any, account: int, who: str) -> None:
    with at_work(self, who):
        time.sleep(0.8)
        raise ValueError("the books do not add up")


@app.task(base=AccountTask, bind=True, lock_ttl=2)
def report(self: Any, account: int, who: str) -> None:
    with at_work(self, who):
        time.sleep(60)
