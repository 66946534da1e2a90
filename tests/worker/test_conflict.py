"""Somebody else holds the lock: each policy, and that an execution that waits stays what it was."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from celery import VERSION, Celery, chain, chord, group
from celery.app.task import Context

from celery_relock import LockedTask
from celery_relock.engine.protocol import Conflict, Held
from celery_relock.errors import LockConflict
from celery_relock.worker import conflict, consumer
from celery_relock.worker.conflict import pause_before
from celery_relock.worker.message import Header, keep_header
from tests.support import wait_for
from tests.support.messages import send_in_protocol_1
from tests.support.parked import lock_of, state_of, wait_until_parked
from tests.support.permits import permits


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker("tests.worker.apps.conflict", concurrency=3)


@pytest.fixture
def holder(worker, account):
    """The lock of this test's account is held until `holder()` is called, or the test ends."""
    sent = worker.module.hold.delay(account)
    worker.journal.wait_for("held", account=account)

    def let_go():
        worker.journal.add(f"free {account}")
        sent.get(timeout=20)

    yield let_go
    worker.journal.add(f"free {account}")


def test_a_message_is_redelivered_unless_redis_had_kept_it_until_now():
    """A full worker puts back what is resumed, and the broker takes that for a delivery."""
    parked, other = (Conflict("a", 1.0, 1, "o", "l", 1, parked) for parked in (True, False))
    for answer, parked_at, told in (
        (Held((1,), (False,), resumed=True), "a", False),
        (Held((1,), (False,), resumed=True), "", True),  # a copy of it was parked behind it
        (Held((1,), (False,)), "a", True),
        (parked, "a", False),
        (other, "a", True),
    ):
        message = Context(id="t", headers={}, delivery_info={"redelivered": True})
        keep_header(message, Header("e", parked_at=parked_at))
        conflict._tell_redelivered(message, answer)
        assert message.delivery_info["redelivered"] is told, (answer, parked_at)


def _seen(worker, account):
    return dict(worker.journal.wait_for("seen", account=account)[0].data)


def _permits(worker, account):
    return permits(worker.journal.events(), f"account:{account}")


def test_block_waits_in_the_slot_and_acquires_in_turn(worker, account):
    sent = [worker.module.blocks.delay(account, 0.1) for _ in range(6)]
    fences = [result.get(timeout=20) for result in sent]
    assert len(_permits(worker, account)) == len(set(fences)) == 6


def test_block_ends_in_a_conflict_after_lock_max_wait(worker, account, holder):
    started = time.monotonic()
    result = worker.module.blocks_briefly.delay(account)
    with pytest.raises(LockConflict, match=r"is held by .*hold.*lock_max_wait=0.5 s"):
        result.get(timeout=20)
    assert 0.4 < time.monotonic() - started < 15
    holder()
    assert worker.module.blocks_briefly.delay(account).get(timeout=20) > 0


@pytest.mark.parametrize("name", ["blocks", "chooses_to_block", "cannot_be_sent_again"])
def test_a_conflict_after_a_wait_in_the_slot_names_who_holds_the_lock_then(
    worker, account, holder, name
):
    lock = lock_of(worker, f"account:{account}")

    def wait_until_queued(count):
        wait_for(lambda: state_of(worker, lock.name).waiting == count, what=f"{count} waiters")

    with ThreadPoolExecutor(1) as next_holder:
        acquired = next_holder.submit(lock.acquire)
        wait_until_queued(1)
        result = getattr(worker.module, name).apply_async((account,), lock_max_wait=3)
        wait_until_queued(2)
        holder()
        assert acquired.result(20)
        with pytest.raises(LockConflict, match=rf"is held by Lock \S+:{os.getpid()} .*'"):
            result.get(timeout=20)
        next_holder.submit(lock.release).result(20)


def test_lock_max_wait_counts_the_wait_for_its_turn_before_that_in_the_slot(
    worker, account, holder
):
    before = worker.module.blocks_in_order.apply_async((account,), lock_max_wait=3)
    started = time.monotonic()
    result = worker.module.blocks_in_order.delay(account)
    for each in (before, result):
        with pytest.raises(LockConflict, match="lock_max_wait"):
            each.get(timeout=20)
    assert 3.9 < time.monotonic() - started < 6.5


def test_lock_max_wait_counts_the_pauses_before_a_callable_chooses_to_block(
    worker, account, holder
):
    started = time.monotonic()
    result = worker.module.retries_and_then_blocks.delay(account)
    with pytest.raises(LockConflict, match="lock_max_wait=4 s"):
        result.get(timeout=20)
    assert 3.9 < time.monotonic() - started < 5.5


def test_raise_is_told_at_once_and_says_who_holds_the_lock(worker, account, holder):
    started = time.monotonic()
    result = worker.module.raises.delay(account)
    with pytest.raises(LockConflict) as caught:
        result.get(timeout=20)
    assert time.monotonic() - started < 15
    text = str(caught.value)
    for part in (f"account:{account}", "conflict.hold[", "workflow", "lease", "'raise'"):
        assert part in text, text
    assert result.state == "FAILURE"


