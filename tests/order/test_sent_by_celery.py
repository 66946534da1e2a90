"""What Celery itself sends for a task that has ended: an error callback, the next step of a chain,
the body of a chord. Nobody is there whom an error of `apply_async` could be told, and Celery, which
expects none, would lose what has ended."""

from __future__ import annotations

import uuid
from contextlib import contextmanager

import pytest
from celery import Celery, chain, chord, current_task
from celery.contrib.testing.worker import start_worker

from celery_relock import LockedTask
from celery_relock.declaration import engine_of
from celery_relock.errors import LockConfigError, LockUnavailable
from tests.support import new_namespace
from tests.support.tcp import TcpProxy

LONG = 30.0


@pytest.fixture(scope="module")
def way(redis_server):
    """The workers' way to their locks."""
    with TcpProxy(redis_server.port) as proxy:
        yield proxy


@pytest.fixture(scope="module", params=["solo", "threads", "prefork"])
def worker(request, module_worker, way):
    env = {"RELOCK_TEST_LOCKS": f"redis://127.0.0.1:{way.port}"}
    return module_worker(
        "tests.order.apps.sent_by_celery",
        pool=request.param,
        concurrency=1,
        namespace=new_namespace(),
        env=env,
    )


@contextmanager
def without_locks(worker, way, account):
    """A task has begun, and its locks cannot be reached when it ends."""
    worker.journal.wait_for(f"began {account}", LONG)
    way.refuse()
    try:
        worker.journal.add(f"end {account}")
        yield
    finally:
        way.accept()


def test_an_error_callback_is_sent_without_its_place_and_the_task_has_its_own_error(
    worker, way, m, account
):
    result = m.fails.apply_async((account,), link_error=m.ordered.si(account))
    with without_locks(worker, way, account):
        with pytest.raises(ValueError, match=account):
            result.get(timeout=LONG)
        worker.wait_for_log(r"ordered\[\S+\] is sent without a place in its order", LONG)
        worker.wait_for_log(r"ordered\[\S+\] raised unexpected: LockUnavailable", LONG)
    assert m.ping.delay().get(timeout=LONG) == "pong"


def test_the_next_step_of_a_chain_is_sent_without_its_place_and_fails_by_itself(
    worker, way, m, account
):
    result = chain(m.first.si(account), m.ordered.si(account)).delay()
    with without_locks(worker, way, account):
        assert result.parent.get(timeout=LONG) == account
        with pytest.raises(LockUnavailable):
            result.get(timeout=LONG)


def test_a_canvas_that_a_body_sends_raises_there(worker, way, m, account):
    result = m.calls_another.delay(account)
    with without_locks(worker, way, account), pytest.raises(LockUnavailable):
        result.get(timeout=LONG)
    assert not worker.journal.events("ordered", of=account)


def only_there(name, value):
    """A callable that fails while this task runs, and when Celery sends what comes after it."""

    def made(**_):
        if current_task and current_task.name == name:
            raise LookupError("no tenant here")
        return value

    return made


def two(account):
    return list(account)


def made_with(order="sent", relock_prefix="", **options):
    """An app whose worker runs in this process, its task `first`, and one that comes after it."""
    app = Celery(f"t{uuid.uuid4().hex}", broker="memory://", backend="cache+memory://")
    app.conf.update(
        task_default_queue=f"q{uuid.uuid4().hex}",
        broker_transport_options={"polling_interval": 0.01},
        relock_url="memory://",
        relock_prefix=relock_prefix,
        result_chord_retry_interval=0.1,
    )

    @app.task(shared=False, name="first")
    def first(value):
        return value

    @app.task(base=LockedTask, shared=False, lock_order=order, **{"lock_key": "a", **options})
    def second(account):
        return f"second {account}"

    return app, first, second


REFUSED = [
    ({"lock_key": "{account}"}, None, {}, "{account} is None"),
    ({"lock_key": two}, "xy", {}, "is for calls with one lock name, and this one has 2"),
    ({"lock_key": only_there("first", "a")}, "x", {}, "no tenant here"),
    ({"relock_prefix": only_there("first", "t:")}, "x", {}, "in relock_prefix .*no tenant"),
    ({}, "x", {"lock_ttl": -1}, "lock_ttl=-1 cannot be used"),
    ({}, "x", {"lock_limit": 2}, "lock_limit"),
    ({}, "x", {"relock_ttl": 5}, "relock_ttl is a setting of the app"),
]
OF_ANY_TASK = [({"order": None, **options}, *more) for options, *more in REFUSED[3:]]


@pytest.mark.parametrize(("options", "value", "said", "why"), REFUSED + OF_ANY_TASK)
def test_a_step_that_is_refused_fails_as_it_runs_and_what_came_before_has_its_outcome(
    options, value, said, why
):
    app, first, second = made_with(**options)
    with start_worker(app, pool="solo", perform_ping_check=False):
        result = chain(first.si(value), second.s().set(**said)).delay()
        with pytest.raises(LockConfigError, match=why):
            result.get(timeout=20)
        assert result.parent.state == "SUCCESS"


def test_so_does_the_body_of_a_chord():
    app, first, second = made_with(lock_key=lambda account: account[0])
    with start_worker(app, pool="solo", perform_ping_check=False):
        result = chord([first.si(None)], second.s()).delay()
        with pytest.raises(LockConfigError, match="must return a lock name"):
            result.get(timeout=20)


def test_so_does_a_retry_whose_message_celery_would_reject():
    app, _, _ = made_with()

    @app.task(base=LockedTask, bind=True, shared=False, lock_key="{account}", lock_order="sent")
    def tries(self, account):
        raise self.retry(args=(None,), countdown=0)

    with start_worker(app, pool="solo", perform_ping_check=False):
        result = tries.delay("a")
        with pytest.raises(LockConfigError, match="is None, and all calls"):
            result.get(timeout=20)


def test_a_step_whose_place_redis_refuses_says_why(monkeypatch):
    app, first, second = made_with()

    def refuses(request):
        raise LockConfigError("the password is wrong")

    monkeypatch.setattr(engine_of(app).backend, "place", refuses)
    with start_worker(app, pool="solo", perform_ping_check=False):
        result = chain(first.si("x"), second.s()).delay()
        with pytest.raises(LockConfigError, match="the password is wrong"):
            result.get(timeout=20)
        assert result.parent.state == "SUCCESS"


@pytest.mark.parametrize(("options", "value", "said", "why"), [REFUSED[1], REFUSED[4]])
def test_what_a_program_sends_is_refused_at_once_also_a_canvas(options, value, said, why):
    _, first, second = made_with(**options)
    call = second.s(value).set(**said)
    for canvas in (call, call | first.s(), chord([call], first.s())):
        with pytest.raises(LockConfigError, match=why):
            canvas.delay()


def test_a_canvas_that_a_program_sends_without_redis_raises_at_once():
    app, first, second = made_with()
    app.conf.relock_url = "redis://127.0.0.1:1"
    with pytest.raises(LockUnavailable):
        (second.s("x") | first.s()).delay()
