"""What `lock_order` refuses, and what it is without a Redis."""

from __future__ import annotations

import functools
import itertools
import time
import uuid

import pytest
from celery import Celery
from celery.app.task import Context
from celery.app.trace import build_tracer
from celery.contrib.testing.worker import start_worker
from kombu.exceptions import EncodeError

from celery_relock import LockedTask, signals
from celery_relock.declaration import engine_of
from celery_relock.engine.protocol import LINE
from celery_relock.errors import LockConfigError, LockUnavailable
from celery_relock.worker import conflict
from celery_relock.worker.message import HEADER, VERSION
from tests.support import wait_for
from tests.support.proxy import Proxy


def app_of(**settings):
    app = Celery(f"t{uuid.uuid4().hex}", broker="memory://", backend="cache+memory://")
    app.conf.update(
        task_default_queue=f"q{uuid.uuid4().hex}",
        broker_transport_options={"polling_interval": 0.01},  # instead of a second
        **settings,
    )
    return app


def begun_in(app, **options):
    """The task `update`, and what its bodies have seen."""
    begun = []

    @app.task(
        base=LockedTask, bind=True, shared=False, lock_key="{account}", lock_order="sent",
        lock_on_unavailable="run", **options,
    )  # fmt: skip
    def update(self, account, number):
        begun.append((number, self.lock.in_order))

    return update, begun


def test_calls_run_in_order_in_the_memory_of_one_process():
    app = app_of(relock_url="memory://")
    update, begun = begun_in(app)
    update.apply_async(("a", 1), queue="late")
    update.delay("a", 2)
    update.delay("a", 3)
    # Named, as Celery 5.4 also consumes the queue that this process has sent a call to.
    only = {"queues": [app.conf.task_default_queue]}
    with start_worker(app, pool="threads", concurrency=2, perform_ping_check=False, **only):
        state = engine_of(app).backend.state
        wait_for(lambda: len(state.parked) == 2, 20, "two calls that wait")
        update.delay("b", 1)
        wait_for(lambda: begun == [(1, True)], 20, "a call of another name")
        app.control.add_consumer("late", reply=True, timeout=20, limit=1)
        wait_for(lambda: len(begun) == 4, 20, "all calls")
    assert begun[1:] == [(1, True), (2, True), (3, True)]


