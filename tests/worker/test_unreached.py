"""Messages that end before the body is reached: in `before_start`, or in an own `__call__`."""

from __future__ import annotations

import os
import signal

import pytest
from celery import chain, group

from celery_relock import locked
from celery_relock.admin import Locks
from tests.support import wait_for
from tests.support.parked import engine_here, lock_of, wait_until_free

APP = "tests.worker.apps.unreached"
ENDS = ["error", "ignore", "retry"]


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker(APP, concurrency=3)


def entered(worker, account, count, timeout=20.0):
    inside = worker.journal.wait_for("inside", timeout, count, account=account)
    return [e["task"] for e in inside]


def stay(worker, account, count):
    def found(events):
        return [e for e in events if e.name == "stays" and e["account"].startswith(account)]

    return found(worker.journal.wait_for(lambda events: len(found(events)) >= count))


def others_wait(app, name, count=1):
    wait_for(lambda: engine_here(app).inspect(name).waiting == count, what="a waiter")


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("name", ["once", "once_by_own_call"])
def test_no_later_call_is_taken_for_a_duplicate(worker, account, name, how):
    task = getattr(worker.module, name)
    first = task.delay(account, how)
    if how == "retry":
        assert entered(worker, account, 1) == [name]
    wait_for(lambda: task.marked(account, how) is None, 10, "the marker to be free")
    assert task.delay(account, "").id != first.id
    assert entered(worker, account, 1 + (how == "retry"))


@pytest.mark.parametrize("how", ENDS)
def test_the_next_in_its_order_goes_on(worker, account, how):
    worker.module.in_order.delay(account, how)
    worker.module.in_order.delay(account, "")
    runs = ["in_order retry", "in_order "] if how == "retry" else ["in_order "]
    assert sorted(entered(worker, account, len(runs))) == sorted(runs)


@pytest.mark.parametrize("how", ["error", "ignore"])
def test_the_lock_that_was_kept_for_a_retry_is_free(worker, account, how):
    worker.module.keeps.delay(account, how)
    entered(worker, account, 1)
    wait_until_free(worker, f"account:{account}", 10)


@pytest.mark.parametrize("how", ["error", "ignore"])
def test_the_lock_of_its_workflow_is_free(worker, account, how):
    step, key = worker.module.step, f"workflow:{account}"
    locked(chain(step.si(account, ""), step.si(account, how)), key=key).delay()
    entered(worker, account, 1)
    wait_until_free(worker, key, 10)


def test_what_is_left_to_a_task_that_is_terminated_before_its_body_is_free(worker, account):
    step, key = worker.module.step, f"workflow:{account}"
    result = locked(chain(step.si(account, ""), step.si(account, "stay")), key=key).delay()
    retry = worker.module.keeps.delay(f"{account}-retry", "stay")
    stay(worker, account, 2)
    worker.module.app.control.revoke([result.id, retry.id], terminate=True)
    wait_until_free(worker, key, 10)
    wait_until_free(worker, f"account:{account}-retry", 10)


def test_what_is_left_to_a_task_whose_process_dies_before_its_body_is_free(worker, account):
    step, once, key = worker.module.step, worker.module.once, f"workflow:{account}"
    locked(chain(step.si(account, ""), step.si(account, "stay")), key=key).delay()
    lost = once.delay(account, "stay")
    for event in stay(worker, account, 2):
        os.kill(event.pid, signal.SIGKILL)
    wait_until_free(worker, key, 10)
    wait_for(lambda: once.marked(account, "") is None, 10, "the marker to be free")
    assert once.delay(account, "").id != lost.id


def test_what_is_left_to_a_task_that_a_cold_shutdown_ends_before_its_body_is_free(
    new_worker, account
):
    worker = new_worker(APP)
    step, once, key = worker.module.step, worker.module.once, f"workflow:{account}"
    locked(chain(step.si(account, ""), step.si(account, "stay")), key=key).delay()
    once.delay(account, "stay")
    stay(worker, account, 2)
    inspect = worker.module.app.control.inspect([worker.node])
    # Celery waits for those of which its main process has not heard yet.
    wait_for(lambda: len(inspect.active()[worker.node]) == 2, what="two active tasks")
    worker.stop(signal.SIGQUIT)
    wait_until_free(worker, key, 10)
    wait_for(lambda: once.marked(account, "") is None, 10, "the marker to be free")


@pytest.mark.parametrize("how", ["skip", "skip beside another app"])
def test_the_steps_behind_one_that_skipped_its_body_run_under_the_lock(worker, account, how):
    app, plain, last = worker.module.app, worker.module.plain, worker.module.last
    key = f"workflow:{account}"
    for _ in range(2):
        steps = plain.si(account, "run"), plain.si(account, how), last.si(account, "run")
        locked(chain(*steps), key=key).delay()
    assert entered(worker, account, 2) == ["plain", "last"]
    others_wait(app, key)
    worker.journal.add(f"go {account}")
    assert entered(worker, account, 4) == ["plain", "last", "plain", "last"]
    wait_until_free(worker, key, 10)
    names = [event.name for event in worker.journal.events(account=account)]
    assert names == ["inside", "inside", "outside"] * 2


def test_the_step_behind_one_that_skipped_its_body_waits_if_the_lock_was_lost(worker, account):
    app, plain, last = worker.module.app, worker.module.plain, worker.module.last
    key = f"workflow:{account}"
    steps = plain.si(account, "run"), plain.si(account, "skip later"), last.si(account, "run")
    locked(chain(*steps), key=key).delay()
    stay(worker, account, 1)
    assert Locks(app).release(key)
    with lock_of(worker, key):
        worker.journal.add(f"skip {account}")
        others_wait(app, key)
    worker.journal.add(f"go {account}")
    assert entered(worker, account, 2) == ["plain", "last"]
    wait_until_free(worker, key, 10)


def test_each_step_behind_one_that_skipped_its_body_waits_if_one_of_two_locks_was_lost(
    worker, account
):
    app, plain, last = worker.module.app, worker.module.plain, worker.module.last
    outer, inner = f"outer:{account}", f"workflow:{account}"
    both = group(last.si(account, "run") for _ in range(2))
    steps = chain(plain.si(account, "run"), plain.si(account, "skip later"), both)
    locked(locked(steps, key=inner), key=outer).delay()
    stay(worker, account, 1)
    assert Locks(app).release(inner)
    with lock_of(worker, inner):
        worker.journal.add(f"skip {account}")
        others_wait(app, inner, 2)
    worker.journal.add(f"go {account}")
    assert entered(worker, account, 3) == ["plain", "last", "last"]
    wait_until_free(worker, outer, 10)
    wait_until_free(worker, inner, 10)
