"""Calls that wait for the commit of a database transaction, as Django's tasks do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid

import pytest

from tests.support.worker import ROOT


@pytest.fixture(scope="module")
def became(redis_server):
    pytest.importorskip("django", reason="Django is not installed")
    settings = {
        "RELOCK_TEST_URL": redis_server.url,
        "RELOCK_TEST_NAMESPACE": f"ns{uuid.uuid4().hex[:12]}",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.dedup.apps.on_commit"],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


def test_a_call_whose_transaction_is_rolled_back_never_counts(became):
    assert became["rolled_back"] == {"before": False, "after": False}


def test_a_call_counts_from_the_commit_on(became):
    assert became["committed"] == {"before": False, "after": True, "sent": 1}


def test_where_duplicates_are_errors_the_commit_stands_and_raises(became):
    assert became["twice_where_that_is_an_error"] == {"raises": True, "after": True}
