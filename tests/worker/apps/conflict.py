"""Tasks that find their lock held, and one that holds it for as long as the test wants."""

from __future__ import annotations

import time
from typing import Any

from kombu import Exchange, Queue

from celery_relock import LockedTask
from tests.support import Journal, make_app
from tests.support.overtaken import OvertakenLocked
from tests.support.permits import holding
from tests.support.without_broker import WithoutABroker

KEY = "account:{account}"

app = make_app(__name__, task_publish_retry_policy={"max_retries": 1, "interval_start": 0.05})
exchange = Exchange("by-topic", type="topic")
app.conf.task_queues = [
    Queue(app.conf.task_default_queue),
    Queue("special", exchange, routing_key="special.#"),
]
app.conf.broker_transport_options = {
    **app.conf.broker_transport_options,
    "priority_steps": list(range(10)),
}
journal = Journal.from_env()


@app.task(base=LockedTask, bind=True, lock_key=KEY)
def hold(self, account):
    """Holds the lock until the test says that it may go."""
    with holding(journal, self.lock):
        journal.add("held", account=account)
        journal.wait_for(f"free {account}", 30)


def waits(self: Any, account: str, seconds: float) -> int:
    with holding(journal, self.lock):
        time.sleep(seconds)
        return self.lock.fence


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_on_conflict="block")
def blocks(self, account, seconds=0.0):
    return waits(self, account, seconds)


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_on_conflict="block", lock_max_wait=0.5)
def blocks_briefly(self, account):
    return waits(self, account, 0)


@app.task(
    base=LockedTask, bind=True, lock_key=KEY, lock_on_conflict="block", lock_order="sent",
    lock_max_wait=4,
)  # fmt: skip
def blocks_in_order(self, account):
    return waits(self, account, 0)


def _retry_three_times(conflict: Any) -> str:
    times = len(journal.events("retries", lock=conflict.name))
    if times < 3:
        journal.add("retries", lock=conflict.name)
    return "retry" if times < 3 else "block"


@app.task(
    base=LockedTask, bind=True, lock_key=KEY, lock_on_conflict=_retry_three_times, lock_max_wait=4
)
def retries_and_then_blocks(self, account):
    return waits(self, account, 0)


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_on_conflict=lambda conflict: "block")
def chooses_to_block(self, account):
    return waits(self, account, 0)


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_on_conflict="raise")
def raises(self, account):
    return waits(self, account, 0)


RETRY = {"lock_key": KEY, "lock_on_conflict": "retry"}


@app.task(base=LockedTask, bind=True, **RETRY)
def comes_back(self, account):
    return waits(self, account, 0)


@app.task(base=LockedTask, bind=True, **RETRY, lock_max_wait=1.0)
def comes_back_briefly(self, account):
    return waits(self, account, 0)


@app.task(base=OvertakenLocked, lock_key=KEY)
def is_overtaken(account):
    raise ValueError(account)


class SeenAtEachDelivery(LockedTask):
    def before_start(self, task_id, args, kwargs):
        header = (self.request.headers or {}).get("relock") or {}
        journal.add("delivered", task_id=task_id, **header)


def look(self: Any, account: str, *rest: Any) -> int:
    """What the body sees of its message, when it runs at last."""
    request = self.request
    with holding(journal, self.lock):
        custom = dict(request.headers or {})
        header = custom.pop("relock")
        seen = {
            "attempts": header.get("attempts", 0),
            "id": request.id,
            "root": request.root_id,
            "parent": request.parent_id,
            "retries": request.retries,
            "group": request.group,
            "expires": request.expires,
            "limits": request.timelimit,
            "stamps": request.stamps,
            "ignore_result": request.ignore_result,
            "reply_to": request.reply_to,
            "correlation_id": request.correlation_id,
            "origin": request.origin,
            "group_index": request.group_index,
            "replaced": request.replaced_task_nesting,
            "delivery_mode": request.delivery_info.get("delivery_mode"),
            "shadow": request.shadow,
            "exchange": request.delivery_info["exchange"],
            "routing_key": request.delivery_info["routing_key"],
            "priority": request.delivery_info["priority"],
            "headers": {key: custom[key] for key in custom if key.startswith("x-")},
        }
        journal.add("seen", account=account, **seen)
        return seen["attempts"]


# max_retries=0: one counted retry would already fail the task.
looks = {
    policy: app.task(
        name=f"looks.{policy}",
        base=SeenAtEachDelivery,
        bind=True,
        max_retries=0,
        lock_key=KEY,
        lock_on_conflict=policy,
    )(look)
    for policy in ("retry", "wait")
}


@app.task
def add(x, y=0):
    return x + y


@app.task
def total(numbers):
    return sum(numbers)


@app.task
def note(value, account):
    journal.add("noted", account=account, value=value)
    return value


@app.task(base=WithoutABroker, bind=True, **RETRY)
def cannot_be_sent_again(self, account):
    journal.add("state", account=account, is_now=self.AsyncResult(self.request.id).state)
    return waits(self, account, 0)


@app.task(base=WithoutABroker, bind=True, **RETRY, lock_max_wait=0.5)
def cannot_be_sent_again_for_long(self, account):
    return waits(self, account, 0)
