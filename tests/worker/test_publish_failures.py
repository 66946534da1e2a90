"""A message that has to be sent again, and the broker does not take it: nothing is lost, nothing is
doubled, and the task is what it was."""

from __future__ import annotations

import uuid

import pytest
from celery import VERSION
from celery.exceptions import SoftTimeLimitExceeded

from celery_relock import Lock
from tests.support import wait_for
from tests.support.parked import lock_of
from tests.support.proxy import Proxy

# Before, what a cut connection had taken stays with the broker until its visibility timeout.
_RESTORES = VERSION >= (5, 5)


@pytest.fixture(scope="module")
def broker(redis_server):
    """What stands between the worker and its broker."""
    with Proxy(redis_server.port) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def worker(module_worker, broker):
    return module_worker(
        "tests.worker.apps.publish_failures",
        concurrency=3,
        env={"RELOCK_TEST_BROKER": broker.url},
    )


@pytest.fixture
def account():
    return uuid.uuid4().hex


@pytest.fixture
def held(worker, account):
    """The lock is held by this test until it is released."""
    conf = worker.module.app.conf
    lock = Lock(conf.relock_url, f"account:{account}", namespace=conf.relock_namespace)
    lock.acquire()
    yield lock
    if lock.owned():
        lock.release()


def _of(worker, account, name):
    return [e for e in worker.journal.events(name) if e["account"] == account]


def _arrive(worker, task, account):
    """The run stands before its lock, with a step that is to come after it."""
    sent = (getattr(worker.module, task).s(account) | worker.module.note.s(account)).apply_async()
    wait_for(lambda: _of(worker, account, "arrived"), what="the run to arrive")
    return sent


def _ran_once(worker, client, account, sent):
    """The body and the step after it ran once, and no copy of the message is left anywhere."""
    assert sent.get(timeout=30) == sent.parent.id
    assert sent.parent.state == "SUCCESS"
    _wait_until_idle(worker, client)
    [ran] = _of(worker, account, "ran")
    assert ran["retries"] == 0
    [noted] = _of(worker, account, "noted")
    assert noted["value"] == sent.parent.id


def _wait_until_idle(worker, client):
    """No message is left with the broker."""
    conf = worker.module.app.conf
    prefix = conf.broker_transport_options["global_keyprefix"]

    def idle():
        queued = client.llen(f"{prefix}{conf.task_default_queue}")
        return not queued and not (_RESTORES and client.hlen(f"{prefix}unacked"))

    wait_for(idle, 20, "the broker to have nothing left")
    assert worker.module.ping.delay().get(timeout=20) == "pong"


@pytest.mark.parametrize("task", ["comes_back", "comes_back_late"])
def test_a_run_that_no_broker_takes_waits_in_its_slot_and_runs_once(
    worker, broker, client, account, held, task
):
    sent = _arrive(worker, task, account)
    broker.refuse()
    worker.journal.add(f"ask {account}")
    try:
        worker.wait_for_log(rf"{task} was not sent again, it stays in its slot", timeout=20)
        assert not _of(worker, account, "ran")
        held.release()
        wait_for(lambda: _of(worker, account, "ran"), what="the body to run without a broker")
    finally:
        broker.accept()
    _ran_once(worker, client, account, sent)


@pytest.mark.parametrize("task", ["parked", "parked_late"])
def test_a_parked_run_whose_lock_is_freed_without_a_broker_runs_once_when_there_is_one(
    worker, broker, client, account, held, task
):
    sent = _arrive(worker, task, account)
    broker.refuse()
    worker.journal.add(f"ask {account}")
    try:
        wait_for(
            lambda: any(w.parked for w in held._engine.inspect(held.name).waiters),
            what="the run to be parked",
        )
        held.release()
        worker.wait_for_log("(?i)cannot connect|connection.*lost|connection refused")
        assert not _of(worker, account, "ran")
    finally:
        broker.accept()
    _ran_once(worker, client, account, sent)


