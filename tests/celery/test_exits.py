"""However a body ends, its lock is free at once and the outcome is what the body made it."""

from __future__ import annotations

import signal
import time
import uuid

import pytest
from billiard.exceptions import Terminated, WorkerLostError
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError

from celery_relock import Lock
from tests.support import wait_for
from tests.support.sections import sections


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker("tests.celery.apps.exits", concurrency=2)


@pytest.fixture
def account():
    return uuid.uuid4().hex


@pytest.fixture
def lock(worker, account):
    conf = worker.module.app.conf
    return Lock(conf.relock_url, f"account:{account}", namespace=conf.relock_namespace)


def _events(worker, name, account, count=1, timeout=15.0):
    def found(events):
        return [e for e in events if e.name == name and e.data.get("account") == account]

    return found(worker.journal.wait_for(lambda events: found(events)[count - 1 :], timeout))


def _is_free_at_once(worker, account, lock):
    # The lease is 30 s, so a lock that is free now was given back.
    _events(worker, "inside", account)
    _events(worker, "over", account)
    assert not lock.locked()


def test_after_success(worker, account, lock):
    result = worker.module.returns.delay(account)
    _is_free_at_once(worker, account, lock)
    assert (result.get(timeout=20), result.state) == (account, "SUCCESS")


def test_after_an_exception(worker, account, lock):
    result = worker.module.raises.delay(account)
    _is_free_at_once(worker, account, lock)
    with pytest.raises(ValueError, match=account):
        result.get(timeout=20)


def test_after_retry_and_during_its_countdown(worker, account, lock):
    result = worker.module.retries.delay(account)
    _is_free_at_once(worker, account, lock)
    assert result.state == "RETRY"
    assert result.get(timeout=20) == "after a retry"


def test_after_ignore(worker, account, lock):
    result = worker.module.ignores.delay(account)
    _is_free_at_once(worker, account, lock)
    assert result.state == "PENDING"


def test_after_reject(worker, account, lock):
    result = worker.module.rejects.delay(account)
    _is_free_at_once(worker, account, lock)
    wait_for(lambda: result.state in ("FAILURE", "PENDING"))
    assert len(_events(worker, "inside", account)) == 1


def test_after_reject_with_requeue_the_message_comes_back_and_runs(worker, account, lock):
    result = worker.module.goes_back_to_the_queue.delay(account)
    assert result.get(timeout=20) == 2
    first, second = _events(worker, "inside", account, count=2)
    assert first["fence"] < second["fence"]
    # At once: taken for a late copy of a run that has ended, it would first look for its result.
    assert second.at - first.at < 1.5
    assert not lock.locked()


def test_after_the_soft_time_limit(worker, account, lock):
    result = worker.module.runs_into_its_soft_limit.delay(account)
    _is_free_at_once(worker, account, lock)
    with pytest.raises(SoftTimeLimitExceeded):
        result.get(timeout=20)


def test_after_replace(worker, account, lock):
    result = worker.module.is_replaced.delay(account)
    _is_free_at_once(worker, account, lock)
    assert result.get(timeout=20) == "from the other"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_after_being_terminated(worker, account, lock, name):
    result = worker.module.is_terminated.delay(account)
    _events(worker, "inside", account)
    worker.module.app.control.revoke(result.id, terminate=True, signal=name)
    _is_free_at_once(worker, account, lock)
    with pytest.raises((TaskRevokedError, SoftTimeLimitExceeded, Terminated)):
        result.get(timeout=20)


def test_after_sys_exit(worker, account, lock):
    result = worker.module.exits.delay(account)
    _is_free_at_once(worker, account, lock)
    with pytest.raises(WorkerLostError):
        result.get(timeout=20)


def test_a_body_that_outlives_its_lease_keeps_its_lock(worker, account):
    # Six seconds under a lease of 1.5 s, while another run wants in.
    long = worker.module.outlives_its_lease.delay(account, 6)
    _events(worker, "inside", account)
    short = worker.module.outlives_its_lease.delay(account, 0.3)
    assert long.get(timeout=30) > 0.4
    assert short.get(timeout=30) > 0.4
    assert len(sections(worker.journal.events(), f"account:{account}")) == 2


def test_the_lock_of_a_killed_child_is_free_when_its_lease_has_ended(worker, account, lock):
    worker.module.is_killed.delay(account)
    (inside,) = _events(worker, "inside", account)
    worker.kill(signal.SIGKILL, pid=inside.pid)
    killed = time.monotonic()
    assert lock.locked()
    wait_for(lambda: not lock.locked(), timeout=10)
    took = time.monotonic() - killed
    print(f"free {took:.2f} s after SIGKILL, under a lease of 1.5 s")
    assert took < 1.6
    assert worker.module.returns.delay(account).get(timeout=20) == account
