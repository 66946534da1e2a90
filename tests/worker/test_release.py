"""What is raised from outside while a task that was called directly releases its lock: the body
around it ends."""

from __future__ import annotations

import time

import pytest
from celery import Celery
from celery.app.trace import build_tracer
from celery.exceptions import SoftTimeLimitExceeded

from celery_relock import LockedTask
from celery_relock.declaration import engine_of


@pytest.fixture
def app(redis_url, namespace):
    with Celery(broker="memory://", set_as_current=False) as app:
        app.conf.update(relock_url=redis_url, relock_namespace=namespace)
        yield app


@pytest.fixture
def run(app, monkeypatch):
    """Run a body that calls another task; what is done once as that one releases. What the body
    has done after it."""

    @app.task(base=LockedTask, shared=False, lock_key="inner {name}")
    def inner(name): ...

    went_on = []

    @app.task(base=LockedTask, shared=False, lock_key="{name}", lock_on_lost="raise", lock_ttl=3)
    def outer(name):
        inner(name)
        went_on.append(name)

    backend = engine_of(app).backend
    release = backend.release

    def run_it(strike):
        todo = [strike]

        def releases(request):
            if request.names[0].startswith("inner") and todo:
                todo.pop()()
            return release(request)

        monkeypatch.setattr(backend, "release", releases)
        task = app.tasks[outer.name]
        request = {"id": "it", "hostname": "here"}
        build_tracer(task.name, task, app=app)("it", ("it",), {}, request)
        assert not todo
        assert not engine_of(app).inspect("inner it").holds
        return went_on

    return run_it


def test_a_time_limit_ends_the_body(run):
    def strike():
        raise SoftTimeLimitExceeded

    assert run(strike) == []


def test_the_loss_of_the_lock_around_it_ends_the_body(run, app):
    def strike():
        engine_of(app).backend.force_release("it")
        until = time.monotonic() + 60
        while time.monotonic() < until:  # until the loss strikes here
            time.sleep(0.01)

    assert run(strike) == []
