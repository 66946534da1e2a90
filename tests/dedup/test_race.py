"""Many processes call one name at the same time: one runs at a time, one is queued, none forgotten.

The long form, of 50 processes with 200 calls each: `scripts/dedup-race`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from celery_relock import Lock
from tests.support import wait_for
from tests.support.worker import ROOT

pytestmark = pytest.mark.slow

PROCESSES, CALLS = map(int, os.environ.get("RELOCK_RACE", "8x25").split("x"))
# Where each call is a message of its own, a worker has to throw nearly all of them away.
PATIENCE = 90 + PROCESSES * CALLS / 20


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker("tests.dedup.apps.race", concurrency=4)


@pytest.fixture
def race(worker, client, redis_url):
    client.delete(worker.module.LOG)
    settings = {
        "RELOCK_TEST_URL": redis_url,
        "RELOCK_TEST_NAMESPACE": worker.namespace,
    }

    def run(name):
        program = ["-m", "tests.dedup.apps.race", name, str(PROCESSES), str(CALLS)]
        env = {**os.environ, **settings}
        subprocess.run([sys.executable, *program], cwd=ROOT, env=env, check=True, timeout=600)

    return run


def _lines(client, worker):
    return [line.decode().split() for line in client.lrange(worker.module.LOG, 0, -1)]


def _all_over(client, worker):
    """Every call got an execution, and each ran once and alone. Returns the lines and the runs."""

    def over():
        lines = _lines(client, worker)
        got = {words[3] for words in lines if words[0] == "got"}
        ended = {words[1] for words in lines if words[0] == "ended"}
        return got <= ended and lines

    lines = wait_for(over, 90, "every run to end")
    assert len([words for words in lines if words[0] == "got"]) == PROCESSES * CALLS
    steps = [words for words in lines if words[0] in ("began", "ended")]
    began, ended = steps[::2], steps[1::2]
    assert [words[0] for words in began] == ["began"] * len(began), "two ran at once"
    assert [words[1] for words in began] == [words[1] for words in ended], "two ran at once"
    runs = [words[1] for words in began]
    assert len(set(runs)) == len(runs), "one ran twice"
    assert set(runs) == {words[3] for words in lines if words[0] == "got"}, "one was not asked for"
    return lines, runs


def _most(lines, first, last):
    """How many calls there were at the most that some caller had got, and no run had `last`."""
    there, over, most = set(), set(), 0
    for words in lines:
        if words[0] == first and words[3] not in over:
            there.add(words[3])
        elif words[0] == last:
            over.add(words[1])
            there.discard(words[1])
        most = max(most, len(there))
    return most


@pytest.mark.parametrize("name", ["until_start", "until_done"])
def test_all_calls_while_one_waits_are_that_one(worker, race, client, redis_url, name):
    with Lock(redis_url, "race", namespace=worker.namespace):
        race(name)
        got = {words[3] for words in _lines(client, worker) if words[0] == "got"}
    assert len(got) == 1
    _, runs = _all_over(client, worker)
    assert set(runs) == got


def test_every_call_is_followed_by_the_begin_of_an_execution(worker, race, client):
    race("until_start")
    lines, runs = _all_over(client, worker)
    begins = {words[1]: at for at, words in enumerate(lines) if words[0] == "began"}
    called = {tuple(words[1:3]): at for at, words in enumerate(lines) if words[0] == "calls"}
    for words in lines:
        if words[0] == "got":
            # What the caller had done before is seen by that run.
            assert begins[words[3]] > called[words[1], words[2]], words
    # One is queued. Its marker goes a moment before it is written down as begun: one more, then.
    assert _most(lines, "got", "began") <= 2
    assert len(runs) < PROCESSES * CALLS
    print(f"{PROCESSES * CALLS} calls, {len(runs)} runs")
    assert not worker.module.until_start.marked()


def test_until_done_every_call_gets_an_execution_that_has_not_ended_before(worker, race, client):
    race("until_done")
    lines, runs = _all_over(client, worker)
    ends = {words[1]: at for at, words in enumerate(lines) if words[0] == "ended"}
    called = {tuple(words[1:3]): at for at, words in enumerate(lines) if words[0] == "calls"}
    # It is written down as ended a moment before its marker goes, so a call may come between.
    late = [w for w in lines if w[0] == "got" and ends[w[3]] < called[w[1], w[2]]]
    for words in late:
        between = lines[ends[words[3]] + 1 : called[words[1], words[2]]]
        assert not [each for each in between if each[0] == "began"], words
    assert _most(lines, "got", "ended") == 1, "one was queued while another one ran"
    assert len(runs) < PROCESSES * CALLS
    print(f"{PROCESSES * CALLS} calls, {len(runs)} runs")
    assert not worker.module.until_done.marked()


# Celery's own, where it stores a result in a process that calls.
@pytest.mark.filterwarnings("ignore:Call to deprecated setex")
def test_where_the_last_call_wins_every_call_is_followed_by_the_begin_of_an_execution(
    worker, race, client
):
    race("last_wins")

    def after_the_last_call():
        lines = _lines(client, worker)
        last_call = max(at for at, words in enumerate(lines) if words[0] == "calls")
        return any(words[0] == "began" for words in lines[last_call:]) and lines

    lines = wait_for(after_the_last_call, PATIENCE, "a run after the last call")
    assert len([words for words in lines if words[0] == "got"]) == PROCESSES * CALLS
    ids = {words[3] for words in lines if words[0] == "got"}
    assert len(ids) > PROCESSES, "hardly any call was one of its own"
    states = wait_for(lambda: _over(worker, ids), PATIENCE, "all of them to be over")
    began = [words[1] for words in lines if words[0] == "began"]
    assert len(began) == len(set(began))
    print(f"{PROCESSES * CALLS} calls, {len(began)} runs, {states}")


def _over(worker, ids):
    states = Counter(worker.module.app.AsyncResult(each).state for each in ids)
    return states if not {*states} - {"SUCCESS", "REVOKED"} else None
