"""Queues that get their messages by a topic exchange, each in another way."""

from __future__ import annotations

import os
from typing import Any

from celery.signals import task_received
from kombu import Exchange, Queue, binding

from celery_relock import LockedTask
from tests.support import Journal, make_app

app = make_app(__name__)
default = app.conf.task_default_queue
by_topic = Exchange(f"{default}-topic", type="topic")
name = f"{default}-orders"
app.conf.task_create_missing_queues = False
app.conf.task_queues = [
    Queue(default),
    {
        "topic": Queue(name, by_topic, routing_key="order.#"),
        "bindings": Queue(name, bindings=[binding(by_topic, routing_key="order.#")]),
    }[os.environ["RELOCK_TEST_QUEUES"]],
]
journal = Journal.from_env()


@task_received.connect(weak=False)
def received(request: Any, **_: Any) -> None:
    journal.add("received", id=request.id)


@app.task(base=LockedTask, bind=True, lock_key="account:{account}")
def takes(self: Any, account: str) -> list[str]:
    info = self.request.delivery_info
    return [info["exchange"], info["routing_key"], *(self.request.headers or {})]


@app.task(base=LockedTask, bind=True, lock_key="account:{account}", lock_on_conflict="retry")
def asks_again(self: Any, account: str) -> None:
    """Does not park, but is sent again."""