def test_retry_comes_back_until_the_lock_is_free_and_counts_as_no_retry(worker, account, holder):
    result = worker.module.looks["retry"].delay(account)
    worker.journal.wait_for("delivered", count=3, task_id=result.id)
    assert result.state == "RETRY"
    holder()
    assert result.get(timeout=30) >= 2
    deliveries = worker.journal.events("delivered", task_id=result.id)
    assert [e.data.get("attempts", 0) for e in deliveries] == list(range(len(deliveries)))
    assert len({e["execution_id"] for e in deliveries}) == 1
    assert len({e["since"] for e in deliveries[1:]}) == 1
    assert _seen(worker, account)["retries"] == 0
    assert len(_permits(worker, account)) == 2


@pytest.fixture(params=["retry", "wait"])
def waits(request, worker, account):
    """A task that waits outside of the worker, by this policy; `until_put_off` sees it do so."""
    task = worker.module.looks[request.param]

    def until_put_off(task_id, count=1):
        if request.param == "retry":
            worker.journal.wait_for("delivered", count=2, task_id=task_id)
        else:
            wait_until_parked(worker, f"account:{account}", count)

    return SimpleNamespace(task=task, until_put_off=until_put_off, policy=request.param)


def test_an_execution_that_came_back_is_the_same_in_all_that_its_message_says(
    worker, account, holder, waits
):
    options = {
        "headers": {"x-mine": "kept"},
        "expires": 300,
        "time_limit": 50,
        "soft_time_limit": 40,
        "shadow": "another name",
        "root_id": "the-root",
        "parent_id": "the-parent",
        "queue": "special",
        "routing_key": "special.delivery",
        "priority": 7,
        "reply_to": "somebody",
        "group_id": "the-group",
        "group_index": 3,
        "stamped_headers": ["stamp"],
        "stamp": "of mine",
    }
    task = waits.task
    straight = f"{account}-straight"
    task.apply_async((straight,), **options).get(timeout=20)
    waited = task.apply_async((account,), **options)
    waits.until_put_off(waited.id)
    holder()
    assert waited.get(timeout=30) >= 1
    at_once, after = _seen(worker, straight), _seen(worker, account)
    assert after["id"] == waited.id
    assert after["expires"]
    assert after["correlation_id"] == waited.id
    for varies in ("id", "account", "attempts", "expires", "correlation_id"):
        at_once.pop(varies), after.pop(varies)
    assert after == at_once
    assert at_once["headers"] == {"x-mine": "kept"}
    assert (at_once["exchange"], at_once["routing_key"]) == ("by-topic", "special.delivery")
    assert at_once["priority"] == 7
    assert (at_once["reply_to"], at_once["group_index"]) == ("somebody", 3)
    assert at_once["stamps"] == {"stamp": "of mine"}
    assert (at_once["root"], at_once["parent"]) == ("the-root", "the-parent")


def test_an_execution_without_a_parent_does_not_become_its_own(worker, account, holder, waits):
    result = waits.task.delay(account)
    waits.until_put_off(result.id)
    holder()
    result.get(timeout=30)
    seen = _seen(worker, account)
    assert (seen["root"], seen["parent"]) == (result.id, None)


def test_a_result_that_is_ignored_stays_ignored(worker, account, holder, waits):
    result = waits.task.apply_async((account,), ignore_result=True)
    waits.until_put_off(result.id)
    holder()
    assert _seen(worker, account)["ignore_result"] is True
    assert worker.module.app.AsyncResult(result.id).state != "SUCCESS"


def test_links_and_errbacks_stay(worker, account, holder, waits):
    note = worker.module.note
    result = waits.task.apply_async((account,), link=note.s(account))
    failing = worker.module.comes_back_briefly.apply_async(
        (account,), link_error=note.si(0, f"{account}-failed")
    )
    worker.journal.wait_for("noted", account=f"{account}-failed")
    with pytest.raises(LockConflict):
        failing.get(timeout=20)
    holder()
    attempts = result.get(timeout=30)
    noted = worker.journal.wait_for("noted", account=account)
    assert [e["value"] for e in noted] == [attempts]


def test_a_chain_goes_on_after_the_wait(worker, account, holder, waits):
    m = worker.module
    result = chain(m.add.si(1, 1), waits.task.si(account), m.add.s(100)).apply_async()
    waits.until_put_off(result.parent.id)
    holder()
    assert result.get(timeout=30) == 100 + result.parent.get(timeout=30)
    seen = _seen(worker, account)
    assert (seen["root"], seen["parent"]) == (result.parent.parent.id, result.parent.parent.id)


def test_a_chord_waits_for_a_member_that_waits(worker, account, holder, waits):
    m = worker.module
    header = [m.add.si(1, 1), waits.task.si(account), waits.task.si(account)]
    result = chord(group(header), m.total.s()).apply_async()
    waits.until_put_off(result.parent[1].id, 2)
    holder()
    for part in result.parent:
        wait_for(part.ready, 30)  # in Celery 5.4 `get` can miss the message of a chord's member
    parts = [part.get(timeout=30) for part in result.parent]
    assert result.get(timeout=30) == sum(parts)
    assert _seen(worker, account)["group"] == result.parent.id
    assert len(_permits(worker, account)) == 3


