"""A message that Celery puts back when its process has passed the hard time limit runs again,
whatever belongs to it."""

from __future__ import annotations

import celery
import pytest
from celery import chain

from celery_relock import locked
from tests.support.parked import wait_until_parked

pytestmark = pytest.mark.skipif(
    celery.VERSION < (5, 7), reason="until Celery 5.7 such a message is rejected for good"
)


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker("tests.worker.apps.put_back", concurrency=3)


def _began(worker, account, count):
    return worker.journal.wait_for("began", count=count, account=account)


def test_it_runs_again_though_it_was_parked_before(worker, account):
    worker.module.holds.delay(account)
    worker.journal.wait_for("holds")
    worker.module.waits_for_its_lock.delay(account, 1)
    wait_until_parked(worker, f"account:{account}")
    worker.journal.add(f"free {account}")
    _began(worker, account, 2)


def test_it_runs_again_before_those_that_were_sent_after_it(worker, account):
    for number in (1, 2):
        worker.module.has_its_turn.delay(account, number)
    events = _began(worker, account, 3)
    assert [(e["number"], e["in_order"]) for e in events] == [(1, True), (1, True), (2, True)]


def test_the_retry_for_which_a_lock_was_kept_runs_again(worker, account):
    worker.module.keeps_its_lock.delay(account, 1)
    _began(worker, account, 3)


def test_it_has_its_dedup_marker_again(worker, account):
    worker.module.is_no_duplicate.delay(account, 1)
    assert [e["marked"] for e in _began(worker, account, 2)] == [True, True]


def test_a_step_of_a_workflow_runs_again_and_the_workflow_goes_on(worker, account):
    one, two = (worker.module.is_a_step.si(account, number) for number in (1, 2))
    locked(chain(one, two), key=f"account:{account}").delay()
    assert [e["number"] for e in _began(worker, account, 3)] == [1, 1, 2]
