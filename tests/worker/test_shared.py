"""`lock_mode="shared"` in a real worker: beside each other, first come first served, parked."""

from __future__ import annotations

import asyncio
import uuid

import pytest
from celery import chain, chord

from celery_relock import locked
from celery_relock.admin import Locks
from celery_relock.asyncio import Lock as AsyncLock
from celery_relock.errors import LockConfigError, LockConflict, LockDeadlock
from tests.support import wait_for
from tests.support.parked import label_of, lock_of, state_of, wait_until_parked


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker("tests.worker.apps.shared", concurrency=3)


@pytest.fixture
def name(account):
    return f"account:{account}"


def _begun(worker, account, count):
    """The ids of the tasks whose bodies have begun, when there are so many."""

    return [e["id"] for e in worker.journal.wait_for("begun", 20, count, account=account)]


def _go(worker, *results):
    for result in results:
        worker.journal.add(f"go {result.id}")
    return [result.get(timeout=20) for result in results]


def test_readers_run_side_by_side_and_a_writer_alone_each_in_its_turn(worker, account, name):
    task = worker.module
    first = task.reads.delay(account)
    _begun(worker, account, 1)
    writer = task.writes.delay(account)
    wait_until_parked(worker, name)
    readers = [task.reads.delay(account) for _ in range(2)]
    wait_until_parked(worker, name, 3)
    assert _begun(worker, account, 1) == [first.id]

    (one,) = _go(worker, first)
    assert _begun(worker, account, 2) == [first.id, writer.id]
    assert len(state_of(worker, name).holders) == 1
    (two,) = _go(worker, writer)
    assert {*_begun(worker, account, 4)[2:]} == {each.id for each in readers}
    both = _go(worker, *readers)

    assert one["fence"] < two["fence"] < both[0]["fence"]
    assert both[0]["fence"] == both[1]["fence"], "all who share have one token"
    wait_for(lambda: not state_of(worker, name).holders, what="the release")


def test_a_callable_of_the_arguments_says_who_shares_also_when_it_is_resumed(worker, account, name):
    task = worker.module
    with lock_of(worker, name):
        results = []
        for count, changes in enumerate((False, False, True), 1):
            results.append(task.either.delay(account, changes=changes))
            wait_until_parked(worker, name, count)
    *readers, writer = results
    assert {*_begun(worker, account, 2)} == {each.id for each in readers}
    assert [hold.shared for hold in state_of(worker, name).holders] == [True, True]
    _go(worker, *readers)
    _begun(worker, account, 3)
    assert [hold.shared for hold in state_of(worker, name).holders] == [False]
    _go(worker, writer)


def test_one_of_several_locks_is_shared(worker, account):
    other = uuid.uuid4().hex
    results = [worker.module.of_a_tenant.delay(each) for each in (account, other)]
    for each in (account, other):
        _begun(worker, each, 1)
        assert not lock_of(worker, f"account:{each}", mode="shared").acquire(blocking=False)
    assert not lock_of(worker, "tenant").acquire(blocking=False)
    with lock_of(worker, "tenant", mode="shared"):
        pass
    _go(worker, *results)


def test_when_a_writer_downgrades_the_parked_readers_are_resumed(worker, account, name):
    task = worker.module
    with lock_of(worker, name):
        writer = task.writes_and_lets_others_read.delay(account)
        wait_until_parked(worker, name)
        reader = task.reads.delay(account)
        wait_until_parked(worker, name, 2)
    # The writer says so when it has downgraded: the reader can be the first to say it.
    assert set(_begun(worker, account, 2)) == {writer.id, reader.id}
    wrote, read = _go(worker, writer, reader)
    assert wrote["fence"] == read["fence"]


def test_a_reader_that_calls_a_writer_inline_is_told_of_the_deadlock(worker, account, name):
    reason = worker.module.reads_and_then_writes.delay(account).get(timeout=20)

    assert f"{name!r} is held by this very call stack, which shares it: acquire it" in reason
    outer, inner, reentered = worker.module.writes_and_then_reads.delay(account).get(timeout=20)
    assert (inner, reentered) == (outer, True)


