"""A message that a hook of its task puts back after the body has ended runs again, as that of a
plain task does."""

from __future__ import annotations

import pytest
from celery import chain

from celery_relock import locked
from celery_relock.admin import Locks
from tests.support import wait_for
from tests.support.parked import wait_until_free


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker("tests.worker.apps.rejected_after", concurrency=2)


@pytest.mark.parametrize("hook", ["on_success", "on_failure", "after_return"])
@pytest.mark.parametrize("how", ["plain", "locked", "ordered", "marked"])
def test_it_runs_until_it_is_put_back_no_more(worker, account, how, hook):
    worker.module.tasks[how, hook].delay(account)
    wait_for(lambda: len(worker.journal.events(f"{how} {hook}")) == 3, 20, "three bodies")
    wait_until_free(worker, account)


@pytest.mark.parametrize("hook", ["on_success", "on_failure", "after_return"])
def test_its_own_cooldown_does_not_keep_it_out(worker, account, hook):
    app, name = worker.module.app, f"cools {hook}"
    worker.module.tasks["cools", hook].delay(account)
    wait_for(lambda: len(worker.journal.events(name)) == 3, 20, "three bodies")

    def cools_down():
        return [each.cooldown for each in Locks(app).get(account).holders] == [True]

    wait_for(cools_down, what="the cooldown")


def test_a_step_of_a_workflow_does_so_and_the_workflow_goes_on(worker, account):
    tasks = worker.module.tasks
    steps = chain(tasks["step", "on_failure"].si(account), tasks["last", ""].si(account))
    locked(steps, key=account).delay()
    wait_for(lambda: worker.journal.events("last "), 20, "the last step")
    assert len(worker.journal.events("step on_failure")) == 3
