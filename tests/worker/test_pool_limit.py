"""A process whose connections to the broker are all in use goes on."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
from celery import Celery
from kombu import pools

from celery_relock import LockedTask
from tests.support.parked import wait_until_parked

pytestmark = pytest.mark.slow


@pytest.fixture(params=["redis", "amqp"])
def worker(request, new_worker, on_broker):
    return new_worker("tests.worker.apps.resuming", env=on_broker(request.param))


@contextmanager
def all_producers(app):
    with app.producer_pool.acquire(block=True) as producer:
        yield {"producer": producer}


@contextmanager
def all_connections(app):
    with app.pool.acquire(block=True) as connection:
        yield {"connection": connection}


def ends(work, timeout=10.0):
    """Whether this ends in time; what it raises is shown by pytest."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout)
    return not thread.is_alive()


@pytest.mark.parametrize("everything", [all_producers, all_connections])
def test_who_releases_a_lock_resumes_what_waits_for_it(worker, account, everything):
    app, takes = worker.module.app, worker.module.takes
    app.conf.broker_pool_limit = 1
    pools.reset()  # kombu makes none smaller while somebody in this process uses a connection of it
    sent = []

    def work():
        with everything(app) as pooled, takes.lock_for(account):
            sent.append(takes.apply_async((account,), **pooled))
            wait_until_parked(worker, f"account:{account}")

    assert ends(work)
    assert sent[0].get(timeout=10) == sent[0].id


def test_who_sends_a_duplicate_tells_monitors_of_it(redis_url, namespace, account):
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(
        relock_url=redis_url,
        relock_namespace=namespace,
        broker_pool_limit=1,
        task_send_sent_event=True,
    )

    @app.task(base=LockedTask, lock_key="report:{name}", lock_dedup="until_start", shared=False)
    def report(name):
        return name

    def work():
        with app.producer_or_acquire() as producer:
            first, second = (report.apply_async((account,), producer=producer) for _ in range(2))
            assert first.id == second.id

    assert ends(work)
    app.close()
