"""A message for all workers is an execution in each of them."""

from __future__ import annotations

import uuid

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


def test_each_worker_runs_it_and_one_after_the_other(workers):
    account = uuid.uuid4().hex
    app = workers[0].module.app
    with app.producer_pool.acquire() as producer:
        # Celery does not: Redis would take the exchange for a direct one.
        queue = app.conf.task_queues[0]
        producer.maybe_declare(queue.exchange)
        task = workers[0].module.clears_the_cache
        task.apply_async((account,), producer=producer, queue=queue)

    def cleared(events):
        return [e for e in events if e.name == "cleared" and e["account"] == account]

    workers[0].journal.wait_for(lambda events: len(cleared(events)) == 2, 20)
    found = cleared(workers[0].journal.events())
    assert len({e["worker"] for e in found}) == 2
