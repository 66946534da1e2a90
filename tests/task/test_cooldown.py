"""`lock_cooldown`: after a success the name stays taken for a while."""

from __future__ import annotations

import threading
import uuid

import pytest
from celery import chain

from celery_relock import LockedTask, is_dropped, locked, signals
from celery_relock.admin import Locks
from celery_relock.errors import LockConfigError, LockConflict
from tests.support import wait_for


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker("tests.task.apps.calls")


def test_after_a_success_whoever_comes_meets_the_conflict_policy(m, account):
    assert m.cools_for_long.delay(account).get(timeout=20) == "ran"

    dropped = m.cools_for_long.apply_async((account,), lock_on_conflict="drop").get(timeout=20)
    assert is_dropped(dropped)
    assert "cools down for" in dropped["reason"]
    assert f"after {m.cools_for_long.name}[" in dropped["reason"]
    told = []

    def hear(reason, **_):
        told.append(reason)

    signals.lock_conflict.connect(hear)
    try:
        with pytest.raises(LockConflict, match="cools down"):
            m.cools_for_long.apply((account,), lock_on_conflict="raise").get()
    finally:
        signals.lock_conflict.disconnect(hear)
    assert len(told) == 1
    assert "cools down for" in told[0], "an event and a signal say it as well"
    (holder,) = Locks(m.app).get(f"cool:{account}").holders
    assert (holder.cooldown, holder.kept, holder.task) == (True, False, m.cools_for_long.name)


def test_a_parked_execution_runs_when_the_cooldown_is_over(worker, m, account):
    sent = [m.cools.delay(account), m.cools.delay(account)]

    assert [each.get(timeout=20) for each in sent] == ["ran", "ran"]
    worker.wait_for_log(rf"\[({sent[0].id}|{sent[1].id})\] parked: ")
    earlier, later = sorted(each.date_done for each in sent)
    # The result is stored a little later than the cooldown begins.
    assert (later - earlier).total_seconds() > 0.5


def test_after_a_failure_the_lock_is_free(m, account):
    with pytest.raises(ValueError, match="broken"):
        m.cools.delay(account, do="broken").get(timeout=20)

    assert m.cools.lock_for(account).acquire(blocking=False)


def test_nobody_of_the_same_workflow_acquires_either(m, account):
    sent = chain(
        m.cools_for_long.si(account),
        m.other_of_the_workflow.si(account).set(lock_on_conflict="drop"),
    ).delay()

    assert is_dropped(sent.get(timeout=20))


def test_a_waiter_in_a_thread_gets_it_after_the_cooldown(m, account):
    m.cools(account)
    got = threading.Event()

    def wait():
        with m.cools.lock_for(account):
            got.set()

    threading.Thread(target=wait).start()
    wait_for(lambda: Locks(m.app).get(f"cool:{account}").waiting, what="the thread to wait")
    assert got.wait(20)


def test_a_lock_that_a_workflow_keeps_has_no_cooldown(m, account):
    declare = m.app.task(
        name=uuid.uuid4().hex, base=LockedTask, lock_cooldown=1, lock_hold="workflow"
    )

    def never(): ...

    with pytest.raises(LockConfigError, match="whichever step declares one"):
        declare(never)()

    steps = chain(m.cools_for_long.si(account), m.cools_for_long.si(account))
    assert locked(steps, key=f"cool:{account}").delay().get(timeout=20) == "ran"
    wait_for(lambda: not Locks(m.app).get(f"cool:{account}").holders, what="the end of the lock")
