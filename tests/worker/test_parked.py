"""An execution whose lock is held is parked: it takes no worker slot, keeps its place in the queue,
and nothing of it is lost."""

from __future__ import annotations

import time
from threading import Thread
from types import SimpleNamespace

import pytest
from celery import chain, chord, group
from celery.canvas import StampingVisitor
from celery.exceptions import ChordError, TaskRevokedError
from celery.exceptions import TimeoutError as NotReady

from celery_relock.errors import LockConflict
from tests.support import leftovers, new_namespace, wait_for
from tests.support.parked import held_here, label_of, lock_of, state_of, wait_until_parked
from tests.support.permits import permits


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker("tests.worker.apps.parked", concurrency=3)


@pytest.fixture
def name(account):
    return f"account:{account}"


@pytest.fixture
def held(worker, name):
    """The lock is held by this process, which cannot send messages, until `held.release()`."""
    with held_here(worker, name) as lock:
        yield lock


def _took(worker, account, count=1, timeout=30.0, of="id"):
    """The ids of the tasks (or runs) that were inside, in order."""

    return [e[of] for e in worker.journal.wait_for("took", timeout, count, account=account)]


def test_a_parked_execution_takes_no_slot_and_says_what_it_waits_for(worker, account, name):
    before = time.time()
    worker.module.hold.delay(account)
    worker.journal.wait_for("held")
    result = worker.module.takes.delay(account)
    wait_until_parked(worker, name)
    assert result.state == "BLOCKED"
    assert not result.ready()
    (holder,) = state_of(worker, name).holders
    told = result.info
    assert (told["lock"], told["holder"], told["owner"]) == (
        name,
        label_of(holder),
        holder.owner,
    )
    assert told["position"] == 0
    assert before - 5 < told["since"] <= told["blocked_at"] < time.time() + 5
    others = []
    for ahead in (1, 2):
        others.append(worker.module.takes.delay(account))
        wait_until_parked(worker, name, ahead + 1)
        assert others[-1].info["position"] == ahead
    # With the holder these are more than this worker has slots.
    assert worker.module.works_beside.delay(7).get(timeout=30) == 7
    with pytest.raises(NotReady):
        result.get(timeout=0.2)
    worker.journal.add(f"free {account}")
    for each in (result, *others):
        assert each.get(timeout=30) == each.id


def test_a_lock_that_cannot_send_is_followed_at_once(module_worker, account, name):
    # Not by the look that every worker takes, and this one not for a minute.
    worker = module_worker(
        "tests.worker.apps.parked",
        concurrency=1,
        namespace=new_namespace(),
        env={"RELOCK_TEST_LOOKS": "60"},
    )
    for _ in range(2):
        with lock_of(worker, name):
            result = worker.module.takes.delay(account)
            wait_until_parked(worker, name)
        assert result.get(timeout=20) == result.id


def test_parked_and_waiting_ones_take_turns_as_they_came(worker, account, name, held):
    takes, order = worker.module.takes, []
    first = takes.delay(account)
    wait_until_parked(worker, name)
    other = lock_of(worker, name, thread_local=False)
    turn = _in_a_thread(lambda: order.append(other.acquire()))
    wait_for(lambda: state_of(worker, name).waiting == 2)
    third = takes.delay(account)
    wait_until_parked(worker, name, 2)
    held.release()
    first.get(timeout=30)
    turn.join(30)
    assert order == [True]
    wait_until_parked(worker, name)
    # A newcomer does not overtake, though it is at the lock before the third's message can be.
    assert not lock_of(worker, name).acquire(blocking=False)
    turn = _in_a_thread(other.release)
    late = lock_of(worker, name)
    assert late.acquire(blocking_timeout=30)
    assert third.ready() or third.get(timeout=30)
    assert _took(worker, account) == [first.id, third.id]
    late.release()


def _in_a_thread(call):
    thread = Thread(target=call)
    thread.start()
    return thread


def test_many_executions_run_once_each_and_in_order(worker, account, name, held, client):
    for _ in range(30):
        worker.module.takes.delay(account)
    wait_until_parked(worker, name, 30)
    line = [place.execution_id for place in state_of(worker, name).waiters]
    held.release()
    assert _took(worker, account, 30, 20, of="execution_id") == line
    assert len(permits(worker.journal.events(), name)) == 30
    namespace = worker.namespace
    wait_for(lambda: not _without_an_end(client, namespace, account))


