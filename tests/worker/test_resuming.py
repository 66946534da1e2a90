"""A turn that has come is used: what is resumed does not stand behind the backlog of its queue."""

from __future__ import annotations

import gc
import itertools
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial

import psutil
import pytest
import redis
from celery import VERSION, Celery
from kombu import Connection, Exchange, Queue
from kombu.common import Broadcast
from kombu.exceptions import OperationalError

from celery_relock import engines
from celery_relock.engine.parking import Sender
from celery_relock.engine.protocol import DEBOUNCE, Message
from celery_relock.errors import LockLost, LockUnavailable, RelockError
from celery_relock.worker import parking, resuming
from celery_relock.worker.parking import Outbox, home
from celery_relock.worker.resuming import TRIP
from tests.support import Worker, new_namespace, programs, wait_for
from tests.support.long import LONG
from tests.support.missing import missing
from tests.support.parked import engine_here, is_consumed, lock_of, state_of, wait_until_parked
from tests.support.programs import GEVENT, said_by
from tests.support.rabbitmq import RabbitServer, find_rabbitmq_server
from tests.support.tcp import TcpProxy

pytestmark = pytest.mark.slow

APP = "tests.worker.apps.resuming"
brokers = pytest.mark.parametrize("broker", ["redis", "amqp"])
AT_ONCE = {"interval_start": 0, "interval_step": 0}  # how kombu connects again


@pytest.fixture(scope="module")
def launch(module_worker, on_broker):
    """Start workers on one broker: `launch("amqp", queues="topic")`; some for one namespace."""

    def begin(broker, *, queues="", namespace="", **options):
        env = {**on_broker(broker), **options.pop("env", {})}
        if queues:
            env["RELOCK_TEST_QUEUES"] = queues
        namespace = namespace or new_namespace()
        return module_worker(APP, namespace=namespace, env=env, **options)

    return begin


@pytest.fixture
def start(launch):
    """The same, for one test."""
    started = []

    def begin(broker, **options):
        started.append(launch(broker, **options))
        return started[-1]

    yield begin
    for one in started:
        one.close()


@pytest.fixture(scope="module", params=["redis", "amqp"])
def worker(request, launch):
    """One for all tests that let it live, on each broker."""
    return ready(launch(request.param, concurrency=2))


def ready(worker, queue=None):
    wait_for(lambda: is_consumed(worker, queue), what="the announcement of the resume queue")
    return worker


def was_received(worker, result, times=1):
    try:
        worker.journal.wait_for("received", 5.0, times, id=result.id)
    except AssertionError:
        return False
    return True


def took(worker, account, count=1, timeout=30.0):
    return worker.journal.wait_for("took", timeout, count, account=account)


def held(worker, account):
    lock = lock_of(worker, f"account:{account}")
    assert lock.acquire()
    return lock


def is_held(worker, account):
    """A task holds the lock until `free`."""
    worker.module.hold.delay(account)
    worker.journal.wait_for("held", account=account)


@pytest.fixture
def backlog(worker):
    """Two slots are busy for a while: `backlog(400)` tenths of a second. Purged at the end."""
    yield lambda count: [worker.module.filler.delay(0.1) for _ in range(count)]
    worker.module.app.control.purge()


def test_turns_follow_each_other_though_the_queue_has_a_backlog(worker, account, backlog):
    m, turns = worker.module, 6
    is_held(worker, account)
    sent = [m.takes.delay(account) for _ in range(turns)]
    wait_until_parked(worker, f"account:{account}", turns)
    backlog(400)
    last = m.note.delay("the end of the backlog")
    worker.journal.add(f"free {account}")
    begun = time.time()
    entered = took(worker, account, turns)
    times = [begun, *(event.at for event in entered)]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert max(gaps) < 10, gaps  # the backlog takes twenty
    assert not last.ready()
    assert [event["id"] for event in entered] == [each.id for each in sent]
    # One delivery that was parked, one that was resumed.
    for each in sent:
        assert len(worker.journal.events("received", id=each.id)) == 2
    # It was not the resume queue that it came from, as far as anybody can tell.
    assert {event["key"] for event in entered} == {m.app.conf.task_default_queue}
    assert not [name for event in entered for name in event["headers"] if "origin" in name]


