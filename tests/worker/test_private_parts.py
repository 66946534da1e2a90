"""Every part of Celery, kombu and Python that is not documented and that the library hangs on, by
the names under which docs/architecture.md lists them. A test fails when a new release has moved its
part."""

from __future__ import annotations

import asyncio
import inspect
import logging
import pickle
import sys
from functools import partial
from threading import RLock, Thread, get_ident
from types import SimpleNamespace

import pytest
from billiard.einfo import ExceptionInfo
from celery import VERSION, Celery, Task, current_app
from celery._state import _get_active_apps, _task_stack
from celery.app.task import Context
from celery.app.trace import build_tracer
from celery.concurrency.base import BasePool
from celery.concurrency.prefork import process_initializer
from celery.events.state import Task as ShownTask
from celery.exceptions import Ignore, Retry, WorkerLostError
from celery.local import Proxy
from celery.signals import before_task_publish, task_failure, worker_init
from celery.states import FAILURE, PENDING, SUCCESS
from celery.utils.imports import symbol_by_name
from celery.utils.threads import LocalStack
from celery.utils.timer2 import Timer as Timer2
from celery.worker import control, state
from celery.worker.consumer import Consumer
from celery.worker.request import Request
from kombu import Connection, Queue, compression
from kombu.asynchronous import Hub
from kombu.asynchronous.timer import Timer
from kombu.common import ignore_errors
from kombu.exceptions import DecodeError
from kombu.utils.limits import TokenBucket
from pydantic import BaseModel

from celery_relock.worker import delayed
from celery_relock.worker.message import ended_request, that_tells_its_end
from tests.support.worker import ROOT

CHECKS = {}


class Model(BaseModel):
    number: int


def row(part):
    """The check of a row, by its first cell."""

    def add(check):
        CHECKS[part] = check
        return check

    return add


def rows():
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.split("\n## What it hangs on")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    return {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[1:] for line in lines}


def test_every_part_in_the_table_has_a_test_and_the_other_way_round():
    assert set(rows()) == set(CHECKS)


@pytest.mark.parametrize("part", CHECKS)
def test_it_is_where_it_was(part):
    try:
        CHECKS[part]()
    except Exception as error:
        what = rows().get(part, ["what docs/architecture.md says"])[0]
        pytest.fail(f"{part} has moved ({error!r}), and this hangs on it: {what}")


@pytest.mark.parametrize("part", rows())
def test_the_files_that_see_it_are_there(part):
    named = rows()[part][1].strip(" |").replace("`", "").split(", ")
    assert [name for name in named if not (ROOT / name).is_file()] == []


def app_with_a_task(**options):
    app = Celery("parts", broker="memory://", backend="cache+memory://", set_as_current=False)

    @app.task(bind=True, shared=False, name="part", **options)
    def part(self):
        return self.request.id

    app.finalize()
    return app, app.tasks["part"]


def received(task, **options):
    """A message as a worker receives it, and Celery's request for it."""
    task.apply_async(queue="parts", **options)
    with task.app.connection_for_read() as connection:
        message = connection.SimpleQueue("parts").get(timeout=30)
        message.ack()
    made = symbol_by_name(task.Request)
    return message, made(message, app=task.app, hostname="a@b", task=task, on_ack=list)


