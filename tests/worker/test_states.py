"""`task_track_started`: a task is STARTED from when its body begins, not while it waits."""

from __future__ import annotations

import time

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from celery_relock.errors import LockUnavailable
from tests.support import wait_for
from tests.support.messages import Message
from tests.support.parked import lock_of, state_of, wait_until_parked

APP = "tests.worker.apps.states"


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker(APP, concurrency=2)


def _shows_started_until_the_end(worker, sent, account):
    [inside] = worker.journal.wait_for("inside", account=account)
    assert sent.state == "STARTED"
    assert sent.info == {"pid": inside.pid, "hostname": worker.node}
    worker.journal.add(f"free {account}")
    assert sent.get(timeout=20) == account


@pytest.mark.parametrize("task", ["parks", "blocks", "comes_back"])
def test_an_execution_is_started_when_it_has_its_lock(worker, account, task):
    with lock_of(worker, account):
        sent = getattr(worker.module, task).delay(account)
        shown = {"parks": "BLOCKED", "blocks": "PENDING", "comes_back": "RETRY"}[task]
        if task == "blocks":
            wait_for(lambda: state_of(worker, account).waiting)
        wait_for(lambda: sent.state == shown, what=shown)
        assert not worker.journal.events("inside", account=account)
    _shows_started_until_the_end(worker, sent, account)


@pytest.mark.parametrize("task", ["without_a_lock", "by_annotation", "inherits"])
def test_however_it_is_asked_for_it_is_stored_once_the_body_runs(worker, account, task):
    sent = getattr(worker.module, task).delay(account)
    _shows_started_until_the_end(worker, sent, account)


def test_one_that_was_parked_is_started_then_though_it_tracks_nothing(worker, account):
    with lock_of(worker, account):
        sent = worker.module.does_not_track.delay(account)
        wait_until_parked(worker, account)
    _shows_started_until_the_end(worker, sent, account)


# Celery's own way to store a result, with redis-py 8.
@pytest.mark.filterwarnings("ignore:Call to deprecated:DeprecationWarning")
@pytest.mark.parametrize("error", [LockUnavailable("away"), SoftTimeLimitExceeded()], ids=repr)
@pytest.mark.parametrize("task", ["does_not_track", "is_acknowledged_late"])
def test_one_that_was_parked_and_has_failed_since_does_not_run(worker, account, task, error):
    """Its failure could not be told to the Redis of the locks."""
    with lock_of(worker, account):
        sent = getattr(worker.module, task).delay(account)
        wait_until_parked(worker, account)
        worker.module.app.backend.store_result(sent.id, error, "FAILURE")
    worker.wait_for_log(rf"{sent.id}\] has ended already")
    assert sent.state == "FAILURE"
    assert not worker.journal.events("inside", account=account)
    wait_for(lambda: not state_of(worker, account).waiting, what="its place to be free")


# Celery's own way to store a result, with redis-py 8.
@pytest.mark.filterwarnings("ignore:Call to deprecated:DeprecationWarning")
def test_one_that_has_the_id_of_one_that_failed_before_runs_when_it_was_parked(worker, account):
    """A copy of it, which stores no BLOCKED over that failure."""
    parked = {"attempts": 1, "since": time.time() + 1, "parked_at": account}
    message = Message(worker, worker.module.does_not_track, account, **parked)
    worker.module.app.backend.store_result(message.id, SoftTimeLimitExceeded(), "FAILURE")
    message.deliver()
    worker.journal.wait_for("inside", account=account)
    worker.journal.add(f"free {account}")
    wait_for(lambda: message.result.state == "SUCCESS", what="its end")


def test_so_is_one_whose_lock_is_free_when_it_is_to_be_parked(worker, account):
    with lock_of(worker, account):
        sent = worker.module.goes_on_in_its_slot.delay(account)
        wait_for(lambda: sent.state == "BLOCKED")
    worker.journal.add(f"open {sent.id}")
    _shows_started_until_the_end(worker, sent, account)


def test_one_that_was_parked_and_ends_without_a_result_is_not_blocked_for_ever(worker, account):
    with lock_of(worker, account):
        sent = worker.module.ignores.delay(account)
        wait_until_parked(worker, account)
    worker.journal.add(f"free {account}")
    worker.wait_for_log(rf"{sent.id}\] ignored")
    assert sent.state == "STARTED"


# Celery's own way to store a result, with redis-py 8.
@pytest.mark.filterwarnings("ignore:Call to deprecated:DeprecationWarning")
@pytest.mark.parametrize("when", ["before it came", "parked"])
def test_one_that_is_aborted_while_it_waits_finds_out_when_it_runs(worker, account, when):
    with lock_of(worker, account):
        sent = worker.module.can_be_aborted.apply_async((account,), countdown=1)
        if when == "parked":
            wait_until_parked(worker, account)
        sent.abort()
        wait_until_parked(worker, account)
        assert sent.state == "ABORTED"
    wait_for(lambda: sent.state == "SUCCESS", what="its end")
    assert sent.result is True


@pytest.mark.parametrize("task", ["does_not_track", "ignores_its_result"])
def test_it_is_stored_of_no_other_task(worker, account, task):
    sent = getattr(worker.module, task).delay(account)
    worker.journal.wait_for("inside", account=account)
    assert sent.state == "PENDING"
    worker.journal.add(f"free {account}")


def test_an_inline_call_leaves_the_state_of_its_caller(worker, account):
    sent = worker.module.calls.delay(account)
    [inside] = worker.journal.wait_for("inside", account=account)
    assert (sent.state, sent.info["pid"]) == ("STARTED", inside.pid)
    worker.journal.add(f"free {account}")
    assert sent.get(timeout=20) == account


# Celery's own way to store a result, with redis-py 8: as an error it would hide one.
@pytest.mark.filterwarnings("ignore:Call to deprecated:DeprecationWarning")
def test_an_eager_call_stores_nothing(worker, account):
    worker.journal.add(f"free {account}")
    done = worker.module.parks.apply((account,))
    assert done.get() == account
    assert worker.module.app.AsyncResult(done.id).state == "PENDING"