def test_nothing_of_the_holder_is_in_what_its_release_resumes(worker, account):
    m = worker.module
    is_held(worker, account)
    for name in ("T1", "T2", "T3"):
        token = m.tenant.set(name)
        m.takes.delay(account)
        m.tenant.reset(token)
    wait_until_parked(worker, f"account:{account}", 3)
    worker.journal.add(f"free {account}")
    assert [event["tenant"] for event in took(worker, account, 3)] == ["T1", "T2", "T3"]


def test_a_retry_goes_where_the_first_message_came_from(worker, account):
    lock = held(worker, account)
    result = worker.module.retries.delay(account)
    wait_until_parked(worker, lock.name)
    lock.release()
    assert result.get(timeout=30) == result.id
    default = worker.module.app.conf.task_default_queue
    assert [event["key"] for event in took(worker, account, 2)] == [default, default]
    came_by = [event["key"] for event in worker.journal.events("received", id=result.id)]
    assert came_by == [default, default, default]  # as the library makes it look, before anybody


def test_a_rate_limit_is_not_spent_twice(worker, account):
    lock = held(worker, account)
    result = worker.module.takes_seldom.delay(account)
    wait_until_parked(worker, lock.name)
    lock.release()
    # Six a minute: another token would have been there ten seconds later.
    assert result.get(timeout=30) == result.id


@brokers
def test_what_waits_long_for_a_slot_is_delivered_once_and_says_nothing_else(start, account, broker):
    worker = ready(start(broker, concurrency=2))
    lock = held(worker, account)
    results = [worker.module.takes.delay(account) for _ in range(2)]
    wait_until_parked(worker, lock.name, 2)
    for _ in range(2):
        worker.module.filler.delay(TRIP + 1)
    worker.wait_for_log("(?s)(filler.*received.*){2}")
    lock.release()
    for each in results:
        assert each.get(timeout=40) == each.id
    assert {len(worker.journal.events("received", id=each.id)) for each in results} == {2}
    # A full worker has requeued it, which is no sign that its body has begun before.
    assert [event["redelivered"] for event in took(worker, account, 2)] == [False, False]


def test_the_policy_retry_sends_the_same_message_later(worker, account):
    lock = held(worker, account)
    token = worker.module.tenant.set("T1")
    result = worker.module.asks_again.apply_async((account,), argsrepr="(secret)")
    worker.module.tenant.reset(token)
    worker.journal.wait_for("received", count=2, id=result.id)
    lock.release()
    assert result.get(timeout=30) == result.id
    assert took(worker, account)[0]["tenant"] == "T1"


# What differs between brokers is in the main process, which is green in one of the pools alone.
@pytest.mark.parametrize(
    ("pool", "broker"),
    [("threads", "redis"), ("solo", "redis"), ("gevent", "redis"), ("gevent", "amqp")],
)
def test_each_pool_has_them(start, account, broker, pool):
    worker = ready(start(broker, pool=pool, concurrency=1 if pool == "solo" else 2))
    lock = held(worker, account)
    results = [worker.module.takes.delay(account) for _ in range(3)]
    wait_until_parked(worker, lock.name, 3)
    for _ in range(400):
        worker.module.filler.delay(0.1)
    last = worker.module.note.delay("the end of the backlog")
    lock.release()
    for each in results:
        assert each.get(timeout=30) == each.id
    assert not last.ready()
    assert {len(worker.journal.events("received", id=each.id)) for each in results} == {2}


def test_the_worker_s_own_queues_stay_as_they_are_and_are_followed(worker, account):
    app = worker.module.app
    default = app.conf.task_default_queue
    more, control = f"{default}-more", app.control
    only = {"destination": [worker.node], "limit": 1}

    def queues():
        # A worker that is busy may answer late.
        inspect = control.inspect(**only, timeout=5)
        answers = wait_for(inspect.active_queues, 20, "an answer")
        (found,) = answers.values()
        return {each["name"] for each in found}

    assert queues() == {default}
    control.add_consumer(more, reply=True, **only)
    ready(worker, more)
    assert queues() == {default, more}
    lock = held(worker, account)
    result = worker.module.takes.apply_async((account,), queue=more)
    wait_until_parked(worker, lock.name)
    lock.release()
    assert result.get(timeout=30) == result.id
    control.cancel_consumer(more, reply=True, **only)
    wait_for(lambda: not is_consumed(worker, more), what="the end of the announcement")
    assert is_consumed(worker)


