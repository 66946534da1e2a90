"""Metrics and spans for OpenTelemetry, of a prefork worker with an SDK in each child."""

from __future__ import annotations

import json
import uuid

import pytest
from celery import Celery, chain
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider

from celery_relock import Lock, LockedTask, locked, signals
from celery_relock.admin import Locks
from celery_relock.contrib import metrics, otel
from celery_relock.contrib.metrics import template_of
from celery_relock.declaration import engine_of
from celery_relock.errors import LockUnavailable
from tests.support import wait_for
from tests.support.ports import free_port
from tests.support.programs import said_by

APP = "tests.contrib.apps.measured"
SIGNALS = [each for name, each in vars(signals).items() if name.startswith("lock_")]


class Exported:
    def __init__(self, worker, path):
        self.worker, self.tasks = worker, worker.module
        self._path = path

    def lines(self, key):
        text = self._path.read_text() if self._path.exists() else ""
        every = [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
        return [line for line in every if key in line]

    def spans(self, task_id, count=1):
        def found():
            return [line for line in self.lines("span") if line["span"] == task_id]

        wait_for(lambda: len(found()) >= count, what=f"{count} spans of {task_id}")
        return found()

    def value(self, name, task, **more):
        """The sum over the processes of what each told last."""
        labels = {"relock.task": f"{APP}.{task}", **more}
        last = {
            line["pid"]: line["value"]
            for line in self.lines("metric")
            if line["metric"] == f"relock.{name}" and line["labels"] == labels
        }
        return sum(last.values())

    def wait_for_value(self, expected, name, task, **more):
        """A process writes its metrics after the task's span, and after its result."""
        wait_for(
            lambda: self.value(name, task, **more) == expected,
            what=f"{expected} as {name} of {task}",
        )


@pytest.fixture(scope="module")
def exported(module_worker, tmp_path_factory):
    path = tmp_path_factory.mktemp("otel") / "lines"
    apps = "tests.contrib.apps"
    env = {"TEST_OTEL_FILE": str(path), "TEST_METRICS_PORT": str(free_port())}
    arguments = ("-I", f"{apps}.with_otel,{apps}.with_prometheus")
    return Exported(module_worker(APP, env=env, arguments=arguments), path)


@pytest.fixture
def in_one_process(new_worker, tmp_path):
    path = tmp_path / "lines"
    env, arguments = {"TEST_OTEL_FILE": str(path)}, ("-I", "tests.contrib.apps.with_otel")
    return Exported(new_worker(APP, pool="solo", env=env, arguments=arguments), path)


def test_beside_it_prometheus_says_what_it_lacks_in_a_prefork_pool(exported):
    exported.worker.wait_for_log("ERROR.*PROMETHEUS_MULTIPROC_DIR is not set")


def test_spans_tell_of_the_lock_and_of_each_wait_and_metrics_of_all(exported):
    account, tasks = uuid.uuid4().hex, exported.tasks
    held = tasks.holds.delay(account)
    exported.worker.journal.wait_for(f"held {account}", 20)
    parked = tasks.waits.delay(account)
    [first] = exported.spans(parked.id)
    blocked = tasks.blocks.delay(account)
    locks = engine_of(tasks.app)
    wait_for(lambda: locks.inspect(f"account:{account}").waiting == 2, what="both to wait")
    exported.worker.journal.add(f"free {account}")
    fence = held.get(timeout=20)
    assert blocked.get(timeout=20) == parked.get(timeout=20) == 1

    [holder] = exported.spans(held.id)
    assert holder["attributes"]["relock.names"] == [f"account:{account}"]
    assert holder["attributes"]["relock.fence"] == fence
    assert holder["attributes"]["relock.waited"] == 0 < holder["attributes"]["relock.held"]
    assert holder["events"] == []
    assert [name for name, _ in first["events"]] == ["relock.conflict", "relock.parked"]
    assert first["events"][0][1]["relock.policy"] == "wait"
    assert f"holds[{held.id}"[:14] in first["events"][0][1]["relock.reason"]
    _, then = exported.spans(parked.id, 2)
    assert [name for name, _ in then["events"]] == ["relock.acquired"]
    assert then["attributes"]["relock.waited"] > 0
    [waited] = exported.spans(blocked.id)
    assert [name for name, _ in waited["events"]][-1] == "relock.acquired"
    exported.wait_for_value(1, "acquired", "holds")
    exported.wait_for_value(1, "wait", "holds")
    exported.wait_for_value(1, "hold", "waits")
    exported.wait_for_value(1, "parkings", "waits")
    exported.wait_for_value(1, "conflicts", "waits", **{"relock.policy": "wait"})
    assert {
        line["unit"] for line in exported.lines("metric") if line["metric"] == "relock.hold"
    } == {"s"}


def test_the_span_of_a_hold_hears_of_its_loss_though_another_thread_does(exported):
    account = uuid.uuid4().hex
    held = exported.tasks.holds.delay(account)
    exported.worker.journal.wait_for(f"held {account}", 20)
    engine_of(exported.tasks.app).backend.force_release(f"account:{account}")
    exported.worker.wait_for_log(f"account:{account}' lost")
    exported.worker.journal.add(f"free {account}")
    [span] = exported.spans(held.id)
    assert span["attributes"]["relock.lost"] is True
    assert [name for name, _ in span["events"]] == ["relock.lost"]
    exported.wait_for_value(1, "lost", "holds")


def test_a_span_names_the_locks_of_the_task_and_of_what_it_calls(exported):
    account = uuid.uuid4().hex
    [span] = exported.spans(exported.tasks.nests.delay(account).id)
    assert span["attributes"]["relock.names"] == [f"account:{account}", f"stock:{account}"]


def test_the_spans_of_a_workflow_end_with_their_steps(in_one_process):
    tasks = in_one_process.tasks
    for _ in range(2):
        account = uuid.uuid4().hex
        steps = chain(tasks.waits.si(account), tasks.waits.si(account), tasks.waits.si(account))
        last = locked(steps, key=f"account:{account}").delay()
        last.get(timeout=20)
        [step] = in_one_process.spans(last.id)
        assert step["attributes"]["relock.held"] > 0
        [before] = in_one_process.spans(last.parent.id)
        assert before["attributes"]["relock.names"] == [f"account:{account}"]
        assert "relock.held" not in before["attributes"]

    assert tasks.living_spans.delay().get(timeout=20) == 1


def test_the_template_is_also_told_if_the_app_has_it_for_all_its_tasks():
    app = Celery("shop", set_as_current=False)
    app.conf.update(relock_url="memory://", relock_key="tenant:{tenant}")

    @app.task(shared=False, base=LockedTask)
    def bills(tenant):
        pass

    assert template_of(app.tasks[bills.name]) == "tenant:{tenant}"


TWICE = """
import sys
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from celery_relock import Lock
from celery_relock.contrib import otel
from celery_relock.errors import LockConfigError
reader = InMemoryMetricReader()
provider = MeterProvider([reader])
otel.instrument(meter_provider=provider, spans=False)
otel.instrument(meter_provider=provider)
for other in (None, MeterProvider([InMemoryMetricReader()])):
    try:
        otel.instrument(meter_provider=other)
    except LockConfigError as error:
        print(error)
with Lock(sys.argv[1], "a", namespace=sys.argv[2]):
    pass
[resource] = reader.get_metrics_data().resource_metrics
[scope] = resource.scope_metrics
for metric in scope.metrics:
    print(metric.name, [point.value for point in metric.data.data_points if metric.unit != "s"])
"""


def test_a_second_call_in_a_process_measures_nothing_twice_and_nowhere_else(redis_url, namespace):
    *refused, acquired, wait, hold = said_by(TWICE, redis_url, namespace).splitlines()
    assert len(refused) == 2
    assert all("with another meter provider" in error for error in refused)
    assert (acquired, wait, hold) == ("relock.acquired [1]", "relock.wait []", "relock.hold []")


@pytest.fixture
def span():
    """Of a task that runs in this process, where spans are told of locks."""
    otel._annotate_spans()
    try:
        with TracerProvider().get_tracer(__name__).start_as_current_span("task") as span:
            yield span
    finally:
        for each in SIGNALS:
            each.disconnect(dispatch_uid="celery_relock.otel")


def test_a_span_and_a_counter_tell_that_redis_could_not_be_reached(span):
    app = Celery("shop", set_as_current=False)
    app.conf.update(relock_url=f"redis://127.0.0.1:{free_port()}", relock_namespace="a")
    counted = []

    @app.task(shared=False, base=LockedTask, lock_key="a", name="pay")
    def pay():
        pass

    metrics.connect("test", lambda *measured: counted.append(measured))
    try:
        with pytest.raises(LockUnavailable):
            pay()
    finally:
        for each in SIGNALS:
            each.disconnect(dispatch_uid="celery_relock.metrics.test")

    [event] = span.events
    assert event.name == "relock.unavailable"
    assert event.attributes["relock.policy"] == "raise"
    assert "cannot be reached" in event.attributes["relock.reason"]
    assert counted == [("unavailable", 1, {"task": "pay", "policy": "raise"})]


@pytest.mark.parametrize("enabled", [True, False])
def test_a_task_without_a_lock_has_none_in_its_span(span, redis_url, namespace, enabled):
    app = Celery("shop", set_as_current=False)
    app.conf.update(relock_url=redis_url, relock_namespace=namespace, relock_enabled=enabled)

    @app.task(shared=False, base=LockedTask, lock_key="a")
    def locks():
        pass

    locks()
    assert bool(span.attributes) == enabled
    assert ("relock.held" in span.attributes) == enabled


def _gauges(locks):
    """The data of the gauges of these locks, by name and unit; None if there are none."""
    reader = InMemoryMetricReader()
    otel.observe(locks, MeterProvider([reader]))
    data = reader.get_metrics_data()
    if data is None:
        return None
    [scope] = data.resource_metrics[0].scope_metrics
    return {
        (each.name, each.unit): [point.value for point in each.data.data_points]
        for each in scope.metrics
    }


def test_the_gauges_are_read_from_redis_when_metrics_are_exported(redis_url, namespace):
    with Lock(redis_url, "a", namespace=namespace):
        found = _gauges(Locks(redis_url, namespace))

    assert {name for name, _ in found} == {f"relock.{name}" for name in metrics.GAUGES}
    assert found["relock.held", ""] == [1]
    [longest] = found["relock.oldest_hold", "s"]
    assert longest > 0


def test_there_are_no_gauges_while_redis_cannot_be_reached():
    assert _gauges(Locks("redis://127.0.0.1:1/0")) is None
