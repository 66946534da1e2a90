"""Metrics for Prometheus: what a prefork worker serves is what happened in all of its processes,
those that are gone too; a real Prometheus scrapes it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
import uuid
from urllib.error import HTTPError
from urllib.parse import urlencode

import pytest
import yaml
from celery import Celery
from prometheus_client.parser import text_string_to_metric_families

from celery_relock import Lock, LockedTask
from celery_relock.admin import Locks
from celery_relock.contrib import metrics, prometheus
from celery_relock.declaration import engine_of
from celery_relock.engine.protocol import Claim
from celery_relock.engines import engine_for
from celery_relock.errors import LockLost
from tests.docs.pages import blocks
from tests.support import reaper, wait_for
from tests.support.ports import free_port
from tests.support.programs import said_by
from tests.support.worker import ROOT

APP = "tests.contrib.apps.measured"
DOCS = ROOT / "docs" / "metrics"
KEY = "account:{account}"


def scraped(port: int) -> dict[tuple[str, frozenset], float]:
    """What is served: each sample by its name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }


class Measured:
    """A worker, and the names of its metrics in short."""

    def __init__(self, worker, port, folder):
        self.worker, self.port, self.folder = worker, port, folder
        self.tasks = worker.module

    def value(self, name, task, **labels):
        labels = {"task": f"{APP}.{task}", "key": KEY, **labels}
        return scraped(self.port).get((f"relock_{name}", frozenset(labels.items())), 0)

    @contextlib.contextmanager
    def held(self):
        account = uuid.uuid4().hex
        sent = self.tasks.holds.delay(account)
        self.worker.journal.wait_for(f"held {account}", 20)
        yield account
        self.worker.journal.add(f"free {account}")
        with contextlib.suppress(Exception):
            sent.get(timeout=20)

    def backend(self):
        return engine_of(self.tasks.app).backend


@pytest.fixture(scope="module")
def measured(module_worker, tmp_path_factory):
    port, folder = free_port(), tmp_path_factory.mktemp("multiproc")
    env = {"PROMETHEUS_MULTIPROC_DIR": str(folder), "TEST_METRICS_PORT": str(port)}
    arguments = ("-I", "tests.contrib.apps.with_prometheus")
    worker = module_worker(APP, concurrency=3, env=env, arguments=arguments)
    return Measured(worker, port, folder)


def test_what_happens_to_locks_is_counted_by_task_and_template(measured):
    tasks, value = measured.tasks, measured.value
    with measured.held() as account:
        parked = tasks.waits.delay(account)
        wait_for(lambda: value("parkings_total", "waits") == 1)
        assert tasks.drops.delay(account).get(timeout=20)["relock"] == "dropped"
        with pytest.raises(Exception, match="is held by"):
            tasks.raises.delay(account).get(timeout=20)
        blocked = tasks.blocks.delay(account)
        wait_for(lambda: value("conflicts_total", "blocks", policy="block") == 1)
        first = tasks.once.delay(account)
        tasks.app.send_task(tasks.once.name, [account]).get(timeout=20)
        assert value("duplicates_total", "once") == 1
        assert value("hold_seconds_count", "holds") == 0
    assert blocked.get(timeout=20) == parked.get(timeout=20) == 1
    first.get(timeout=20)

    assert value("conflicts_total", "waits", policy="wait") == 1
    assert value("parkings_total", "waits") == value("resumed_total", "waits") == 1
    assert value("reentered_total", "waits") == 1  # called by `blocks`
    assert value("conflicts_total", "drops", policy="drop") == value("dropped_total", "drops") == 1
    assert value("conflicts_total", "raises", policy="raise") == 1
    for task in ("holds", "waits", "blocks", "once"):
        assert value("acquired_total", task) == value("wait_seconds_count", task) == 1, task
        assert value("hold_seconds_count", task) == 1, task
    assert value("wait_seconds_sum", "holds") == 0
    held = value("hold_seconds_sum", "holds")
    assert 0 < value("wait_seconds_sum", "blocks") < held
    assert 0 < value("wait_seconds_sum", "waits") < held + 10
    names = {name for name, _ in scraped(measured.port)}
    assert not any(account in str(labels) for _, labels in scraped(measured.port))
    assert names == {name for name in names if name.startswith("relock_")}