def test_what_is_sent_again_comes_back_to_a_queue_that_the_worker_was_told_to_consume(
    start, account
):
    worker = ready(start("redis"))
    name = f"{worker.namespace}-told"
    told = {"exchange": f"{name}-topic", "exchange_type": "topic", "routing_key": "a.#"}
    # The pool's children do not hear of it.
    only = {"destination": [worker.node], "reply": True}
    assert worker.module.app.control.add_consumer(name, **told, **only)
    queue = Queue(name, Exchange(told["exchange"], "topic"), routing_key="a.#")
    lock = held(worker, account)
    sent = {"queue": queue, "routing_key": "a.b"}
    result = worker.module.comes_again.apply_async((account,), **sent)
    worker.wait_for_log(f"{result.id}\\] retry: ")
    lock.release()
    assert result.get(timeout=30) == result.id


def test_each_worker_runs_its_own_copy_of_what_a_fanout_exchange_of_redis_brings(start, account):
    namespace, nodes = new_namespace(), ["one@127.0.0.1", "two@127.0.0.1"]
    of = {"queues": "copies", "namespace": namespace}
    first, second = (start("redis", **of, arguments=("-n", node)) for node in nodes)
    queue = first.module.app.conf.task_queues[1]
    with first.module.app.producer_or_acquire() as producer:
        take = partial(first.module.takes.apply_async, queue=queue, producer=producer)
        while not was_received(first, take(("nobody's",)), 2):
            pass  # Redis tells only who listens already, and a worker that is ready may not yet
        lock, sent = held(first, account), 3
        for _ in range(sent):
            take((account,))
    wait_until_parked(first, lock.name, sent * len(nodes))
    lock.release()
    hosts = Counter(event["host"] for event in took(first, account, sent * len(nodes)))
    assert hosts == dict.fromkeys(nodes, sent)
    # One resume queue would be for both, and the wrong one would discard half of the copies.
    assert is_consumed(second)
    assert not is_consumed(second, queue.name)


@brokers
@pytest.mark.parametrize("which", ["topic", "fanout"])
def test_queues_that_others_share_an_exchange_with(start, account, broker, which):
    worker = ready(start(broker, queues=which))
    app = worker.module.app
    queue = app.conf.task_queues[1]  # as its process knows it: a Broadcast has a name for each
    if which == "topic":
        ready(worker, queue.name)
    lock = held(worker, account)
    key = {"routing_key": "a.b.c"} if which == "topic" else {}
    with app.producer_or_acquire() as producer:
        producer.maybe_declare(queue.exchange)  # Celery does not declare what is a Broadcast's
        sent = {"queue": queue, "producer": producer, **key}
        result = worker.module.takes.apply_async((account,), **sent)
        # Redis tells a fanout only to who listens already, and a worker that is ready may not yet.
        while not was_received(worker, result):
            result = worker.module.takes.apply_async((account,), **sent)
    wait_until_parked(worker, lock.name)
    lock.release()
    assert result.get(timeout=30) == result.id
    (event,) = took(worker, account)
    first, second = worker.journal.events("received", id=result.id)
    assert first["exchange"] == queue.exchange.name
    for again in (second, event):
        assert (again["exchange"], again["key"]) == (first["exchange"], first["key"])


@brokers
@pytest.mark.parametrize(
    ("multiplier", "slots", "pool"),
    [
        ("0", ("-c", "2"), "prefork"),
        ("1", ("--autoscale", "2,1"), "prefork"),
        ("1", ("--autoscale", "1,1"), "prefork"),
        ("1", ("-c", "1"), "prefork"),
        ("1", ("-c", "2"), "gevent"),
    ],
    ids=["without a bound", "autoscale", "control autoscale", "pool_grow", "gevent"],
)
def test_a_long_resumed_task_holds_up_no_other_that_has_a_slot(
    start, broker, multiplier, slots, pool
):
    env = {"RELOCK_TEST_PREFETCH": multiplier}
    worker = ready(start(broker, pool=pool, arguments=slots, env=env))
    accounts = [uuid.uuid4().hex[:8] for _ in range(2)]
    locks = [held(worker, account) for account in accounts]
    for account, seconds in zip(accounts, (60, 0), strict=True):
        worker.module.takes_late.delay(account, seconds)
        wait_until_parked(worker, f"account:{account}")
    control, only = worker.module.app.control, {"destination": [worker.node], "reply": True}
    if slots == ("-c", "1"):
        assert control.pool_grow(1, **only)
    if slots == ("--autoscale", "1,1"):
        assert control.autoscale(2, 1, **only)
    for lock, account in zip(locks, accounts, strict=True):
        lock.release()
        took(worker, account)


