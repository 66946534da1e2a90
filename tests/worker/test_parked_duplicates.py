"""A message that is delivered twice, while it is parked and while it runs: it runs once."""

from __future__ import annotations

import signal
import uuid
from threading import Thread

import pytest

from celery_relock.errors import LockDeadlock
from tests.support import wait_for
from tests.support.apps import LOOK_EVERY
from tests.support.messages import Message
from tests.support.parked import lock_of, state_of, wait_until_parked


@pytest.fixture(scope="module")
def worker(module_worker):
    soon = {LOOK_EVERY: "0.2"}
    return module_worker("tests.worker.apps.parked_duplicates", concurrency=3, env=soon)


@pytest.fixture(params=["early", "late", "chosen"])
def message(request, worker):
    made = Message(worker, worker.module.tasks[request.param])
    yield made
    made.let_go()


def kill(message, run):
    """Kill the process of a run. Celery looks for a success, and then stores the failure: the
    success of a copy that came between would be lost."""
    message.worker.kill(signal.SIGKILL, pid=run.pid)
    if not message.task.reject_on_worker_lost:
        message.events("failed", 1)


def test_a_parked_execution_that_meets_the_lock_again_keeps_its_place(worker, message):
    message.let_go()
    with lock_of(worker, message.lock):
        message.deliver()
        wait_until_parked(worker, message.lock)
        line = state_of(worker, message.lock).waiters
        behind = worker.module.tasks["early"].delay(message.account)
        wait_until_parked(worker, message.lock, 2)
        message.deliver()
        message.states(3)
        assert state_of(worker, message.lock).waiters[0].execution_id == line[0].execution_id
        assert message.result.state == behind.state == "BLOCKED"
    assert [message.result.get(timeout=20), behind.get(timeout=20)] == ["run 1", "run 2"]
    asked = worker.journal.events("asked", of=message.lock)
    assert len(asked) <= 1, "a callable is asked once, and its answer stands"


def test_copies_of_a_parked_execution_have_its_place_and_run_once(worker, message):
    message.let_go()
    with lock_of(worker, message.lock):
        message.deliver()
        wait_until_parked(worker, message.lock)
        message.deliver()
        message.states(2)
        assert state_of(worker, message.lock).waiting == 1
        assert message.result.state == "BLOCKED"
    assert message.result.get(timeout=20) == "run 1"
    message.deliver()
    states = message.states(4)
    assert states.count("SUCCESS") == 1
    assert set(states) == {"SUCCESS", "IGNORED"}
    assert len(message.permits()) == 1
    assert message.result.get() == "run 1"


def test_a_copy_parks_behind_its_own_execution_and_is_gone_after_a_clean_end(worker, message):
    message.deliver()
    message.events("inside", 1)
    message.deliver()
    wait_until_parked(worker, message.lock)
    message.deliver()
    message.states(2)
    assert message.result.state == "PENDING", "a copy wrote a state over that of its execution"
    assert state_of(worker, message.lock).waiting == 1
    message.let_go()
    assert message.result.get(timeout=20) == "run 1"
    wait_for(lambda: state_of(worker, message.lock).waiting == 0)
    # With `acks_late` a copy comes once more, and finds the result.
    ignored = 3 if message.task.acks_late else 2
    assert sorted(message.states(ignored + 1)) == ["IGNORED"] * ignored + ["SUCCESS"]


def test_a_copy_takes_over_when_its_execution_is_killed(worker, message):
    message.deliver()
    (first,) = message.events("inside", 1)
    message.deliver()
    wait_until_parked(worker, message.lock)
    kill(message, first)
    message.events("inside", 2)
    message.let_go()
    wait_for(lambda: message.result.state == "SUCCESS", 20)
    assert message.result.get() == "run 2"
    wait_for(lambda: state_of(worker, message.lock).waiting == 0)
    both = message.events("inside")
    # The broker has told it of no message.
    assert [event["redelivered"] for event in both] == [False, True]