@pytest.mark.parametrize("dedup", [False, "until_start"])
def test_a_call_whose_place_was_taken_unheard_and_that_is_sent_all_the_same_comes_for_it(
    monkeypatch, dedup
):
    app = app_of(relock_url="memory://")
    update, begun = begun_in(app, lock_dedup=dedup or None)
    backend = engine_of(app).backend
    take = backend.place

    def unheard(request):
        assert take(request)
        raise LockUnavailable("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(backend, "place", unheard)
        first = update.delay("a", 1)
    if dedup:
        assert update.delay("a", 2).id == first.id
    update.apply_async(("a", 2), lock_dedup=False)
    with start_worker(app, pool="threads", concurrency=1, perform_ping_check=False):
        wait_for(lambda: len(begun) == 2, 20, "both calls")
    assert begun == [(1, False), (2, True)]


def test_a_call_that_goes_on_as_it_cannot_reach_its_line_is_not_lost(monkeypatch):
    """It asks for its lock next, and waits for that: it is to come again."""
    app = app_of(relock_url="memory://")
    update, begun = begun_in(app)
    engine, asked = engine_of(app), []
    acquire = engine.backend.acquire

    def once_unheard(claim, *more):
        asked.append(claim)
        if len(asked) == 1:
            raise LockUnavailable("away")
        return acquire(claim, *more)

    lock = update.lock_for("a", 1)
    assert lock.acquire()
    monkeypatch.setattr(engine.backend, "acquire", once_unheard)
    update.delay("a", 1)
    with start_worker(app, pool="threads", concurrency=1, perform_ping_check=False):
        wait_for(lambda: engine.backend.inspect("a").waiting, 20, "the call to be parked")
        wait_for(lambda: not engine.later._calls, 20, "what is made up for")
        lock.release()
        wait_for(lambda: begun, 20, "the call")
    assert begun == [(1, True)]  # nobody has overtaken it


def waiting_in(app, account):
    backend = engine_of(app).backend
    return backend.inspect(f"{LINE}{account}").waiting


@pytest.mark.parametrize("fault", ["", "lose_reply", "lose_command"])
def test_a_call_gets_place_and_dedup_marker_in_one_step_and_a_duplicate_gets_neither(
    redis_server, namespace, fault
):
    with Proxy(redis_server.port) as proxy:
        app = app_of(relock_url=proxy.url, relock_namespace=namespace)
        update, _ = begun_in(app, lock_dedup="until_start")
        update.delay("warm-up", 1)
        proxy.seen.clear()
        if fault:
            getattr(proxy, fault)(of="place")
        first = update.delay("a", 1)
        # The second: from now on the marker lasts for as long as the message may.
        assert proxy.seen == ["place"] * (2 if fault else 1) + ["renew"]
        proxy.seen.clear()
        assert update.delay("a", 2).id == first.id
        assert proxy.seen == ["place"]
        assert waiting_in(app, "a") == 1
        assert update.marked("a", 1).id == first.id


def test_place_and_marker_of_a_call_are_for_the_same_name_and_it_is_asked_for_once():
    app = app_of(relock_url="memory://")
    numbers = itertools.count()

    @app.task(
        base=LockedTask, shared=False, lock_order="sent", lock_dedup="until_done",
        lock_key=lambda: f"{app.main}:{next(numbers)}",
    )  # fmt: skip
    def update(): ...

    update.delay()

    assert next(numbers) == 1


def test_a_call_whose_message_cannot_be_sent_leaves_neither_place_nor_marker(redis_url, namespace):
    app = app_of(relock_url=redis_url, relock_namespace=namespace)
    update, _ = begun_in(app, lock_dedup="until_start")
    with pytest.raises(EncodeError):
        update.delay("a", object())
    assert waiting_in(app, "a") == 0
    assert update.marked("a", 1) is None


def test_without_locks_there_is_no_order():
    app = app_of(relock_enabled=False)
    update, begun = begun_in(app)
    assert update.delay("a", 1).id
    trace = build_tracer(update.name, update, app=app)
    trace("id", ("a", 1), {}, {"id": "id", "hostname": "here"})
    assert begun == [(1, None)]


def test_a_call_that_runs_without_its_line_and_its_lock_is_not_in_order_and_says_so_once():
    app = app_of(relock_url="redis://127.0.0.1:1")
    update, begun = begun_in(app)
    trace = build_tracer(update.name, update, app=app)
    told = {"v": VERSION, "execution_id": "e", "order": ["a", 0]}
    heard = []

    def hear(signal, names, policy, **_):
        heard.append((signal.name, names, policy))

    signals.lock_unavailable.connect(hear)
    signals.lock_unprotected.connect(hear)
    try:
        trace("id", ("a", 1), {}, {"id": "id", "hostname": "here", HEADER: told})
    finally:
        signals.lock_unavailable.disconnect(hear)
        signals.lock_unprotected.disconnect(hear)
    assert begun == [(1, False)]
    assert heard == [("lock_unavailable", ("a",), "run"), ("lock_unprotected", ("a",), "")]


@pytest.mark.parametrize("policy", ["raise", "run"])
def test_a_call_that_gets_no_place_is_sent_or_not_as_the_task_says(policy):
    app = app_of(relock_url="redis://127.0.0.1:1")

    @app.task(base=LockedTask, shared=False, lock_key="a", lock_order="sent",
              lock_on_unavailable=policy)  # fmt: skip
    def update():
        pass

    began = time.monotonic()
    if policy == "raise":
        with pytest.raises(LockUnavailable):
            update.delay()
    else:
        assert update.delay().id
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("dedup", [None, "until_done"])
def test_a_call_that_was_not_sent_leaves_no_place_though_it_had_one(redis_url, namespace, dedup):
    """As a lost answer does it, the server has executed the command that fails."""
    app = app_of(
        relock_url=redis_url,
        relock_namespace=namespace,
        relock_min_replicas=1,
        relock_min_replicas_timeout=0.1,
    )

    @app.task(base=LockedTask, shared=False, lock_key="a", lock_order="sent", lock_dedup=dedup)
    def update():
        pass

    backend = engine_of(app).backend
    with pytest.raises(LockUnavailable, match="replicas"):
        update.delay()
    line = [backend.keys.lock(f"{LINE}a")]
    wait_for(lambda: not backend.inspection().survey(line, 0, 0)[0].waiting, what="its place to go")
    wait_for(lambda: update.marked() is None, what="its marker to go")


@pytest.mark.parametrize(
    "options",
    [
        {"lock_key": False},
        {"lock_key": ["a:{account}", "b:{number}"]},
        {"lock_limit": 2},
        {"lock_reentrant": "workflow"},
        {"lock_hold": "workflow"},
        {"lock_keep_on_retry": True, "lock_order_retry": "end"},
    ],
    ids=lambda options: "-".join(options),
)
def test_what_does_not_go_with_an_order_is_refused_when_the_task_is_declared(options):
    app = app_of(relock_url="memory://")

    @app.task(base=LockedTask, shared=False, **{"lock_key": "a", "lock_order": "sent", **options})
    def update(account, number):
        pass

    with pytest.raises(LockConfigError, match="lock_order='sent' excludes"):
        app.finalize()


def test_a_call_with_several_names_is_refused_when_it_is_sent():
    app = app_of(relock_url="memory://")

    @app.task(
        base=LockedTask, shared=False, lock_order="sent", lock_key=lambda accounts: list(accounts)
    )
    def update(accounts):
        pass

    with pytest.raises(LockConfigError, match="2: 'a', 'b'"):
        update.delay(["a", "b"])


def test_a_call_that_only_a_decorator_accepts_fails_in_the_worker():
    app = app_of(relock_url="memory://")

    def with_extra(function):
        @functools.wraps(function)
        def wrapper(*args, extra=None, **kwargs):
            return function(*args, **kwargs)

        return wrapper

    @app.task(base=LockedTask, shared=False, lock_key="{account}", lock_order="sent", typing=False)
    @with_extra
    def update(account):
        pass

    call = ("a",), {"extra": 2}
    with start_worker(app, pool="solo", perform_ping_check=False):
        for sent in (update.apply_async(*call), app.send_task(update.name, *call)):
            with pytest.raises(TypeError, match="__signature__") as failed:
                sent.get(timeout=20)
            # A client reads it back without this library.
            assert type(failed.value) is TypeError


def test_a_step_whose_arguments_do_not_fit_fails_as_a_step():
    app = app_of(relock_url="memory://")
    update, begun = begun_in(app, typing=False)
    flow = update.s("a", 1) | update.s("a", 2)  # which gets the result of the first, too
    with start_worker(app, pool="solo", perform_ping_check=False), pytest.raises(TypeError):
        flow.delay().get(timeout=20)
    assert begun == [(1, True)]


def test_a_late_copy_gives_its_execution_time_to_store_the_result_once(monkeypatch):
    """An ordered call asks twice: for its turn, and for its lock."""
    monkeypatch.setattr(conflict, "_STORING", 2.0)
    update, _ = begun_in(app_of(relock_url="memory://"), acks_late=True)
    message, asked = Context(id=uuid.uuid4().hex, retries=0), [time.monotonic()]
    for _ in range(2):
        assert conflict._has_to_run(update, message)
        asked.append(time.monotonic())
    first, second = (b - a for a, b in itertools.pairwise(asked))
    assert first >= 2.0
    assert second < 1.0
