"""What a worker starts beside Celery's own, and that it ends with the worker."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import redis
from celery import Celery
from celery.contrib.testing.worker import start_worker

from celery_relock import LockedTask
from celery_relock.declaration import where
from celery_relock.errors import LockConfigError
from celery_relock.worker import events
from tests.support import wait_for


@pytest.mark.filterwarnings("ignore::celery.exceptions.SecurityWarning")
def test_a_threads_pool_refuses_at_its_start_what_it_cannot_interrupt(redis_url: str):
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(relock_url=redis_url, worker_hijack_root_logger=False)

    @app.task(base=LockedTask, lock_key="a", lock_on_lost="raise", name="settle", shared=False)
    def settle():
        pass

    with pytest.raises(LockConfigError, match=r'lock_on_lost="raise" cannot .*\(settle\): use a'):
        app.Worker(pool="threads")
    app.Worker(pool="solo")
    settle.lock_on_lost = "flag"
    app.Worker(pool="threads")
    app.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"relock_namespace": "shop"}, "redis://:***@there:1/2 (result_backend), namespace 'shop'"),
        ({"relock_url": "redis://here/3"}, "redis://here/3 (relock_url), namespace 'relock'"),
        ({"relock_url": redis.Redis()}, "the Redis of a client (relock_url), namespace 'relock'"),
    ],
)
def test_where_its_locks_are_is_said_by_the_setting_that_says_so(settings: Any, says: str):
    app = Celery("shop", broker="memory://", backend="redis://:secret@there:1/2", **settings)
    assert where(app) == says
    app.close()


def test_a_worker_says_in_its_log_where_its_locks_are(new_worker):
    running = new_worker("tests.worker.apps.reaping", concurrency=1)
    running.wait_for_log(
        rf"the locks of this worker are in redis://\S+ \(relock_url\), "
        rf"namespace '{running.namespace}'"
    )


@pytest.mark.filterwarnings("ignore::celery.exceptions.SecurityWarning")
@pytest.mark.parametrize("setting", ["relock_ttl", "relock_prefix", "relock_on_conflict"])
def test_a_setting_that_comes_too_late_for_a_task_is_refused(redis_url: str, setting: str):
    value = {"relock_ttl": 5, "relock_prefix": "t:", "relock_on_conflict": "raise"}[setting]
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(relock_url=redis_url, worker_hijack_root_logger=False)

    class Charge(LockedTask):
        name = "charge"
        lock_key = "a"

        def run(self):
            pass

    app.register_task(Charge())
    app.Worker(pool="solo")
    app.conf.update({setting: value})
    with pytest.raises(LockConfigError, match=f"{setting} was set after task charge"):
        app.Worker(pool="solo")
    app.close()


@pytest.mark.filterwarnings("ignore::celery.exceptions.SecurityWarning")
@pytest.mark.parametrize(
    ("url", "says"),
    [(None, "needs a Redis"), ("redis://localhost/prod", "the database, after the slash")],
)
def test_a_worker_whose_locked_tasks_could_only_fail_does_not_start(url: str | None, says: str):
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(relock_url=url, worker_hijack_root_logger=False)

    @app.task(name="plain", shared=False)
    def plain():
        pass

    app.Worker(pool="solo")

    @app.task(base=LockedTask, lock_key="a", name="charge", shared=False, lazy=False)
    def charge():
        pass

    with pytest.raises(LockConfigError, match=says):
        app.Worker(pool="solo")
    app.close()


@pytest.mark.filterwarnings("ignore::celery.exceptions.SecurityWarning")
@pytest.mark.parametrize("setting", ["relock_url", "relock_namespace", "relock_enabled"])
def test_a_change_of_where_the_locks_live_that_comes_too_late_is_refused(
    redis_url: str, setting: str
):
    value = {"relock_url": f"{redis_url}?db=1", "relock_namespace": "t", "relock_enabled": False}
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(relock_url=redis_url, worker_hijack_root_logger=False)

    @app.task(base=LockedTask, lock_key="a", name="charge", shared=False)
    def charge():
        pass

    charge.lock_for()
    app.Worker(pool="solo")
    app.conf.update({setting: value[setting]})
    with pytest.raises(LockConfigError, match=r"where the locks live \(.*\) was changed after"):
        app.Worker(pool="solo")
    app.close()


def test_a_worker_in_a_thread_leaves_no_thread_behind_and_its_process_is_none_any_more():
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(
        relock_url="memory://",
        worker_hijack_root_logger=False,
        broker_transport_options={"polling_interval": 0.01},
    )

    @app.task(base=LockedTask, lock_key="report", shared=False)
    def report():
        return "done"

    before = set(threading.enumerate())
    with start_worker(app, perform_ping_check=False, pool="solo", loglevel="WARNING"):
        assert report.delay().get(timeout=20) == "done"
        names = [each.name for each in threading.enumerate() if each not in before]
        assert {"relock-reaper", "relock-resumer"} <= set(names)
        assert events._worker is not None
    wait_for(lambda: set(threading.enumerate()) <= before, what="the end of its threads")
    assert events._worker is None
    app.close()