def test_a_wait_that_is_given_up_is_a_wait_too(measured):
    tasks, value = measured.tasks, measured.value
    tried = ("holds", "blocks", "chooses_to_block")
    with measured.held() as account:
        before = {task: value("wait_seconds_count", task) for task in tried}
        for task in before:
            given_up = getattr(tasks, task).apply_async((account,), lock_max_wait=0.3)
            with pytest.raises(Exception, match="is held by"):
                given_up.get(timeout=20)
            wait_for(lambda: value("wait_seconds_count", task) == before[task] + 1)  # noqa: B023
            assert value("wait_seconds_sum", task) >= 0.3
    assert value("conflicts_total", "holds", policy="raise") == 1


def test_what_a_child_counted_stays_when_it_is_gone_and_the_next_one_counts_on(measured):
    value, journal = measured.value, measured.worker.journal
    before = value("acquired_total", "holds")
    account = uuid.uuid4().hex
    measured.tasks.holds.delay(account)
    [held] = journal.wait_for(f"held {account}", 20)
    measured.worker.kill(signal.SIGKILL, held.pid)
    wait_for(lambda: value("reclaimed_total", "holds") == 1)
    assert value("acquired_total", "holds") == before + 1
    wait_for(lambda: held.pid not in measured.worker.children())
    wait_for(lambda: len(measured.worker.children()) == 3)
    with measured.held() as account:
        wait_for(lambda: value("acquired_total", "holds") == before + 2)
        measured.backend().force_release(f"account:{account}")
        wait_for(lambda: value("lost_total", "holds") == 1)
    wait_for(lambda: value("hold_seconds_count", "holds") == before + 1)


TWICE = """
import sys
from prometheus_client import CollectorRegistry
from celery_relock import Lock
from celery_relock.contrib import prometheus
from celery_relock.errors import LockConfigError

registry = CollectorRegistry()
prometheus.instrument(registry=registry)
prometheus.instrument(registry=registry, templates=True)
try:
    prometheus.instrument()
except LockConfigError as error:
    print(error)
with Lock(sys.argv[1], "a", namespace=sys.argv[2]):
    pass
print(registry.get_sample_value("relock_acquired_total", {"task": ""}))
prometheus.instrument(port=int(sys.argv[3]), registry=registry)
from celery.signals import worker_ready
worker_ready.send(None)
from urllib.request import urlopen
print(urlopen(f"http://127.0.0.1:{sys.argv[3]}/metrics").read().decode())
"""


def test_a_second_call_in_a_process_measures_nothing_twice(redis_url, namespace):
    said = said_by(TWICE, redis_url, namespace, str(free_port()))

    refused, acquired, *served = said.splitlines()
    assert "another registry" in refused
    assert acquired == "1.0"
    assert 'relock_acquired_total{task=""} 1.0' in served


UNSERVED = """
import logging, os, socket, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.WARNING)
taken = socket.create_server(("127.0.0.1", 0))
port = taken.getsockname()[1]
if sys.argv[1]:
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = sys.argv[1]
    taken.close()
from celery.signals import worker_ready
from celery_relock.contrib import prometheus
prometheus.instrument(port=port, addr="127.0.0.1")
worker_ready.send(None)
"""


@pytest.mark.parametrize(
    ("folder", "because"),
    [("", "Address already in use"), ("/no/such/folder", "is not set or not a directory")],
)
def test_a_worker_says_in_a_line_why_its_metrics_are_not_served(folder, because):
    (line,) = said_by(UNSERVED, folder).splitlines()
    assert line.startswith("metrics: cannot serve them at 127.0.0.1:")
    assert because in line


@pytest.fixture
def told():
    """What is measured in this process: instrument, number, labels."""
    found = []
    metrics.connect("this test", lambda name, value, labels: found.append((name, value, labels)))
    yield found
    for signal_ in metrics._RULES:
        signal_.disconnect(dispatch_uid="celery_relock.metrics.this test")


