"""Tasks that wait for a lock beside a backlog; what a worker receives goes to the journal."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextvars import ContextVar
from types import FrameType
from typing import Any

from celery.signals import before_task_publish, task_received, worker_ready
from kombu import Exchange, Queue
from kombu.common import Broadcast

from celery_relock import LockedTask
from celery_relock.worker import resuming
from tests.support import Journal, make_app
from tests.support.permits import holding

KEY = "account:{account}"

if again := os.environ.get("RELOCK_TEST_AGAIN"):
    resuming.AGAIN_AFTER = float(again)
settings: dict[str, Any] = {"worker_cancel_long_running_tasks_on_connection_loss": False}
if prefetch := os.environ.get("RELOCK_TEST_PREFETCH"):
    settings["worker_prefetch_multiplier"] = int(prefetch)
app = make_app(__name__, **settings)
default = app.conf.task_default_queue
if queues := os.environ.get("RELOCK_TEST_QUEUES"):
    by_topic = Exchange(f"{default}-topic", type="topic")
    app.conf.task_create_missing_queues = False
    app.conf.task_queues = {
        "topic": [Queue(default), Queue(f"{default}-topic", by_topic, routing_key="a.#")],
        "fanout": [Queue(default), Broadcast(f"{default}-fanout")],
        "copies": [Queue(default), Queue("copies", Exchange(f"{default}-copies", type="fanout"))],
    }[queues]
journal = Journal.from_env()
tenant: ContextVar[str] = ContextVar("tenant", default="nobody")


@before_task_publish.connect(weak=False)
def stamp(sender: str = "", headers: Any = None, **_: Any) -> None:
    if sender.startswith(__name__):  # other apps of the test process have handlers of their own
        headers["x-tenant"] = tenant.get()


@task_received.connect(weak=False)
def received(request: Any, **_: Any) -> None:
    info = request.message.delivery_info
    journal.add("received", id=request.id, key=info["routing_key"], exchange=info["exchange"])


class Struck(Exception):
    """What somebody's signal handler raises."""


@worker_ready.connect(weak=False)
def strike(**_: Any) -> None:
    """A signal comes when the main loop calls this function of ours for the next time."""
    name = os.environ.get("RELOCK_TEST_STRIKE")

    def handler(*_: Any) -> None:
        raise Struck

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == name:
            sys.setprofile(None)
            os.kill(os.getpid(), signal.SIGUSR2)

    if name:
        signal.signal(signal.SIGUSR2, handler)
        sys.setprofile(profile)


@app.task(base=LockedTask, bind=True, lock_key=KEY)
def hold(self: Any, account: str) -> None:
    """Holds the lock until the test says that it may go."""
    tenant.set("holder")
    with holding(journal, self.lock):
        journal.add("held", account=account)
        journal.wait_for(f"free {account}", 60)


def take(self: Any, account: str, seconds: float) -> str:
    request = self.request
    with holding(journal, self.lock):
        journal.add(
            "took",
            account=account,
            id=request.id,
            tenant=(request.headers or {}).get("x-tenant"),
            exchange=request.delivery_info["exchange"],
            key=request.delivery_info["routing_key"],
            host=request.hostname,
            redelivered=bool(request.delivery_info.get("redelivered")),
            headers=sorted(request.headers or {}),
        )
        time.sleep(seconds)
    return str(request.id)


@app.task(base=LockedTask, bind=True, lock_key=KEY)
def takes(self: Any, account: str, seconds: float = 0.0) -> str:
    return take(self, account, seconds)


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_on_conflict="retry")
def comes_again(self: Any, account: str) -> str:
    return take(self, account, 0.0)


@app.task(base=LockedTask, bind=True, lock_key=KEY, acks_late=True)
def takes_late(self: Any, account: str, seconds: float = 0.0) -> str:
    return take(self, account, seconds)


@app.task(base=LockedTask, bind=True, lock_key=KEY, rate_limit="6/m")
def takes_seldom(self: Any, account: str) -> str:
    return take(self, account, 0.0)


@app.task(base=LockedTask, bind=True, lock_key=KEY)
def retries(self: Any, account: str) -> str:
    took = take(self, account, 0.0)
    if not self.request.retries:
        raise self.retry(countdown=0)
    return took


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_on_conflict="retry")
def asks_again(self: Any, account: str) -> str:
    return take(self, account, 0.0)


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_on_conflict="retry", acks_late=True)
def asks_again_late(self: Any, account: str, seconds: float) -> str:
    return take(self, account, seconds)


@app.task
def filler(seconds: float) -> None:
    time.sleep(seconds)


@app.task
def note(name: str) -> None:
    journal.add("noted", name=name)