def test_a_conflict_with_the_caller_itself_says_so(worker, account, name):
    kind, reason = worker.module.reads_and_then_writes_at_once.delay(account).get(timeout=20)

    assert kind == "LockConflict"
    assert f"the lock {name!r} is shared by " in reason
    assert "; this very call stack is among its holders: acquire it exclusively first" in reason


@pytest.mark.parametrize("which", ["fence", "fence_sent_again", "fence_at_once"])
def test_a_writer_in_a_workflow_that_shares_the_lock_is_told_of_the_workflow(
    worker, account, name, which
):
    steps = chain(worker.module.shared_fence.si(account), getattr(worker.module, which).si(account))
    sent = locked(steps, key=name, mode="shared").apply_async()

    with pytest.raises(LockConflict) as refused:
        sent.get(timeout=20)

    how = "is among its holders" if which == "fence_at_once" else "which shares it"
    assert "the workflow of this task" in refused.value.reason
    assert f"{how}: let the workflow hold it exclusively" in refused.value.reason
    assert "call stack" not in refused.value.reason
    assert isinstance(refused.value, LockDeadlock) is (which != "fence_at_once")
    assert f"waits for the lock {name!r}, which its own ancestor" not in worker.log()


def test_a_writer_is_not_told_to_share_its_workflow_s_lock_as_a_descendant(worker, account, name):
    task = worker.module
    body = chord([task.adds_a_writer.si(account)], task.step.si(account))
    locked(body, key=name, mode="shared").apply_async()
    (adds,) = _begun(worker, account, 1)
    worker.wait_for_log(f"LockDeadlock.*{name}.*the workflow of this task")
    worker.journal.add(f"go {adds}")

    assert f"waits for the lock {name!r}, which its own ancestor" not in worker.log()


def test_a_workflow_may_share_its_lock_from_step_to_step(worker, account, name):
    task = worker.module
    flow = locked(chain(task.step.si(account), task.step.si(account)), key=name, mode="shared")
    last = flow.delay()
    for count in (1, 2):
        running = _begun(worker, account, count)[-1]
        assert not lock_of(worker, name).acquire(blocking=False)
        with lock_of(worker, name, mode="shared"):
            pass
        worker.journal.add(f"go {running}")
    last.get(timeout=20)
    wait_for(lambda: not state_of(worker, name).holders, what="the release")


def test_a_shared_canvas_applied_inside_a_reader_overtakes_the_writer_that_waits(
    worker, account, name
):
    task, writers = worker.module, []

    def meanwhile():
        writers.append(task.writes.delay(account))
        wait_until_parked(worker, name)

    (fence, reentered) = task.reads_by_a_workflow(account, meanwhile)
    assert (fence > 0, reentered) == (True, True)
    _go(worker, *writers)


@pytest.mark.parametrize("what", ["task", "lock", "coroutine", "canvas"])
def test_what_has_re_entered_inline_relies_on_the_lock(worker, account, name, what):
    task = worker.module

    def refused(downgrade):
        with pytest.raises(LockConfigError, match="a call inside of its holder has re-entered it"):
            downgrade()
        assert not lock_of(worker, name, mode="shared", owner="else").acquire(blocking=False)

    async def in_a_coroutine(downgrade):
        conf = task.app.conf
        async with AsyncLock(conf.relock_url, name, namespace=conf.relock_namespace):
            refused(downgrade)

    def how(downgrade):
        if what == "task":
            task.calls(account, lambda: refused(downgrade))
        elif what == "lock":
            with task.writes.lock_for(account):
                refused(downgrade)
        elif what == "coroutine":
            asyncio.run(in_a_coroutine(downgrade))
        else:
            locked(task.plain.si(lambda: refused(downgrade)), key=name).apply().get()

    assert task.downgrades_within(account, how) is False