def test_what_somebody_frees_by_force_is_counted_where_that_is_done(redis_url, namespace, told):
    lock = Lock(redis_url, "a", namespace=namespace)
    lock.acquire()
    assert Locks(redis_url, namespace).release("a")
    [forced] = [each for each in told if each[0] == "forced"]
    assert forced[1:] == (1, {"task": "Lock", "action": "release"})
    assert ("acquired", 1, {"task": ""}) in told
    # Else the loss is told while the next test counts.
    with pytest.raises(LockLost):
        lock.release()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_what_is_not_acquired_is_not_counted(redis_url, namespace, told, enabled, mode):
    app = Celery("shop", set_as_current=False)
    app.conf.update(relock_url=redis_url, relock_namespace=namespace, relock_enabled=enabled)

    @app.task(shared=False, base=LockedTask, lock_key="a", lock_mode=mode)
    def inner():
        pass

    @app.task(shared=False, base=LockedTask, lock_key="a", lock_mode=mode)
    def outer():
        inner()

    outer()

    counted = [name for name, *_ in told]
    assert counted == (["acquired", "wait", "reentered", "hold"] if enabled else [])


@pytest.mark.parametrize("of_workflow", [True, False])
def test_the_last_step_of_a_workflow_counts_as_a_hold_though_it_came_before_the_step_before_ended(
    redis_url, namespace, told, of_workflow
):
    """Nobody else tells that the lock was held: a step tells of no release if it leaves the lock to
    another."""
    engine, ancestors = engine_for(redis_url, namespace), ()
    leases = []
    for run in ("step", "last"):
        claim = Claim(run, "n", "w", ("a",), (1,), 30.0, "", ancestors=ancestors)
        leases.append(engine.lease(claim))
        leases[-1].of_workflow = of_workflow
        engine.acquire(leases[-1])
        ancestors = (run,)
    assert leases[-1].reentered == (True,)

    engine.release(leases[-1])

    assert [name for name, *_ in told if name == "hold"] == ["hold"] * of_workflow
    engine.release(leases[0])


# -- A real Prometheus, its rules, a dashboard


def names() -> set[str]:
    """Every metric that there is, as it is asked for."""
    every = {f"relock_{name}_total" for name in metrics.COUNTERS}
    for name in metrics.HISTOGRAMS:
        every |= {f"{prometheus.metric_name(name)}_{part}" for part in ("bucket", "sum", "count")}
    every |= {prometheus.metric_name(name) for name in metrics.GAUGES}
    return every | {"relock_up", "relock_read_seconds"}


def asked_for(expression: str) -> set[str]:
    return set(re.findall(r"\brelock_\w+", expression))


