"""Retries: the lock is released for the countdown, or kept for the retry if the task says so."""

from __future__ import annotations

import time

import celery
import pytest
from celery.exceptions import MaxRetriesExceededError

from celery_relock import locked
from celery_relock.errors import LockConfigError, LockConflict, LockDeadlock
from tests.support import new_namespace, wait_for
from tests.support.messages import Message
from tests.support.parked import lock_of, wait_until_free

APP = "tests.worker.apps.retry"


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker(APP, concurrency=3)


def _inside(worker, account, count, timeout=30.0):
    """So many entries into the lock, in their order."""
    return worker.journal.wait_for("inside", timeout, count, account=account)


def _who(entries):
    return [(entry["task"], entry["retries"]) for entry in entries]


def test_the_lock_is_released_for_a_countdown_longer_than_the_lease(worker, account):
    sent = worker.module.gives_back.delay(account, 3.0)
    _inside(worker, account, 1)
    worker.module.stranger.delay(account).get(timeout=20)
    sent.get(timeout=20)
    entries = _inside(worker, account, 3)
    assert _who(entries) == [("gives_back", 0), ("stranger", 0), ("gives_back", 1)]
    assert entries[0]["fence"] < entries[1]["fence"] < entries[2]["fence"]
    assert entries[2]["continuous"]  # nothing was to be kept


def test_a_lock_that_is_kept_outlasts_the_countdown_and_nobody_acquires_between(worker, account):
    sent = worker.module.keeps.delay(account, 2.5)
    _inside(worker, account, 1)
    other = worker.module.stranger.delay(account)
    sent.get(timeout=20)
    other.get(timeout=20)
    entries = _inside(worker, account, 3)
    assert _who(entries) == [("keeps", 0), ("keeps", 1), ("stranger", 0)]
    assert entries[0]["fence"] == entries[1]["fence"] < entries[2]["fence"]
    assert entries[1]["continuous"]
    assert not entries[1]["reentered"]


def test_it_is_not_kept_for_a_retry_beyond_its_expiry(worker, account):
    worker.module.keeps.apply_async((account, 60.0), expires=2)
    _inside(worker, account, 1)
    worker.module.stranger.delay(account).get(timeout=20)


def test_a_message_without_our_header_is_retried_from_inside_of_a_direct_call(worker, account):
    message = Message(worker, worker.module.retries_inside, account, with_header=False)
    message.deliver()
    assert message.result.get(timeout=20) == "retried"


def test_it_is_kept_from_retry_to_retry(worker, account):
    worker.module.keeps.delay(account, 0.2, times=2).get(timeout=20)
    entries = _inside(worker, account, 3)
    assert len({entry["fence"] for entry in entries}) == 1
    assert all(entry["continuous"] for entry in entries)
    assert not lock_of(worker, f"account:{account}").locked()


@pytest.mark.parametrize("name", ["keeps_by_itself", "keeps_as_registered"])
def test_autoretry_keeps_it_too(worker, account, name):
    getattr(worker.module, name).delay(account).get(timeout=20)
    first, second = _inside(worker, account, 2)
    assert first["fence"] == second["fence"]
    assert second["continuous"]


def test_it_is_released_when_the_retries_are_used_up(worker, account):
    with pytest.raises(MaxRetriesExceededError):
        worker.module.gives_up.delay(account).get(timeout=20)
    assert not lock_of(worker, f"account:{account}").locked()
    assert len(_inside(worker, account, 2)) == 2


def test_a_retry_that_cannot_name_its_lock_frees_what_is_kept_for_it(worker, account):
    with pytest.raises(LockConfigError):
        worker.module.forgets_its_lock.delay(account).get(timeout=20)
    wait_until_free(worker, f"account:{account}")


def test_it_is_released_before_on_failure_when_autoretry_makes_no_more_retries(worker, account):
    with pytest.raises(ValueError, match=account):
        worker.module.gives_up_by_itself.delay(account).get(timeout=20)
    [failed] = worker.journal.wait_for("failed", account=account)
    assert failed["free"]


@pytest.mark.parametrize("policy", ["parked", "blocked", "sent_again", "refused"])
def test_a_retry_that_comes_before_its_predecessor_is_out_waits_for_it(worker, account, policy):
    getattr(worker.module, f"lingers_{policy}").delay(account)
    first, second = _inside(worker, account, 2)
    [over] = worker.journal.events("over", account=account)
    assert second.at >= over.at
    assert first["fence"] == second["fence"]
    assert second["continuous"]
    wait_until_free(worker, f"account:{account}")


