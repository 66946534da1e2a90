"""A message for all workers is an execution in each of them."""

from __future__ import annotations

import uuid
from contextlib import suppress

import pytest

from celery_relock.admin import Locks
from celery_relock.declaration import engine_of
from tests.support import new_namespace, wait_for
from tests.support.parked import held_here, wait_until_parked


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


def send(app, task, account, **options):
    with app.producer_pool.acquire() as producer:
        # Celery does not: Redis would take the exchange for a direct one.
        queue = app.conf.task_queues[0]
        producer.maybe_declare(queue.exchange)
        task.apply_async((account,), producer=producer, queue=queue, **options)


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


def test_all_copies_that_are_parked_are_cancelled_together(workers):
    app, account = workers[0].module.app, uuid.uuid4().hex
    sent_to_both(workers)  # from now on both listen
    locks, task_id = Locks(app), uuid.uuid4().hex
    with held_here(workers[0], f"cache:{account}"):
        send(app, workers[0].module.clears_the_cache, account, task_id=task_id)
        wait_until_parked(workers[0], f"cache:{account}", 2)
        was_cancelled, left = locks.cancel(task_id), locks.get(f"cache:{account}").parked
    assert (was_cancelled, left) == (True, 0)
    sent_to_both(workers)
    assert not cleared(workers, account)


def test_a_copy_is_parked_also_when_the_last_one_has_left(workers):
    app, account = workers[0].module.app, uuid.uuid4().hex
    sent_to_both(workers)
    locks, task_id = Locks(app), uuid.uuid4().hex
    with held_here(workers[0], f"cache:{account}"):
        send(app, workers[0].module.clears_the_cache, account, task_id=task_id)
        wait_until_parked(workers[0], f"cache:{account}", 2)
        first, last = locks.get(f"cache:{account}").waiters
        parking = engine_of(app).parking
        assert parking.withdraw(last.execution_id)
        why = locks.why(task_id)
        assert parking.withdraw(first.execution_id)
    assert (why.state, why.lock) == ("parked", f"cache:{account}")
    assert f"[{task_id}] is parked: it has waited " in why.sentence


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
