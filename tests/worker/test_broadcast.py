"""A message for all workers is an execution in each of them."""

from __future__ import annotations

import uuid
from contextlib import suppress

import pytest

from tests.support import new_namespace, wait_for


@pytest.fixture(scope="module")
def workers(module_worker):
    names = new_namespace()
    return [
        module_worker(
            "tests.worker.apps.broadcast",
            namespace=names,
            concurrency=1,
            arguments=("-n", f"{node}@127.0.0.1"),
        )
        for node in ("one", "two")
    ]


def send(app, task, account):
    with app.producer_pool.acquire() as producer:
        # Celery does not: Redis would take the exchange for a direct one.
        queue = app.conf.task_queues[0]
        producer.maybe_declare(queue.exchange)
        task.apply_async((account,), producer=producer, queue=queue)


def send_copy_for(receiver, app, task, account):
    """What becomes of a copy that its worker has parked, if that worker is dead by then."""
    sent = app.amqp.create_task_message(uuid.uuid4().hex, task.name, (account,), {})
    ours = {"v": 2, "execution_id": uuid.uuid4().hex[:22], "receiver": receiver}
    headers = {**sent.headers, "relock": ours}
    queue = app.conf.task_queues[0]
    with app.producer_pool.acquire() as producer:
        producer.publish(
            sent.body,
            exchange=queue.exchange,
            routing_key=queue.routing_key or app.conf.task_default_routing_key,
            declare=[queue.exchange],
            headers=headers,
            **sent.properties,
        )


def cleared(workers, account):
    events = workers[0].journal.events("cleared")
    return {event["worker"] for event in events if event["account"] == account}


def sent_to_both(workers, receiver=None, task=None):
    """Send a copy for a receiver, if one is named, and then a message that both workers execute.
    Returns the accounts of the two."""
    module = workers[0].module
    task = task or module.clears_the_cache
    for _ in range(5):
        # Redis tells only who listens already, and a worker that is ready may not yet.
        its, account = uuid.uuid4().hex, uuid.uuid4().hex
        if receiver:
            send_copy_for(receiver, module.app, module.clears_the_cache, its)
        send(module.app, task, account)
        with suppress(AssertionError):
            workers[0].journal.wait_for(
                lambda _, account=account: len(cleared(workers, account)) == 2, 6
            )
            return its, account
    raise AssertionError("not every worker has executed the message")


def test_each_worker_runs_it_and_one_after_the_other(workers):
    sent_to_both(workers)


def test_the_copy_of_a_dead_worker_runs_in_no_other(workers):
    copy, _ = sent_to_both(workers, "dead@127.0.0.1")
    assert not cleared(workers, copy)


def test_a_copy_that_comes_again_runs_in_its_own_worker(workers):
    copy, _ = sent_to_both(workers, "two@127.0.0.1")
    assert cleared(workers, copy) == {"two@127.0.0.1"}


@pytest.mark.parametrize("name", ["clears_until_start", "clears_until_done"])
def test_a_call_that_every_worker_has_executed_counts_no_longer(workers, name):
    task = getattr(workers[0].module, name)
    _, account = sent_to_both(workers, task=task)
    wait_for(lambda: task.marked(account) is None, 10, "its dedup marker to be free")
