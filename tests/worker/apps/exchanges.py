"""Exchanges of RabbitMQ that bring one message to several queues."""

from __future__ import annotations

from typing import Any

from celery.signals import task_postrun
from kombu import Exchange, Queue
from kombu.common import Broadcast

from celery_relock import LockedTask
from tests.support import Journal, make_app
from tests.support.permits import holding

app = make_app(__name__, result_backend=None)
NAME = app.conf.relock_namespace
#: Two queues of the worker have the key "order.paid", and the queue "foreign" has no consumer.
by_topic = Exchange(f"topic-{NAME}", type="topic")
#: A message comes from the first to the second, and to "overheard", which has no consumer either.
ahead, behind = Exchange(f"ahead-{NAME}", type="topic"), Exchange(f"behind-{NAME}", type="topic")
#: Queues that are shared by all workers; and one that each worker has for itself.
news = Exchange(f"news-{NAME}", type="fanout")
app.conf.task_queues = [
    Queue(app.conf.task_default_queue),
    Queue(f"all-{NAME}", by_topic, routing_key="order.#"),
    Queue(f"paid-{NAME}", by_topic, routing_key="order.paid"),
    Queue(f"behind-{NAME}", behind, routing_key="#"),
    Queue(f"billing-{NAME}", news),
    Queue(f"audit-{NAME}", news),
    Broadcast(f"everybody-{NAME}"),
]
foreign = Queue(f"foreign-{NAME}", by_topic, routing_key="order.#")
overheard = Queue(f"overheard-{NAME}", ahead, routing_key="#")
journal = Journal.from_env()
LOCKED: dict[str, Any] = {"base": LockedTask, "bind": True, "lock_key": "account:{account}"}


@app.task(**LOCKED)
def parks(self: Any, account: str) -> None:
    with holding(journal, self.lock):
        journal.add("seen", account=account, worker=self.request.hostname)


@app.task(**LOCKED, lock_on_conflict="retry")
def comes_again(self: Any, account: str) -> None:
    with holding(journal, self.lock):
        journal.add("seen", account=account, worker=self.request.hostname)


@task_postrun.connect
def over(task_id: str = "", state: str = "", **_: Any) -> None:
    journal.add("over", id=task_id, state=state)