@brokers
def test_a_warm_shutdown_ends_what_was_resumed_and_runs_it_once(start, account, broker):
    worker = ready(start(broker))
    lock = held(worker, account)
    result = worker.module.takes_late.delay(account, 1.0)
    wait_until_parked(worker, lock.name)
    lock.release()
    took(worker, account)
    assert worker.stop() == 0
    assert not is_consumed(worker)
    other = start(broker, namespace=worker.namespace)
    # By its turn at the lock, whatever had come again would have been looked at.
    last = other.module.takes.delay(account)
    assert last.get(timeout=30) == last.id
    assert [event["id"] for event in took(other, account)] == [result.id, last.id]
    assert result.get(timeout=30) == result.id


@brokers
def test_a_resume_queue_that_its_worker_has_left_loses_nothing(start, account, broker):
    worker = ready(start(broker))
    namespace = worker.namespace
    lock = held(worker, account)
    results = [worker.module.takes.delay(account) for _ in range(2)]
    wait_until_parked(worker, lock.name, 2)
    worker.kill()
    # It still counts as one that consumes, so that is where the first message is published.
    assert is_consumed(worker)
    engine = engine_here(worker.module.app)
    outbox = engine.parking.sender = Outbox(engine.backend.consumed)
    outbox.add(worker.module.app)
    try:
        lock.release()
    finally:
        engine.parking.sender = Sender()
    wait_for(lambda: state_of(worker, lock.name).waiting == 2)
    other = start(broker, namespace=namespace)
    for each in results:
        assert each.get(timeout=20) == each.id
    assert len(took(other, account, 2)) == 2


LASTING = {"x-queue-type": "classic"}
PASSING = {**LASTING, "x-expires": resuming.EXPIRES}


@pytest.mark.parametrize(
    ("queue", "arguments"),
    [
        (Queue("q"), LASTING),
        (Queue("q", queue_arguments={"x-queue-type": "quorum"}), LASTING),
        (Queue("q", auto_delete=True), PASSING),
        (Queue("q", durable=False), PASSING),
        (Queue("q", queue_arguments={"x-expires": 1000}), PASSING),
        (Queue("q", expires=1), PASSING),
        (Broadcast("q"), PASSING),
    ],
    ids=["durable", "quorum", "auto-delete", "transient", "x-expires", "expires", "broadcast"],
)
def test_a_resume_queue_of_rabbitmq_is_classic_and_lives_as_long_as_the_queue_beside_it(
    queue, arguments
):
    # A quorum queue drops what is requeued too often, and a full worker does that.
    assert resuming._beside(queue, amqp=True).queue_arguments == arguments


def test_what_a_killed_worker_leaves_in_its_resume_queue_waits_there_for_the_next(
    start, account, rabbitmq
):
    worker = ready(start("amqp"))
    lock = held(worker, account)
    result = worker.module.takes_late.delay(account, 60)
    wait_until_parked(worker, lock.name)
    lock.release()
    took(worker, account)
    worker.kill()
    name = f"{worker.module.default}.resumed"
    with Connection(rabbitmq.url) as connection:
        there = connection.channel()

        def left():
            return there.queue_declare(name, durable=True, auto_delete=False, arguments=LASTING)

        wait_for(lambda: left().message_count == 1, 20, "the message that comes again")
        beside = Queue(name, channel=there)
        (message,) = [beside.get()]
        assert message.headers["id"] == result.id
        message.requeue()
    other = start("amqp", namespace=worker.namespace)
    both = took(other, account, 2)
    assert [event["id"] for event in both] == [result.id] * 2
    assert [event["redelivered"] for event in both] == [False, True]


@pytest.mark.parametrize("name", ["takes_late", "asks_again_late"])
def test_what_a_killed_worker_had_begun_says_so_also_after_it_has_waited_for_its_lock(
    start, account, name
):
    worker = ready(start("amqp"))
    result = getattr(worker.module, name).delay(account, 60)
    took(worker, account)
    with ThreadPoolExecutor(1) as thread:  # that the lock is of
        lock = lock_of(worker, f"account:{account}")
        waits = thread.submit(lock.acquire, blocking_timeout=60)
        wait_for(lambda: state_of(worker, lock.name).waiting, what="the waiter")
        worker.kill()
        other = start("amqp", namespace=worker.namespace)
        assert waits.result(60)
        wait_for(lambda: was_received(other, result, 2), 20, "the message that comes again")
        if name == "takes_late":
            wait_until_parked(other, lock.name)
        else:
            wait_for(lambda: was_received(other, result, 3), 20, "the one that is sent again")
        thread.submit(lock.release).result()
    assert [event["redelivered"] for event in took(other, account, 2)] == [False, True]


