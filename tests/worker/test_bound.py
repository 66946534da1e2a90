"""A message is resumed to the queue that it came from, whatever else its exchange delivers to."""

from __future__ import annotations

import pytest
from kombu import Queue

from tests.support import wait_for
from tests.support.parked import is_consumed, wait_until_parked

pytestmark = pytest.mark.slow

APP = "tests.worker.apps.bound"
both = pytest.mark.parametrize("kind", ["topic", "bindings"])


@pytest.fixture(params=["redis", "amqp"])
def start(request, new_worker, on_broker):
    def begin(kind):
        started = new_worker(APP, env={**on_broker(request.param), "RELOCK_TEST_QUEUES": kind})
        wait_for(lambda: is_consumed(started, started.module.name), what="a consumer")
        return started

    return begin


class Audit:
    """Another app's queue at the same exchange."""

    def __init__(self, worker):
        m = worker.module
        self._connection = m.app.connection_for_read()
        self._queue = Queue(f"{m.default}-audit", m.by_topic, routing_key="order.#")(
            self._connection.default_channel
        )
        self._queue.declare()

    def received(self):
        """All that has come so far."""
        found = []
        while message := self._queue.get(no_ack=True):
            found.append(message.headers["id"])
        return found

    def close(self):
        self._connection.close()


def send(worker, task, account):
    m = worker.module
    queue = m.app.amqp.queues[m.name]
    return getattr(m, task).apply_async(
        (account,), exchange=m.by_topic.name, routing_key="order.new", declare=[queue]
    )


@both
def test_it_goes_to_its_queue_alone_while_the_worker_of_that_is_away(start, account, kind):
    worker = start(kind)
    m, audit = worker.module, Audit(worker)
    lock = m.takes.lock_for(account)
    assert lock.acquire()
    result = send(worker, "takes", account)
    wait_until_parked(worker, f"account:{account}")
    worker.stop()
    wait_for(lambda: not is_consumed(worker, m.name), what="the end of the announcement")
    lock.release()
    again = start(kind)
    assert result.get(timeout=10)[:2] == [m.by_topic.name, "order.new"]
    assert "relock_origin" not in result.get()
    assert len(again.journal.events("received", id=result.id)) == 2
    assert audit.received() == [result.id]
    audit.close()


@both
def test_what_is_sent_again_later_goes_to_its_queue_alone(start, account, kind):
    worker = start(kind)
    m, audit = worker.module, Audit(worker)
    lock = m.asks_again.lock_for(account)
    assert lock.acquire()
    result = send(worker, "asks_again", account)
    worker.journal.wait_for("received", count=2, id=result.id)
    lock.release()
    result.get(timeout=30)
    assert audit.received() == [result.id]
    audit.close()


@both
def test_one_after_the_other_is_resumed(start, account, kind):
    worker = start(kind)
    lock = worker.module.takes.lock_for(account)
    assert lock.acquire()
    results = [send(worker, "takes", account) for _ in range(3)]
    wait_until_parked(worker, f"account:{account}", 3)
    lock.release()
    for each in results:
        each.get(timeout=5)
