"""A message that has to be sent again, and the broker does not take it: nothing is lost, nothing is
doubled, and the task is what it was."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack

import pytest
from celery import VERSION
from celery.exceptions import SoftTimeLimitExceeded

from tests.support import new_namespace, wait_for
from tests.support.messages import Message
from tests.support.parked import held_here, lock_of, wait_until_free, wait_until_parked
from tests.support.proxy import Proxy

# Before, what a cut connection had taken stays with the broker until its visibility timeout.
_RESTORES = VERSION >= (5, 6)


@pytest.fixture(scope="module")
def broker(redis_server):
    """What stands between the worker and its broker."""
    with Proxy(redis_server.port) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def locks(redis_server):
    """What stands between the worker and the Redis of its locks."""
    with Proxy(redis_server.port) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def _nothing_left_for_the_next_test(broker, locks):
    yield
    for proxy in (broker, locks):
        proxy.forget()
        proxy.accept()


# The worker of Celery before 5.6 does not get over a second outage: there each test has its own.
@pytest.fixture(scope="module" if _RESTORES else "function")
def worker(module_worker, broker, locks):
    one = module_worker(
        "tests.worker.apps.publish_failures",
        namespace=new_namespace(),
        concurrency=10,
        env={"RELOCK_TEST_BROKER": broker.url, "RELOCK_TEST_LOCKS": locks.url},
    )
    yield one
    if not _RESTORES:
        one.close()


@pytest.fixture
def hold(worker):
    """Hold the lock of an account in this test, until it is released."""
    with ExitStack() as held:
        yield lambda account: held.enter_context(held_here(worker, f"account:{account}"))


@pytest.fixture
def arrive(worker, client):
    """Send tasks, each for an account of its own, and return their results by account once a child
    has each of them.

    The message of each is acknowledged then, if that is not for later: what is cut off in between
    stays with the broker until its visibility timeout.
    """

    def arrive(canvases):
        sent = {account: canvas.apply_async() for account, canvas in canvases.items()}
        for account in sent:
            worker.journal.wait_for("arrived", account=account)
        tasks = worker.module.app.tasks
        early = {
            _first_result(sent[account]).id
            for account, canvas in canvases.items()
            if not tasks[_first(canvas).task].acks_late
        }
        wait_for(lambda: early.isdisjoint(_unacknowledged(worker, client)), what="acknowledged")
        return sent

    return arrive


def _unacknowledged(worker, client):
    """The tasks whose messages a worker has, and has not acknowledged."""
    found = client.hvals(f"{_prefix(worker)}unacked")
    return {json.loads(each)[0]["headers"]["id"] for each in found}


def _first_result(result):
    return result if result.parent is None else _first_result(result.parent)


def _first(canvas):
    return getattr(canvas, "tasks", [canvas])[0]


def _with_a_note(worker, task, account):
    """The task, and a step that is to come after it."""
    return worker.module.app.tasks[task].s(account) | worker.module.note.s(account)


def _prefix(worker):
    return worker.module.app.conf.broker_transport_options["global_keyprefix"]


def _ran_once(worker, client, account, sent):
    """The body and the step after it ran once, and no copy of the message is left anywhere."""
    assert sent.get(timeout=30) == sent.parent.id
    # Celery sends the next step before it stores the result.
    wait_for(lambda: sent.parent.state == "SUCCESS")
    _wait_until_idle(worker, client)
    [ran] = worker.journal.events("ran", account=account)
    assert ran["retries"] == 0
    [noted] = worker.journal.events("noted", account=account)
    assert noted["value"] == sent.parent.id


def _wait_until_idle(worker, client):
    """No message is left with the broker."""
    prefix = _prefix(worker)

    def idle():
        queued = client.llen(f"{prefix}{worker.module.app.conf.task_default_queue}")
        return not queued and not (_RESTORES and client.hlen(f"{prefix}unacked"))

    wait_for(idle, 20, "the broker to have nothing left")
    assert worker.module.ping.delay().get(timeout=20) == "pong"


def _go_on(worker, accounts):
    for account in accounts:
        worker.journal.add(f"ask {account}")


# Celery connects again two seconds after a broker has gone, so tasks share an outage.


def test_what_no_broker_takes_waits_in_its_slot_and_runs_once(
    worker, broker, client, arrive, hold, account
):
    tasks = {f"{task}-{account}": task for task in ("comes_back", "comes_back_late")}
    locks = {each: hold(each) for each in tasks}
    sent = arrive({each: _with_a_note(worker, task, each) for each, task in tasks.items()})
    broker.refuse()
    _go_on(worker, tasks)
    try:
        for each, task in tasks.items():
            worker.wait_for_log(rf"{task} was not sent again, it stays in its slot", timeout=20)
            assert not worker.journal.events("ran", account=each)
            locks[each].release()
            worker.journal.wait_for("ran", account=each)
    finally:
        broker.accept()
    for each in tasks:
        worker.journal.add(f"end {each}")
    for each in tasks:
        _ran_once(worker, client, each, sent[each])


def test_what_is_parked_and_whose_lock_is_freed_without_a_broker_runs_once_when_there_is_one(
    worker, broker, client, arrive, hold, account
):
    tasks = {f"{task}-{account}": task for task in ("parked", "parked_late")}
    locks = {each: hold(each) for each in tasks}
    sent = arrive({each: _with_a_note(worker, task, each) for each, task in tasks.items()})
    before = len(worker.log())
    broker.refuse()
    _go_on(worker, tasks)
    try:
        for each in tasks:
            wait_until_parked(worker, f"account:{each}")
            locks[each].release()
        lost = re.compile("(?i)cannot connect|connection.*lost|connection refused")
        wait_for(lambda: lost.search(worker.log(), before), what="the worker without its broker")
        assert not any(worker.journal.events("ran", account=each) for each in tasks)
    finally:
        broker.accept()
    for each in tasks:
        _ran_once(worker, client, each, sent[each])


@pytest.mark.parametrize("task", ["comes_back", "comes_back_late"])
def test_a_message_that_was_taken_though_the_sender_heard_nothing_runs_once(
    worker, broker, client, arrive, hold, account, task
):
    held = hold(account)
    sent = arrive({account: _with_a_note(worker, task, account)})
    broker.lose_reply(of="LPUSH")
    _go_on(worker, [account])
    wait_for(lambda: broker.idle, what="the message to be sent")
    held.release()
    worker.journal.add(f"end {account}")
    _ran_once(worker, client, account, sent[account])


def test_a_time_limit_while_the_message_is_sent_again_ends_the_task(
    worker, broker, arrive, hold, account
):
    held = hold(account)
    canvas = _with_a_note(worker, "comes_back_in_time", account)
    sent = arrive({account: canvas})[account]
    unanswered = broker.hold(of="LPUSH")
    _go_on(worker, [account])
    assert unanswered.arrived.wait(30)
    with pytest.raises(SoftTimeLimitExceeded):
        sent.parent.get(timeout=20)
    held.release()
    unanswered.deliver()  # the broker has it after all
    worker.wait_for_log(rf"{sent.parent.id}\] (parked|waits|was replaced|is a late)", 20)
    assert not held.locked()
    assert not worker.journal.events("ran", account=account)
    assert sent.parent.state == "FAILURE"


def test_a_time_limit_while_the_message_is_sent_again_because_redis_is_away_ends_the_task(
    worker, broker, locks, arrive, account, client
):
    sent = arrive({account: _with_a_note(worker, "waits_for_redis_in_time", account)})[account]
    unanswered = broker.hold(of="LPUSH")
    locks.refuse()
    _go_on(worker, [account])
    assert unanswered.arrived.wait(30)
    with pytest.raises(SoftTimeLimitExceeded):
        sent.parent.get(timeout=20)
    tombstones = f"{worker.namespace}:*:d:*"
    ended = len(client.keys(tombstones))
    locks.accept()
    wait_for(lambda: len(client.keys(tombstones)) > ended, what="its end to be remembered")
    unanswered.deliver()  # the broker has it after all
    worker.wait_for_log(rf"{sent.parent.id}\] is a late copy", 20)
    assert not worker.journal.events("ran", account=account)
    assert sent.parent.state == "FAILURE"


@pytest.mark.skipif(VERSION < (5, 6), reason="Celery stores RETRY once more")
def test_the_end_of_what_was_sent_again_because_redis_is_away_is_not_replaced_by_its_retry(
    worker, locks, account
):
    locks.refuse()
    result = worker.module.is_overtaken.delay(account)
    worker.journal.wait_for("sent again", account=account)
    assert result.state == "RETRY"
    locks.accept()
    worker.journal.wait_for("retried", account=account, attempts=0)
    assert result.state == "FAILURE"
    with pytest.raises(ValueError, match=account):
        result.get(timeout=10)


RETRIES = (
    "retries",
    "retries_late",
    *("retries_and_keeps", "retries_and_holds", "retries_once", "retries_in_order"),
    *("autoretries_and_keeps", "autoretries_and_holds"),
    *("autoretries_once", "autoretries_in_order"),
)


def _ends_without_a_broker(worker, broker, accounts, rejected=()):
    """The locks are held, the broker goes, the tasks go on: the locks are free.

    Args:
        rejected: ids of tasks whose retry is not taken: of some the lock is free before it is sent.
    """
    locks = [f"account:{account}" for account in accounts]
    assert all(lock_of(worker, lock).locked() for lock in locks)
    broker.refuse()
    _go_on(worker, accounts)
    try:
        for lock in locks:
            wait_until_free(worker, lock, 20)
        for each in rejected:
            worker.wait_for_log(rf"(?i){each}\] reject", 20)
    finally:
        broker.accept()


def test_a_retry_that_no_broker_takes_leaves_no_lock_behind(worker, broker, arrive, account):
    tasks = {f"{name}-{account}": worker.module.app.tasks[name] for name in RETRIES}
    sent = arrive({each: task.s(each) for each, task in tasks.items()})
    _ends_without_a_broker(worker, broker, tasks, rejected=[one.id for one in sent.values()])
    for each, task in tasks.items():
        if VERSION >= (5, 7):  # others store nothing of a task that Celery rejects
            wait_for(lambda each=each: sent[each].state == "FAILURE", 20)
        if task.name.endswith("once"):
            wait_for(lambda task=task, each=each: task.marked(each) is None)
        if task.name.endswith("in_order"):  # the call behind it has its turn
            task.delay(each)
            worker.journal.wait_for("ran", 20, count=2, account=each)
    assert worker.module.ping.delay().get(timeout=20) == "pong"
    for each in tasks:
        assert {e["retries"] for e in worker.journal.events("ran", account=each)} == {0}


def test_a_next_step_that_no_broker_takes_leaves_no_lock_behind(worker, broker, arrive, account):
    plain, holding = f"plain-{account}", f"holding-{account}"
    tasks = {plain: "goes_on", holding: "goes_on_for_the_workflow"}
    arrive({each: _with_a_note(worker, task, each) for each, task in tasks.items()})
    _ends_without_a_broker(worker, broker, tasks)
    assert worker.module.ping.delay().get(timeout=20) == "pong"
    assert [len(worker.journal.events("ran", account=each)) for each in tasks] == [1, 1]
    # The other one is free before its next step is sent.
    assert not worker.journal.events("noted", account=holding)


@pytest.mark.parametrize("task", RETRIES)
def test_a_retry_that_was_taken_though_the_sender_heard_nothing_runs_once(
    worker, broker, arrive, account, task
):
    sent = arrive({account: worker.module.app.tasks[task].s(account)})[account]
    broker.lose_reply(of="LPUSH")
    _go_on(worker, [account])
    wait_for(lambda: broker.idle, what="the retry to be sent")
    assert sent.get(timeout=30) == sent.id
    worker.wait_for_log(
        rf"{sent.id}\] (parked|waits|was replaced|is a late)", 20
    )  # it was sent twice
    assert [e["retries"] for e in worker.journal.events("ran", account=account)] == [0, 1]
    wait_until_free(worker, f"account:{account}")


# The last: what a worker rejects while its broker is away stays with Redis as not acknowledged.
def test_a_message_whose_autoretry_no_broker_takes_runs_when_a_redrive_brings_it_back(
    worker, broker
):
    message = Message(worker, worker.module.autoretries_or_is_rejected)
    account = message.account
    message.deliver()
    worker.journal.wait_for("arrived", account=account)
    broker.refuse()
    _go_on(worker, [account])
    try:
        worker.wait_for_log(rf"(?i){message.id}\] reject", 20)
    finally:
        broker.accept()
    assert worker.module.ping.delay().get(timeout=20) == "pong"
    message.deliver()
    worker.journal.wait_for("ran", count=2, account=account)