def worker_of(app, **options):
    """A worker that is never started, and that this process does not take for its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_init, "send", lambda **_: [])
        patch.setattr("celery.worker.components._set_task_join_will_block", lambda _: None)
        return app.WorkController(pool="threads", concurrency=1, **options)


def passes(member, *owners):
    assert all(hasattr(owner, member) for owner in owners), member


@row("`celery._state._task_stack`, `Task.request_stack`, and `LocalStack`, of which they are")
def _():
    _, task = app_with_a_task()
    seen = []
    task.run = lambda: seen.append((_task_stack.top, _task_stack.stack, task.request_stack.stack))
    task.apply(task_id="x")
    ((top, tasks, requests),) = seen
    assert top is task
    assert tasks[-1] is task
    assert requests[-1].id == "x"
    assert isinstance(_task_stack, LocalStack)
    assert isinstance(task.request_stack, LocalStack)
    own = LocalStack()
    own.push(1)
    elsewhere = Thread(target=lambda: seen.append(own.stack))
    elsewhere.start()
    elsewhere.join()
    assert (own.stack, seen[-1]) == ([1], [])


@row("`app._tasks`, `Task._app`, `Proxy._get_current_object`")
def _():
    app, task = app_with_a_task()
    assert app._tasks["part"] is task
    assert type(task)._app is app
    assert Proxy(lambda: app)._get_current_object() is app
    assert isinstance(current_app, Proxy)


@row("`app.annotations`, whose parts have `annotate_any`")
def _():
    app = Celery(set_as_current=False)
    app.conf.task_annotations = {"*": {"lock_key": "one"}, "part": {"lock_ttl": 5}}
    assert [part.annotate_any() for part in app.annotations] == [{"lock_key": "one"}]


@row("a data attribute `run` on a task's instance")
def _():
    _, task = app_with_a_task()
    task.run = lambda: "ours"
    assert task.apply().get() == task() == "ours"


@row("a task's `__call__`, or else its `run`, is what the tracer calls")
def _():
    class Called(Task):
        def __call__(self):
            return "called", self.run()

    _, task = app_with_a_task(base=Called)
    task.run = lambda: "run"
    assert task.apply().get() == ("called", "run")
    _, task = app_with_a_task()
    task.run = lambda: "run"
    assert task.apply().get() == "run"


@row("`Task.track_started` is only asked for its truth")
def _():
    class Never:
        def __bool__(self):
            return False

    app, task = app_with_a_task(track_started=Never())
    states = []
    app.backend.store_result = lambda *args, **_: states.append(args[2])
    _, request = received(task)
    tracer = build_tracer(task.name, task, app=app)
    tracer(request.id, (), {}, {**request.request_dict, "hostname": "a@b"})
    assert "STARTED" not in states


@row("`Request.message`, and `Request.request_dict`, whose `properties` reach the child")
def _():
    _, task = app_with_a_task()
    message, request = received(task)
    assert request.message is message
    request.request_dict["properties"] = {**request.request_dict["properties"], "kept": 1}
    jobs = []
    pool = SimpleNamespace(apply_async=lambda *args, **options: jobs.append(options["args"]))
    request.execute_using_pool(pool)
    assert Context(jobs[0][2]).properties["kept"] == 1


@row(
    "`Task.Request`, whose `on_failure`, `on_timeout`, `revoked` and `terminate` end a message in "
    "the main process"
)
def check_ends():
    assert symbol_by_name(Task.Request) is Request
    assert all(map(partial(hasattr, Request), ("on_failure", "on_timeout")))
    assert "_announce_revoked" in Request.revoked.__code__.co_names
    assert "_announce_revoked" in Request.terminate.__code__.co_names
    _, task = app_with_a_task()
    task.Request = that_tells_its_end(Request)
    _, request = received(task)
    seen = []

    def tell(**_):
        seen.append(ended_request())

    task_failure.connect(tell, sender=task)
    try:
        raise WorkerLostError
    except WorkerLostError:
        request.on_failure(ExceptionInfo())
    assert seen == [request]
    assert ended_request() is None


@row("`Context.__dict__` has what the message said of `ignore_result`")
def _():
    assert vars(Context({"ignore_result": True}))["ignore_result"] is True
    assert vars(Context({})).get("ignore_result") is None


@row(
    "`Request.on_failure` acknowledges by `acks_on_failure_or_timeout`, "
    "or `acks_on_failure` and `acks_on_timeout`"
)
def _():
    names = {*Request.on_failure.__code__.co_names}
    one, both = {"acks_on_failure_or_timeout"}, {"acks_on_failure", "acks_on_timeout"}
    assert names >= one or names >= both, names


@row("the function that autoretry puts around `run` closes over its options")
def _():
    class Registered(Task):
        name = "registered"

        def run(self):
            pass

    app = Celery(set_as_current=False)
    task = app.register_task(
        Registered(),
        autoretry_for=(KeyError,),
        dont_autoretry_for=(IndexError,),
        retry_kwargs={"max_retries": 5},
    )
    told = inspect.getclosurevars(task.run).nonlocals
    assert told["autoretry_for"] == (KeyError,)
    assert told["dont_autoretry_for"] == (IndexError,)
    assert told["retry_kwargs"] == {"max_retries": 5}


@row("`Task.override_max_retries`, which autoretry counts by before `retry_kwargs`")
def _():
    app = Celery(set_as_current=False)
    runs = []

    @app.task(bind=True, autoretry_for=(KeyError,), retry_kwargs={"max_retries": 5})
    def fails(self):
        runs.append(self.request.retries)
        self.override_max_retries = 1
        raise KeyError

    assert fails.apply().state == FAILURE
    assert runs == [0, 1]


@row("`Consumer.create_task_handler`, `strategies`, `disable_rate_limits`, `Task.start_strategy`")
def _():
    app, task = app_with_a_task(rate_limit="1/m")
    consumer = worker_of(app).consumer
    passes("strategies", consumer)
    asked = []

    class Unlimited:
        disable_rate_limits = True

        def __getattr__(self, name):
            asked.append(name)
            return getattr(consumer, name)

    stand_in = Unlimited()
    taken = []
    stand_in.strategies = {task.name: lambda message, *_, **__: taken.append(message)}
    take = Consumer.create_task_handler(stand_in)
    message, _ = received(task)
    take(message)
    assert taken == [message]
    assert callable(task.start_strategy(app, stand_in))
    assert "disable_rate_limits" not in asked


@row(
    "`Consumer.task_consumer`, `call_soon`, `timer`, `pool.num_processes`, `prefetch_multiplier`, "
    "`on_decode_error`, `blueprint`"
)
def _():
    app, _ = app_with_a_task()
    consumer = worker_of(app).consumer
    for member in ("task_consumer", "call_soon", "timer", "pool", "prefetch_multiplier"):
        passes(member, consumer)
    passes("on_decode_error", consumer)
    passes("state", consumer.blueprint)
    passes("call_repeatedly", consumer.timer)
    passes("num_processes", consumer.pool)


@row("`Consumer.on_decode_error`, which a task handler of the consumer calls by this name")
def _():
    app, task = app_with_a_task()
    consumer, told = worker_of(app).consumer, []
    consumer.on_decode_error = lambda message, error: told.append(message)

    def fails(*_, **__):
        raise DecodeError

    consumer.strategies = {task.name: fails}
    message, _ = received(task)
    Consumer.create_task_handler(consumer)(message)
    assert told == [message]


@row(
    "`Consumer.controller`, `WorkController.autoscaler`, `pool.active`, `pool.limit`, "
    "`pool.is_green`"
)
def _():
    app, _ = app_with_a_task()
    for member in ("active", "limit", "is_green"):
        passes(member, worker_of(app).consumer.pool)
    passes("controller", worker_of(app).consumer)
    passes("autoscaler", worker_of(app).consumer.controller)


@row("`Consumer.hub`, `Hub.on_tick`")
def _():
    app, _ = app_with_a_task()
    passes("hub", worker_of(app).consumer)
    assert isinstance(Hub().on_tick, set)


@row(
    "`celery.worker.state`: `revoked`, `revoked_stamps`, `active_requests`, `reserved_requests`, "
    "`all_total_count`, `task_ready`"
)
def _():
    _, task = app_with_a_task()
    _, request = received(task)
    state.task_reserved(request)
    assert request in state.reserved_requests
    before = state.all_total_count[0]
    state.task_accepted(request)
    assert request in state.active_requests
    assert state.all_total_count[0] == before + 1
    state.task_ready(request)
    assert request not in {*state.active_requests, *state.reserved_requests}
    assert "x" not in state.revoked
    assert isinstance(state.revoked_stamps, dict)


@row("`Request._terminate_on_ack`")
def _():
    _, task = app_with_a_task()
    task.acks_late = True
    _, request = received(task)
    assert request._terminate_on_ack is None
    request.terminate(BasePool())
    assert request._terminate_on_ack is not None
    with pytest.raises(NotImplementedError):
        request.on_accepted(1, 1.0)
    assert request in state.active_requests
    state.task_ready(request)


@row("`celery.worker.request.Request`")
def _():
    _, task = app_with_a_task()
    _, request = received(task)
    assert request.id
    assert not request.revoked()


@row("`WorkController.task_events`")
def _():
    app, _ = app_with_a_task()
    assert worker_of(app, task_events=True).task_events


_made = []


def _make(told, app):
    _made.append((told, app))


@row("`Celery.fixups`, which a spawned child makes its app with before the tracers of its tasks")
def _():
    app, _ = app_with_a_task()
    app.fixups = [*app.fixups, partial(_make, "told")]
    made = pickle.loads(pickle.dumps(app))
    assert _made == [("told", made)]
    begun = inspect.getsource(process_initializer)
    parts = ["loader.init_worker()", "setup_worker_optimizations(", "= build_tracer("]
    if VERSION >= (5, 7):
        assert sorted(parts, key=begun.index) == parts
    calls = []
    made.on_after_finalize.connect(lambda **_: calls.append(sorted(made._tasks)), weak=False)
    made.finalize()
    assert calls == [sorted(made._tasks)]


@row("`celery.events.state.Task.event`")
def _():
    for end in (SUCCESS, FAILURE):
        task = ShownTask(uuid="x")
        for kind, fields, shown in (
            ("received", {}, "RECEIVED"),
            ("blocked", {"state": "BLOCKED"}, "BLOCKED"),
            ("started", {}, "BLOCKED"),  # why there is a task-pending
            ("pending", {"state": "STARTED"}, "STARTED"),
            ("received", {}, "STARTED"),
            ({SUCCESS: "succeeded", FAILURE: "failed"}[end], {}, end),
        ):
            task.event(kind, 1.0, 1.0, dict(fields))
            assert task.state == shown, (kind, task.state)


@row("the log record of an ignored task, made while its error is handled")
def _():
    _, task = app_with_a_task()
    seen = []

    def look(record):
        seen.append((sys.exc_info()[1], record.args["description"]))
        record.args["description"] = "parked"
        seen.append(record.getMessage())
        return False

    def ignored():
        raise Ignore("why")

    task.run = ignored
    log = logging.getLogger("celery.app.trace")
    level, disabled = log.level, log.disabled
    log.setLevel(logging.INFO)
    log.disabled = False
    log.addFilter(look)
    try:
        task.apply(task_id="x")
    finally:
        log.removeFilter(look)
        log.setLevel(level)
        log.disabled = disabled
    (error, description), text = seen
    assert isinstance(error, Ignore)
    assert description == "ignored"
    assert text == "Task part[x] parked"


@row("a channel is closed by its attribute `close`, also by its connection and by the worker")
def _():
    for end in (
        lambda connection, _: connection.close(),
        lambda connection, _: connection.collect(),
        lambda connection, channel: connection.maybe_close_channel(channel),
        lambda connection, channel: ignore_errors(connection, channel.close),
    ):
        connection, closed = Connection("memory://"), []
        channel = connection.channel()
        channel.close = partial(closed.append, channel)
        end(connection, channel)
        assert closed == [channel]


@row("`kombu.Consumer._active_tags`")
def _():
    with Connection("memory://") as connection:
        consumer = connection.Consumer([Queue("part")])
        consumer.consume()
        assert list(consumer._active_tags) == ["part"]


@row("`kombu.compression.compress` and `get_encoder`")
def _():
    assert compression.get_encoder("gzip")[1] == "application/x-gzip"
    packed, kind = compression.compress(b"x" * 100, "application/x-gzip")
    assert compression.decompress(packed, kind) == b"x" * 100


@row("`app.conf.maps`, `app.conf.prefix`")
def _():
    with Celery("part", namespace="shop_", set_as_current=False) as app:
        app.conf.timezone = "Europe/Rome"
        assert app.conf.timezone == "Europe/Rome"  # which loads the configuration
        assert app.conf.maps[0]["timezone"] == "Europe/Rome"
        assert app.conf.prefix == "shop_"


@row("`Task._dump_pydantic_arguments` (Celery 5.7)")
def _():
    if VERSION < (5, 7):
        return

    app, plain = app_with_a_task()

    @app.task(name="modelled", pydantic=True)
    def modelled(model: Model):
        raise AssertionError

    assert plain._dump_pydantic_arguments is None
    assert modelled._dump_pydantic_arguments((Model(number=1),), {}) == (({"number": 1},), {})


@row("`Transport.driver_type`")
def _():
    assert Connection("redis://").transport.driver_type == "redis"
    assert Connection("amqp://").transport.driver_type == "amqp"


@row("`detect_quorum_queues` (Celery 5.5)")
def _():
    quorum_queues = pytest.importorskip("celery.utils.quorum_queues")
    waiting = pytest.importorskip("kombu.transport.native_delayed_delivery")
    app = Celery("quorum", broker="amqp://", set_as_current=False)
    assert not quorum_queues.detect_quorum_queues(app, "amqp")[0]
    app.amqp.queues.add(Queue("q", queue_arguments={"x-queue-type": "quorum"}))
    assert quorum_queues.detect_quorum_queues(app, "amqp")[0]
    assert not quorum_queues.detect_quorum_queues(app, "redis")[0]
    assert waiting.level_name(0).startswith(delayed._WAITING)
    assert delayed.key_before(waiting.calculate_routing_key(5, "its.own")) == "its.own"


@row("`RLock._is_owned`")
def _():
    lock = RLock()
    assert not lock._is_owned()
    with lock:
        assert lock._is_owned()


@row("`_thread_id` of asyncio's event loop")
def _():
    async def thread():
        return asyncio.get_running_loop()._thread_id

    assert asyncio.run(thread()) == get_ident()


@row("a stored success is not overwritten, and `Backend.forget`")
def _():
    app, _ = app_with_a_task()
    app.backend.store_result("x", 1, SUCCESS)
    app.backend.store_result("x", 2, FAILURE)
    assert app.backend.get_state("x") == SUCCESS
    app.backend.forget("x")
    assert app.backend.get_state("x") == PENDING


@row("what a request says of `ignore_result` when its task has ended (Celery 5.6)")
def _():
    if VERSION < (5, 6):
        return

    app, task = app_with_a_task()

    def run():
        task.request.ignore_result = True
        raise Retry

    task.run = run
    build_tracer(task.name, task, app=app)("x", (), {}, {"id": "x"})
    assert app.backend.get_state("x") == PENDING


@row(
    "`celery._state._get_active_apps`; `before_task_publish` tells by `declare` the `Queue` object "
    "of the app that sends"
)
def _():
    app, _ = app_with_a_task()
    assert app in _get_active_apps()
    told = []
    before_task_publish.connect(lambda declare, **_: told.extend(declare), weak=False, sender="t")
    app.conf.broker_url = "memory://"
    app.send_task("t")
    assert told[0] is app.amqp.queues["celery"]


@row("`Consumer.timer`, `Timer.schedule`, `Schedule.queue`")
def _():
    assert "self.timer = " in inspect.getsource(Consumer.__init__)
    timer = Timer()
    timer.call_after(60, print, ("a request",))
    assert [each.entry.args for each in timer.schedule.queue] == [("a request",)]
    assert Timer2(timer.schedule).schedule.queue  # of the pools that have no event loop


@row("`Consumer.task_buckets`, `TokenBucket.contents`")
def _():
    assert "self.task_buckets = " in inspect.getsource(Consumer.__init__)
    assert "bucket.add((request, tokens))" in inspect.getsource(Consumer._limit_task)
    bucket = TokenBucket(1.0)
    bucket.add(("a request", 1))
    assert list(bucket.contents) == [("a request", 1)]


@row("`Panel.data`, `celery.worker.control.query_task`, `celery.worker.state.requests`")
def _():
    assert state.requests == {}
    assert control.Panel.data["query_task"] is not None
    app, _ = app_with_a_task()
    assert control.query_task(SimpleNamespace(app=app), ["nobody"]) == {}
