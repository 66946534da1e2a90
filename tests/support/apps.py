"""Celery apps for worker processes: configured by the environment that `Worker` sets."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from celery.concurrency.asynpool import AsynPool

from tests.support.keys import BENCH_PREFIX

# Seconds after which a worker looks for children that have ended: five by itself, in which nothing
# becomes of their tasks. Not for tests of how soon a lock is free: it could be by this.
LOOK_EVERY = "RELOCK_TEST_LOOK_EVERY"


class _App(Celery):
    """Keeps its tasks to itself: a module of tasks is imported anew for each worker, and Celery
    would register every copy with every app of the process."""

    def task(self, *args: Any, **options: Any) -> Any:
        options.setdefault("shared", False)
        return super().task(*args, **options)


def make_app(name: str, **settings: Any) -> Celery:
    """An app on the test's Redis: broker, results and locks, none of them shared with other tests.

    Use it at the top of a module that is given to `Worker`: `app = make_app(__name__)`. Its `env`
    may say otherwise: RELOCK_TEST_BROKER, RELOCK_TEST_LOCKS, RELOCK_TEST_RESULTS (also "none").
    """
    url = os.environ["RELOCK_TEST_URL"]
    broker = os.environ.get("RELOCK_TEST_BROKER", url)
    results = os.environ.get("RELOCK_TEST_RESULTS", url)
    namespace = os.environ["RELOCK_TEST_NAMESPACE"]
    prefix = {"global_keyprefix": f"{BENCH_PREFIX}celery:{namespace}:"}
    app = _App(name)
    app.conf.update(
        broker_url=broker,
        result_backend=None if results == "none" else results,
        broker_transport_options={} if broker.startswith("amqp") else prefix,
        result_backend_transport_options=prefix,
        broker_connection_retry_on_startup=True,
        worker_hijack_root_logger=False,
        task_default_queue=f"queue-{namespace}",
        relock_url=os.environ.get("RELOCK_TEST_LOCKS", url),
        relock_namespace=namespace,
    )
    app.conf.update(settings)
    if every := os.environ.get(LOOK_EVERY):
        AsynPool.timers = property(lambda pool: {pool.maintain_pool: float(every)})
    return app
