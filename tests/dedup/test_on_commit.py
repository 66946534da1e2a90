"""Calls that wait for the commit of a database transaction, as Django's tasks do."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support import new_namespace
from tests.support.worker import ROOT


@pytest.fixture(scope="module")
def became(redis_server):
    pytest.importorskip("django", reason="Django is not installed")
    settings = {
        "RELOCK_TEST_URL": redis_server.url,
        "RELOCK_TEST_NAMESPACE": new_namespace(),
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


MODES = ("until_start", "until_done", "seconds", "raise", "replace", "debounce")


@pytest.mark.parametrize("mode", MODES)
def test_a_call_whose_transaction_is_rolled_back_never_counts(became, mode):
    assert became[mode]["rolled_back"] == {"before": False, "after": False}


@pytest.mark.parametrize("mode", MODES)
def test_a_call_counts_from_the_commit_on(became, mode):
    # A newer call replaces the first. Where duplicates are errors the commit stands, and raises. A
    # burst tells of each call, and its message waits.
    times = 2 if mode in ("replace", "debounce") else 1
    told = {"before": False, "after": True, "sent": times, "raises": mode == "raise"}
    assert became[mode]["committed"] == told