@pytest.mark.parametrize("beside", ["nobody", "an older one"])
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *(("and_keeps", policy) for policy in ("wait", "raise", "drop")),
        ("and_holds", "wait"),
        ("as_a_step", "raise"),
    ],
)
def test_a_retry_takes_no_other_permit_beside_that_of_its_predecessor(
    worker, account, name, policy, beside
):
    key = f"account:{account}"
    task = getattr(worker.module, f"lingers_{name}")
    older = lock_of(worker, key, limit=2)
    if beside == "an older one":
        assert older.acquire(blocking=False)
    if name == "as_a_step":
        locked(task.si(account), key=key, limit=2, on_gap="raise").delay()
    else:
        task.apply_async((account,), lock_on_conflict=policy)
    first, second = _inside(worker, account, 2)
    [over] = worker.journal.events("over", account=account)
    assert second.at >= over.at
    assert first["fence"] == second["fence"]
    assert first["continuous"]
    assert second["continuous"]
    assert f"{key}' lost" not in worker.log()
    if older.owned():
        older.release()
    wait_until_free(worker, key)


def test_a_retry_waits_for_its_predecessor_no_longer_than_it_may_wait(worker, account):
    older = lock_of(worker, f"account:{account}", limit=2)
    assert older.acquire(blocking=False)
    sent = worker.module.stays_as_one_of_two.apply_async((account, 0), lock_max_wait=0.5)
    [first] = _inside(worker, account, 1)
    with pytest.raises(LockConflict, match="lock_max_wait"):
        sent.get(timeout=20)
    worker.kill(pid=first.pid)
    older.release()
    wait_until_free(worker, f"account:{account}")


@pytest.mark.parametrize("name", ["and_keeps", "and_holds", "in_order"])
def test_a_retry_that_waits_for_its_predecessor_runs_once_the_state_retry_is_stored(
    worker, account, name
):
    # Else Celery can write RETRY over the retry's SUCCESS.
    getattr(worker.module, f"stores_late_{name}").delay(account)
    _, second = _inside(worker, account, 2)
    [over] = worker.journal.wait_for("over", account=account)
    assert second.at >= over.at
    wait_until_free(worker, f"account:{account}")


@pytest.mark.parametrize("name", ["goes_on", "goes_on_and_cools_down", "goes_on_and_fails"])
def test_it_is_kept_for_a_retry_with_whose_sending_the_body_does_not_end(worker, account, name):
    getattr(worker.module, name).delay(account)
    first, second = _inside(worker, account, 2)
    assert first["fence"] == second["fence"]
    assert second["continuous"]
    wait_until_free(worker, f"account:{account}")


def test_a_retry_finds_out_that_what_was_kept_for_it_is_gone(worker, account):
    sent = worker.module.keeps.delay(account, 3.0)
    first = _inside(worker, account, 1)[0]
    worker.wait_for_log(rf"{sent.id}\] retry: ")
    lock = lock_of(worker, f"account:{account}")
    assert lock._engine.backend.force_release(lock.name)
    sent.get(timeout=20)
    second = _inside(worker, account, 2)[1]
    assert second["fence"] > first["fence"]
    assert not second["continuous"]
    worker.wait_for_log(rf"WARNING.*account:{account}' lost.*was kept for this retry")


@pytest.mark.parametrize("is_gone", [True, False])
def test_what_a_retry_calls_finds_out_that_what_was_kept_for_it_is_gone(worker, account, is_gone):
    sent = worker.module.keeps_and_calls.delay(account, 3.0 if is_gone else 0.0)
    worker.wait_for_log(rf"{sent.id}\] retry: ")
    lock = lock_of(worker, f"account:{account}")
    if is_gone:
        assert lock._engine.backend.force_release(lock.name)
    sent.get(timeout=20)
    _, *told = _inside(worker, account, 5)
    assert [each["continuous"] for each in told] == [not is_gone] * 4


@pytest.mark.parametrize("how", ["succeeds", "fails"])
def test_a_retry_that_is_sent_outside_of_the_lock_finds_out_that_nothing_was_kept(
    worker, account, how
):
    getattr(worker.module, f"{how}_and_retries_outside").delay(account)
    second = _inside(worker, account, 2)[1]
    assert not second["continuous"]
    wait_until_free(worker, f"account:{account}")


def test_a_retry_that_is_revoked_frees_what_is_kept_for_it(worker, account):
    sent = worker.module.keeps.delay(account, 3.0)
    worker.wait_for_log(rf"{sent.id}\] retry: ")
    assert lock_of(worker, f"account:{account}").locked()
    worker.module.app.control.revoke(sent.id)
    # The lease would last for five minutes more; Celery discards the message when it is due.
    wait_until_free(worker, f"account:{account}")
    assert len(_inside(worker, account, 1)) == 1


def test_it_is_kept_though_the_process_that_sent_the_retry_is_killed(worker, account):
    sent = worker.module.keeps.delay(account, 4.0)
    first = _inside(worker, account, 1)[0]
    worker.wait_for_log(rf"{sent.id}\] retry: ")
    # Until then Celery would take the whole task for lost.
    inspect = worker.module.app.control.inspect(timeout=0.3)
    wait_for(lambda: not any((inspect.active() or {"": [1]}).values()), what="the end of the run")
    worker.kill(pid=first.pid)
    sent.get(timeout=20)
    second = _inside(worker, account, 2)[1]
    assert second["fence"] == first["fence"]
    assert second["continuous"]


