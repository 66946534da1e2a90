"""Where the states of calls go through the caller's database connection, as with
django-celery-results, they are not always seen, or stored: what becomes of a call is no matter of
that."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from tests.support.worker import ROOT, environment_of

pytestmark = pytest.mark.slow

WAYS = ("rolled_back", "failed", "in_a_coroutine", "committed")


@pytest.fixture(scope="module")
def worker(module_worker, tmp_path_factory):
    pytest.importorskip("django", reason="Django is not installed")
    database = tmp_path_factory.mktemp("results") / "results.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")  # who reads keeps nobody from writing
        connection.execute("CREATE TABLE results (key TEXT PRIMARY KEY, value TEXT)")
    env = {"RELOCK_TEST_DATABASE": str(database)}
    return module_worker("tests.dedup.apps.transactions", concurrency=2, env=env)


@pytest.fixture(scope="module")
def became(worker):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.dedup.apps.transactions"],
        cwd=ROOT,
        env=environment_of(worker.settings),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("task", ["early", "late", "until_done", "seconds"])
def test_a_call_that_was_replaced_does_not_run_and_is_revoked(worker, became, task, way):
    called = became[f"{task} {way}"]
    first, second = called["ids"]
    worker.wait_for_log(rf"{first}\] (was replaced|is a late|succeeded)")
    began = worker.journal.events("began", account=called["account"])
    assert [each["id"] for each in began] == [second]
    assert called["states"] == ["REVOKED", "SUCCESS"]
