"""An execution leaves nothing behind that others stand at, also if it is rejected, so that it can
come again; a call that counts for its seconds does, whatever ends it."""

from __future__ import annotations

import pytest

from celery_relock.worker.ending import end_unexecuted
from tests.support import wait_for
from tests.support.apps import LOOK_EVERY
from tests.support.messages import Message
from tests.support.parked import (
    engine_here,
    lock_of,
    state_of,
    wait_until_free,
    wait_until_parked,
)


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker("tests.worker.apps.left_behind", concurrency=2, env={LOOK_EVERY: "0.2"})


def begins(worker, account, count=1, **facts):
    """Much sooner than the gap of an order is over."""
    return worker.journal.wait_for("began", 15, count, account=account, **facts)


def fails(result):
    wait_for(lambda: result.state == "FAILURE", 20, "its failure")


def test_an_order_goes_on_behind_a_rejected_call_for_which_it_had_no_room(worker, m, account):
    m.finds_no_room.delay(account, 1)
    begins(worker, account)
    m.finds_no_room.delay(account, 2)
    wait_until_parked(worker, f"order\taccount:{account}")
    fails(m.finds_no_room.delay(account, 3))
    worker.journal.add(f"go {account}")
    begins(worker, account, number=2)
    m.finds_no_room.delay(account, 4)
    begins(worker, account, number=4)


def test_an_order_goes_on_behind_a_rejected_call_that_got_no_name(worker, m, account):
    fails(m.is_not_named_in_order.delay(account, 1))
    m.is_not_named_in_order.delay(account, 2)
    begins(worker, account)


def test_the_marker_of_a_rejected_call_that_got_no_name_is_free(worker, m, account):
    m.is_not_named_once.delay(account, 1)
    wait_for(lambda: m.is_not_named_once.marked(account, 1) is None, 10, "the marker to be free")


def test_the_lock_that_was_kept_for_a_retry_that_is_rejected_is_free(worker, m, account):
    with lock_of(worker, f"other:{account}"):
        fails(m.keeps_its_lock.delay(account))
        wait_until_free(worker, f"account:{account}", 10)


def test_a_late_copy_that_waits_is_nobodys_predecessor_when_it_is_revoked(worker, m, account):
    """It waits as nobody knows how its execution has ended."""
    copy, behind = (Message(worker, m.comes_late, account) for _ in range(2))
    name = f"account:{account}"
    end_unexecuted(engine_here(m.app), [name], copy.execution_id)
    with lock_of(worker, name):
        copy.deliver()
        wait_until_parked(worker, name)
        behind.deliver()
        wait_until_parked(worker, name, 2)
        m.app.control.revoke(copy.id, destination=[worker.node])
        wait_until_parked(worker, name, 1)
    begins(worker, account, id=behind.id)
    wait_until_parked(worker, name, 0)
    assert [e["id"] for e in worker.journal.events("began", account=account)] == [behind.id]


@pytest.mark.parametrize("how", ["is lost", "takes too long"])
def test_a_call_counts_for_its_seconds_though_its_process_was_killed(worker, m, account, how):
    for_seconds, until_done = m.loses[how, 120], m.loses[how, "until_done"]
    first = for_seconds.delay(account)
    fails(first)
    until_done.delay(f"{account} too")
    begins(worker, f"{account} too")
    wait_for(lambda: until_done.marked(f"{account} too") is None, 20, "the other marker")
    assert for_seconds.delay(account).id == first.id


def test_a_call_counts_for_its_seconds_though_its_message_was_put_back(worker, m, account):
    first = m.is_put_back_once.delay(account)
    begins(worker, account, 2)
    wait_for(lambda: not state_of(worker, f"account:{account}").held)
    assert m.is_put_back_once.delay(account).id == first.id


def test_an_order_goes_on_behind_a_call_whose_process_exits_before_it_begins(worker, m, account):
    """Before Celery 5.7 that is no lost worker: its main process does not tell of it."""
    m.exits_at_first.delay(account)
    worker.journal.wait_for("came", 15, account=account)
    m.exits_at_first.delay(account)
    begins(worker, account)