@pytest.mark.parametrize("task", ["comes_back", "comes_back_late"])
def test_a_message_that_was_taken_though_the_sender_heard_nothing_runs_once(
    worker, broker, client, account, held, task
):
    sent = _arrive(worker, task, account)
    broker.lose_reply(of="LPUSH")
    worker.journal.add(f"ask {account}")
    wait_for(lambda: broker.idle, what="the message to be sent")
    held.release()
    _ran_once(worker, client, account, sent)


def test_a_time_limit_while_the_message_is_sent_again_ends_the_run(worker, broker, account, held):
    sent = _arrive(worker, "comes_back_in_time", account)
    unanswered = broker.hold(of="LPUSH")
    worker.journal.add(f"ask {account}")
    assert unanswered.arrived.wait(10)
    with pytest.raises(SoftTimeLimitExceeded):
        sent.parent.get(timeout=20)
    held.release()
    unanswered.deliver()  # the broker has it after all
    worker.wait_for_log(rf"{sent.parent.id}\] ignored", 20)
    assert not held.locked()
    assert not _of(worker, account, "ran")
    assert sent.parent.state == "FAILURE"


RETRIES = ("retries", "retries_late", "retries_and_keeps", "retries_in_a_section", "retries_once")


def _arrive_to_retry(worker, task, account):
    sent = worker.module.app.tasks[task].delay(account)
    wait_for(lambda: _of(worker, account, "arrived"), what="the run to arrive")
    return sent


@pytest.mark.parametrize("task", RETRIES)
def test_a_retry_that_no_broker_takes_leaves_no_lock_behind(worker, broker, account, task):
    sent = _arrive_to_retry(worker, task, account)
    lock = lock_of(worker, f"account:{account}")
    assert lock.locked()
    broker.refuse()
    worker.journal.add(f"ask {account}")
    try:
        wait_for(lambda: not lock.locked(), 20, "the lock to be free")
    finally:
        broker.accept()
    if VERSION >= (5, 7):  # others store nothing of a run that Celery rejects
        wait_for(lambda: sent.state == "FAILURE", 20)
    assert worker.module.ping.delay().get(timeout=20) == "pong"
    assert [e["retries"] for e in _of(worker, account, "ran")] == [0]
    if task == "retries_once":
        wait_for(lambda: worker.module.app.tasks[task].marked(account) is None)


@pytest.mark.parametrize("task", ["goes_on", "goes_on_in_a_section"])
def test_a_next_step_that_no_broker_takes_leaves_no_lock_behind(worker, broker, account, task):
    first = worker.module.app.tasks[task].s(account)
    (first | worker.module.note.s(account)).apply_async()
    wait_for(lambda: _of(worker, account, "arrived"), what="the run to arrive")
    lock = lock_of(worker, f"account:{account}")
    assert lock.locked()
    broker.refuse()
    worker.journal.add(f"ask {account}")
    try:
        wait_for(lambda: not lock.locked(), 20, "the lock to be free")
    finally:
        broker.accept()
    assert worker.module.ping.delay().get(timeout=20) == "pong"
    assert len(_of(worker, account, "ran")) == 1
    if task == "goes_on_in_a_section":  # the other one is free before the step is sent
        assert not _of(worker, account, "noted")


@pytest.mark.parametrize("task", RETRIES)
def test_a_retry_that_was_taken_though_the_sender_heard_nothing_runs_once(
    worker, broker, account, task
):
    sent = _arrive_to_retry(worker, task, account)
    broker.lose_reply(of="LPUSH")
    worker.journal.add(f"ask {account}")
    wait_for(lambda: broker.idle, what="the retry to be sent")
    assert sent.get(timeout=30) == sent.id
    worker.wait_for_log(rf"{sent.id}\] ignored", 20)  # it was sent twice
    assert [e["retries"] for e in _of(worker, account, "ran")] == [0, 1]
    wait_for(lambda: not lock_of(worker, f"account:{account}").locked())