def test_without_the_right_to_a_resume_queue_a_worker_does_without(start, account, rabbitmq):
    namespace = new_namespace()
    with Connection(rabbitmq.url) as connection:
        # One with other arguments: RabbitMQ refuses it as it refuses one without permission.
        beside = Queue(f"queue-{namespace}.resumed", queue_arguments={"x-max-length": 9})
        beside(connection.channel()).declare()
    worker = start("amqp", namespace=namespace)
    worker.wait_for_log("no resume queue beside")
    lock = held(worker, account)
    result = worker.module.takes.delay(account)
    wait_until_parked(worker, lock.name)
    lock.release()
    assert result.get(timeout=30) == result.id
    assert not is_consumed(worker)


def test_a_worker_that_is_full_again_and_again_takes_what_is_resumed_without_a_new_connection(
    start, account, rabbitmq
):
    turns = 12
    with TcpProxy(rabbitmq.port) as proxy:
        broker = {"RELOCK_TEST_BROKER": f"amqp://guest:guest@127.0.0.1:{proxy.port}//"}
        worker = ready(start("redis", concurrency=1, env=broker))
        lock = held(worker, account)
        results = [worker.module.takes.delay(account) for _ in range(turns)]
        wait_until_parked(worker, lock.name, turns)
        for _ in range(200):
            worker.module.filler.delay(0.02)
        before = proxy.taken
        lock.release()
        for each in results:
            assert each.get(timeout=30) == each.id
        # The child publishes by one of its own, as does this process, which had the lock.
        assert proxy.taken - before < turns / 2
        worker.module.app.control.purge()


def test_a_resume_queue_that_could_not_be_had_for_a_while_is_tried_again(start, rabbitmq):
    namespace = new_namespace()
    with Connection(rabbitmq.url) as connection:
        # That of another connection is refused as one whose node is down, and not for good.
        beside = Queue(f"queue-{namespace}.resumed", exclusive=True, durable=False)
        beside(connection.channel()).declare()
        worker = start("amqp", namespace=namespace, env={"RELOCK_TEST_AGAIN": "0.5"})
        worker.wait_for_log("no resume queue beside .*RESOURCE_LOCKED.* again in a minute")
        assert not is_consumed(worker)
    ready(worker)


@pytest.mark.skipif(not LONG, reason="only in the long form")
def test_a_resume_queue_on_a_node_that_is_down_stops_no_worker_and_is_read_when_it_is_up(
    start, account
):
    if find_rabbitmq_server() is None:
        missing("no rabbitmq-server")
    with ExitStack() as stack:
        servers = [RabbitServer()]
        stack.callback(servers[0].stop)
        servers.append(RabbitServer(mate=servers[0]))
        stack.callback(servers[1].stop)
        namespace = new_namespace()
        with Connection(servers[1].url) as connection:  # that is where it is from now on
            beside = Queue(f"queue-{namespace}.resumed", queue_arguments=LASTING)
            beside(connection.channel()).declare()
        broker = {"RELOCK_TEST_BROKER": servers[0].url}
        worker = ready(start("redis", namespace=namespace, env=broker))
        servers[1].kill()
        worker.wait_for_log("Connection to broker lost")
        for _ in range(3):
            lock = held(worker, account)
            result = worker.module.takes.delay(account)
            wait_until_parked(worker, lock.name)
            lock.release()
            assert result.get(timeout=30) == result.id
        worker.wait_for_log("no resume queue beside .* again in a minute", 120)
        servers[1].restart()
        wait_for(lambda: is_consumed(worker), 120, "the resume queue to be read")


def test_under_gevent_no_other_greenlet_comes_in_between_while_a_worker_looks_after_its_queues(
    redis_url, namespace
):
    """It would have the worker's connection, for the acknowledgement of a task, when the main loop
    reads from it next: which ends the worker."""
    said = programs.run(
        """
        from types import SimpleNamespace
        from celery.concurrency.gevent import Timer
        from kombu import Queue
        from celery_relock.worker.resuming import ResumeQueues

        called, ran = threading.Event(), []

        def connect(**options):
            called.set()
            raise OSError

        connection, app = SimpleNamespace(channel_errors=()), SimpleNamespace()
        app.connection_for_read = connect
        c = SimpleNamespace(connection=connection, timer=Timer(), app=app)
        queues = ResumeQueues(c)
        spawn(ran.append, "another greenlet")
        queues._declare("queue", Queue("queue.resumed"))
        say(ran)
        say(called.wait(10))
        """,
        redis_url,
        namespace,
        first=GEVENT,
    )
    assert said == ["[]", "True"]