@pytest.mark.parametrize("policy", ["wait", "block"])
@pytest.mark.parametrize(
    "name", ["stays_and_keeps", "stays_as_one_of_two", "stays_in_order", "stays_marked"]
)
def test_a_retry_that_is_here_runs_though_the_process_that_sent_it_is_killed(
    worker, account, name, policy
):
    task = getattr(worker.module, name)
    sent = task.apply_async((account, 0), lock_on_conflict=policy)
    first = _inside(worker, account, 1)[0]
    received = f"{sent.id}] received"
    wait_for(lambda: worker.log().count(received) >= 2, what="its retry")
    worker.kill(pid=first.pid)
    assert _who(_inside(worker, account, 2)) == [(name, 0), (name, 1)]


@pytest.mark.parametrize("name", ["stays_and_keeps", "stays_in_order", "stays_marked"])
def test_a_retry_that_is_not_due_is_not_lost_with_the_process_that_sent_it(worker, account, name):
    # Celery looks for a lost child every 5 s (`AsynPool.timers`), if its pipe ends before it does.
    sent = getattr(worker.module, name).delay(account, 8.0)
    first = _inside(worker, account, 1)[0]
    received = f"{sent.id}] received"
    wait_for(lambda: worker.log().count(received) == 2, what="its retry")
    worker.kill(pid=first.pid)
    wait_for(lambda: sent.state == "FAILURE", what="Celery's word that the process was lost")
    assert _who(_inside(worker, account, 2)) == [(name, 0), (name, 1)]


def test_a_retry_that_never_comes_frees_the_lock_with_the_end_of_its_lease(module_worker, account):
    running = module_worker(APP, concurrency=1, namespace=new_namespace())
    sent = running.module.keeps_briefly.delay(account, 2.0)
    running.wait_for_log(rf"{sent.id}\] retry: ")
    running.close()
    # Kept from the retry on, for the countdown and the gap.
    wait_until_free(running, f"account:{account}")
    assert 2.9 < time.time() - _inside(running, account, 1)[0].at < 15


def test_a_retry_with_other_arguments_keeps_only_the_names_that_it_needs(worker, account):
    second, third = f"{account}-second", f"{account}-third"
    sent = worker.module.moves_on.delay(account, second, third)
    wait_for(lambda: sent.state == "RETRY")
    assert not lock_of(worker, f"account:{account}").locked(), "nobody comes back for it"
    assert lock_of(worker, f"account:{second}").locked()
    sent.get(timeout=20)
    assert not lock_of(worker, f"account:{second}").locked()
    assert not lock_of(worker, f"account:{third}").locked()


def test_a_retry_that_needs_none_of_its_names_keeps_none(worker, account):
    third, fourth = f"{account}-third", f"{account}-fourth"
    with lock_of(worker, f"account:{third}"):
        sent = worker.module.moves_on.delay(account, f"{account}-second", third, fourth)
        wait_for(lambda: sent.state == "BLOCKED", what="the retry")
        for each in (account, f"{account}-second", fourth):
            wait_for(lambda each=each: not lock_of(worker, f"account:{each}").locked(), what=each)
    assert {*sent.get(timeout=20)} == {f"account:{third}", f"account:{fourth}"}


def test_retries_that_would_wait_for_what_is_kept_for_each_other_are_told(worker, account):
    one, two = f"{account}-1", f"{account}-2"
    moves_on = worker.module.moves_on
    sent = [moves_on.delay(account, one, two), moves_on.delay(f"{account}-3", two, one)]
    outcomes = [each.get(timeout=20, propagate=False) for each in sent]
    (told,) = [each for each in outcomes if isinstance(each, LockDeadlock)]
    assert f"account:{one}" in str(told)
    assert f"account:{two}" in str(told)
    (free,) = [each for each in outcomes if each is not told]
    assert {*free} == {f"account:{one}", f"account:{two}"}
    for each in (one, two):
        wait_until_free(worker, f"account:{each}")


def test_what_a_workflow_holds_is_not_narrowed_to_the_names_that_a_retry_needs(worker, account):
    second = f"{account}-second"
    steps = worker.module.holds_both.si(account, second), worker.module.stranger.si(second)
    sent = celery.chain(*steps).delay()
    wait_for(lambda: sent.parent.state == "RETRY")
    assert lock_of(worker, f"account:{second}").locked(), "the step behind it needs it"
    sent.get(timeout=20)
    entries = [*_inside(worker, account, 2), *_inside(worker, second, 1)]
    assert _who(entries) == [("holds_both", 0), ("holds_both", 1), ("stranger", 0)]
    assert len({entry["fence"] for entry in entries}) == 1
    assert all(entry["continuous"] for entry in entries)
    wait_until_free(worker, f"account:{second}")


@pytest.mark.skipif(celery.VERSION < (5, 7), reason="Celery has this option since 5.7")
def test_the_retry_of_a_killed_child_has_the_lock_name_and_the_options_of_its_call(worker, account):
    sent = worker.module.is_killed_at_first.apply_async(
        (account,), relock_prefix="tenant:", lock_max_wait=77
    )
    assert sent.get(timeout=30) == [f"tenant:account:{account}", {"max_wait": 77}]