def _without_an_end(client, namespace, account):
    every = (key for key in leftovers(client, namespace) if account in key)
    return [key for key in every if client.ttl(key) == -1]


def test_a_holder_that_dies_lets_the_parked_execution_acquire_when_its_lease_ends(
    worker, account, name
):
    lock = lock_of(worker, name, timeout=1.0, renew=False)
    lock.acquire()
    result = worker.module.takes.delay(account)
    wait_until_parked(worker, name)
    started = time.monotonic()
    assert result.get(timeout=30) == result.id
    assert time.monotonic() - started < 15


def test_a_lock_released_by_force_goes_to_the_parked_execution(worker, account, name, held):
    result = worker.module.takes.delay(account)
    wait_until_parked(worker, name)
    held._engine.backend.force_release(name)
    assert result.get(timeout=30) == result.id


def test_a_revoked_execution_leaves_the_queue_soon(worker, account, name, held):
    first, second = (worker.module.takes.delay(account) for _ in range(2))
    wait_until_parked(worker, name, 2)
    first.revoke()
    with pytest.raises(TaskRevokedError):
        first.get(timeout=30)
    wait_for(lambda: state_of(worker, name).waiting == 1)
    assert (first.state, second.state) == ("REVOKED", "BLOCKED")
    held.release()
    second.get(timeout=30)
    assert _took(worker, account) == [second.id]


def test_a_parked_execution_is_reached_by_a_stamp(worker, account, name, held):
    class Batch(StampingVisitor):
        def on_signature(self, sig, **headers):
            return {"batch": account}

    signature = worker.module.takes.si(account)
    other = signature.apply_async()
    signature.stamp(visitor=Batch())
    stamped = signature.apply_async()
    wait_until_parked(worker, name, 2)
    worker.module.app.control.revoke_by_stamped_headers({"batch": [account]})
    with pytest.raises(TaskRevokedError):
        stamped.get(timeout=30)
    assert other.state == "BLOCKED"
    held.release()
    assert other.get(timeout=30) == other.id


def test_query_task_says_where_a_parked_task_is(worker, account, name, held):
    sent = worker.module.takes.delay(account)
    wait_until_parked(worker, name)
    inspect = worker.module.app.control.inspect()

    def told():
        (answer,) = inspect.query_task(sent.id, "nobody").values()
        assert set(answer) == {sent.id}
        state, where = answer[sent.id]
        return where if state == "parked" else None  # until then its worker has it

    told = wait_for(told)
    assert (told["lock"], told["ahead"]) == (name, 0)
    assert told["holders"] == [label_of(state_of(worker, name).holders[0])]
    held.release()
    sent.get(timeout=30)


def test_purge_takes_what_is_queued_and_leaves_what_is_parked(worker, account, name, held):
    sent = worker.module.takes.delay(account)
    wait_until_parked(worker, name)
    worker.module.app.control.purge()
    held.release()
    assert sent.get(timeout=30) == sent.id


def test_a_running_holder_that_is_revoked_frees_the_lock_for_the_parked_execution(
    worker, account, name
):
    running = worker.module.takes_long.delay(account)
    _took(worker, account)
    waits = worker.module.takes.delay(account)
    wait_until_parked(worker, name)
    worker.module.app.control.revoke(running.id, terminate=True, signal="SIGKILL")
    with pytest.raises(TaskRevokedError):
        running.get(timeout=30)
    assert waits.get(timeout=30) == waits.id


def test_an_execution_that_expires_while_it_is_parked_is_revoked_and_frees_its_place(
    worker, account, name, held
):
    late, next_one = (worker.module.takes.apply_async((account,), expires=e) for e in (0.7, 60))
    wait_until_parked(worker, name, 2)
    with pytest.raises(TaskRevokedError):
        late.get(timeout=30)
    wait_for(lambda: state_of(worker, name).waiting == 1)
    held.release()
    next_one.get(timeout=30)
    assert _took(worker, account) == [next_one.id]