@pytest.mark.skipif(VERSION < (5, 7), reason="two workers of one name start on this Celery")
def test_a_worker_that_cannot_start_says_why_and_nothing_of_resume_queues(start):
    worker = ready(start("amqp"))
    with pytest.raises(AssertionError, match="the worker ended") as raised:
        start("amqp", namespace=worker.namespace)  # of the same node name
    assert "RESOURCE_LOCKED" in str(raised.value)
    assert "celery_relock/worker" not in str(raised.value)


def test_beside_a_queue_with_the_longest_of_names_there_is_no_resume_queue(start, account):
    name = f"{uuid.uuid4().hex}-".ljust(250, "q")
    worker = start("amqp", arguments=("-Q", name))
    worker.wait_for_log(f"no resume queue beside '{name}'.*more than 255 bytes")
    lock = held(worker, account)
    result = worker.module.takes.apply_async((account,), queue=name)
    wait_until_parked(worker, lock.name)
    lock.release()
    assert result.get(timeout=30) == result.id


@brokers
def test_a_connection_that_breaks_is_made_anew(start, account, broker, request, redis_server):
    target = request.getfixturevalue("rabbitmq") if broker == "amqp" else redis_server
    with TcpProxy(target.port) as proxy:
        url = target.url.replace(str(target.port), str(proxy.port))
        worker = ready(start(broker, env={"RELOCK_TEST_BROKER": url}))
        # On Redis it says that it is ready before it waits for messages, and until then a
        # connection that is cut is made anew unseen.
        worker.module.note.delay("the first").get(timeout=20)
        proxy.cut()
        worker.wait_for_log("Connection to broker lost", timeout=20)
        worker.wait_for_log("(?s)(Connected to.*){2}", timeout=20)
        ready(worker)
        lock = held(worker, account)
        results = [worker.module.takes.delay(account) for _ in range(3)]
        wait_until_parked(worker, lock.name, 3)
        for _ in range(400):
            worker.module.filler.delay(0.1)
        last = worker.module.note.delay("the end of the backlog")
        lock.release()
        for each in results:
            assert each.get(timeout=30) == each.id
        assert not last.ready()


@brokers
def test_what_a_signal_handler_raises_amid_the_look_after_the_queues_ends_the_worker(start, broker):
    env = {"RELOCK_TEST_STRIKE": "resume_queue"}
    worker = start(broker, pool="solo", env=env)
    worker.wait_for_log("Unrecoverable error: Struck")


# --- which broker


def test_apps_of_one_process_publish_to_their_own_brokers(redis_url, namespace, account):
    both = [
        Worker(APP.replace("resuming", "two"), redis_url, namespace, env={"RELOCK_TEST_APP": name})
        for name in ("first", "second")
    ]
    try:
        for worker, name in zip(both, ("first", "second"), strict=True):
            app = worker.module.app
            assert app.main == name
        a, b = both
        a.module.app.tasks["hold"].delay(account)
        a.journal.wait_for("held")
        results = [worker.module.app.tasks["takes"].delay(account) for worker in (b, a, b)]
        wait_for(lambda: state_of(a, f"account:{account}").waiting == 3)
        a.journal.add(f"free {account}")
        assert [each.get(timeout=30) for each in results] == ["second", "first", "second"]
        assert len(a.journal.events("took", app="first")) == 1
    finally:
        for worker in both:
            worker.close()


def lose_the_broker(worker, client, account, times, backlog=0):
    """End all connections of a worker's main process, each time when it has resumed a task."""
    lost, process = "Connection to broker lost", psutil.Process(worker.pid)
    for _ in range(times):
        lock, before = held(worker, account), worker.log().count(lost)
        result = worker.module.takes.delay(account)
        wait_until_parked(worker, lock.name)
        lock.release()
        result.get(timeout=30)
        for _ in range(backlog):
            worker.module.filler.delay(0.2)
        for each in process.net_connections("tcp"):
            with suppress(redis.ResponseError):  # it is gone already
                client.client_kill(f"{each.laddr.ip}:{each.laddr.port}")
        wait_for(lambda before=before: worker.log().count(lost) > before)


