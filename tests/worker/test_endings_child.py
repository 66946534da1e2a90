"""However a body or its process ends, its lock is free and Celery does what it does without one."""

from __future__ import annotations

import os
import signal

import celery
import pytest

from tests.support import new_namespace, wait_for
from tests.support.apps import LOOK_EVERY
from tests.support.endings import ACKS, BODY, CHILD, RECORD, SIGNAL, record, row, rows
from tests.support.long import LONG
from tests.support.proofs import Case, cases, nothing_lasts, prove

pytestmark = pytest.mark.slow

APP = "tests.worker.apps.endings"
WHOLE = LONG or RECORD in os.environ
# Celery notices five seconds later that a child has ended; until then nothing becomes of its task.
# That the lock does not wait for this is seen by test_reaping.
SOON = {} if RECORD in os.environ else {LOOK_EVERY: "0.3"}
POOLS = ("prefork", "threads", "gevent", "solo")


@pytest.fixture(scope="module", params=POOLS)
def pool(request, module_worker, redis_server):
    namespace = new_namespace()
    started = module_worker(APP, pool=request.param, concurrency=8, namespace=namespace)
    started.pool = request.param
    yield started
    nothing_lasts(redis_server.client(), namespace)
    started.close()


# When a message is acknowledged does not depend on the pool.
CASES = [
    (pool, ack) for pool in POOLS for ack in ACKS if WHOLE or pool == "prefork" or ack == "early"
]


@pytest.mark.parametrize(("pool", "ack"), CASES, indirect=["pool"])
@rows(BODY)
def test_the_lock_of_a_body_that_ends_is_free_at_once(pool, row, ack, redis_url, client):
    canvases = ("chain", "chord") if pool.pool == "prefork" else ("chain",)
    groups = [cases(pool, redis_url, row.body, ack, canvases)]
    if pool.pool == "solo":
        groups = [[case] for case in groups[0]]
    expected = getattr(row, ack)
    seconds = []
    for group in groups:
        seconds += prove(group, client, expected, over=expected.state == "PENDING")
    assert max(seconds) < 10
    record(row, pool.pool, ack, seconds, expected)


def test_a_body_longer_than_its_lease_keeps_its_lock(pool, redis_url, client):
    case = cases(pool, redis_url, "stays_briefly", "early", ("chain",))[0]
    case.send()
    case.events("inside")
    case.await_stranger()
    wait_for(lambda: case.seconds_ago("inside") > 2.4)  # under a lease of two
    assert case.state_of_lock().holders
    case.register.let_go(case.account)
    assert case.seconds_until_free() < 10
    wait_for(lambda: case.outcome().then == "next")
    case.left_nothing(client)


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker(APP, concurrency=8)


@pytest.fixture(scope="module")
def doomed(module_worker, redis_server):
    # Not the one above: whatever ends a child that was revoked before, Celery calls it revoked.
    namespace = new_namespace()
    yield module_worker(APP, concurrency=8, namespace=namespace, env=SOON)
    nothing_lasts(redis_server.client(), namespace)


@pytest.mark.parametrize("ack", ACKS)
@rows(SIGNAL)
def test_the_lock_of_a_body_that_is_broken_off_is_free_at_once(worker, row, ack, redis_url, client):
    expected = getattr(row, ack)
    end = _how(worker, row) if row.how or row.after else None
    seconds = prove(cases(worker, redis_url, row.body, ack), client, expected, end)
    assert max(seconds) - row.after < 10
    record(row, "prefork", ack, seconds, expected)


@pytest.mark.parametrize("ack", ACKS)
@rows(CHILD)
def test_the_lock_of_a_process_that_ends_is_free_as_soon_as_it_is_gone(
    doomed, row, ack, redis_url, client
):
    if row.since > celery.VERSION:
        pytest.skip(f"from Celery {row.since} on")
    expected = getattr(row, ack)
    group = cases(doomed, redis_url, row.body, ack)
    seconds = prove(group, client, expected, _how(doomed, row))
    assert max(seconds) - row.after < 10
    record(row, "prefork", ack, seconds, expected)


def _how(worker, row):
    """What the test does to a case of the row."""
    verb, _, name = row.how.partition(" ")

    def end(case: Case) -> None:
        if verb == "kill":
            os.kill(case.events("inside")[0].pid, signal.Signals[name])
        elif verb == "revoke":
            worker.module.app.control.revoke(case.id, terminate=True, signal=name)

    return end


@pytest.mark.parametrize("ack", ACKS)
@row("revoke with SIGINT")
def test_a_child_ignores_sigint_so_its_lock_stays_until_its_body_ends(
    worker, row, ack, redis_url, client
):
    case, plain = cases(worker, redis_url, "stays", ack, ("chain",))
    for one in (case, plain):
        one.send()
        one.events("inside")
    case.await_stranger()
    for one in (case, plain):
        worker.module.app.control.revoke(one.id, terminate=True, signal="SIGINT")
    wait_for(lambda: case.outcome().state == "REVOKED" == plain.outcome().state)
    before = len(case.register.touches(case.account))
    wait_for(lambda: len(case.register.touches(case.account)) > before + 3)
    assert case.state_of_lock().holders
    for one in (case, plain):
        one.register.let_go(one.account)
    seconds = case.seconds_until_free()
    for one in (case, plain):
        one.comes_to(row.early if ack == "early" else row.late)
        one.left_nothing(client)
    record(row, "prefork", ack, [seconds], case.outcome())


@row("revoked before its start", "expired")
@pytest.mark.parametrize("ack", ACKS)
def test_a_message_that_never_runs_never_acquires_its_lock(worker, row, ack, redis_url, client):
    case, plain = cases(worker, redis_url, "returns", ack, ("chain",))
    for one in (case, plain):
        if row.name == "expired":
            one.send(countdown=0.4, expires=0.1)
        else:
            one.send(countdown=1.0)
            worker.module.app.control.revoke(one.id)
    for one in (case, plain):
        wait_for(lambda one=one: one.outcome().state == "REVOKED")
        assert one.outcome().then == "nothing"
        one.left_nothing(client)
        assert one.register.touches(one.account) == []
    record(row, "prefork", ack, [0.0], case.outcome())
