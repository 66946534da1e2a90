"""Metrics for Prometheus: what a prefork worker serves is what happened in all of its processes,
those that are gone too; a real Prometheus scrapes it."""

from __future__ import annotations

import contextlib
import signal
import urllib.request
import uuid

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support import wait_for
from tests.support.redis_server import _free_port
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

    def __init__(self, worker, port):
        self.worker, self.port = worker, port
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
        from celery_relock.declaration import engine_of

        return engine_of(self.tasks.app).backend


@pytest.fixture(scope="module")
def measured(module_worker, tmp_path_factory):
    port, folder = _free_port(), tmp_path_factory.mktemp("multiproc")
    env = {"PROMETHEUS_MULTIPROC_DIR": str(folder), "TEST_METRICS_PORT": str(port)}
    arguments = ("-I", "tests.contrib.apps.with_prometheus")
    return Measured(module_worker(APP, concurrency=3, env=env, arguments=arguments), port)


def test_what_happens_to_locks_is_counted_by_task_and_template(measured):
    tasks, value = measured.tasks, measured.value
    with measured.held() as account:
        parked = tasks.waits.delay(account)
        wait_for(lambda: value("parked_total", "waits") == 1)
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
    assert value("parked_total", "waits") == value("resumed_total", "waits") == 1
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