@pytest.mark.skipif(VERSION < (5, 6), reason="Celery stores RETRY once more")
@pytest.mark.parametrize("policy", ["retry", "wait"])
def test_the_end_of_a_message_that_was_sent_again_is_not_replaced_by_its_retry(
    worker, account, holder, policy
):
    # With "wait" because it is too large to be parked.
    large = {"headers": {"large": "x" * 1_000_000}} if policy == "wait" else {}
    task = worker.module.is_overtaken
    result = task.apply_async((account,), lock_on_conflict=policy, **large)
    worker.journal.wait_for("sent again", account=account)
    assert result.state == "RETRY"
    assert isinstance(result.info, LockConflict)
    holder()
    worker.journal.wait_for("failed", account=account)
    worker.journal.wait_for("retried", account=account, attempts=0)
    assert result.state == "FAILURE"
    with pytest.raises(ValueError, match=account):
        result.get(timeout=10)


def test_a_conflict_that_lasts_ends_after_lock_max_wait(worker, account, holder):
    started = time.monotonic()
    result = worker.module.comes_back_briefly.delay(account)
    with pytest.raises(LockConflict, match="lock_max_wait=1 s"):
        result.get(timeout=20)
    assert 0.9 < time.monotonic() - started < 15


def test_the_pauses_grow_to_a_bound_and_are_spread(worker):
    first = [pause_before(1) for _ in range(200)]
    assert 0.25 <= min(first) < max(first) <= 0.5
    assert max(first) - min(first) > 0.1
    assert all(5 <= pause_before(attempt) <= 10 for attempt in (6, 20, 5000))


def test_an_execution_that_cannot_be_sent_again_waits_in_its_slot(worker, account, holder):
    result = worker.module.cannot_be_sent_again.delay(account)
    wait_for(lambda: result.state == "RETRY", what="the try to send it again")
    worker.wait_for_log("cannot_be_sent_again was not sent again")
    assert not result.ready()
    holder()
    assert result.get(timeout=20) > 0
    # Else a copy would take that RETRY for one of the body's own, and not run in its place.
    [state] = worker.journal.events("state", account=account)
    assert state["is_now"] == "STARTED"
    assert len(_permits(worker, account)) == 2


@pytest.mark.parametrize("name", ["hold", "comes_back"])
def test_a_message_of_protocol_1_waits_in_its_slot_and_runs_with_its_lock(
    worker, account, holder, name
):
    task = getattr(worker.module, name)
    result = send_in_protocol_1(task, account)
    worker.wait_for_log(f"{task.name} is one of task_protocol=1")
    assert not result.ready()
    holder()
    result.get(timeout=20)
    assert len(_permits(worker, account)) == 2


def test_an_execution_that_cannot_be_sent_again_waits_no_longer_than_it_may(
    worker, account, holder
):
    result = worker.module.cannot_be_sent_again_for_long.delay(account)
    with pytest.raises(LockConflict, match=r"lock_max_wait=0\.5 s"):
        result.get(timeout=20)


@pytest.mark.parametrize(
    ("told", "has_to_run"),
    [
        ({}, False),
        ({"chain": ["step"]}, True),
        ({"callbacks": ["step"]}, True),
        ({"errbacks": ["step"]}, True),
        ({"chord": "body"}, True),  # Celery counts its members by `on_chord_part_return`
    ],
)
def test_a_copy_without_a_result_has_to_run_for_what_comes_after_it(told, has_to_run):
    app = Celery("copies", set_as_current=False, broker="memory://")

    @app.task(base=LockedTask, lock_key="a", acks_late=True, shared=False)
    def ends():
        raise AssertionError

    task = app.tasks[ends.name]
    message = Context(id="t1", headers={}, ignore_result=True, **told)
    assert conflict._has_to_run(task, message) is has_to_run


def test_a_thread_with_the_number_of_one_in_which_a_worker_consumed_waits_as_any(monkeypatch):
    monkeypatch.setattr(consumer, "_here", threading.local())
    said = []

    def consume():
        consumer.remember_consumer()
        said.append((threading.get_ident(), consumer.consumes_here()))

    def come_later():
        said.append((threading.get_ident(), consumer.consumes_here()))

    def come_after_another() -> bool:
        """Whether one of them has the number of the first."""
        said.clear()
        for body in (consume, *[come_later] * 20):
            thread = threading.Thread(target=body)
            thread.start()
            thread.join()
        return said[0][0] in dict(said[1:])

    # A thread of somebody else's can have got that number.
    found = any(come_after_another() for _ in range(20))
    (number, consumes), *later = said
    assert consumes
    assert found, f"no thread of this system gets the number of another one: {number}"
    assert not any(dict(later).values())
