"""What is resumed goes to a worker that has a slot for it."""

from __future__ import annotations

import itertools
import time
import uuid
from types import SimpleNamespace

import pytest
from celery import Celery, bootsteps
from celery.concurrency.prefork import TaskPool
from kombu import Connection, Queue
from kombu.asynchronous.timer import Timer

from celery_relock.worker import resuming
from celery_relock.worker.resuming import LIVES, STUCK, TRIP
from tests.support import wait_for
from tests.support.parked import is_consumed, lock_of, wait_until_parked, wait_until_requeued

pytestmark = pytest.mark.slow

APP = "tests.worker.apps.slots"
brokers = pytest.mark.parametrize("broker", ["redis", "amqp"])


@pytest.fixture
def start(new_worker, on_broker, namespace):
    """Start workers of one slot for one queue: `start("amqp", 2)`."""
    started = []

    def begin(broker, count, pool="prefork", **env):
        env |= on_broker(broker)
        for _ in range(count):
            node = ("-n", f"w{len(started)}@{namespace}")
            started.append(new_worker(APP, pool=pool, concurrency=1, arguments=node, env=env))
            wait_for(lambda: is_consumed(started[-1]), what="the announcement of the resume queue")
        return started[-count:]

    return begin


def busy(worker, seconds=0.0):
    """A slot is busy for so many seconds, or until `open_gate`; returns the gate and the worker."""
    gate = uuid.uuid4().hex
    worker.module.stands.delay(gate, seconds)
    return gate, worker.journal.wait_for("stands", gate=gate)[0]["host"]


def open_gate(worker, gate):
    worker.journal.add(f"open {gate}")


def parked(worker, account):
    """A call that is parked until its lock is released."""
    lock = lock_of(worker, f"account:{account}")
    assert lock.acquire()
    result = worker.module.takes.delay(account)
    wait_until_parked(worker, lock.name)
    return lock, result


@pytest.mark.parametrize(
    ("broker", "pool", "env"),
    [
        ("redis", "prefork", {}),
        ("redis", "prefork", {"RELOCK_TEST_NO_PREFETCH": "1"}),
        ("redis", "threads", {}),
        ("amqp", "prefork", {}),
    ],
)
def test_a_worker_without_a_free_slot_leaves_it_to_one_that_has_one(start, broker, pool, env):
    worker, _ = start(broker, 2, pool, **env)
    gate, host = busy(worker)
    for _ in range(8):
        lock, result = parked(worker, uuid.uuid4().hex)
        lock.release()
        assert result.get(timeout=TRIP - 0.5) == result.id
    assert host not in {event["host"] for event in worker.journal.events("took")}
    open_gate(worker, gate)


@brokers
def test_while_all_are_busy_it_waits_once_for_who_is_free_first(start, account, broker):
    worker, _ = start(broker, 2)
    gate, _ = busy(worker)
    lock, result = parked(worker, account)
    _, host = busy(worker, TRIP + 2)  # longer than a message may be on its way without a word
    lock.release()
    assert result.get(timeout=TRIP + 5) == result.id
    assert [event["host"] for event in worker.journal.events("took", account=account)] == [host]
    assert len(worker.journal.events("received", id=result.id)) == 2
    open_gate(worker, gate)


@brokers
def test_one_that_waits_long_in_a_worker_is_run_by_another_that_has_a_slot(
    start, account, namespace, broker
):
    prefetch = {"RELOCK_TEST_PREFETCH": "2"}
    (worker,) = start(broker, 1, **prefetch)
    lock, result = parked(worker, account)
    (gate, _), behind = busy(worker), uuid.uuid4().hex
    worker.module.stands.delay(behind)
    worker.wait_for_log("(?s)(stands.*received.*){2}")
    lock.release()
    wait_until_requeued(worker)
    open_gate(worker, gate)  # there is no other worker, so it stands behind the second one
    worker.journal.wait_for("received", count=2, id=result.id)
    start(broker, 1, **prefetch)
    assert result.get(timeout=3 * TRIP) == result.id
    assert [event["host"] for event in worker.journal.events("took", account=account)] == [
        f"w1@{namespace}"
    ]
    open_gate(worker, behind)


@brokers
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_turns_follow_each_other_though_each_slot_is_taken_at_once(start, account, broker, pool):
    (worker,) = start(broker, 1, pool)
    m, turns = worker.module, 5
    lock = lock_of(worker, f"account:{account}")
    assert lock.acquire()
    sent = [m.takes.delay(account, turn) for turn in range(turns)]
    wait_until_parked(worker, lock.name, turns)
    for _ in range(200):
        m.filler.delay(0.2)
    last = m.note.delay("the end of the backlog")
    begun = time.time()
    lock.release()
    for each in sent:
        assert each.get(timeout=20) == each.id
    times = [begun, *(event.at for event in worker.journal.events("took", account=account))]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    print(broker, pool, [round(gap, 3) for gap in gaps])
    assert max(gaps) < 2, gaps
    assert not last.ready()
    m.app.control.purge()