def test_lock_max_wait_ends_a_parked_execution_as_a_failure_of_its_own(worker, account, name, held):
    m = worker.module
    started = time.monotonic()
    link = m.takes_soon.apply_async((account,), link_error=m.note.si(0, f"{account}-plain"))
    steps = chain(m.takes_soon.si(account), m.works_beside.si(3)).apply_async()
    whole = chord(group(m.works_beside.si(1), m.takes_soon.si(account)), m.works_beside.s())()
    for result in (link, steps.parent, whole):
        # Of a chord the error of its member or that of its body, whichever Celery hears of first.
        with pytest.raises((LockConflict, ChordError), match=r"lock_max_wait=1 s"):
            result.get(timeout=30)
    assert 0.9 < time.monotonic() - started < 20
    noted = worker.journal.wait_for("noted")
    assert f"{account}-plain" in [e["account"] for e in noted]
    wait_for(lambda: steps.state == "FAILURE")
    wait_for(lambda: state_of(worker, name).waiting == 0)


def test_one_more_than_lock_max_parked_fails_and_says_why(worker, account, name, held):
    task = worker.module.takes_with_few
    parked = [task.delay(account) for _ in range(2)]
    wait_until_parked(worker, name, 2)
    with pytest.raises(LockConflict, match=r"has 2 parked already, .*lock_max_parked") as caught:
        task.delay(account).get(timeout=30)
    assert str(caught.value).count(caught.value.page) == 1
    held.release()
    assert [r.get(timeout=30) for r in parked] == [r.id for r in parked]


def test_a_message_too_large_for_redis_stays_with_the_broker(worker, account, held):
    content = {"content": SimpleNamespace(account=account), "also": ["x" * 1_000_000]}
    result = worker.module.takes_pickled.apply_async((), content, serializer="pickle")
    worker.wait_for_log("larger than 1000000 bytes")
    wait_for(lambda: result.state == "RETRY")
    held.release()
    assert result.get(timeout=20)[0] == result.id


def test_rich_arguments_come_back_by_the_serializer_they_were_sent_with(
    worker, account, name, held
):
    args, kwargs = (SimpleNamespace(account=account),), {"also": {"ü", "b"}}
    result = worker.module.takes_pickled.apply_async(args, kwargs, serializer="pickle")
    wait_until_parked(worker, name)
    held.release()
    assert result.get(timeout=30) == [result.id, ["b", "ü"]]


@pytest.mark.parametrize(("task", "retries"), [("retries_once", 1), ("retries_by_itself", 2)])
def test_a_resumed_execution_that_retries_has_all_its_retries(
    worker, account, name, held, task, retries
):
    result = getattr(worker.module, task).delay(account)
    wait_until_parked(worker, name)
    held.release()
    assert result.get(timeout=30) == retries
    assert _took(worker, account, retries + 1) == [result.id] * (retries + 1)


def test_an_execution_that_wants_several_locks_waits_for_all_of_them(worker, account, name, held):
    other = lock_of(worker, f"account:{account}-other")
    other.acquire()
    result = worker.module.takes_both.delay(account, f"{account}-other")
    wait_until_parked(worker, name)
    held.release()
    wait_until_parked(worker, other.name)
    assert not state_of(worker, name).holders
    other.release()
    assert result.get(timeout=30) == result.id


def test_at_a_limit_of_two_two_acquire_and_the_third_is_parked(worker, account, name):
    sent = [worker.module.takes_with_another.delay(account) for _ in range(3)]
    _took(worker, account, 2)
    wait_until_parked(worker, name)
    assert len(state_of(worker, name).holders) == 2
    worker.journal.add(f"free {account}")
    [result.get(timeout=30) for result in sent]


@pytest.mark.parametrize("task", ["calls_inline", "applies_inline"])
def test_an_inline_call_waits_in_its_slot(worker, account, name, held, task):
    result = getattr(worker.module, task).delay(account)
    wait_for(lambda: state_of(worker, name).waiting == 1)
    assert not state_of(worker, name).parked
    held.release()
    result.get(timeout=30)
    _took(worker, account)


def test_inline_calls_in_all_slots_do_not_wait_for_a_parked_execution_that_gets_none(
    worker, account, name, held
):
    parked = [worker.module.takes.delay(account) for _ in range(2)]
    wait_until_parked(worker, name, 2)
    inline = [worker.module.calls_inline.delay(account) for _ in range(3)]
    wait_for(lambda: state_of(worker, name).waiting == 5)
    held.release()
    for result in (*inline, *parked):
        result.get(timeout=20)
    assert len(_took(worker, account, 5)) == 5
