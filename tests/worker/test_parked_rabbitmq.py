"""Parked in Redis, resumed through RabbitMQ: classic and quorum queues, no result backend."""

from __future__ import annotations

from collections import Counter

import celery
import pytest
from celery import chain

from celery_relock.declaration import engine_of
from tests.support import leftovers, wait_for
from tests.support.parked import held_here
from tests.support.tcp import TcpProxy

no_quorum = pytest.mark.skipif(
    celery.VERSION[:2] < (5, 5), reason="Celery 5.4 has no quorum queues"
)
both = pytest.mark.parametrize("queue", ["classic", pytest.param("quorum", marks=no_quorum)])


@pytest.fixture(scope="module")
def broker(rabbitmq):
    """The way to it, which can be shut."""
    with TcpProxy(rabbitmq.port) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def worker(broker, module_worker):
    return module_worker(
        "tests.worker.apps.parked_rabbitmq",
        concurrency=2,
        env={"RELOCK_TEST_BROKER": f"amqp://guest:guest@127.0.0.1:{broker.port}//"},
    )


@pytest.fixture
def held(worker, account):
    """The lock of this test's account, held by this process until `held.release()`."""
    with held_here(worker, f"account:{account}") as lock:
        yield lock


def _told(worker, name, **facts):
    return worker.journal.wait_for(name, 20, **facts)[0]


def _parked(worker, result):
    return _told(worker, "over", id=result.id, state="IGNORED")


@both
def test_a_resumed_message_is_what_it_was_in_all_that_it_says(worker, account, held, queue):
    options = {
        "queue": queue,
        "routing_key": f"{queue}.delivery",
        "priority": 7,
        "headers": {"x-mine": "kept"},
        "time_limit": 50,
        "soft_time_limit": 40,
        "shadow": "another name",
        "root_id": "the-root",
        "parent_id": "the-parent",
        "reply_to": "somebody",
        "stamped_headers": ["stamp"],
        "stamp": "of mine",
    }
    task = worker.module.work
    straight = f"{account}-straight"
    task.apply_async((straight,), **options)
    waits = task.apply_async((account,), **options)
    _parked(worker, waits)
    held.release()
    after, at_once = (
        dict(_told(worker, "seen", account=each).data) for each in (account, straight)
    )
    assert after["id"] == waits.id
    for varies in ("id", "account"):
        after.pop(varies), at_once.pop(varies)
    assert after == at_once
    assert (after["exchange"], after["routing_key"]) == ("by-topic", f"{queue}.delivery")
    assert after["headers"] == {"x-mine": "kept"}
    assert after["priority"] == 7


@both
def test_who_releases_the_lock_resumes_the_next_one_in_the_order_of_their_coming(
    worker, account, queue
):
    where = {"queue": queue, "routing_key": f"{queue}.x"}
    worker.module.hold.apply_async((account,))
    _told(worker, "held", account=account)
    sent = []
    for _ in range(5):
        sent.append(worker.module.work_acked_late.apply_async((account,), **where))
        _parked(worker, sent[-1])
    worker.journal.add(f"free {account}")
    for each in sent:
        _told(worker, "over", id=each.id, state="SUCCESS")
    seen = worker.journal.events("seen", account=account)
    assert [e["id"] for e in seen] == [each.id for each in sent]


def test_a_chain_goes_on_after_the_wait(worker, account, held):
    result = chain(worker.module.work.si(account), worker.module.note.si(account)).apply_async()
    _parked(worker, result.parent)
    held.release()
    _told(worker, "noted", account=account)


def test_a_revoked_execution_leaves_the_queue_and_the_next_one_goes_on(worker, account, held):
    first, second = (worker.module.work.delay(account) for _ in range(2))
    _parked(worker, first), _parked(worker, second)
    worker.module.app.control.revoke(first.id)
    assert not _told(worker, "revoked", id=first.id)["expired"]
    held.release()
    _told(worker, "over", id=second.id, state="SUCCESS")
    assert _ids_seen(worker, account) == [second.id]


