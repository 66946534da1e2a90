"""The Redis of the locks fails, that of the broker does not: what a task makes of it."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest

from celery_relock.errors import LockConfigError, LockConflict, LockUnavailable, RelockError
from tests.support import wait_for
from tests.support.messages import Message
from tests.support.parked import lock_of, state_of, wait_until_parked, wait_until_requeued


@pytest.fixture(scope="module")
def worker(module_worker, locks):
    # One process: a second one may have no connection yet when Redis freezes.
    return module_worker(
        "tests.worker.apps.faults", concurrency=1, env={"RELOCK_TEST_LOCKS": locks.url}
    )


@pytest.fixture
def down(locks):
    """The lock Redis is down until `up()` is called, or the test ends."""
    locks.kill()
    state = {"down": True}

    def up():
        if state.pop("down", False):
            locks.restart(keep_data=False)

    yield up
    up()


@pytest.fixture
def refuses(locks):
    """Whether the lock Redis refuses all scripts, as a user without the right gets it."""

    def refuses(does):
        rights = ("-evalsha", "-eval") if does else ("+@all",)
        locks.client().execute_command("ACL", "SETUSER", "default", *rights)

    yield refuses
    refuses(False)


def _inside(worker, account, timeout=30.0):
    return worker.journal.wait_for("inside", timeout, account=account)


def test_down_at_acquire_raises_and_the_body_does_not_run(worker, account, down):
    result = worker.module.raises.delay(account)
    started = time.monotonic()
    with pytest.raises(LockUnavailable):
        result.get(timeout=20)
    assert time.monotonic() - started < 15
    assert not worker.journal.events("inside", account=account)


def _copy_is_discarded(worker, locks, twin):
    """As soon as Redis can be told that the execution has ended."""
    memory = f"*:d:{twin.execution_id}"
    wait_for(lambda: list(locks.client().scan_iter(match=memory)), what="its end to be remembered")
    twin.deliver()
    worker.wait_for_log(rf"{twin.id}\] is a late copy")
    assert not worker.journal.events("inside", account=twin.account)


def test_a_copy_of_what_failed_while_redis_was_down_is_discarded(worker, locks, down):
    twin = Message(worker, worker.module.raises)
    twin.deliver()
    with pytest.raises(LockUnavailable):
        twin.result.get(timeout=20)
    down()
    _copy_is_discarded(worker, locks, twin)


def test_what_is_refused_its_lock_as_redis_goes_down_fails_with_its_conflict(worker, locks):
    twin = Message(worker, worker.module.is_refused)
    lock = lock_of(worker, twin.lock)
    assert lock.acquire()
    twin.deliver()
    worker.journal.wait_for("asked", account=twin.account)
    locks.kill()
    try:
        twin.let_go()
        with pytest.raises(LockConflict):
            twin.result.get(timeout=30)
    finally:
        locks.restart(keep_data=False)
    with suppress(RelockError):
        lock.release()
    _copy_is_discarded(worker, locks, twin)


def test_down_at_acquire_with_retry_comes_back_until_redis_does(worker, account, down):
    result = worker.module.comes_back.delay(account)
    worker.wait_for_log(rf"{result.id}\] retry: .*again in")
    down()
    seen = result.get(timeout=30)
    assert seen["protected"]
    assert seen["fence"] > 0
    assert seen["retries"] == 0


def test_frozen_at_acquire_with_retry_keeps_what_was_kept_for_the_message(worker, account, locks):
    # What a test before owes would have the one connection to itself, and nothing of this attempt
    # would reach the frozen Redis.
    threads = worker.module.threads
    wait_for(lambda: "relock-later" not in threads.delay().get(timeout=10))
    result = worker.module.keeps_it.delay(account)
    _inside(worker, account)
    worker.wait_for_log(rf"{result.id}\] retry: Retry in 1s")
    locks.pause()
    # The commands of this attempt are executed when nobody waits for their answers any more.
    worker.wait_for_log(rf"{result.id}\] retry: .*again in")
    locks.resume()
    assert result.get(timeout=30)


def test_down_for_longer_than_lock_max_wait_raises_after_all(worker, account, down):
    result = worker.module.comes_back_briefly.delay(account)
    with pytest.raises(LockUnavailable):
        result.get(timeout=30)


def test_down_at_acquire_with_run_goes_on_without_the_lock_and_says_so(worker, account, down):
    result = worker.module.runs_all_the_same.delay(account)
    assert result.get(timeout=20) == {"fence": 0, "protected": False}
    worker.wait_for_log("ERROR.*runs_all_the_same.*RUNS WITHOUT ITS LOCK")


def test_with_the_broker_away_too_the_execution_stays_in_its_slot(worker, account, down):
    result = worker.module.stays_in_its_slot.delay(account)
    worker.wait_for_log("stays_in_its_slot was not sent again")
    down()
    assert result.get(timeout=30)["protected"]


def test_what_stays_in_its_slot_waits_no_longer_than_lock_max_wait(worker, account, down):
    result = worker.module.stays_in_its_slot_briefly.delay(account)
    with pytest.raises(LockUnavailable):
        result.get(timeout=30)
    down()
    assert not worker.journal.events("inside", account=account)


def test_down_at_release_leaves_the_result_as_it_is(worker, account, locks, down):
    down()
    result = worker.module.holds.delay(account)
    _inside(worker, account)
    locks.kill()
    try:
        worker.journal.add(f"free {account}")
        assert result.get(timeout=20) == "what the body returned"
        worker.wait_for_log(rf"WARNING.*Cannot release the lock .*account:{account}.*lease ends it")
    finally:
        locks.restart(keep_data=False)


def test_down_at_release_is_released_when_redis_is_back_and_not_when_the_lease_ends(
    worker, account, locks
):
    result = worker.module.holds_long.delay(account)
    _inside(worker, account)
    locks.client().save()
    locks.kill()
    worker.journal.add(f"free {account}")
    result.get(timeout=20)
    worker.wait_for_log(rf"Cannot release the lock .*account:{account}.*trying again")
    assert not worker.journal.events("released", account=account)
    locks.restart(keep_data=True)
    worker.wait_for_log(rf"The lock .*account:{account}.* is released now")
    assert len(worker.journal.events("released", account=account)) == 1
    assert worker.module.raises.delay(account).get(timeout=30)["protected"]


def test_what_redis_refuses_at_release_is_released_when_it_does_no_more(worker, account, refuses):
    result = worker.module.holds_long.delay(account)
    _inside(worker, account)
    refuses(True)
    worker.journal.add(f"free {account}")
    result.get(timeout=20)
    worker.wait_for_log(rf"Cannot release the lock .*account:{account}.*trying again")
    refuses(False)
    assert worker.module.raises.delay(account).get(timeout=30)["protected"]
    worker.wait_for_log(rf"The lock .*account:{account}.* is released now")


@pytest.mark.parametrize("task", ["raises", "is_rejected"])
def test_a_parked_one_that_fails_as_redis_refuses_does_not_run_later(
    worker, account, locks, refuses, task
):
    """But where its message is rejected, the broker may bring it back, and then it is to run."""
    name, other = f"account:{account}", f"other{account}"
    with lock_of(worker, name):
        result = getattr(worker.module, task).delay(account)
        wait_until_parked(worker, name)
        (parked,) = state_of(worker, name).waiters
        worker.module.holds.delay(other)
        _inside(worker, other)
    wait_until_requeued(worker)
    refuses(True)
    worker.journal.add(f"free {other}")
    with pytest.raises(LockConfigError):
        result.get(timeout=20)
    refuses(False)
    wait_for(lambda: not state_of(worker, name).parked, what="its message to be gone")
    assert not worker.journal.events("inside", account=account)
    memory = list(locks.client().scan_iter(match=f"*:d:{parked.execution_id}"))
    assert len(memory) == (0 if task == "is_rejected" else 1)


def test_the_scripts_are_sent_again_after_script_flush(worker, account, locks):
    assert worker.module.raises.delay(account).get(timeout=20)["protected"]
    locks.client().script_flush()
    result = worker.module.raises.delay(account).get(timeout=20)
    assert result["protected"]


def test_somebody_elses_key_is_told_and_left_alone(worker, account, locks):
    client = locks.client()
    # Learn where the lock's key is from an execution that holds it.
    result = worker.module.holds.delay(account)
    _inside(worker, account)
    (key,) = client.scan_iter(match=f"*account:{account}")
    worker.journal.add(f"free {account}")
    result.get(timeout=20)
    client.set(key, "precious")
    with pytest.raises(LockConfigError, match="relock_namespace"):
        worker.module.raises.delay(account).get(timeout=20)
    assert client.get(key) == b"precious"


def test_an_empty_redis_after_a_restart_serves_at_once(worker, account, locks):
    before = worker.module.raises.delay(account).get(timeout=20)
    locks.restart(keep_data=False)
    after = worker.module.raises.delay(account).get(timeout=20)
    assert after["fence"] > before["fence"]
