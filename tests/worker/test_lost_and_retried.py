"""A task whose process is lost before its body, and which Celery retries then
(`retry_on_worker_lost`): the retry is a new execution, and what the lost one had is free."""

from __future__ import annotations

import celery
import pytest
from celery import chain

from celery_relock import locked
from tests.support import wait_for
from tests.support.apps import LOOK_EVERY
from tests.support.parked import lock_of, wait_until_free, wait_until_parked

pytestmark = pytest.mark.skipif(celery.VERSION < (5, 7), reason="Celery has this option since 5.7")


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker("tests.worker.apps.left_behind", concurrency=2, env={LOOK_EVERY: "0.2"})


def runs(worker, account):
    worker.journal.wait_for("began", 15, account=account)


def test_its_marker_is_free(worker, m, account):
    first = m.is_killed_once.delay(account)
    runs(worker, account)
    wait_for(lambda: m.is_killed_once.marked(account) is None, 10, "the marker to be free")
    assert m.is_killed_once.delay(account).id != first.id


def test_its_order_goes_on_before_the_gap_is_over_and_is_told_to_be_left(worker, m, account):
    m.is_killed_in_order.delay(account)
    runs(worker, account)
    [ran] = worker.journal.events("ran", account=account)
    assert ran["in_order"] is False


def test_the_lock_of_its_workflow_is_free_when_it_has_run(worker, m, account):
    steps = chain(m.is_a_step.si(account), m.is_killed_in_a_workflow.si(account))
    locked(steps, key=f"workflow:{account}").delay()
    runs(worker, account)
    wait_until_free(worker, f"workflow:{account}", 10)


def test_its_message_that_was_parked_comes_no_more(worker, m, account):
    name = f"account:{account}"
    with lock_of(worker, name):
        m.is_killed_after_a_wait.delay(account)
        wait_until_parked(worker, name)
    runs(worker, account)
    wait_until_parked(worker, name, 0)
    assert len(worker.journal.events("began", account=account)) == 1