@brokers
def test_what_is_resumed_while_the_main_loop_executes_a_body_is_next(start, account, broker):
    (worker,) = start(broker, 1, "solo")
    m, behind = worker.module, uuid.uuid4().hex
    lock, result = parked(worker, account)
    busy(worker, STUCK + 4)
    for _ in range(8):
        m.stands.delay(behind, 3)
    time.sleep(STUCK + 2)
    assert is_consumed(worker)
    lock.release()
    assert result.get(timeout=20) == result.id
    (took,) = worker.journal.events("took", account=account)
    assert not [each for each in worker.journal.events("stands", gate=behind) if each.at < took.at]
    m.app.control.purge()


@brokers
def test_another_worker_takes_what_is_resumed_beside_a_long_body_in_a_main_loop(
    start, account, broker
):
    worker, _ = start(broker, 2, "solo")
    gate, host = busy(worker)
    time.sleep(STUCK + 2)
    lock, result = parked(worker, account)
    lock.release()
    assert result.get(timeout=3 * TRIP) == result.id
    (took,) = worker.journal.events("took", account=account)
    assert took["host"] != host
    open_gate(worker, gate)


@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_a_worker_whose_main_loop_is_stuck_counts_as_no_consumer(start, pool):
    (worker,) = start("redis", 1, pool)
    if pool == "prefork":
        busy(worker, STUCK + LIVES)  # that is no reason, as its body runs elsewhere
    worker.module.app.control.broadcast("stick", {"seconds": STUCK + 4})
    wait_for(lambda: not is_consumed(worker), STUCK + 3, "the end of its announcement")
    wait_for(lambda: is_consumed(worker), what="another one")


@pytest.mark.parametrize("how", ["cancelled", "exit", "shutdown"])
def test_a_body_that_ends_with_no_exception_leaves_its_slot_free(start, account, how):
    (worker,) = start("redis", 1, "threads")  # where nothing else ends by that
    worker.module.ends.delay(how)
    worker.module.note.delay("behind it").get(timeout=10)
    lock, result = parked(worker, account)
    lock.release()
    assert result.get(timeout=10) == result.id


def test_a_task_that_the_pool_can_not_terminate_leaves_its_slot_free(start, account):
    (worker,) = start("redis", 1, "threads", RELOCK_TEST_PREFETCH="2")
    gate, _ = busy(worker)
    behind = worker.module.filler.delay(0)
    worker.wait_for_log("filler.*received")
    behind.revoke(terminate=True)
    worker.wait_for_log(f"Terminating {behind.id}")
    open_gate(worker, gate)
    lock, result = parked(worker, account)
    lock.release()
    assert result.get(timeout=10) == result.id


def test_a_pool_that_a_cold_shutdown_has_ended_has_no_slot_for_what_still_comes():
    pool = TaskPool(1, app=Celery(broker="memory://", set_as_current=False))
    worker = SimpleNamespace(pool=pool, controller=None)
    pool.start()
    try:
        assert resuming._has_free_slot(worker)
    finally:
        pool.terminate()
    assert not resuming._has_free_slot(worker)


class _Timer(Timer):
    """Without a main loop, what is due at once is called at once."""

    def call_after(self, secs, fun, **_):
        fun()


class _Consumer(SimpleNamespace):
    """A worker's consumer, in a worker whose pool has been ended by a cold shutdown."""

    def create_task_handler(self):
        return self.taken.append


def test_what_comes_while_the_consuming_is_being_ended_is_requeued(rabbitmq):
    queue = Queue(uuid.uuid4().hex)
    with Connection(rabbitmq.url) as connection, Connection(rabbitmq.url) as other:
        worker = _Consumer(
            app=Celery(broker=rabbitmq.url, set_as_current=False),
            blueprint=SimpleNamespace(state=bootsteps.RUN),
            call_soon=lambda *_: None,
            connection=connection,
            connection_errors=connection.connection_errors,
            channel_errors=connection.channel_errors,
            controller=SimpleNamespace(
                relock_resumer=SimpleNamespace(consumes=list, left_broker=repr)
            ),
            hub=SimpleNamespace(on_tick=set()),
            on_decode_error=None,
            pool=SimpleNamespace(active=False, is_green=False, limit=1, num_processes=1),
            prefetch_multiplier=1,
            taken=[],
            task_consumer=SimpleNamespace(queues=[queue]),
            timer=_Timer(),
        )
        queues = resuming.ResumeQueues(worker)
        queues.start(worker)
        beside = resuming._beside(queue, amqp=True)(other.default_channel)

        def is_consumed():
            queues._sync()
            return queues._consumer.consuming_from(beside.name)

        def is_on_its_way():
            return beside.queue_declare(passive=True).message_count == 0

        try:
            wait_for(is_consumed, what="the resume queue")
            with other.Producer() as producer:
                producer.publish("{}", routing_key=beside.name)
            wait_for(is_on_its_way, what="the delivery")
            queues.stop(worker)
            assert wait_for(beside.get, what="the message").body == "{}"
            assert worker.taken == []
        finally:
            queues.shutdown(worker)
            beside.delete()
