"""Exchanges of RabbitMQ that bring one message to several queues: what waits for its lock comes
back to the queue that it was in, and to no other."""

from __future__ import annotations

import pytest

from celery_relock.lock import Lock
from tests.support.parked import held_here

APP = "tests.worker.apps.exchanges"


@pytest.fixture(scope="module")
def shared(rabbitmq, module_worker):
    return module_worker(APP, env={"RELOCK_TEST_BROKER": rabbitmq.url})


@pytest.fixture
def held(shared, account):
    """The lock of this test's account, held by this process until `held.release()`."""
    with held_here(shared, f"account:{account}") as lock:
        yield lock


@pytest.fixture
def channel(shared):
    with shared.module.app.connection_for_write() as connection:
        yield connection.default_channel


def seen(worker, account, count):
    """Wait until the body has run so often, and give the workers in which it did."""

    return [e["worker"] for e in worker.journal.wait_for("seen", 20, count, account=account)]


def waits(worker, sent, count):
    """Wait until so many messages of a call have met a held lock."""

    def waiting(events):
        of_it = [e["state"] for e in events if e.name == "over" and e["id"] == sent.id]
        return sum(state in ("IGNORED", "RETRY") for state in of_it) >= count

    worker.journal.wait_for(waiting, 20)


def count(queue):
    """How many messages came to a queue that nobody consumes."""
    found = 0
    while queue.get(no_ack=True) is not None:
        found += 1
    return found


@pytest.mark.parametrize(("task", "messages"), [("parks", 2), ("comes_again", 4)])
def test_what_waits_comes_back_to_one_queue_though_its_exchange_has_others(
    shared, account, held, channel, task, messages
):
    module = shared.module
    foreign = module.foreign(channel)
    foreign.declare()
    where = {"exchange": module.by_topic.name, "routing_key": "order.paid"}
    sent = getattr(module, task).apply_async((account,), **where)
    waits(shared, sent, messages)
    held.release()
    seen(shared, account, 1)
    assert count(foreign) == 1


@pytest.mark.parametrize(("task", "messages"), [("parks", 1), ("comes_again", 2)])
def test_what_waits_comes_back_to_its_queue_that_another_exchange_is_ahead_of(
    shared, account, held, channel, task, messages
):
    module = shared.module
    overheard = module.overheard(channel)
    overheard.declare()
    module.behind(channel).bind_to(module.ahead.name, routing_key="#")
    sent = getattr(module, task).apply_async(
        (account,), exchange=module.ahead.name, routing_key="x"
    )
    waits(shared, sent, messages)
    held.release()
    seen(shared, account, 1)
    assert count(overheard) == 1


@pytest.mark.parametrize(("task", "messages"), [("parks", 2), ("comes_again", 4)])
def test_each_queue_of_a_fanout_exchange_has_an_execution_of_its_own(
    shared, account, held, task, messages
):
    module = shared.module
    sent = getattr(module, task).apply_async((account,), exchange=module.news.name, routing_key="x")
    waits(shared, sent, messages)
    held.release()
    assert len(seen(shared, account, 2)) == 2


def test_what_waits_in_a_queue_of_a_fanout_exchange_runs_in_whatever_worker(
    new_worker, rabbitmq, redis_url, account
):
    def start(node):
        broker = {"RELOCK_TEST_BROKER": rabbitmq.url}
        return new_worker(APP, env=broker, concurrency=1, arguments=("-n", node))

    before = start("before@127.0.0.1")
    module = before.module
    with Lock(redis_url, f"account:{account}", namespace=module.NAME):
        sent = module.parks.apply_async((account,), exchange=module.news.name, routing_key="x")
        waits(before, sent, 2)
        before.stop()
        after = start("after@127.0.0.1")
    assert seen(after, account, 2) == ["after@127.0.0.1"] * 2