def test_an_execution_that_expires_leaves_the_queue_though_nobody_releases_the_lock(
    worker, account, held
):
    result = worker.module.work.apply_async((account,), expires=1.0)
    _parked(worker, result)
    assert _told(worker, "revoked", id=result.id)["expired"]
    engine = engine_of(worker.module.app)
    wait_for(lambda: engine.inspect(f"account:{account}").waiting == 0, what="the free place")
    held.release()
    assert _ids_seen(worker, account) == []


def _ids_seen(worker, account):
    return [e["id"] for e in worker.journal.events("seen", account=account)]


def test_what_is_parked_waits_for_a_broker_that_is_away(broker, worker, account, held):
    result = worker.module.work.delay(account)
    _parked(worker, result)
    broker.refuse()
    held.release()
    worker.wait_for_log("could not be resumed|Trying again in", timeout=20)
    broker.accept()
    _told(worker, "over", id=result.id, state="SUCCESS")
    assert _ids_seen(worker, account) == [result.id]


@no_quorum
@pytest.mark.parametrize("queue", ["quorum", "quorum-by-name"])
def test_what_is_sent_again_to_a_quorum_queue_waits_in_the_broker_and_keeps_back_nobody(
    worker, account, held, queue
):
    """A worker can have eight of its messages, as it has two processes, and cannot ask for more."""
    where = {"queue": queue, "routing_key": f"{queue}.x" if queue == "quorum" else queue}
    task, control = worker.module.comes_again, worker.module.app.control
    sent = [task.apply_async((account,), **where).id for _ in range(9)]

    def often(events):
        tries = Counter(e["id"] for e in events if e.name == "over" and e["state"] == "RETRY")
        return all(tries[each] >= 5 for each in sent)

    worker.journal.wait_for(often, 60)
    wait_for(lambda: not any(control.inspect(timeout=1).scheduled().values()), 20)
    held.release()
    for each in sent:
        _told(worker, "over", id=each, state="SUCCESS")
    assert sorted(_ids_seen(worker, account)) == sorted(sent)


@no_quorum
def test_a_message_that_waited_in_the_broker_until_it_was_due_comes_back_where_it_was_sent_to(
    worker, account, held
):
    waits = worker.module.work.apply_async((account,), queue="quorum", countdown=1.5)
    _parked(worker, waits)
    held.release()
    after = _told(worker, "seen", account=account)
    # Celery sends it by the routing key of the queue, whatever that is.
    assert (after["exchange"], after["routing_key"]) == ("by-topic", "quorum.#")
    assert not {"x-death", "x-delivery-count"} & after["headers"].keys()


def test_nothing_is_left_in_redis(client, worker):
    app = worker.module.app
    names = leftovers(client, app.conf.relock_namespace)
    assert [n for n in names if client.ttl(n) == -1 and not n.endswith(":meta")] == []


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("name", ["is_rejected", "is_requeued", "fails_unacknowledged"])
def test_a_message_that_the_broker_brings_back_on_purpose_runs_again(
    worker, account, held, name, waits
):
    module = worker.module
    if not waits:
        held.release()
    with module.app.connection_for_write() as connection:
        module.resting(connection.default_channel).declare()
    sent = getattr(module, name).apply_async((account,), queue="comes-back")
    if waits:
        _parked(worker, sent)
        held.release()
    worker.journal.wait_for("tried", 20, count=3, id=sent.id)
    # The lock is free: nobody stands behind an execution that is over.
    module.work.apply_async((account,), queue="classic")
    _told(worker, "seen", account=account)
    assert len(worker.journal.events("tried", id=sent.id)) == 3


def test_a_message_that_is_rejected_as_it_has_waited_too_long_runs_when_the_broker_brings_it_back(
    worker, account, held
):
    module = worker.module
    with module.app.connection_for_write() as connection:
        module.resting(connection.default_channel).declare()
    sent = module.fails_unacknowledged_after_a_wait.apply_async((account,), queue="comes-back")
    worker.journal.wait_for("over", 20, id=sent.id, state="FAILURE")
    held.release()
    worker.journal.wait_for("tried", 20, id=sent.id)