def test_a_copy_takes_over_when_the_worker_is_killed_before_the_result_is_stored(new_worker):
    """With `acks_late`. The copy may be all that is left: the broker has delivered it once more, as
    the connection was lost, and it was acknowledged when it was parked."""

    def start():
        soon = {LOOK_EVERY: "0.2"}
        return new_worker("tests.worker.apps.parked_duplicates", concurrency=3, env=soon)

    worker = start()
    message = Message(worker, worker.module.tasks["dies"])
    message.deliver()
    message.events("inside", 1)
    message.deliver()
    wait_until_parked(worker, message.lock)
    message.let_go()
    worker.journal.wait_for("dies")
    start()
    assert message.result.get(timeout=30) == "run 2"
    wait_for(lambda: not state_of(worker, message.lock).waiting)


def test_the_callable_is_asked_of_conflicts_and_not_of_copies(worker):
    message = Message(worker, worker.module.tasks["chosen"])
    message.deliver()
    message.events("inside", 1)
    message.deliver()
    wait_until_parked(worker, message.lock)
    assert not worker.journal.events("asked", of=message.lock)
    assert not worker.journal.events("asked", of=None)
    message.let_go()
    message.result.get(timeout=20)


@pytest.mark.parametrize("end", ["is killed", "ends"])
def test_a_copy_whose_execution_ends_before_it_can_park_is_not_lost(worker, account, end):
    message = Message(worker, worker.module.tasks["early"], f"gated-{account}")
    message.deliver()
    (first,) = message.events("inside", 1)
    message.deliver()
    message.events("parks", 1)
    if end == "is killed":
        kill(message, first)
        wait_for(lambda: not state_of(worker, message.lock).holders)
    else:
        message.let_go()
        message.states(1)
    worker.journal.add(f"park {message.account}")
    if end == "is killed":
        message.events("inside", 2)
        message.let_go()
        wait_for(lambda: message.result.state == "SUCCESS", 20)
        assert message.result.get() == "run 2"
        assert message.states(1) == ["SUCCESS"], "the copy came back instead of going on"
    else:
        assert message.states(2) == ["SUCCESS", "IGNORED"]
        assert message.result.get() == "run 1"
    assert not state_of(worker, message.lock).waiting


def test_a_copy_of_an_execution_that_waits_in_its_slot_comes_back_and_is_discarded(worker):
    message = Message(worker, worker.module.tasks["blocks"])
    message.let_go()
    with lock_of(worker, message.lock):
        message.deliver()
        wait_for(lambda: state_of(worker, message.lock).waiting)
        message.deliver()
        assert message.states(1) == ["IGNORED"]
        assert message.result.state == "PENDING"
    assert message.result.get(timeout=20) == "run 1"
    assert sorted(message.states(3)) == ["IGNORED", "IGNORED", "SUCCESS"]
    assert len(message.permits()) == 1


def test_two_tasks_that_would_wait_for_each_other_for_ever_are_told(worker):
    one, two = uuid.uuid4().hex, uuid.uuid4().hex
    sent = [worker.module.crosses.delay(*pair) for pair in ((one, two), (two, one))]
    outcomes = [result.get(timeout=30, propagate=False) for result in sent]
    (told,) = [each for each in outcomes if isinstance(each, LockDeadlock)]
    assert f"account:{one}" in str(told)
    assert f"account:{two}" in str(told)
    (other,) = [each for each in sent if each.state == "SUCCESS"]
    assert f"[{other.id}]" in str(told), "which task it is that holds the one and waits"
    # The other one got its second lock when the first had given its own back.
    assert [each for each in outcomes if each is not told] in ([one], [two])


def test_apply_waits_where_it_is_called(worker):
    message = Message(worker, worker.module.tasks["early"])
    message.let_go()
    lock = lock_of(worker, message.lock)
    lock.acquire()
    got = []
    call = worker.module.tasks["early"].apply
    thread = Thread(target=lambda: got.append(call((message.account,)).get()))
    thread.start()
    wait_for(lambda: state_of(worker, message.lock).waiting)
    assert not state_of(worker, message.lock).parked
    lock.release()
    thread.join(30)
    assert got == ["run 1"]
