"""A message that was rejected runs when its broker brings it back, whatever had ended it: by a
dead-letter queue or a redrive comes, byte for byte, what was rejected."""

from __future__ import annotations

import json
import os
import signal
import uuid
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from celery import VERSION, chain

from celery_relock import locked
from tests.support import RedisServer, wait_for
from tests.support.apps import LOOK_EVERY
from tests.support.parked import lock_of, state_of, wait_until_free, wait_until_parked
from tests.support.proxy import Proxy

APP = "tests.worker.apps.brought_back"
LOST = pytest.mark.skipif(VERSION < (5, 7), reason="an exit is no lost worker to this Celery")
#: What Celery ends otherwise than its body did.
ENDS_OTHERWISE = pytest.mark.parametrize(
    "name",
    [
        "has a result that cannot be stored",
        "fails in its own call",
        "is rejected by its own call",
        "has a retry that no broker takes",
    ],
)
STEPS = pytest.mark.parametrize("kind", ["plain", "of a workflow"])


@pytest.fixture(scope="module")
def locks(redis_binary):
    """The Redis of the locks, and the way to it, which can be shut."""
    server = RedisServer(binary=redis_binary)
    with Proxy(server.port) as proxy:
        yield SimpleNamespace(proxy=proxy, server=server)
    server.stop()


@pytest.fixture(scope="module")
def worker(module_worker, locks):
    env = {"RELOCK_TEST_LOCKS": locks.proxy.url, LOOK_EVERY: "0.2"}
    return module_worker(APP, concurrency=2, env=env)


class Shelf:
    """A queue that no worker consumes: its message is brought as often as the test says."""

    def __init__(self, worker, client):
        conf = worker.module.app.conf
        self._client, self._prefix = client, conf.broker_transport_options["global_keyprefix"]
        self._queue, self.name = conf.task_default_queue, f"shelf-{uuid.uuid4().hex}"

    def take(self):
        _, raw = self._client.brpop([self._prefix + self.name], timeout=20)
        self._raw = raw.replace(self.name.encode(), self._queue.encode())
        headers = json.loads(raw)["headers"]
        self.id, self._task = headers["id"], headers["task"]
        self.execution_id = headers["relock"]["execution_id"]

    def bring(self, as_task=""):
        raw = self._raw
        if as_task:
            raw = raw.replace(b'"task": "%b"' % self._task.encode(), b'"task": "%b"' % as_task)
        self._client.lpush(self._prefix + self._queue, raw)

    def wait_until_rejected(self):
        """Its worker is done with the message."""
        mine, unacked = self.id.encode(), f"{self._prefix}unacked"
        wait_for(lambda: not any(mine in each for each in self._client.hvals(unacked)), 20)


@pytest.fixture
def shelf(worker, client):
    return Shelf(worker, client)


@pytest.fixture
def put(worker, shelf, account):
    """Put the message of a task on the shelf: alone, or as a step of a workflow."""

    def put_there(name, kind="locked", is_step=False):
        task = worker.module.tasks[kind, name]
        if is_step:
            first = worker.module.tasks["plain", "runs"].si(f"first of {account}")
            step = task.si(account).set(queue=shelf.name)
            locked(chain(first, step), key=f"workflow:{account}").delay()
        else:
            task.apply_async((account,), queue=shelf.name)
        shelf.take()
        return worker.module.app.AsyncResult(shelf.id)

    return put_there


def happens(worker, account, place, count=1):
    return worker.journal.wait_for(place, 15, count, account=account)


@pytest.mark.parametrize("is_step", [False, True])
@pytest.mark.parametrize("kind", ["plain", "locked"])
@ENDS_OTHERWISE
def test_it_runs_again_after_an_end_that_came_when_its_body_was_over(
    worker, shelf, put, account, name, kind, is_step
):
    put(name, kind, is_step)
    for count in (1, 2, 3):
        shelf.bring()
        happens(worker, account, "began", count)
        shelf.wait_until_rejected()


@pytest.mark.parametrize(
    "name", ["is put back by its own call", pytest.param("exits in its own call", marks=LOST)]
)
def test_it_runs_again_at_once_if_its_own_call_put_it_back(worker, account, name):
    task = worker.module.tasks["locked", name]
    task.delay(account)
    happens(worker, account, "began", 1 + len(task.after))


def test_it_is_discarded_if_its_process_ended_when_its_result_was_stored(
    worker, shelf, put, account
):
    result = put("exits when its result is stored")
    shelf.bring()
    happens(worker, account, "told")
    shelf.wait_until_rejected()
    shelf.bring()
    worker.wait_for_log(rf"{result.id}\] is a late copy of an execution that has ended")
    assert result.state == "SUCCESS"
    assert len(worker.journal.events("began", account=account)) == 1


