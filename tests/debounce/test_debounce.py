"""The calls of a burst: which are merged, what is executed, and what the callers get."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import uuid

import pydantic
import pytest
from celery import Celery, Task, chain, chord, group
from kombu import Connection, Exchange, Queue

from celery_relock import LockedTask, declaration
from celery_relock.dedup import marker
from celery_relock.engine import ids
from celery_relock.engine.protocol import DEBOUNCE
from celery_relock.errors import LockConfigError, LockUnavailable
from celery_relock.worker.parking import home, publish
from tests.support import leftovers, long, wait_for
from tests.support.monitor import Monitor
from tests.support.ports import free_port
from tests.support.tcp import TcpProxy
from tests.support.worker import ROOT, environment_of

APP = "tests.debounce.apps.calls"
LONG = 30.0


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker(APP, concurrency=3)


@pytest.fixture
def start_worker(module_worker, namespace):
    return lambda: module_worker(APP, namespace=namespace)


@pytest.fixture
def shop():
    return uuid.uuid4().hex


def _backend(task):
    return declaration.engine_of(task.app).backend


def _name(task, shop):
    return DEBOUNCE + "\t".join((task.name, f"shop:{shop}"))


def _calling(worker, code):
    """A process that calls tasks of this worker."""
    command = [sys.executable, "-c", f"from {APP} import *; {code}"]
    env = environment_of(worker.settings)
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)


def _end(task, shop):
    """No more calls come: the burst is over at once."""
    engine = declaration.engine_of(task.app)
    engine.backend.force_release(_name(task, shop), "pause")
    engine.parking.resume()


def _began(worker, shop, count=1):
    return worker.journal.wait_for("began", LONG, count, shop=shop)


def _whats(worker, shop, count=1):
    return [event["what"] for event in _began(worker, shop, count)]


def _is_over(task, shop):
    state = _backend(task).inspect(_name(task, shop))
    return not state.holds and not state.waiting


def test_a_burst_is_one_execution_with_the_arguments_of_its_last_call(worker, m, shop):
    results = [m.soon.delay(shop, number) for number in range(20)]
    assert len({each.id for each in results}) == 1
    assert [each.get(timeout=LONG) for each in results] == [19] * 20
    assert _whats(worker, shop) == [19]
    assert m.soon.delay(shop, "next").id != results[0].id
    assert _whats(worker, shop, 2) == [19, "next"]
    wait_for(lambda: _is_over(m.soon, shop), LONG)


def test_a_burst_whose_name_is_too_long_for_a_key_is_sent_once(worker, m):
    shop = uuid.uuid4().hex * 5
    assert m.soon.delay(shop, 1).get(timeout=LONG) == 1
    wait_for(lambda: _is_over(m.soon, shop), LONG)
    assert _whats(worker, shop) == [1]


def test_it_waits_until_no_more_calls_come_and_counts_nothing_meanwhile(worker, m, shop):
    first = m.later.delay(shop, 1)
    second = m.later.delay(shop=shop, what=2)
    assert (first.id, first.state) == (second.id, "PENDING")
    assert m.later.delay(shop + "x").id != first.id
    assert m.soon.delay(shop, "of another task").get(timeout=LONG)
    assert _whats(worker, shop) == ["of another task"]
    _end(m.later, shop)
    assert first.get(timeout=LONG) == 2


def test_the_last_call_has_its_way_in_all_but_the_id(worker, m, shop):
    m.later.apply_async((shop, 1), headers={"mine": 1}, queue="nowhere", priority=1)
    last = m.later.apply_async((shop, 2), headers={"mine": 2}, compression="gzip", priority=3)
    place = _backend(m.later).burst(_name(m.later, shop), True)
    told = json.loads(place.message)
    assert (told["headers"]["mine"], told["properties"]["priority"]) == (2, 3)
    assert told["routing_key"] != "nowhere"
    _end(m.later, shop)
    assert last.get(timeout=LONG) == 2


def test_monitors_hear_of_each_call_and_of_the_execution(worker, m, shop, monkeypatch):
    monkeypatch.setitem(m.app.conf, "task_send_sent_event", True)
    monitor = Monitor(m.app)
    _, result = m.later.delay(shop, 0), m.later.delay(shop, 1)
    wait_for(lambda: len(monitor.of(result.id, "task-sent")) == 2, LONG)
    monitor.close()
    assert f"('{shop}', 1)" in monitor.of(result.id, "task-sent")[1]["args"]
    _end(m.later, shop)
    assert result.get(timeout=LONG) == 1


def test_a_call_after_the_burst_was_sent_is_another_execution(worker, m):
    shop = f"slow{uuid.uuid4().hex}"
    first = m.later.delay(shop, 1)
    _end(m.later, shop)
    _began(worker, shop)
    second = m.later.delay(shop, 2)
    assert second.id != first.id
    _end(m.later, shop)
    worker.journal.add(f"free {shop}")
    assert (first.get(timeout=LONG), second.get(timeout=LONG)) == (1, 2)


def test_what_somebody_waits_for_is_never_merged(worker, m, shop):
    held = m.later.delay(shop, "held")
    sig = m.later.si
    sent = [
        m.later.apply_async((shop, "id"), task_id=uuid.uuid4().hex),
        chain(sig(shop, "chain 1"), sig(shop, "chain 2")).delay(),
        group(sig(shop, "group 1"), sig(shop, "group 2")).delay(),
        chord([sig(shop, "header 1"), sig(shop, "header 2")], sig(shop, "body")).delay(),
        m.later.apply_async((shop, "linked"), link=sig(shop, "link")),
        m.later.apply_async((shop, "alone"), lock_debounce=False),
    ]
    for each in sent:
        each.get(timeout=LONG)
    began = _whats(worker, shop, 11)
    assert len(began) == 11
    assert "held" not in began
    _end(m.later, shop)
    assert held.get(timeout=LONG) == "held"


def test_lock_max_parked_refuses_no_call_while_the_burst_before_it_is_published(worker, m, shop):
    calls = [m.later.apply_async((shop,), lock_max_parked=1)]
    backend, name = _backend(m.later), _name(m.later, shop)
    taken = backend.resume(home(m.app), ids.new_attempt_id(), [ids.short(calls[0].id)])
    (mine,) = [each for each in taken.messages if each.name == name]
    calls.append(m.later.apply_async((shop,), lock_max_parked=1))
    assert calls[1].id != calls[0].id
    backend.withdraw(mine.execution_id, 60.0)
    _discard(m.later, shop)


def test_a_retry_is_sent_at_once_and_merged_with_nothing(worker, m, shop):
    first = m.tries_twice.delay(shop, 1)
    _end(m.tries_twice, shop)
    first.get(timeout=LONG)
    assert [e["retries"] for e in _began(worker, shop, 2)] == [0, 1]


def test_a_task_may_call_itself(worker, m, shop):
    first = m.sends.delay(shop)
    _end(m.sends, shop)
    second = first.get(timeout=LONG)
    assert second != first.id
    _end(m.sends, shop)
    assert m.sends.AsyncResult(second).get(timeout=LONG) == "again"


def test_calls_by_a_connection_of_the_callers_are_merged(worker, m, shop):
    with m.app.connection_for_write() as connection:
        calls = [m.later.apply_async((shop, n), connection=connection) for n in range(2)]
    assert calls[0].id == calls[1].id
    _end(m.later, shop)
    assert calls[0].get(timeout=LONG) == 1
    assert _whats(worker, shop) == [1]


def test_a_call_to_a_queue_that_no_worker_knows_reaches_it_by_its_exchange(m, shop):
    """On Redis, where a process takes an exchange for a direct one until it is told."""
    queue = Queue(f"special{shop}", Exchange(f"topics{shop}", "topic"), routing_key="a.*")
    m.soon.apply_async((shop,), queue=queue, routing_key="a.b")
    with m.app.connection_for_read() as connection:
        found = connection.SimpleQueue(queue).get(timeout=LONG)
        assert found.headers["task"] == m.soon.name
        found.ack()


def test_a_call_that_celery_does_not_publish_says_so(m, shop, monkeypatch):
    monkeypatch.setattr(m.app, "send_task", lambda *args, **options: None)
    with pytest.raises(LockConfigError, match=r"not published by the `producer`"):
        m.later.delay(shop)


def test_options_of_one_call(worker, m, shop):
    m.later.delay(shop, 1)
    last = m.later.apply_async((shop, 2), lock_debounce=0.1)
    assert last.get(timeout=LONG) == 2
    with pytest.raises(LockConfigError, match=r"lock_debounce=600 .* no countdown or eta"):
        m.later.apply_async((shop,), countdown=5)
    with pytest.raises(LockConfigError, match=r"expires in 600 s, .* would never run"):
        m.later.apply_async((shop,), expires=600)
    with pytest.raises(LockConfigError, match=r"lock_debounce_max=1 is less than .*=600"):
        m.later.apply_async((shop,), lock_debounce_max=1)
    with pytest.raises(LockConfigError, match="Declare the callable on the task"):
        m.later.apply_async((shop,), lock_debounce_reduce=dict)
    with pytest.raises(LockConfigError, match="larger than 1000000 bytes"):
        m.later.delay(shop, "x" * 1_000_000)


def test_a_revoked_burst_is_not_executed_and_takes_no_more_calls_once_a_worker_has_looked(
    worker, m, shop
):
    first = m.later.delay(shop, 1)
    first.revoke()
    wait_for(lambda: first.state == "REVOKED", LONG, "the revoke")
    wait_for(lambda: m.later.delay(shop, 2).id != first.id, LONG)
    _end(m.later, shop)
    assert _whats(worker, shop) == [2]


def test_with_dedup_a_burst_that_comes_while_one_runs_is_dropped(worker, m):
    shop = f"slow{uuid.uuid4().hex}"
    first = m.one_at_a_time.delay(shop, 1)
    _end(m.one_at_a_time, shop)
    _began(worker, shop)
    second = m.one_at_a_time.delay(shop, 2)
    assert m.one_at_a_time.delay(shop, 3).id == second.id != first.id
    _end(m.one_at_a_time, shop)
    assert second.get(timeout=LONG)["of"] == first.id
    worker.journal.add(f"free {shop}")
    assert first.get(timeout=LONG) == 1
    third = m.one_at_a_time.delay(shop, 4)
    _end(m.one_at_a_time, shop)
    assert third.get(timeout=LONG) == 4
    engine = declaration.engine_of(m.app)
    name = marker.name_for(m.one_at_a_time.name, [f"shop:{shop}"])
    wait_for(lambda: marker.look(engine, name) is None, LONG)


def _reducing(m, reduce):
    """A task that no worker has, with such a callable."""

    @m.app.task(
        base=LockedTask,
        name=f"reduces.{uuid.uuid4().hex}",
        lock_key="shop:{shop}",
        lock_debounce=600,
        lock_debounce_reduce=reduce,
    )
    def reduces(shop, ids): ...

    return reduces


def _discard(task, shop):
    """Take a burst away. Returns it."""
    backend, name = _backend(task), _name(task, shop)
    found = backend.burst(name, True)
    backend.withdraw(found.burst_id, 60.0)
    return found


def _arguments(burst):
    args, kwargs, _ = json.loads(json.loads(burst.message)["body"])
    return {**dict(zip(("shop", "ids"), args, strict=False)), **kwargs}


# --- all arguments --------------------------------------------------------------------------------


def test_a_reducer_gets_the_arguments_of_all_calls_by_name(worker, m, shop):
    m.all_ids.delay(shop, (1, 2))
    m.all_ids.delay(shop, ids=[3])
    last = m.all_ids.delay(shop, [4], how="slow")
    assert last.get(timeout=LONG) == [[1, 2, 3, 4], "slow"]


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {"shop": None, "ids": [2]}, ([], {"shop": None, "ids": [1, 2]})),
        ((None,), {"ids": [2]}, ([None], {"ids": [1, 2]})),
        ((None, [2]), {}, ([None, [1, 2]], {})),
    ],
)
def test_the_arguments_are_sent_by_name_or_by_position_as_the_last_call_had_them(
    m, shop, args, kwargs, message
):
    reduces = _reducing(m, lambda earlier, later: {**later, "ids": earlier["ids"] + later["ids"]})
    reduces.delay(shop, [1])
    reduces.delay(*(each or shop for each in args), **{n: v or shop for n, v in kwargs.items()})
    sent = json.loads(json.loads(_discard(reduces, shop).message)["body"])[:2]
    assert sent == [[v or shop for v in message[0]], {n: v or shop for n, v in message[1].items()}]


class Order(pydantic.BaseModel):
    number: int


@pytest.mark.skipif(
    not hasattr(Task, "_dump_pydantic_arguments"), reason="this Celery sends no pydantic models"
)
@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_a_reducer_gets_models_as_they_are_sent(m, shop, serializer, monkeypatch):
    monkeypatch.setitem(m.app.conf, "accept_content", ["json", "pickle"])
    seen = []

    @m.app.task(
        base=LockedTask,
        name=f"orders.{uuid.uuid4().hex}",
        pydantic=True,
        serializer=serializer,
        lock_key="shop:{shop}",
        lock_debounce=600,
        lock_debounce_reduce=lambda earlier, later: seen.append((earlier, later)) or later,
    )
    def orders(shop: str, order: Order): ...

    for number in range(3):
        orders.delay(shop, Order(number=number))
    made = Order if serializer == "pickle" else dict
    asked = [[each["order"] for each in pair] for pair in seen]
    assert asked == [[made(number=n), made(number=n + 1)] for n in range(2)]
    _discard(orders, shop)


def test_a_call_that_comes_while_another_one_is_merged_is_not_lost(m, shop):
    between = []

    def reduce(earlier, later):
        if later["ids"] == ["outer"] and not between:
            between.append(reduces.delay(shop, ["inner"]))
        return {**later, "ids": earlier["ids"] + later["ids"]}

    reduces = _reducing(m, reduce)
    assert reduces.delay(shop, ["first"]).id == reduces.delay(shop, ["outer"]).id == between[0].id
    assert _arguments(_discard(reduces, shop))["ids"] == ["first", "inner", "outer"]


@pytest.mark.skipif(not long.LONG, reason="only in the long form")
def test_no_argument_is_lost_or_there_twice_though_processes_call_at_once(worker, m, shop):
    callers = [_calling(worker, f"call_often({shop!r}, {number}, 12)") for number in range(3)]
    for each in callers:
        each.communicate(timeout=60)
    assert [each.returncode for each in callers] == [0] * 3
    wait_for(lambda: _is_over(m.all_ids, shop), LONG, "the last burst")

    def seen():
        return [each for ids, _ in _whats(worker, shop) for each in ids]

    wait_for(lambda: len(seen()) >= 36, LONG, "all of them")
    assert sorted(seen()) == sorted(f"{caller}-{n}" for caller in range(3) for n in range(12))


@pytest.mark.parametrize(
    ("reduce", "says"),
    [
        (lambda earlier, later: 1 / 0, "raised ZeroDivisionError"),
        (lambda earlier, later: {"ids": [1]}, "has to return the arguments of .* by name"),
        (lambda earlier, later: {**later, "other": 1}, "has to return the arguments of"),
        (lambda earlier, later: None, "raised TypeError"),
        (
            lambda earlier, later: {**later, "shop": "x"},
            "returned the arguments of another lock than 'shop:",
        ),
    ],
)
def test_a_reducer_that_does_not_do_is_named_and_the_burst_stays_as_it_was(m, shop, reduce, says):
    reduces = _reducing(m, reduce)
    reduces.delay(shop, [1])
    before = _backend(reduces).burst(_name(reduces, shop), True)
    with pytest.raises(LockConfigError, match=f"lock_debounce_reduce {says}"):
        reduces.delay(shop, [2])
    assert _discard(reduces, shop) == before


# --- kills ----------------------------------------------------------------------------------------


def test_a_caller_that_is_killed_has_made_its_call(worker, m, shop):
    with _calling(worker, f"call_and_wait({shop!r})") as caller:
        task_id = caller.stdout.readline().strip()
        caller.kill()
    _end(m.later, shop)
    assert m.later.AsyncResult(task_id).get(timeout=LONG) == "last words"


def test_a_burst_outlives_the_workers_and_runs_once(start_worker, shop):
    one = start_worker()
    task = one.module.later
    result = task.delay(shop, 1)
    one.kill(signal.SIGKILL)
    assert task.delay(shop, 2).id == result.id
    backend = _backend(task)
    backend.force_release(_name(task, shop), "pause")
    assert task.delay(shop, 3).id == result.id, "nobody has published it"
    two = start_worker()
    assert result.get(timeout=LONG) == 3
    assert _whats(two, shop) == [3]


def test_who_is_killed_when_it_is_to_publish_delays_a_burst_and_nothing_is_lost_or_doubled(
    worker, m, shop
):
    """The test takes two messages, publishes one, and says nothing of either."""
    shops = shop, f"{shop}x"
    results = [m.later.delay(each, each) for each in shops]
    backend, names = _backend(m.later), [_name(m.later, each) for each in shops]
    tasks = [ids.short(each.id) for each in results]
    taken = backend.resume(home(m.app), ids.new_attempt_id(), tasks)
    texts = {message.name: message.text for message in taken.messages}
    assert {*names} <= texts.keys()
    publish(m.app, texts[names[0]])
    assert [each.get(timeout=LONG) for each in results] == [*shops]
    for name in names:
        wait_for(lambda of=name: not backend.inspect(of).waiting, LONG, "the messages to go")
    for each in shops:
        assert m.soon.delay(each, "after it").get(timeout=LONG)
        assert _whats(worker, each) == [each, "after it"]


# --- without a lock Redis, without a worker -------------------------------------------------------


def test_eager_calls_run_at_once(m, shop, monkeypatch):
    assert m.later.apply((shop, 1), lock_debounce=5).get() == 1
    monkeypatch.setitem(m.app.conf, "task_always_eager", True)
    assert m.later.delay(shop, 2).get() == 2


@pytest.fixture
def apart(m, monkeypatch):
    """The app's locks are on another address than its worker's."""

    def move(**settings):
        for name, value in settings.items():
            monkeypatch.setitem(m.app.conf, name, value)
        declaration.forget_engine(m.app)

    yield move
    monkeypatch.undo()
    declaration.forget_engine(m.app)


def test_without_redis_a_call_fails_or_is_sent_at_once(worker, m, shop, apart):
    apart(relock_url=f"redis://127.0.0.1:{free_port()}")
    with pytest.raises(LockUnavailable):
        m.later.delay(shop, 1)
    sent = m.later.apply_async((shop, 2), lock_on_unavailable="retry")
    assert sent.get(timeout=LONG) == 2


def _task_of(redis_url, namespace, **settings):
    app = Celery(uuid.uuid4().hex, broker="memory://", set_as_current=False)
    app.conf.update(relock_url=redis_url, relock_namespace=namespace, **settings)

    @app.task(name="later", base=LockedTask, lock_key="{shop}", lock_debounce=60, shared=False)
    def later(shop): ...

    return later


@pytest.fixture
def in_vain(redis_url, namespace):
    """A task of which Redis executes each call that fails, as when the answer is lost."""
    failing = {"relock_min_replicas": 1, "relock_min_replicas_timeout": 0.1}
    return _task_of(redis_url, namespace, **failing)


def _burst(task):
    return _backend(task).burst(f"{DEBOUNCE}{task.name}\tshop", False)


@pytest.mark.parametrize("policy", ["raise", "run"])
def test_a_call_that_could_not_be_kept_begins_no_burst_though_it_had_begun_one(in_vain, policy):
    if policy == "raise":
        with pytest.raises(LockUnavailable, match="replicas"):
            in_vain.delay("shop")
    else:
        assert in_vain.apply_async(("shop",), lock_on_unavailable="run").id
    wait_for(lambda: _burst(in_vain) is None, what="the burst to go")


def test_a_caller_has_the_calls_as_children_that_were_made_and_no_others(
    in_vain, redis_url, namespace
):
    kept = _task_of(redis_url, namespace)

    @in_vain.app.task(bind=True, shared=False)
    def caller(self):
        made = [kept.delay("shop"), kept.delay("shop")]
        with pytest.raises(LockUnavailable):
            in_vain.delay("shop")
        made.append(in_vain.apply_async(("shop",), lock_on_unavailable="run"))
        kept.apply_async(("shop",), add_to_parent=False)
        return made, self.request.children

    made, children = caller.apply().get()
    assert children == made


def test_a_call_that_was_merged_into_such_a_burst_meanwhile_is_kept(
    in_vain, redis_url, namespace, monkeypatch
):
    later = declaration.engine_of(in_vain.app).later
    monkeypatch.setattr(later, "add", (left := []).append)
    with pytest.raises(LockUnavailable):
        in_vain.delay("shop")
    merged = _task_of(redis_url, namespace).delay("shop")
    for call in left:
        call()
    assert len(left) == 1
    assert _burst(in_vain).task_id == merged.id


def test_without_locks_each_call_is_sent_at_once(worker, m, shop, apart):
    apart(relock_enabled=False)
    assert m.later.delay(shop, 1).get(timeout=LONG) == 1
    assert m.later.apply_async((shop, 2), countdown=0.1).get(timeout=LONG) == 2
    assert m.later.delay(shop, "x" * 1_000_000).get(timeout=LONG)


def test_a_broken_call_or_one_that_cannot_be_written_leaves_nothing(m, shop, client):
    with pytest.raises(TypeError):
        m.later.delay()
    with pytest.raises(Exception, match="serializable"):
        m.later.delay(shop, object())
    namespace = m.app.conf.relock_namespace
    assert not [key for key in leftovers(client, namespace) if shop in key]


def test_on_rabbitmq_a_queue_of_the_call_is_there_when_its_message_comes(
    module_worker, rabbitmq, shop, namespace
):
    worker = module_worker(APP, namespace=namespace, env={"RELOCK_TEST_BROKER": rabbitmq.url})
    task, queue = worker.module.later, f"queue-{shop}"
    # The connection of an earlier test can be used, and have ended.
    result = task.apply_async((shop, 1), queue=queue, priority=2, retry=True)
    _backend(task).force_release(_name(task, shop))
    wait_for(lambda: _is_over(task, shop), LONG, "the worker to publish it")
    task.app.control.add_consumer(queue, destination=[worker.node])
    assert result.get(timeout=LONG) == 1


def test_a_call_is_merged_although_the_broker_has_ended_its_connection(m, shop, rabbitmq):
    """As RabbitMQ does with one that was silent for long."""
    calls = []
    with (
        TcpProxy(rabbitmq.port) as proxy,
        Connection(f"amqp://127.0.0.1:{proxy.port}") as connection,
    ):
        for queue in ("first", "second"):
            how = {"connection": connection, "queue": f"{queue}-{shop}"}
            calls.append(m.later.apply_async((shop, queue), retry=True, **how))
            proxy.cut()
    assert calls[0].id == calls[1].id
    _backend(m.later).force_release(_name(m.later, shop))
