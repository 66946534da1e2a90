"""Steps that are no LockedTask keep the permit, in every worker."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import uuid

import pytest
from celery import Celery, _state, chain
from celery.app.trace import build_tracer

from celery_relock import LockedTask, locked
from celery_relock.worker import bootstep
from tests.support import make_app


@pytest.mark.parametrize("pool", ["solo", "threads", "prefork"])
def test_plain_steps_keep_the_permit_in_a_worker_of_start_worker(new_worker, pool):
    # It sends no celeryd_init, celeryd_after_setup and worker_ready.
    started = new_worker(
        "tests.workflow.apps.workflows",
        pool=pool,
        concurrency=1,
        program=(sys.executable, "-m", "tests.company.embedded"),
    )
    account, module = uuid.uuid4().hex[:12], started.module
    names = ["0", "1", "2"]
    flow = chain(module.plain.s(account=account, name=name) for name in names)
    assert locked(flow, key=f"account:{account}").delay().get(timeout=30) == names
    entered = started.journal.events("enter")
    assert [event["step"] for event in entered] == names
    assert len({event["fence"] for event in entered}) == 1
    assert entered[0]["fence"] > 0


@pytest.fixture
def app(redis_url, namespace, monkeypatch):
    monkeypatch.setenv("RELOCK_TEST_URL", redis_url)
    monkeypatch.setenv("RELOCK_TEST_NAMESPACE", namespace)
    made = make_app(__name__)
    yield made
    made.close()


def test_the_tasks_of_a_worker_are_prepared_once(app):
    @app.task
    def plain():
        return "ran"

    app.finalize()
    bootstep.prepare(app)
    prepared = app.tasks[plain.name].run
    bootstep.prepare(app)
    assert app.tasks[plain.name].run is prepared
    assert prepared.__wrapped__ is not prepared
    assert prepared() == app.tasks[plain.name]() == "ran"


def test_a_locked_task_whose_class_has_its_own_on_bound_is_no_plain_one(app):
    class Own(LockedTask):
        @classmethod
        def on_bound(cls, app):
            """Without that of its base class."""

    @app.task(base=Own, lock_key="own", shared=False)
    def locks(): ...

    app.finalize()
    bootstep.prepare(app)
    assert "run" not in vars(app.tasks[locks.name])


def test_a_plain_task_that_a_body_calls_is_a_function_for_it(app):
    @dataclasses.dataclass(frozen=True)
    class Frozen(Exception):
        """Refuses each assignment, also that of a traceback."""

        number: int

    @app.task(shared=False)
    def raises():
        raise Frozen(1)

    @app.task(shared=False)
    def handles():
        with pytest.raises(Frozen):
            raises()
        with pytest.raises(Frozen):
            raises.apply(throw=True)
        return "handled"

    assert in_a_worker(app, handles) == "handled"


def test_a_plain_task_that_calls_its_own_run_is_at_most_one_frame_deeper_than_itself(app):
    @app.task(bind=True, shared=False)
    def goes_down(self, number):
        return self.run(number - 1) if number else len(inspect.stack())

    assert in_a_worker(app, goes_down, 11) - in_a_worker(app, goes_down, 1) == 20


def in_a_worker(app, task, *args):
    """The result of a task in Celery's tracer, in an app whose tasks are prepared."""
    app.finalize()
    bootstep.prepare(app)
    task = app.tasks[task.name]
    task.ignore_result = True
    trace = build_tracer(task.name, task, app=app, propagate=True)
    task_id = uuid.uuid4().hex
    return trace(task_id, args, {}, {"id": task_id, "hostname": "here"})[0]


def test_the_tasks_of_an_app_without_locks_stay_as_they_are(monkeypatch):
    # Without the shared tasks of other tests in this process.
    monkeypatch.setattr(_state, "_on_app_finalizers", set())
    app = Celery("without", broker="memory://")

    @app.task(shared=False)
    def plain():
        return "ran"

    app.finalize()
    bootstep.prepare(app)
    assert "run" not in vars(app.tasks[plain.name])
