"""A message for all workers is an execution in each of them."""

from __future__ import annotations

import uuid
from contextlib import suppress

import pytest


@pytest.fixture(scope="module")
def workers(module_worker):
    names = f"ns-broadcast-{uuid.uuid4().hex[:8]}"
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


def test_each_worker_runs_it_and_one_after_the_other(workers):
    module, journal = workers[0].module, workers[0].journal
    for _ in range(5):
        # Redis tells only who listens already, and a worker that is ready may not yet.
        account = uuid.uuid4().hex
        send(module.app, module.clears_the_cache, account)

        def cleared(events, account=account):
            return {e["worker"] for e in events if e.name == "cleared" and e["account"] == account}

        with suppress(AssertionError):
            journal.wait_for(lambda events: len(cleared(events)) == 2, 6)
            break
    assert len(cleared(journal.events())) == 2