def test_the_step_after_a_downgrade_shares_what_was_left_to_it(worker, account, name):
    task = worker.module
    flow = chain(task.downgrades_for_the_next_step.si(account), task.step.si(account)).delay()
    running = _begun(worker, account, 1)
    assert not lock_of(worker, name).acquire(blocking=False)
    with lock_of(worker, name, mode="shared"):
        pass
    _go(worker, flow)
    assert running == [flow.id]


def test_the_retry_of_what_was_downgraded_is_alone_again(worker, account, name):
    task = worker.module
    result = task.downgrades_and_retries.delay(account, 0.1)
    _begun(worker, account, 1)
    writer = task.writes.delay(account)
    wait_until_parked(worker, name)
    worker.journal.add(f"go {result.id}")

    told = result.get(timeout=20)
    assert told["continuous"]
    assert _begun(worker, account, 3) == [result.id, result.id, writer.id]
    _go(worker, writer)


def test_a_retry_that_comes_while_others_share_what_was_downgraded_follows_a_writer_and_is_told(
    worker, account, name
):
    task = worker.module
    result = task.downgrades_and_retries.delay(account, 0.1)
    _begun(worker, account, 1)
    reader = task.reads.delay(account)
    _begun(worker, account, 2)
    writer = task.writes.delay(account)
    wait_until_parked(worker, name)
    worker.journal.add(f"go {result.id}")
    wait_until_parked(worker, name, 2)
    _go(worker, reader, writer)

    assert not result.get(timeout=20)["continuous"]
    assert _begun(worker, account, 4) == [result.id, reader.id, writer.id, result.id]
    worker.wait_for_log(f"WARNING.*{name}' lost.*kept for this retry .*or others shared the lock")


def test_why_tells_a_reader_that_a_writer_is_ahead_and_nobody_the_age_of_another_reader(
    worker, account, name
):
    task, locks = worker.module, Locks(worker.module.app)
    first = task.reads.delay(account)
    _begun(worker, account, 1)
    writer = task.writes.delay(account)
    wait_until_parked(worker, name)
    reader = task.reads.delay(account)
    wait_until_parked(worker, name, 2)

    holds, waits, is_behind = (locks.why(each.id).sentence for each in (first, writer, reader))
    shared = "which has been shared without a break for "
    assert f"{first.id}] shares the lock {name!r}, {shared}" in holds
    assert f"{first.id}] shares it, {shared}" in waits
    ahead = ", and an exclusive execution waits ahead"
    assert is_behind.endswith(ahead)
    assert not waits.endswith(ahead)
    _go(worker, first, writer, reader)


def test_query_task_says_who_shares_the_lock_that_a_parked_task_waits_for(worker, account, name):
    task = worker.module
    readers = [task.reads.delay(account) for _ in range(2)]
    _begun(worker, account, 2)
    writer = task.writes.delay(account)
    wait_until_parked(worker, name)

    def told():
        (answer,) = task.app.control.inspect().query_task(writer.id).values()
        state, where = answer[writer.id]
        return where if state == "parked" else None  # until then its worker has it

    holders = wait_for(told, 20)["holders"]
    assert sorted(holders) == sorted(map(label_of, state_of(worker, name).holders))
    assert len(holders) == 2
    _go(worker, *readers, writer)


def test_lock_for_has_the_mode_of_the_call(worker, account):
    with worker.module.either.lock_for(account, changes=False) as reading:
        with worker.module.reads.lock_for(account) as other:
            assert reading.fence == other.fence
        assert not worker.module.either.lock_for(account, changes=True).acquire(blocking=False)


def test_locked_refuses_a_mode_that_it_cannot_use(worker, account, name):
    for mode in (["shared"], "read"):
        with pytest.raises(LockConfigError, match="mode"):
            locked(worker.module.step.si(account), key=name, mode=mode)
