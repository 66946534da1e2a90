"""Children that are spawned, and not forked, have all that the main process has set up."""

from __future__ import annotations

import pickle
import signal
from types import SimpleNamespace

import celery
import pytest
from celery import Celery, chain

from celery_relock import locked
from celery_relock.worker import events
from tests.support import wait_for
from tests.support.apps import LOOK_EVERY
from tests.support.parked import lock_of, wait_until_free

APP = "tests.worker.apps.spawned"
can_spawn = pytest.mark.skipif(celery.VERSION < (5, 7), reason="this Celery spawns no children")


@pytest.fixture(scope="module")
def worker(module_worker):
    # A child for each task: what has run a locked task has loaded what others need.
    arguments = ("--pool-start-method=spawn", "-E", "--max-tasks-per-child=1")
    return module_worker(APP, concurrency=1, arguments=arguments, env={LOOK_EVERY: "0.2"})


@can_spawn
def test_a_task_whose_body_is_not_reached_leaves_nothing_behind(worker, account):
    task = worker.module.ends_early
    task.delay(account)
    worker.journal.wait_for("ends", timeout=30, account=account)
    wait_for(lambda: task.marked(account) is None, 10, "the marker to be free")


@can_spawn
def test_plain_steps_pass_the_lock_of_their_workflow_on_and_the_last_frees_it(worker, account):
    step, key = worker.module.step, f"workflow:{account}"
    assert locked(chain(step.si(key), step.si(key)), key=key).delay().get(timeout=30) is True
    wait_until_free(worker, key, 10)


@can_spawn
def test_a_monitor_hears_of_the_locks_as_of_the_tasks(worker, monitor, account):
    sent = worker.module.works.delay(account)
    fence = sent.get(timeout=30)
    acquired = monitor.wait(sent.id, "lock-acquired")
    monitor.wait(sent.id, "lock-released")
    assert acquired["fence"] == fence
    assert acquired["hostname"] == worker.node


@pytest.mark.parametrize("wanted", [True, False])
def test_a_child_sends_events_as_the_last_worker_of_its_app_does(wanted):
    app = Celery(set_as_current=False)
    for each in (not wanted, wanted):
        events._begins(SimpleNamespace(app=app, hostname="a@b", task_events=each))
    assert len(app.fixups) == len(app.builtin_fixups) + 1
    events.forget(events._worker)
    made = pickle.loads(pickle.dumps(app))
    worker, told = events._worker, {*events._told}
    events.forget(worker)
    made.close()
    app.close()
    assert worker.app is made
    assert worker.hostname == "a@b"
    assert bool(told) is wanted


@can_spawn
def test_the_lock_of_a_killed_child_is_free_at_once_and_so_is_that_of_the_one_in_its_place(
    worker, account
):
    for name in (f"{account}-1", f"{account}-2"):
        worker.module.is_killed.delay(name)
        [held] = worker.journal.wait_for("holding", timeout=30, account=name)
        lock = lock_of(worker, f"account:{name}")
        assert lock.locked()
        worker.kill(signal.SIGKILL, pid=held.pid)
        wait_until_free(worker, f"account:{name}", 10)
