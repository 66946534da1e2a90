"""Where the states of calls go through the caller's database connection, as with
django-celery-results, they are not always seen, or stored: what becomes of a call is no matter of
that."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing

import pytest
from django.core.exceptions import SynchronousOnlyOperation

from celery_relock.worker import states
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
    called = became["replaced"][f"{task} {way}"]
    first, second = called["ids"]
    worker.wait_for_log(rf"{first}\] (was replaced|is a late|succeeded)")
    began = worker.journal.events("began", account=called["account"])
    assert [each["id"] for each in began] == [second]
    assert called["states"] == ["REVOKED", "SUCCESS"]


@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_was_revoked_swallows_nothing(became, way):
    assert became["revoked"][way]["sent"]


@pytest.mark.parametrize("way", WAYS)
def test_a_state_that_is_asked_for_in_another_thread_leaves_no_connection(became, way):
    assert became["revoked"][way]["left"] == 0


def test_nothing_goes_wrong_meanwhile(became):
    assert became["said"] == []


def test_a_result_backend_that_is_silent_holds_up_its_caller_for_a_bounded_time(monkeypatch):
    monkeypatch.setattr(states, "_ASKING", 0.05)
    here = threading.current_thread()
    asked, answers, over = threading.Event(), threading.Event(), threading.Event()

    def ask():
        if threading.current_thread() is here:
            raise SynchronousOnlyOperation("it refuses")
        asked.set()
        answers.wait(30)
        over.set()

    with pytest.raises(SynchronousOnlyOperation, match="refuses"):
        states.asked_anywhere(ask)
    assert asked.is_set()
    assert not over.is_set()
    answers.set()


def test_a_result_backend_that_is_not_django_s_is_asked_once():
    asked = []

    def ask():
        asked.append(threading.current_thread())
        raise ConnectionError("away")

    with pytest.raises(ConnectionError, match="away"):
        states.asked_anywhere(ask)
    assert asked == [threading.current_thread()]
