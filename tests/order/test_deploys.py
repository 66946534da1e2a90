"""A deploy takes `lock_order` off while calls wait in the line, or turns it on while they wait for
the lock; or it turns on `lock_dedup` for a task with an order, or changes it."""

from __future__ import annotations

from contextlib import closing

import pytest

from celery_relock.engine.protocol import LINE
from tests.support.parked import lock_of, wait_until_parked

APP = "tests.order.apps.deployed"


@pytest.mark.parametrize("key", ["account:{account}", "other:{account}"])
def test_calls_that_took_their_places_when_they_arrived_come_one_after_the_other_without_pause(
    new_worker, account, key
):
    name = f"account:{account}"
    with closing(new_worker(APP, env={"RELOCK_TEST_ORDER": "sent"})) as before:
        lock = lock_of(before, name)
        assert lock.acquire()
        for number in range(6):  # by its name: the place is taken where the message arrives
            before.module.app.send_task(before.module.charge.name, (account, number))
            wait_until_parked(before, LINE + name if number else name, max(number, 1))
    lock.release()  # only now: the worker is killed, and would begin the first one
    after = new_worker(APP, env={"RELOCK_TEST_KEY": key})
    after.journal.wait_for(lambda found: len(found) == 6, timeout=12)
    assert [e["number"] for e in after.journal.events("charged")] == list(range(6))


def test_calls_that_were_parked_for_the_lock_before_keep_their_places_and_hold_up_nobody(
    new_worker, account
):
    name = f"account:{account}"
    with closing(new_worker(APP)) as before:
        lock = lock_of(before, name)
        assert lock.acquire()
        for number in range(4):
            before.module.charge.delay(account, number)
            wait_until_parked(before, name, number + 1)
    after = new_worker(APP, env={"RELOCK_TEST_ORDER": "sent"})
    after.module.charge.delay(account, 4)
    wait_until_parked(after, name, 5)
    lock.release()
    after.journal.wait_for(lambda found: len(found) == 5, timeout=12)
    charged = after.journal.events("charged")
    assert [e["number"] for e in charged] == list(range(5))
    assert [e["in_order"] for e in charged] == [False] * 4 + [True]


def test_a_call_that_a_worker_takes_for_a_duplicate_leaves_its_place(new_worker, account):
    name, env = f"account:{account}", {"RELOCK_TEST_ORDER": "sent"}
    with closing(new_worker(APP, env=env)) as before:
        lock = lock_of(before, name)
        assert lock.acquire()
    for number in range(3):  # its code does not know of duplicates yet
        before.module.charge.delay(account, number)
    after = new_worker(APP, env={**env, "RELOCK_TEST_DEDUP": "until_start"})
    after.wait_for_log("(?s)(is a duplicate of.*){2}")
    lock.release()
    after.journal.wait_for("charged")
    after.module.charge.delay(account, 3)
    after.journal.wait_for("charged", 12, number=3, in_order=True)


@pytest.mark.parametrize("word", ["until_start", "until_done"])
@pytest.mark.parametrize("is_word_new", [True, False])
def test_a_call_from_before_runs_and_counts_as_it_was_sent(new_worker, account, word, is_word_new):
    then, now = ("60", word) if is_word_new else (word, "60")
    with closing(new_worker(APP, env={"RELOCK_TEST_DEDUP": then})) as before:
        lock = lock_of(before, f"account:{account}")
        assert lock.acquire()
        calls = [before.module.charge.delay(account, 0)]
        wait_until_parked(before, f"account:{account}", 1)
    calls.append(before.module.charge.delay(f"{account}, queued", 1))
    after = new_worker(APP, env={"RELOCK_TEST_DEDUP": now})
    lock.release()
    for call in calls:
        call.get(timeout=30)
    after.journal.wait_for("charged", 12, 2)
    marked = after.module.charge.marked(account, 0)
    assert (marked and marked.id) == (calls[0].id if is_word_new else None)
