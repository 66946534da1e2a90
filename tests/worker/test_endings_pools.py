"""What can end a body in the pools that have no processes: its lock is free when it has ended."""

from __future__ import annotations

import signal

import celery
import pytest

from tests.support import new_namespace, wait_for
from tests.support.endings import ACKS, GOES_ON, Outcome, record, row
from tests.support.proofs import cases, nothing_lasts, prove

pytestmark = pytest.mark.slow

APP = "tests.worker.apps.endings"
POOLS = ("threads", "gevent", "solo")
_BY_POOL = Outcome("another in each pool, see below", "-", "-")


@pytest.fixture(scope="module", params=POOLS)
def pool(request, module_worker, redis_server):
    namespace = new_namespace()
    # Late acknowledged messages that Celery never acknowledges (`MemoryError`, `sys.exit()`) stay
    # with the worker, which receives only as many as it has slots.
    started = module_worker(APP, pool=request.param, concurrency=16, namespace=namespace)
    started.pool = request.param
    yield started
    nothing_lasts(redis_server.client(), namespace)
    started.close()


def _in(*pools):
    return pytest.mark.parametrize("pool", pools, indirect=True)


def _groups(pool, url, body, ack):
    """With and without a lock side by side; solo has one at a time."""
    group = cases(pool, url, body, ack, ("chain",))
    return [[case] for case in group] if pool.pool == "solo" else [group]


def _is_free_at_once(pool, row, ack, url, client, end=None):
    expected = getattr(row, ack)
    seconds = prove(cases(pool, url, row.body, ack), client, expected, end)
    assert max(seconds) - row.after < 10
    record(row, pool.pool, ack, seconds, expected)


@_in("gevent")
@pytest.mark.parametrize("ack", ACKS)
@row("gevent: hard time limit")
def test_the_lock_of_a_body_beyond_its_limit_is_free_at_once(pool, row, ack, redis_url, client):
    _is_free_at_once(pool, row, ack, redis_url, client, lambda case: case.events("inside"))


@_in("gevent")
@pytest.mark.parametrize("ack", ACKS)
@row("gevent: revoke with terminate")
def test_the_lock_of_a_killed_greenlet_is_free_at_once(pool, row, ack, redis_url, client):
    if row.since > celery.VERSION:
        pytest.skip("the greenlets of Celery 5.4 go on")

    def revoke(case):
        pool.module.app.control.revoke(case.id, terminate=True)

    _is_free_at_once(pool, row, ack, redis_url, client, revoke)


@_in("threads", "gevent")
@pytest.mark.parametrize("ack", ACKS)
@row("threads, gevent: `MemoryError`")
def test_the_lock_of_a_body_out_of_memory_is_free_at_once(pool, row, ack, redis_url, client):
    _is_free_at_once(pool, row, ack, redis_url, client)


@_in("threads", "gevent")
@pytest.mark.parametrize("ack", ACKS)
@row("threads, gevent: `sys.exit()`")
def test_the_lock_of_a_body_that_exits_is_free_at_once(pool, row, ack, redis_url, client):
    _is_free_at_once(pool, row, ack, redis_url, client)


@_in("threads", "solo")
@pytest.mark.parametrize("ack", ACKS)
@row("threads, solo: a time limit, which they do not have")
def test_a_limit_that_a_pool_does_not_have_ends_no_lock(pool, row, ack, redis_url, client):
    for group in _groups(pool, redis_url, "overruns_in_its_pool", ack):
        for case in group:
            _enter(case)
        for case in group:
            wait_for(lambda case=case: case.seconds_ago("inside") > 1.3)  # its limit is one
        _go_on_until_the_end(pool, row, group, client)


@_in("threads", "solo")
@pytest.mark.parametrize("ack", ACKS)
@row("threads, solo: revoke with terminate, which they do not have")
def test_a_body_that_cannot_be_terminated_keeps_its_lock(pool, row, ack, redis_url, client):
    for group in _groups(pool, redis_url, "stays", ack):
        for case in group:
            _enter(case)
            pool.module.app.control.revoke(case.id, terminate=True)
        if pool.pool == "threads":  # solo reads it when the body is over
            pool.wait_for_log("pidbox command error: NotImplementedError")
        _go_on_until_the_end(pool, row, group, client)


def _enter(case):
    case.send()
    case.events("inside")
    if case.locked:
        case.await_stranger()


def _go_on_until_the_end(pool, row, group, client):
    """The bodies are still at work, under their locks, until they are let go."""
    for case in group:
        before = len(case.register.touches(case.account))
        wait_for(lambda c=case, n=before: len(c.register.touches(c.account)) > n + 3)
        assert bool(case.state_of_lock().holders) is case.locked
        case.register.let_go(case.account)
    for case in group:
        if case.locked:
            seconds = case.seconds_until_free()
            assert seconds < 10
            record(row, pool.pool, case.ack, [seconds], GOES_ON._replace(chord="-"))
        case.comes_to(GOES_ON)
        case.left_nothing(client)


# The last one for each worker: it is the end of it.
@row("threads, gevent, solo: SIGQUIT to the worker")
def test_a_worker_without_processes_releases_its_locks_when_it_is_told_to_quit(
    pool, row, redis_url, client
):
    # In Celery 5.4 the handler only notes the signal, so solo looks at it when its body is over.
    lets_end = pool.pool == "threads" or (pool.pool == "solo" and celery.VERSION < (5, 5))
    sent = [cases(pool, redis_url, "stays", ack, ("chain",))[0] for ack in ACKS]
    if pool.pool == "solo":
        sent = sent[1:]
    for case in sent:
        case.send()
        case.events("inside")
        case.await_stranger()
        if not lets_end:
            case.ends_now()
    pool.kill(signal.SIGQUIT)
    if lets_end:
        # What the handler then raises ends a loop that waits; a timer of kombu's only logs it.
        is_new = celery.VERSION >= (5, 5)
        pool.wait_for_log("will terminate all running tasks" if is_new else "Cold shutdown")
        assert all(case.state_of_lock().holders for case in sent)
    if lets_end or pool.pool != "solo":
        # Celery's own handler fails in the middle of gevent's loop: which bodies it
        # breaks off before is chance. The others end by themselves.
        for case in sent:
            case.register.let_go(case.account)
    for case in sent:
        seconds = case.seconds_until_free()
        assert seconds < 10
        case.left_nothing(client)
        record(row, pool.pool, case.ack, [seconds], _BY_POOL)