def test_a_worker_that_loses_its_broker_again_and_again_keeps_nothing_of_that(
    start, client, account
):
    worker = ready(start("redis"))
    process = psutil.Process(worker.pid)
    lose_the_broker(worker, client, account, 3)
    time.sleep(2)  # until it has connected anew
    before = process.num_fds()
    lose_the_broker(worker, client, account, 15)
    wait_for(lambda: process.num_fds() < before + 5, what="that it keeps few descriptors")


def test_a_worker_with_a_backlog_goes_on_when_it_loses_its_broker(start, client, account):
    worker = ready(start("redis"))
    lose_the_broker(worker, client, account, 8, backlog=8)
    assert worker.module.takes.delay(account).get(timeout=60)
    assert not worker.ended


def test_a_worker_with_a_backlog_goes_on_when_its_broker_has_been_down(start, own_redis, account):
    broker, lost = own_redis("--appendonly", "yes"), "Connection to broker lost"
    worker = ready(start("redis", env={"RELOCK_TEST_BROKER": broker.url}))
    for times in range(1, 4):
        sent = [worker.module.filler.delay(1.0) for _ in range(8)]
        wait_for(lambda sent=sent: f"{sent[4].id}] received" in worker.log(), what="the backlog")
        broker.kill()
        wait_for(lambda times=times: worker.ended or worker.log().count(lost) >= times)
        broker.restart(keep_data=True)
        assert worker.module.takes.delay(account).get(timeout=60)


def test_what_is_parked_is_not_handed_out_by_a_worker_that_has_lost_its_broker(
    start, own_redis, account
):
    broker = own_redis("--appendonly", "yes")
    worker = ready(start("redis", env={"RELOCK_TEST_BROKER": broker.url}))
    lock, result = held(worker, account), worker.module.takes.delay(account)
    wait_until_parked(worker, f"account:{account}")
    broker.kill()
    worker.wait_for_log("Trying again in 2")
    lock.release()
    worker.wait_for_log("Trying again in 4")
    broker.restart(keep_data=True)
    assert result.get(timeout=60)
    assert "could not be resumed" not in worker.log()


def test_one_outbox_publishes_for_all_apps_of_its_process_and_for_no_other(
    monkeypatch, redis_url, namespace
):
    monkeypatch.setenv("RELOCK_TEST_URL", redis_url)
    monkeypatch.setenv("RELOCK_TEST_NAMESPACE", namespace)
    from tests.worker.apps.two import _app

    first, second, third = (_app(name) for name in ("first", "second", "third"))
    outbox = Outbox(lambda channel: False)
    outbox.add(first), outbox.add(second), outbox.add(second)
    assert sorted(outbox.homes.split()) == sorted([home(first), home(second)])
    raw = parking.RawMessage(
        *(b"[]", "application/json", "utf-8", {"task": "t"}, {"priority": 0}, "", "q")
    )
    for app in (first, second):
        text = parking.parked_text(app, raw, {"of": app.main})
        outbox.send(Message("e", "n", text))
        with app.connection_for_read() as connection:
            message = connection.default_channel.basic_get("q", no_ack=True)
            assert message.headers["relock"] == {"of": app.main}
            assert connection.default_channel.basic_get("q") is None
    with pytest.raises(RelockError, match="not one of this process"):
        outbox.send(Message("e", "n", parking.parked_text(third, raw, {})))


def test_a_broker_that_has_failed_is_asked_whether_it_answers_and_others_are_not(
    redis_url, rabbitmq
):
    raw = parking.RawMessage(
        *(b"[]", "application/json", "utf-8", {"task": "t"}, {"priority": 0}, "", "q")
    )
    with TcpProxy(rabbitmq.port) as way:
        url = f"amqp://guest:guest@127.0.0.1:{way.port}//"
        app, other = (
            Celery(name, broker=broker, set_as_current=False)
            for name, broker in (("app", url), ("other", redis_url))
        )
        app.conf.update(
            task_publish_retry=False, broker_transport_options={"max_retries": 1, **AT_ONCE}
        )
        outbox = Outbox(lambda channel: False)
        outbox.add(app), outbox.add(other)
        way.refuse()
        assert sorted(outbox.reachable().split()) == sorted(outbox.homes.split())
        with pytest.raises(OperationalError):
            outbox.send(Message("e", "n", parking.parked_text(app, raw, {})))
        assert outbox.reachable() == home(other)
        way.accept()
        assert sorted(outbox.reachable().split()) == sorted([home(app), home(other)])
        app.close()


