"""No lock is left out in silence, whatever else is at work in the process."""

from __future__ import annotations

import logging

import pytest

from celery_relock.errors import LockConfigError
from tests.support import wait_for
from tests.support.parked import lock_of


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker("tests.worker.apps.bypass", concurrency=1)


@pytest.mark.parametrize("name", ["instrumented", "answers_itself"])
def test_a_task_that_ends_without_its_lock_fails_and_says_what_stands_between(
    worker, account, name
):
    sent = getattr(worker.module, name).delay(account)
    with pytest.raises(LockConfigError, match=r"In between stand: .*tests\.worker\.apps\.bypass"):
        sent.get(timeout=20)


@pytest.mark.parametrize("name", ["instrumented", "answers_itself"])
def test_so_does_one_that_is_applied_here_and_now(worker, account, name):
    with pytest.raises(LockConfigError, match="ended without its lock"):
        getattr(worker.module, name).apply((account,)).get()


@pytest.mark.parametrize("name", ["instrumented", "answers_itself"])
def test_so_does_one_that_is_called_directly_in_a_task_or_outside_of_any(worker, account, name):
    task = getattr(worker.module, name)
    with pytest.raises(LockConfigError, match=r"a direct call of .* ended without its lock"):
        task(account)
    with pytest.raises(LockConfigError, match=r"a direct call of .* ended without its lock"):
        worker.module.calls_directly.delay(task.name, account).get(timeout=20)


@pytest.mark.parametrize("name", ["locked", "takes_no_lock"])
def test_one_that_went_through_its_lock_or_has_none_is_called_directly(worker, account, name):
    task = getattr(worker.module, name)
    assert task(account) == worker.module.calls_directly.delay(task.name, account).get(timeout=20)


def test_one_that_is_not_even_called_is_a_failure_in_the_end(worker, account):
    sent = worker.module.called_by_another_way.delay(account)
    worker.wait_for_log(rf"called_by_another_way\[{sent.id}\] ended without its lock")
    wait_for(lambda: worker.module.app.AsyncResult(sent.id).state == "FAILURE")


@pytest.mark.parametrize("name", ["locked", "takes_no_lock"])
def test_a_task_that_went_through_its_lock_or_has_none_does_not(worker, account, name):
    assert getattr(worker.module, name).delay(account).get(timeout=20)


def _failed(worker, name, account):
    worker.module.app.tasks[name].delay(account)
    return worker.journal.wait_for("failed", account=account, task=name)[0]


def test_the_traceback_of_a_locked_task_is_as_small_as_a_plain_one_s_and_ends_in_its_body(
    worker, account
):
    plain, locked = (_failed(worker, name, account) for name in ("fails_plain", "fails_locked"))
    # A pipe takes 64 KB, and a child that cannot send the rest waits for the main process.
    assert locked["size"] < 1.4 * plain["size"]
    assert plain["frames"][-1] == locked["frames"][-1] == "fails"
    assert len(locked["frames"]) <= len(plain["frames"]) + 3


def test_the_traceback_of_an_error_of_the_lock_says_where_it_was_raised(worker, account):
    with lock_of(worker, f"account:{account}"):
        assert _failed(worker, "refused", account)["frames"][-2:] == ["run", "_decide"]


def test_a_task_with_options_of_a_lock_and_another_base_is_named_when_it_is_first_sent(
    worker, account, caplog
):
    with caplog.at_level(logging.WARNING, "celery_relock"):
        worker.module.looks_locked.delay(account)
        worker.module.looks_locked.delay(account)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "looks_locked is declared with lock_key, lock_ttl and takes NO LOCK" in warning
    assert "base=LockedTask" in warning


def test_it_is_named_when_a_worker_starts(worker):
    worker.wait_for_log(r"looks_locked is declared with lock_key, lock_ttl and takes NO LOCK")


def test_an_option_by_another_name_is_told_in_the_log_of_a_worker_that_starts(worker):
    # With the time and the level of its log, which a worker with --logfile has in that file alone.
    worker.wait_for_log(
        r"WARNING/MainProcess\] task \S+\.misnames_its_key has key='account:.*lock_key"
    )
