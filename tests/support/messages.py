"""A message that comes again: a broker delivers once more what was not acknowledged."""

from __future__ import annotations

import uuid
from typing import Any

from celery.result import AsyncResult

from celery_relock.engine import ids
from tests.support.journal import Event
from tests.support.permits import permits
from tests.support.worker import Worker


def send_in_protocol_1(task: Any, *args: Any) -> AsyncResult[Any]:
    """As a sender with Celery's old `task_protocol` does, which has no header of ours."""
    app, task_id = task.app, str(uuid.uuid4())
    message = app.amqp.as_task_v1(task_id, task.name, args)
    with app.producer_or_acquire() as producer:
        app.amqp.send_task_message(producer, task.name, message)
    return task.AsyncResult(task_id)


class Message:
    """One message of a task, delivered as often as wanted, byte for byte the same.

    Args:
        worker: who gets it.
        task: its task, which has the lock `account:{account}` and notes the account in the journal.
        args: the account and what else the task takes, by default an account of its own.
        retries: how many retries came before it.
        with_header: whether this library had a hand in sending it.
        header: what its header says besides.
    """

    def __init__(
        self,
        worker: Worker,
        task: Any,
        *args: Any,
        retries: int = 0,
        with_header: bool = True,
        **header: Any,
    ) -> None:
        self.worker, self.app, self.task = worker, worker.module.app, task
        args = args or (uuid.uuid4().hex,)
        self.account, self.id, self.execution_id = args[0], str(uuid.uuid4()), ids.new_id()
        self.lock = f"account:{self.account}"
        self._sent = self.app.amqp.create_task_message(
            self.id, task.name, args, {}, retries=retries, ignore_result=task.ignore_result
        )
        if with_header:
            self._sent.headers["relock"] = {"v": 2, "execution_id": self.execution_id, **header}

    def deliver(self, **headers: Any) -> None:
        """Deliver it, with other headers of Celery's than before if they are given."""
        with self.app.producer_pool.acquire() as producer:
            producer.publish(
                self._sent.body,
                headers={**self._sent.headers, **headers},
                routing_key=self.app.conf.task_default_queue,
                serializer="json",
                **self._sent.properties,
            )

    @property
    def result(self) -> AsyncResult[Any]:
        """A new one each time: it remembers a final state, and a lost worker's is followed."""
        return self.app.AsyncResult(self.id)

    def events(self, name: str, count: int = 0, timeout: float = 30.0) -> list[Event]:
        """What was noted for its account, when there is so much of it."""
        return self.worker.journal.wait_for(name, timeout, count, account=self.account)

    def states(self, count: int) -> list[str]:
        """How its deliveries have ended, when so many have."""
        return [event["state"] for event in self.events("over", count)]

    def permits(self) -> list[int]:
        """The fencing tokens of its runs, none of which ran beside another."""
        return permits(self.worker.journal.events(), self.lock)

    def let_go(self) -> None:
        """Its body may end, now and whenever it runs again."""
        self.worker.journal.add(f"free {self.account}")
