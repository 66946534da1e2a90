"""Redis cannot be reached when a marker is to be released, just before its body begins."""

from __future__ import annotations

import pytest

from celery_relock.errors import LockUnavailable
from tests.support.parked import engine_here, lock_of


@pytest.fixture(scope="module")
def worker(module_worker, proxy):
    env = {"RELOCK_TEST_LOCKS": proxy.url}
    return module_worker("tests.dedup.apps.redis_faults", concurrency=1, env=env)


@pytest.fixture
def unheard(proxy, account):
    """The release of the marker, of which nobody hears. The next release is that of the lock."""
    yield proxy.hold(of="release", text=account)
    proxy.forget()


def _began(worker, account):
    return worker.journal.events("began", account=account)


@pytest.mark.parametrize("executed", [False, True], ids=["on its way", "executed"])
def test_a_call_that_is_to_run_later_runs_once(worker, m, unheard, account, executed):
    first = m.comes_back.delay(account)
    assert unheard.arrived.wait(30)
    if executed:
        unheard.deliver()
    worker.wait_for_log(rf"{first.id}\] retry: Cannot release the dedup marker.*again in")
    assert first.get(timeout=30) == first.id
    second = m.comes_back.delay(account)
    assert second.get(timeout=30) == second.id != first.id
    assert len(_began(worker, account)) == 2


def test_a_call_that_is_to_run_later_counts_until_it_begins(worker, m, unheard, account):
    first = m.comes_back.delay(account)
    assert unheard.arrived.wait(30)
    holder = lock_of(worker, f"account:{account}")
    assert not holder.acquire(blocking=False)
    worker.wait_for_log(rf"{first.id}\] retry: Cannot release the dedup marker.*again in")
    with holder:
        assert m.comes_back.delay(account).id == first.id
    assert first.get(timeout=30) == first.id
    assert len(_began(worker, account)) == 1


def test_with_the_broker_away_too_it_begins_in_its_slot(worker, m, unheard, account):
    m.stays.delay(account).get(timeout=30)
    worker.wait_for_log("stays was not sent again")
    assert [each["lost"] for each in _began(worker, account)] == [False]


def test_what_loses_its_lock_meanwhile_does_not_begin(worker, m, unheard, account):
    result = m.stays_briefly.delay(account)
    assert unheard.arrived.wait(30)
    engine_here(m.app).backend.force_release(f"account:{account}")
    with pytest.raises(LockUnavailable):
        result.get(timeout=30)
    assert not _began(worker, account)


def test_by_default_it_fails_and_its_error_says_what_to_set(worker, m, unheard, account):
    with pytest.raises(LockUnavailable, match=rf"dedup marker.*{account}.*lock_on_unavailable"):
        m.raises.delay(account).get(timeout=30)
    assert not _began(worker, account)


def test_a_body_that_is_to_run_without_redis_begins(worker, m, unheard, account):
    m.runs.delay(account).get(timeout=30)
    assert len(_began(worker, account)) == 1
