"""Tasks whose messages are in RabbitMQ, their locks in Redis, and no result backend at all."""

from __future__ import annotations

from typing import Any

import celery
from celery.exceptions import Reject
from celery.signals import task_postrun, task_revoked
from kombu import Exchange, Queue

from celery_relock import LockedTask
from tests.support import Journal, make_app
from tests.support.permits import holding

KEY = "account:{account}"

app = make_app(
    __name__,
    broker_transport_options={"confirm_publish": True},
    result_backend=None,
)
exchange = Exchange("by-topic", type="topic")
app.conf.task_queues = [
    Queue(app.conf.task_default_queue),
    Queue("classic", exchange, routing_key="classic.#", max_priority=9),
]
if celery.VERSION[:2] >= (5, 5):  # the first that can consume from one
    arguments = {"x-queue-type": "quorum"}
    app.conf.task_queues.append(
        Queue("quorum", exchange, routing_key="quorum.#", queue_arguments=arguments)
    )
    app.conf.task_queues.append(
        Queue("quorum-by-name", Exchange(""), "quorum-by-name", queue_arguments=arguments)
    )
# What is rejected from "comes-back" rests for a moment and is back then.
for name, to, more in (
    ("comes-back", "rests", {}),
    ("rests", "comes-back", {"x-message-ttl": 200}),
):
    back = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": to, **more}
    queue = Queue(name, Exchange(""), routing_key=name, queue_arguments=back)
    if name == "comes-back":
        app.conf.task_queues.append(queue)
    else:
        resting = queue
journal = Journal.from_env()


@app.task(base=LockedTask, bind=True, lock_key=KEY)
def hold(self: Any, account: str) -> None:
    """Holds the lock until the test says that it may go."""
    with holding(journal, self.lock):
        journal.add("held", account=account)
        journal.wait_for(f"free {account}", 30)


@app.task(base=LockedTask, bind=True, lock_key=KEY)
def work(self: Any, account: str, *rest: Any) -> str:
    request = self.request
    with holding(journal, self.lock):
        custom = {k: v for k, v in (request.headers or {}).items() if k.startswith("x-")}
        journal.add(
            "seen",
            account=account,
            id=request.id,
            root=request.root_id,
            parent=request.parent_id,
            retries=request.retries,
            limits=request.timelimit,
            stamps=request.stamps,
            reply_to=request.reply_to,
            shadow=request.shadow,
            exchange=request.delivery_info["exchange"],
            routing_key=request.delivery_info["routing_key"],
            priority=request.delivery_info["priority"],
            headers=custom,
        )
    return account


@app.task(base=LockedTask, bind=True, lock_key=KEY, acks_late=True, reject_on_worker_lost=True)
def work_acked_late(self: Any, account: str) -> None:
    with holding(journal, self.lock):
        journal.add("seen", account=account, id=self.request.id)


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_on_conflict="retry", ignore_result=True)
def comes_again(self: Any, account: str) -> None:
    journal.add("seen", account=account, id=self.request.id)


def _third_time(self: Any, account: str, error: Exception) -> str:
    """Each try of one message is told; the first two end with the error."""
    with holding(journal, self.lock):
        journal.add("tried", account=account, id=self.request.id)
    if len(journal.events("tried", account=account)) < 3:
        raise error
    return account


REJECTED = {"acks_late": True, "base": LockedTask, "bind": True, "lock_key": KEY}


@app.task(**REJECTED)
def is_rejected(self: Any, account: str) -> str:
    return _third_time(self, account, Reject("not yet", requeue=False))


@app.task(**REJECTED)
def is_requeued(self: Any, account: str) -> str:
    return _third_time(self, account, Reject("not yet", requeue=True))


@app.task(**REJECTED, acks_on_failure_or_timeout=False)
def fails_unacknowledged(self: Any, account: str) -> str:
    return _third_time(self, account, ValueError("not yet"))


@app.task(**REJECTED, acks_on_failure_or_timeout=False, lock_max_wait=0.5)
def fails_unacknowledged_after_a_wait(self: Any, account: str) -> None:
    with holding(journal, self.lock):
        journal.add("tried", account=account, id=self.request.id)


@app.task
def note(account: str) -> None:
    journal.add("noted", account=account)


@task_postrun.connect
def over(task_id: str = "", state: str = "", **_: Any) -> None:
    journal.add("over", id=task_id, state=state)


@task_revoked.connect
def revoked(request: Any = None, expired: bool = False, **_: Any) -> None:
    journal.add("revoked", id=request.id, expired=expired)