@pytest.mark.parametrize(
    ("kind", "where"), [("locked", ""), ("ordered", ""), ("ordered", " to the end of its line")]
)
def test_it_runs_again_at_once_if_its_process_was_killed_before_its_autoretry_was_sent(
    worker, account, kind, where
):
    worker.module.tasks[kind, f"is killed before it has sent its retry{where}"].delay(account)
    happens(worker, account, "began", 2)


def test_it_runs_again_if_its_process_was_killed_before_its_autoretry_before_its_turn_was_sent(
    worker, account
):
    worker.module.tasks["ordered", "runs until it is let go"].delay(account)
    happens(worker, account, "began")
    name = "is killed before it has sent a retry as its turn did not come"
    worker.module.tasks["ordered", name].delay(account)
    happens(worker, account, "sends_again")
    worker.journal.add(f"go again {account}")
    happens(worker, account, "began", 2)


@pytest.mark.parametrize(
    "name",
    [
        "fails before it begins",
        "fails before it begins, without a result",
        "fails before it begins, where no autoretry is",
    ],
)
@pytest.mark.parametrize("kind", ["locked", "ordered"])
def test_it_runs_after_an_error_before_it_began(worker, shelf, put, account, kind, name):
    put(name, kind)
    shelf.bring()
    happens(worker, account, "before")
    shelf.wait_until_rejected()
    shelf.bring()
    happens(worker, account, "began")


def test_it_runs_after_an_error_before_it_began_though_it_had_been_parked(
    worker, shelf, put, account
):
    put("fails before it begins after a wait")
    name = f"account:{account}"
    with lock_of(worker, name):
        shelf.bring()
        wait_until_parked(worker, name)
    happens(worker, account, "before", 2)
    shelf.wait_until_rejected()
    shelf.bring()
    happens(worker, account, "began")


@STEPS
def test_a_step_of_a_workflow_runs_after_an_error_before_it_began(
    worker, shelf, put, account, kind
):
    put("fails before it begins", kind, is_step=True)
    shelf.bring()
    happens(worker, account, "before")
    shelf.wait_until_rejected()
    shelf.bring()
    happens(worker, account, "began")


@pytest.mark.parametrize(
    "name", ["is put back before it begins", pytest.param("exits before it begins", marks=LOST)]
)
def test_it_runs_at_once_if_it_was_put_back_before_it_began(worker, account, name):
    worker.module.tasks["ordered", name].delay(account)
    happens(worker, account, "began")


def brought_to_who_does_not_know_it(worker, shelf, account):
    shelf.bring(as_task=b"unknown " + account.encode())
    worker.wait_for_log(f"Received unregistered task of type 'unknown {account}'")
    shelf.wait_until_rejected()


@pytest.mark.parametrize("name", ["runs", "is acknowledged early"])
def test_it_runs_at_a_worker_that_knows_its_task_after_one_that_did_not(
    worker, shelf, put, account, name
):
    put(name, "ordered")
    brought_to_who_does_not_know_it(worker, shelf, account)
    shelf.bring()
    happens(worker, account, "began")


@STEPS
def test_a_step_of_a_workflow_runs_at_a_worker_that_knows_its_task_after_one_that_did_not(
    worker, shelf, put, account, kind
):
    put("runs", kind, is_step=True)
    brought_to_who_does_not_know_it(worker, shelf, account)
    shelf.bring()
    happens(worker, account, "began")


@pytest.mark.parametrize("kind", ["plain", "locked"])
@pytest.mark.parametrize(
    ("name", "count"),
    [("is killed after its body", 2), ("fails and is killed after its body then", 3)],
)
def test_it_runs_again_after_its_process_was_killed_before_its_result_was_stored(
    worker, shelf, put, account, kind, name, count
):
    """Also if a failure is its result still, that of the kill or of the run before."""
    result = put(name, kind)
    shelf.bring()
    wait_for(lambda: result.state == "FAILURE", 20)
    shelf.wait_until_rejected()
    shelf.bring()
    happens(worker, account, "began", count)
    wait_for(lambda: worker.module.app.AsyncResult(shelf.id).state == "SUCCESS", 20)


def test_a_workflow_begins_after_no_broker_took_its_first_step(worker, shelf, account):
    step = worker.module.tasks["of a workflow", "is sent by no broker"]
    canvas = locked(chain(step.si(account)), key=f"workflow:{account}")
    canvas.tasks[0].set(queue=shelf.name)
    canvas.delay()
    shelf.take()
    for count in (1, 2, 3):
        shelf.bring()
        happens(worker, account, "sends", count)
        shelf.wait_until_rejected()
    happens(worker, account, "began")