def test_very_many_that_are_revoked_at_once_are_looked_for_bit_by_bit(
    redis_url, namespace, monkeypatch
):
    """All at once they would keep Redis from others: 50,000 for 0.2 s, by each worker."""
    backend = engines.engine_for(redis_url, namespace).backend
    asked, resume = [], backend.resume
    monkeypatch.setattr(backend, "resume", lambda *of: (asked.append(len(of[2])), resume(*of))[1])
    many = [uuid.uuid4().hex for _ in range(50_000)]
    resumer = resuming.Resumer(engines.engine_for(redis_url, namespace), lambda: many, tuple, bool)
    resumer.start()
    try:
        wait_for(lambda: sum(asked) == len(many), what="all to be looked for")
    finally:
        resumer.stop()
    assert max(asked) < 2000


def test_an_outbox_keeps_nothing_of_apps_that_come_and_go(redis_url):
    outbox = Outbox(lambda channel: False)
    stays = Celery("stays", broker=redis_url, set_as_current=False)
    outbox.add(stays)
    for number in range(5):
        outbox.add(Celery(f"goes{number}", broker=redis_url, set_as_current=False))
        gc.collect()
    assert [known() for known in outbox._apps] == [stays]
    assert outbox.homes == home(stays)


def test_a_lock_redis_that_is_away_means_the_queue_that_it_came_from(app_of_two):
    def consumed(channel):
        raise LockUnavailable("away")

    outbox = Outbox(consumed)
    outbox.add(app_of_two)
    raw = parking.RawMessage(
        *(b"[]", "application/json", "utf-8", {"task": "t"}, {"priority": 0}, "", "q", "q")
    )
    outbox.send(Message("e", "n", parking.parked_text(app_of_two, raw, {})))
    with app_of_two.connection_for_read() as connection:
        assert connection.default_channel._size("q") == 1


def test_a_loss_that_strikes_while_the_lock_redis_is_asked_is_for_the_body(app_of_two):
    """As of `lock_on_lost="raise"`, where a direct call in the body releases its own lock."""

    def consumed(channel):
        raise LockLost("the body's")

    outbox = Outbox(consumed)
    outbox.add(app_of_two)
    headers = {"task": "t"}
    raw = parking.RawMessage(b"[]", "application/json", "utf-8", headers, {}, "", "q", "q")
    with pytest.raises(LockLost):
        outbox.send(Message("e", "n", parking.parked_text(app_of_two, raw, {})))


def test_the_message_of_a_burst_goes_to_its_own_queue_as_no_other_copy_of_it_is_kept(app_of_two):
    outbox = Outbox(lambda channel: True)
    outbox.add(app_of_two)
    raw = parking.RawMessage(
        *(
            b"[]",
            "application/json",
            "utf-8",
            {"task": "t"},
            {"priority": 0},
            "",
            "bursts",
            "bursts",
        )
    )
    text = parking.parked_text(app_of_two, raw, {})
    for name in (f"{DEBOUNCE}t", "n"):
        outbox.send(Message("e", name, text))
    with app_of_two.connection_for_read() as connection:
        sizes = [connection.default_channel._size(queue) for queue in ("bursts", "bursts.resumed")]
    assert sizes == [1, 1]


@pytest.fixture
def app_of_two(monkeypatch, redis_url, namespace):
    monkeypatch.setenv("RELOCK_TEST_URL", redis_url)
    monkeypatch.setenv("RELOCK_TEST_NAMESPACE", namespace)
    from tests.worker.apps.two import _app

    return _app("only")


def test_a_process_that_only_sends_loads_nothing_of_a_worker():
    program = (
        "import sys\n"
        "from celery import Celery\n"
        "from celery_relock import LockedTask\n"
        "app = Celery('a', broker='memory://', set_as_current=False)\n"
        "app.conf.relock_url = 'redis://127.0.0.1:1/0'\n"
        "@app.task(base=LockedTask, lock_key='k')\n"
        "def t(): pass\n"
        "app.finalize()\n"
        "print([name for name in sys.modules"
        " if name in ('celery_relock.worker.resuming', 'celery_relock.worker.bootstep')])\n"
    )
    assert said_by(program) == "[]\n"