def on_the_dashboard() -> list[str]:
    panels = json.loads((DOCS / "dashboard.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def the_rules() -> list[dict]:
    [group] = yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"]
    return group["rules"]


def in_the_alerts() -> list[str]:
    return [rule["expr"] for rule in the_rules()]


def test_alerts_and_dashboard_ask_for_metrics_that_exist_and_the_page_names_each():
    for expression in [*on_the_dashboard(), *in_the_alerts()]:
        assert asked_for(expression), expression
        assert asked_for(expression) <= names(), expression
    page = (DOCS.parent / "metrics.md").read_text()
    for name in {*metrics.COUNTERS, *metrics.HISTOGRAMS, *metrics.GAUGES}:
        assert f"`{name}`" in page, name


def test_each_name_is_that_of_one_metric():
    """A meter, and a registry, can have the counters and the gauges side by side."""
    tables = (metrics.COUNTERS, metrics.HISTOGRAMS, metrics.GAUGES, ("up", "read"))
    every = [name for table in tables for name in table]
    assert sorted(every) == sorted(set(every))


def test_the_examples_of_the_page_run():
    """In a process of their own: they measure all of it from then on."""
    said_by("\n".join(blocks("metrics")))


@pytest.fixture(scope="module")
def exporter(measured):
    """`celery relock exporter`, and the port that it says."""
    process = reaper.start(
        [
            *(sys.executable, "-m", "celery", "-A", APP, "relock", "exporter"),
            *("--port", "0", "--addr", "127.0.0.1"),
        ],
        cwd=ROOT,
        env={**os.environ, **measured.worker.settings},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    found = re.search(r"http://127\.0\.0\.1:(\d+)/metrics", process.stdout.readline())
    assert found
    yield int(found[1])
    process.terminate()
    assert process.wait(30) == 0
    process.stdout.close()
    reaper.end(process)


def test_the_exporter_counts_what_is_in_redis(measured, exporter):
    def gauge(name):
        return scraped(exporter)[f"relock_{name}", frozenset()]

    def gauges():
        return {name: gauge(name) for name in ("held", "holders", "waiting", "parked")}

    assert gauge("up") == 1
    wait_for(lambda: not any(gauges().values()))
    with measured.held() as account:
        parked = measured.tasks.waits.delay(account)
        blocked = measured.tasks.blocks.delay(account)
        all_one = dict.fromkeys(("held", "holders", "waiting", "parked"), 1)
        wait_for(lambda: gauges() == all_one)
        assert 0 < gauge("oldest_wait_seconds") < gauge("oldest_hold_seconds") < 20
    assert parked.get(timeout=20) == blocked.get(timeout=20) == 1


def test_an_execution_with_several_locks_has_a_hold_or_a_place_for_each(measured):
    app = measured.tasks.app

    @app.task(base=LockedTask, lock_key=["x", "y"])
    def counted():
        found = metrics.Figures(Locks(app)).read()
        return [found[name] for name in ("held", "holders", "waiting", "parked")]

    with measured.held() as account:
        parked = measured.tasks.both.delay(account)
        wait_for(lambda: counted() == [3, 3, 0, 2], what="two places of one parked message")
    parked.get(timeout=20)
    wait_for(lambda: counted() == [2, 2, 0, 0])


def test_without_redis_the_exporter_says_so_and_tells_no_old_numbers():
    found = prometheus.Gauges(Locks("redis://127.0.0.1:1/0")).collect()
    told = {family.name: family.samples[0].value for family in found}
    assert told.keys() == {"relock_up", "relock_read_seconds"}
    assert told["relock_up"] == 0


@pytest.fixture(scope="module")
def prometheus_server(measured, exporter, tmp_path_factory):
    """A Prometheus that scrapes the worker and the exporter, with our alert rules. Its API."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("no prometheus (on Debian: apt-get install prometheus)")
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    targets = [f"127.0.0.1:{measured.port}", f"127.0.0.1:{exporter}"]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(DOCS / "alerts.yml")],
        "scrape_configs": [{"job_name": "relock", "static_configs": [{"targets": targets}]}],
    }
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    with (folder / "log").open("w") as log:
        process = reaper.start(
            [
                *(binary, f"--config.file={folder / 'config.yml'}"),
                *(f"--storage.tsdb.path={folder / 'data'}", "--log.level=warn"),
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )

    def ask(path, **query):
        url = f"http://127.0.0.1:{port}/api/v1/{path}?{urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    yield ask
    reaper.end(process)


def test_a_prometheus_scrapes_all_of_it_and_takes_the_rules_and_the_dashboard(
    measured, prometheus_server
):
    def value(expression):
        try:
            found = prometheus_server("query", query=expression)["result"]
            return float(found[0]["value"][1]) if found else None
        except HTTPError as error:  # it starts
            error.close()
        except OSError:
            pass

    with measured.held():
        wait_for(lambda: value("relock_held") == 1, 20)
        counted = scraped(measured.port)
        acquired = sum(v for (name, _), v in counted.items() if name == "relock_acquired_total")
        wait_for(lambda: value("sum(relock_acquired_total)") == acquired)
    assert value("sum(up)") == 2
    for expression in on_the_dashboard():
        asked = expression.replace("$__rate_interval", "1m").replace("$task", ".*")
        prometheus_server("query", query=asked)  # raises for what is no query
    wait_for(
        lambda: all(
            rule["health"] == "ok"
            for group in prometheus_server("rules")["groups"]
            for rule in group["rules"]
        )
    )
    [group] = prometheus_server("rules")["groups"]
    assert len(group["rules"]) == len(in_the_alerts())


def promtool(*arguments: str) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool (on Debian: apt-get install prometheus)")
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_finds_nothing_wrong_with_the_rules():
    promtool("check", "rules", "--lint-fatal", str(DOCS / "alerts.yml"))


LOST = 'relock_lost_total{task="pay", instance="a"}'
FAILED = 'relock_renewal_failures_total{instance="a"}'
RESUMED = 'relock_resumed_total{task="pay", instance="a"}'
RECLAIMED = 'relock_reclaimed_total{task="%s", instance="a"}'
AWAY = 'relock_unavailable_total{task="pay", policy="raise", instance="a"}'
FORCED = 'relock_forced_total{task="pay", action="release", instance="a"}'
# What is scraped each minute, an alert, and whether it fires after so many minutes. `_` stands for
# a scrape without the series: a counter is there from its first event on, and begins at 1.
ALERTS = [
    ({LOST: "_x20 1x40"}, "RelockLockLost", {19: 0, 20: 1, 21: 1, 29: 1, 32: 0}),
    ({LOST: "3x20 4x40"}, "RelockLockLost", {19: 0, 23: 1, 35: 0}),
    ({LOST: "7x20 _x5 1x40"}, "RelockLockLost", {19: 0, 27: 1, 45: 0}),  # its worker began anew
    ({LOST: "1x40", LOST.replace('"a"', '"b"'): "_x20 1x20"}, "RelockLockLost", {19: 0, 22: 1}),
    ({FAILED: "_x20 3x40"}, "RelockRenewalsFail", {19: 0, 20: 1, 21: 1, 24: 0}),
    ({FAILED: "3x20 5x40"}, "RelockRenewalsFail", {19: 0, 21: 1, 24: 0}),
    ({AWAY: "_x20 1x40"}, "RelockUnavailable", {19: 0, 20: 1, 24: 1, 26: 0}),
    ({AWAY.replace("raise", "run"): "_x20 1x40"}, "RelockUnavailable", {20: 0, 21: 0}),
    ({FORCED: "_x20 1x40"}, "RelockForced", {19: 0, 20: 1, 21: 1, 32: 0}),
    ({FORCED: "1x20 2x40"}, "RelockForced", {19: 0, 23: 1, 35: 0}),
    (
        {RECLAIMED % task: "_x20 1x40" for task in "abcdef"},
        "RelockWorkersAreKilled",
        {19: 0, 21: 1, 40: 0},
    ),
    ({RECLAIMED % "a": "_x20 5x40"}, "RelockWorkersAreKilled", {21: 0, 25: 0}),
    ({"relock_parked": "3x100"}, "RelockNobodyIsResumed", {29: 0, 31: 1}),
    ({"relock_parked": "0x100"}, "RelockNobodyIsResumed", {90: 0}),
    ({"relock_parked": "3x100", RESUMED: "4x100"}, "RelockNobodyIsResumed", {75: 1}),
    ({"relock_parked": "3x100", RESUMED: "4+1x100"}, "RelockNobodyIsResumed", {75: 0}),
    ({"relock_parked": "3x100", RESUMED: "_x20 1x80"}, "RelockNobodyIsResumed", {45: 0, 90: 1}),
]


BY = {"task": "pay", "instance": "a"}


@pytest.mark.parametrize(("series", "alert", "fires"), ALERTS)
def test_an_alert_fires_also_for_what_is_counted_for_the_first_time(series, alert, fires, tmp_path):
    rule = next(rule for rule in the_rules() if rule["alert"] == alert)
    by = {name: of for name, of in BY.items() if f"by ({name})" in rule["expr"]}
    labels = {**rule["labels"], **by}
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {
                "eval_time": f"{minute}m",
                "alertname": alert,
                "exp_alerts": [{"exp_labels": labels, "exp_annotations": said(rule)}] * firing,
            }
            for minute, firing in fires.items()
        ],
    }
    file = tmp_path / "test.yml"
    tests = {"rule_files": [str(DOCS / "alerts.yml")], "tests": [test]}
    file.write_text(yaml.safe_dump(tests))
    promtool("test", "rules", str(file))


def test_the_dashboard_shows_what_is_counted_for_the_first_time(tmp_path):
    asked = [each.replace("$task", ".*") for each in on_the_dashboard() if "increase(" in each]
    assert len(asked) == 6
    counters = {name for expression in asked for name in asked_for(expression)}
    test = {
        "interval": "1m",
        "input_series": [
            {"series": f'{name}{{task="pay"}}', "values": "_x20 1x10"} for name in counters
        ],
        "promql_expr_test": [
            {"expr": each, "eval_time": "22m", "exp_samples": [{"labels": "{}", "value": 1}]}
            for each in asked
        ],
    }
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [], "tests": [test]}))
    promtool("test", "rules", str(file))


def said(rule):
    values = {"{{ $labels.task }}": "pay", "{{ $labels.instance }}": "a", "{{ $value }}": "3"}
    return {
        key: functools.reduce(lambda text, each: text.replace(*each), values.items(), text)
        for key, text in rule["annotations"].items()
    }
