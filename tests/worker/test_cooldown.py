"""`lock_cooldown` begins with a success, and where the lock was acquired."""

from __future__ import annotations

import pytest
from celery import chain
from celery.exceptions import BackendStoreError, WorkerLostError

from celery_relock.admin import Locks
from tests.support import wait_for
from tests.support.parked import wait_until_free


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker("tests.worker.apps.cooldown", concurrency=2)


def cools_down(worker, name):
    return [each.cooldown for each in Locks(worker.module.app).get(name).holders] == [True]


def bodies(worker, account):
    return len(worker.journal.events("ran", account=account))


@pytest.mark.parametrize("link", [False, True])
def test_there_is_none_when_the_result_or_the_next_step_cannot_be_encoded(worker, account, link):
    call = worker.module.returns_what_cannot_be_stored.s(account)
    if link:
        call.link(worker.module.after.s(account))
    with pytest.raises(Exception, match="not JSON serializable"):
        call.delay().get(timeout=20)
    wait_until_free(worker, account)


def test_there_is_none_when_the_result_cannot_be_stored(worker, account):
    with pytest.raises(BackendStoreError):
        worker.module.returns_too_much.delay(account).get(timeout=20)
    wait_until_free(worker, account)


@pytest.mark.parametrize("name", ["is_retried", "is_retried_and_kept", "goes_on"])
def test_a_retry_that_was_sent_is_not_kept_out_and_begins_one(worker, account, name):
    getattr(worker.module, name).delay(account)
    wait_for(lambda: bodies(worker, account) == 2, 10, "the body of the retry")
    wait_for(lambda: cools_down(worker, account), what="the cooldown")


def test_a_message_that_was_executed_by_a_killed_process_is_not_kept_out(worker, account):
    m = worker.module
    sent = chain(m.is_killed_and_comes_again.s(account), m.after.s(account)).delay()
    assert sent.get(timeout=20) == 2
    assert cools_down(worker, account)


def test_there_is_none_when_the_process_was_killed_before_it_told_of_the_success(worker, account):
    with pytest.raises(WorkerLostError):
        worker.module.is_killed.delay(account).get(timeout=20)
    wait_until_free(worker, account)


def test_there_is_none_when_it_was_revoked_before_it_told_of_the_success(worker, account):
    sent = worker.module.hangs.delay(account)
    wait_for(lambda: worker.journal.events("hangs", account=account), what="the end of the body")
    assert cools_down(worker, account)
    sent.revoke(terminate=True, signal="SIGKILL")
    wait_until_free(worker, account)


@pytest.mark.parametrize("name", ["descendant", "of the workflow"])
def test_there_is_none_where_the_lock_was_re_entered(worker, account, name):
    assert worker.module.holds.delay(account, name).get(timeout=20) is True
    wait_until_free(worker, account)


def test_it_begins_at_those_of_several_locks_that_were_acquired(worker, account):
    name = "descendant with another lock"
    assert worker.module.holds.delay(account, name).get(timeout=20) is False
    wait_until_free(worker, account)
    assert cools_down(worker, f"{account} too")
