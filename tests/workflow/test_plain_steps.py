"""Steps that are no LockedTask keep the permit, in every worker."""

from __future__ import annotations

import sys
import uuid

import pytest
from celery import Celery, _state, chain

from celery_relock import locked
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
