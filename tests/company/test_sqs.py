"""The broker is Amazon's SQS, in moto's server; the locks are in Redis."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from uuid import uuid4

import boto3
import pytest
from moto.server import ThreadedMotoServer
from moto.sqs import models

from celery_relock import doctor
from celery_relock.admin import Locks
from tests.support import wait_for
from tests.support.parked import wait_until_parked
from tests.support.worker import Worker

# moto lacks this rule of SQS: it takes no second message with a `MessageDeduplicationId` for five
# minutes, also when it has deleted the first one ("exactly-once processing" in AWS's guide).
_FOR_ONCE = 300.0


class _Queue(models.Queue):  # type: ignore[misc]
    made: ClassVar[list[str]] = []

    def __init__(self, name: str, *rest: Any, **more: Any) -> None:
        self.made.append(name)
        super().__init__(name, *rest, **more)

    def add_message(self, message: Any) -> None:
        seen = self.__dict__.setdefault("_seen", {})
        if self.fifo_queue and time.monotonic() < seen.get(message.deduplication_id, 0):
            return
        seen[message.deduplication_id] = time.monotonic() + _FOR_ONCE
        super().add_message(message)


class Sqs:
    """An SQS, and the settings that lead a worker to its queues."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._client = boto3.client(
            "sqs",
            endpoint_url=f"http://127.0.0.1:{port}",
            region_name="us-east-1",
            aws_access_key_id="key",
            aws_secret_access_key="secret",
        )

    def queue(self, **attributes: str) -> str:
        """Make a queue, and return its name."""
        name = f"q-{uuid4().hex[:8]}" + (".fifo" if attributes else "")
        self._client.create_queue(QueueName=name, Attributes=attributes)
        return name

    def queues(self) -> list[str]:
        urls = self._client.list_queues().get("QueueUrls", [])
        return [url.rpartition("/")[2] for url in urls]

    def in_flight(self, name: str) -> int:
        """How many messages a worker has, which are not acknowledged."""
        what = "ApproximateNumberOfMessagesNotVisible"
        url = self._client.get_queue_url(QueueName=name)["QueueUrl"]
        found = self._client.get_queue_attributes(QueueUrl=url, AttributeNames=[what])
        return int(found["Attributes"][what])

    def env(self, *queues: str, key: str = "key") -> dict[str, str]:
        """The settings of a worker that has this access key, and that may use these queues alone,
        or any queue."""
        account = f"http://127.0.0.1:{self.port}/123456789012"
        options = {
            "region": "us-east-1",
            "is_secure": False,
            "polling_interval": 0.1,
            "wait_time_seconds": 1,
        }
        if queues:
            told = {name: {"url": f"{account}/{name}"} for name in queues}
            options["predefined_queues"] = told
        return {
            "RELOCK_TEST_BROKER": f"sqs://{key}:secret@localhost:{self.port}//",
            "RELOCK_TEST_SQS": json.dumps(options),
        }


@pytest.fixture(scope="module")
def sqs() -> Iterator[Sqs]:
    before, models.Queue = models.Queue, _Queue
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield Sqs(server.get_host_and_port()[1])
    server.stop()
    models.Queue = before


@pytest.fixture
def start(sqs: Sqs, new_worker: Callable[..., Worker]) -> Callable[..., Worker]:
    def started(*queues: str, key: str = "key", alone: bool = True) -> Worker:
        env = sqs.env(*queues if alone else (), key=key)
        arguments = ("-Q", ",".join(queues))
        return new_worker("tests.company.sqs_app", arguments=arguments, env=env)

    return started


@pytest.mark.parametrize("task", ["work", "again"])
def test_what_has_waited_is_no_duplicate_to_a_queue_that_knows_each_message(
    sqs: Sqs, start: Callable[..., Worker], task: str
) -> None:
    fifo = sqs.queue(FifoQueue="true")
    one = start(fifo)
    sent = []
    for n in range(2):
        # A group each: SQS delivers no message of a group while another one is being processed.
        ids = {"MessageGroupId": f"{n}", "MessageDeduplicationId": uuid4().hex}
        sent.append(getattr(one.module, task).apply_async(("a",), queue=fifo, **ids).id)
        if not n:
            one.journal.wait_for("begin")
    one.wait_for_log(r"\] (parked|retry): ")
    one.journal.add("free a")
    ends = one.journal.wait_for("end", 40, count=2)
    assert [end["id"] for end in ends] == sent
    assert not [name for name in sqs.queues() if name.endswith("resumed")]


def test_a_worker_is_handed_what_it_can_publish(sqs: Sqs, start: Callable[..., Worker]) -> None:
    mine, its = sqs.queue(), sqs.queue()
    one, other = start(mine), start(its)
    for n in range(4):
        here, queue = (one, mine) if n % 2 == 0 else (other, its)
        here.module.work.apply_async(("a",), queue=queue)
        if n:
            wait_until_parked(one, "a", n)
        else:
            one.journal.wait_for("begin")
    one.journal.add("free a")
    one.journal.wait_for("end", 60, count=4)
    for each in (one, other):
        assert "could not be resumed" not in each.log()


def test_what_is_parked_is_resumed_with_the_next_access_key(
    sqs: Sqs, start: Callable[..., Worker]
) -> None:
    queue = sqs.queue()
    before = start(queue)
    before.module.work.apply_async(("a",), queue=queue)
    before.journal.wait_for("begin")
    waits = before.module.work.apply_async(("a",), queue=queue).id
    wait_until_parked(before, "a")
    wait_for(lambda: sqs.in_flight(queue) == 1, what="the parked message acknowledged")
    before.kill()
    after = start(queue, key="another")
    after.journal.add("free a")
    after.journal.wait_for("end", 60, id=waits)


def test_nobody_is_said_to_be_missing_where_no_worker_can_answer(
    sqs: Sqs, start: Callable[..., Worker]
) -> None:
    queue = sqs.queue()
    one = start(queue, alone=False)
    one.module.work.apply_async(("a",), queue=queue)
    one.journal.wait_for("begin")
    waits = one.module.work.apply_async(("a",), queue=queue).id
    wait_until_parked(one, "a")
    app = one.module.app
    assert "no worker that answers" not in Locks(app).why(waits).sentence
    made = list(_Queue.made)
    assert doctor.examine(app, timeout=0.5).worst != "error"
    assert Locks(app).why("of-nobody").state == "unknown"
    assert _Queue.made == made, "none for answers"
    one.journal.add("free a")
    one.journal.wait_for("end", 40, count=2)