def test_it_does_not_run_beside_the_retry_that_was_sent_of_its_conflict(
    worker, shelf, put, account
):
    """It was acknowledged, so what comes again is a late copy."""
    result, name = put("is retried when its wait is over"), f"account:{account}"
    with lock_of(worker, name):
        shelf.bring()
        wait_for(lambda: result.state == "RETRY", 20)
    shelf.bring()
    wait_for(lambda: result.state == "SUCCESS", 20)
    shelf.wait_until_rejected()
    assert [e["retries"] for e in worker.journal.events("began", account=account)] == [1]


@contextmanager
def without_redis(worker, locks, shelf, account, was_parked=True):
    """The message was parked, if it was, and has come again; then Redis is away."""
    name = f"account:{account}"
    if was_parked:
        with lock_of(worker, name):
            shelf.bring()
            wait_until_parked(worker, name)
        happens(worker, account, "before", 2)
    locks.proxy.refuse()
    try:
        worker.journal.add(f"go {account}")
        if not was_parked:
            shelf.bring()
        yield
    finally:
        locks.proxy.accept()
    wait_for(lambda: state_of(worker, name).waiting == 0, 30, "its place in the queue to be free")


@pytest.mark.parametrize("name", ["finds no Redis", "finds no Redis, without a result"])
def test_it_runs_after_its_lock_was_unavailable_though_its_process_died_then(
    worker, locks, shelf, put, account, name
):
    put(name)
    with without_redis(worker, locks, shelf, account):
        shelf.wait_until_rejected()
        children = worker.children()
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not {*worker.children()} & {*children}, 10)
    shelf.bring()
    happens(worker, account, "began")


@pytest.mark.parametrize(
    "name", ["runs without Redis and fails", "runs without Redis and fails, without a result"]
)
def test_it_runs_again_after_it_failed_when_it_ran_without_redis(
    worker, locks, shelf, put, account, name
):
    put(name)
    with without_redis(worker, locks, shelf, account):
        happens(worker, account, "began")
        shelf.wait_until_rejected()
    shelf.bring()
    happens(worker, account, "began", 2)


@pytest.mark.parametrize("by", ["its own process", "a reaper"])
def test_it_runs_again_after_its_process_was_killed_when_it_ran_without_redis(
    worker, locks, shelf, put, account, by
):
    """When Redis was back, its place in the queue was removed by its own process, or by a reaper as
    it was dead by then."""
    put("runs without Redis and is killed")
    with without_redis(worker, locks, shelf, account):
        happens(worker, account, "began")
        if by == "a reaper":
            worker.journal.add(f"kill {account}")
            happens(worker, account, "before", 3)
    worker.journal.add(f"kill {account}")
    worker.journal.add(f"go again {account}")
    happens(worker, account, "began", 2)


def test_a_retry_that_ran_without_what_was_kept_for_it_runs_again_if_its_process_is_killed(
    worker, locks, account
):
    name = "is retried, runs without Redis and is killed"
    worker.module.tasks["locked", name].delay(account)
    happens(worker, account, "before", 2)
    locks.proxy.refuse()
    try:
        worker.journal.add(f"go {account}")
        happens(worker, account, "began", 2)
    finally:
        locks.proxy.accept()
    wait_until_free(worker, f"account:{account}")
    worker.journal.add(f"kill {account}")
    happens(worker, account, "began", 3)


@pytest.mark.parametrize("was_parked", [False, True])
def test_it_is_discarded_after_it_ended_well_when_it_ran_without_redis(
    worker, locks, shelf, put, account, was_parked
):
    result = put("runs without Redis and ends")
    with without_redis(worker, locks, shelf, account, was_parked):
        happens(worker, account, "began")
        shelf.wait_until_rejected()
    key = f"*:d:{shelf.execution_id}"
    with locks.server.client() as client:
        wait_for(lambda: [*client.scan_iter(match=key)], 20, "its end to be remembered")
    shelf.bring()
    worker.wait_for_log(rf"{result.id}\] is a late copy of an execution that has ended")
    assert len(worker.journal.events("began", account=account)) == 1


def test_a_copy_does_not_run_beside_it_where_it_was_acknowledged_early_and_runs_without_redis(
    worker, locks, shelf, put, account
):
    result = put("runs without Redis, acknowledged early")
    with without_redis(worker, locks, shelf, account):
        happens(worker, account, "began")
    shelf.bring()
    worker.wait_for_log(rf"{result.id}\] is a late copy of an execution that has ended")
    worker.journal.add(f"go again {account}")
    assert len(worker.journal.events("began", account=account)) == 1


def test_a_retry_runs_again_if_its_process_was_killed_before_the_retry_of_its_conflict_was_sent(
    worker, account
):
    name = "is killed before it has sent a retry of its conflict"
    worker.module.tasks["locked", name].delay(account)
    happens(worker, account, "before", 2)
    with lock_of(worker, f"account:{account}"):  # what was kept for it has ended
        worker.journal.add(f"go {account}")
        happens(worker, account, "sends_again", 2)
    happens(worker, account, "began", 2)
