"""A message that is delivered twice, while it is parked and while it runs: it runs once."""

from __future__ import annotations

import signal
import uuid
from threading import Thread

import pytest

from celery_relock.engine import ids
from celery_relock.errors import LockDeadlock
from tests.support import wait_for
from tests.support.parked import lock_of, state_of, wait_until_parked
from tests.support.permits import permits


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker("tests.worker.apps.parked_duplicates", concurrency=3)


class Message:
    """One message, published as often as wanted, byte for byte the same."""

    def __init__(self, worker, name, account=""):
        self.worker, self.app = worker, worker.module.app
        self.account, self.id = account + uuid.uuid4().hex, str(uuid.uuid4())
        self.name = f"account:{self.account}"
        self._sent = self.app.amqp.create_task_message(self.id, name, (self.account,), {})
        self._sent.headers["relock"] = {"v": 2, "execution_id": ids.new_id()}

    @property
    def result(self):
        """A new one each time: it remembers a final state, and a lost worker's is followed."""
        return self.app.AsyncResult(self.id)

    def deliver(self):
        with self.app.producer_pool.acquire() as producer:
            producer.publish(
                self._sent.body,
                headers=dict(self._sent.headers),
                routing_key=self.app.conf.task_default_queue,
                serializer="json",
                **self._sent.properties,
            )

    def events(self, name, count=0):
        return self.worker.journal.wait_for(name, 20, count, account=self.account)

    def states(self, count):
        return [e["state"] for e in self.events("over", count)]

    def let_go(self):
        self.worker.journal.add(f"free {self.account}")


@pytest.fixture(params=["early", "late", "chosen"])
def message(request, worker):
    made = Message(worker, request.param)
    yield made
    made.let_go()


def test_a_parked_execution_that_meets_the_lock_again_keeps_its_place(worker, message):
    message.let_go()
    with lock_of(worker, message.name):
        message.deliver()
        wait_until_parked(worker, message.name)
        line = state_of(worker, message.name).waiters
        behind = worker.module.tasks["early"].delay(message.account)
        wait_until_parked(worker, message.name, 2)
        message.deliver()
        message.states(3)
        assert state_of(worker, message.name).waiters[0].execution_id == line[0].execution_id
        assert message.result.state == behind.state == "BLOCKED"
    assert [message.result.get(timeout=20), behind.get(timeout=20)] == ["run 1", "run 2"]
    asked = worker.journal.events("asked", of=message.name)
    assert len(asked) <= 1, "a callable is asked once, and its answer stands"


def test_copies_of_a_parked_execution_have_its_place_and_run_once(worker, message):
    message.let_go()
    with lock_of(worker, message.name):
        message.deliver()
        wait_until_parked(worker, message.name)
        message.deliver()
        message.states(2)
        assert state_of(worker, message.name).waiting == 1
        assert message.result.state == "BLOCKED"
    assert message.result.get(timeout=20) == "run 1"
    message.deliver()
    states = message.states(4)
    assert states.count("SUCCESS") == 1
    assert set(states) == {"SUCCESS", "IGNORED"}
    assert len(permits(worker.journal.events(), message.name)) == 1
    assert message.result.get() == "run 1"


def test_a_copy_parks_behind_its_own_execution_and_is_gone_after_a_clean_end(worker, message):
    message.deliver()
    message.events("inside", 1)
    message.deliver()
    wait_until_parked(worker, message.name)
    message.deliver()
    message.states(2)
    assert message.result.state == "PENDING", "a copy wrote a state over that of its execution"
    assert state_of(worker, message.name).waiting == 1
    message.let_go()
    assert message.result.get(timeout=20) == "run 1"
    assert state_of(worker, message.name).waiting == 0
    assert message.states(3) == ["IGNORED", "IGNORED", "SUCCESS"]


def test_a_copy_takes_over_when_its_execution_is_killed(worker, message):
    message.deliver()
    (first,) = message.events("inside", 1)
    message.deliver()
    wait_until_parked(worker, message.name)
    worker.kill(signal.SIGKILL, pid=first.pid)
    message.events("inside", 2)
    message.let_go()
    wait_for(lambda: message.result.state == "SUCCESS", 20)
    assert message.result.get() == "run 2"
    wait_for(lambda: state_of(worker, message.name).waiting == 0)
    assert len(message.events("inside")) == 2


def test_the_callable_is_asked_of_conflicts_and_not_of_copies(worker):
    message = Message(worker, "chosen")
    message.deliver()
    message.events("inside", 1)
    message.deliver()
    wait_until_parked(worker, message.name)
    assert not worker.journal.events("asked", of=message.name)
    assert not worker.journal.events("asked", of=None)
    message.let_go()
    message.result.get(timeout=20)


@pytest.mark.parametrize("end", ["is killed", "ends"])
def test_a_copy_whose_execution_ends_before_it_can_park_is_not_lost(worker, end):
    message = Message(worker, "early", "gated-")
    message.deliver()
    (first,) = message.events("inside", 1)
    message.deliver()
    message.events("parks", 1)
    if end == "is killed":
        worker.kill(signal.SIGKILL, pid=first.pid)
        wait_for(lambda: not state_of(worker, message.name).holders)
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
    assert not state_of(worker, message.name).waiting


def test_a_copy_of_an_execution_that_waits_in_its_slot_comes_back_and_is_discarded(worker):
    message = Message(worker, "blocks")
    message.let_go()
    with lock_of(worker, message.name):
        message.deliver()
        wait_for(lambda: state_of(worker, message.name).waiting)
        message.deliver()
        assert message.states(1) == ["IGNORED"]
        assert message.result.state == "PENDING"
    assert message.result.get(timeout=20) == "run 1"
    assert sorted(message.states(3)) == ["IGNORED", "IGNORED", "SUCCESS"]
    assert len(permits(worker.journal.events(), message.name)) == 1


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
    message = Message(worker, "early")
    message.let_go()
    lock = lock_of(worker, message.name)
    lock.acquire()
    got = []
    call = worker.module.tasks["early"].apply
    thread = Thread(target=lambda: got.append(call((message.account,)).get()))
    thread.start()
    wait_for(lambda: state_of(worker, message.name).waiting)
    assert not state_of(worker, message.name).parked
    lock.release()
    thread.join(30)
    assert got == ["run 1"]
