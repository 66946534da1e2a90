"""Conflicts where nobody may wait: an error callback in the worker's main process, and a worker
that is hit by many conflicts at once. It goes on taking tasks."""

from __future__ import annotations

import re
import time

import pytest

from celery_relock.errors import LockConflict
from tests.support.apps import LOOK_EVERY
from tests.support.parked import lock_of, wait_until_free


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker("tests.worker.apps.errbacks", concurrency=3, env={LOOK_EVERY: "0.3"})


@pytest.fixture
def held(worker, account):
    sent = worker.module.holds.delay(account)
    worker.journal.wait_for("held", account=account)
    yield sent
    worker.journal.add(f"free {account}")
    sent.get(timeout=20)


def _kill_one_with(worker, errback, account):
    """A child is killed; Celery calls the errback in the main process when it notices."""
    sent = worker.module.dies.apply_async(
        (account,), link_error=getattr(worker.module, errback).s(account)
    )
    worker.kill(pid=worker.journal.wait_for("alive", account=account)[0].pid)
    return sent


@pytest.mark.parametrize("errback", ["waits", "chooses"])
def test_an_errback_in_the_main_process_never_waits_for_its_lock(worker, account, held, errback):
    _kill_one_with(worker, errback, account)
    # By which line Celery logs it depends on its version.
    told = rf"(?:{errback}' raised|callback raised)(?s:.)*?LockConflict\W+(.*account:{account}.*)"
    reason = worker.wait_for_log(re.compile(told), timeout=30)[1]
    assert f"holds[{held.id}]" in reason
    assert "waits for nobody. With one argument" in reason
    started = time.monotonic()
    assert worker.module.ping.delay().get(timeout=30) == "pong"
    assert time.monotonic() - started < 20
    assert lock_of(worker, f"account:{account}").locked()
    assert not worker.journal.events("errback", account=account)


def test_an_errback_in_the_main_process_runs_under_its_lock_when_that_is_free(worker, account):
    sent = _kill_one_with(worker, "waits", account)
    errback = worker.journal.wait_for("errback", account=account)[0]
    assert errback.pid == worker.pid
    assert errback["of"] == sent.id
    assert errback["fence"] > 0
    wait_until_free(worker, f"account:{account}")


def test_the_errback_of_a_hard_time_limit_does_not_wait_either(worker, account, held):
    worker.module.overruns.apply_async((account,), link_error=worker.module.waits.s(account))
    worker.journal.wait_for("alive", account=account)
    told = rf"LockConflict\W.*account:{account}.*holds\[{held.id}\]"
    worker.wait_for_log(told, timeout=30)
    started = time.monotonic()
    assert worker.module.ping.delay().get(timeout=30) == "pong"
    assert time.monotonic() - started < 20


def test_fifty_conflicts_in_a_row_leave_the_worker_as_it_was(worker, account, held):
    results = [worker.module.raises.delay(account) for _ in range(50)]
    for result in results:
        with pytest.raises(LockConflict) as caught:
            result.get(timeout=30)
        assert caught.value.name == f"account:{account}"
        assert caught.value.owner
    assert worker.module.ping.delay().get(timeout=30) == "pong"
    worker.journal.add(f"free {account}")
    held.get(timeout=20)
    assert worker.module.raises.delay(account).get(timeout=30) > 0
