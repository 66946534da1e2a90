"""However a worker ends, the locks of its tasks are free, and what was to come back comes back."""

from __future__ import annotations

import signal

import celery
import psutil
import pytest

from tests.support import wait_for
from tests.support.endings import ACKS, Outcome, record, row
from tests.support.proofs import Case

pytestmark = pytest.mark.slow

APP = "tests.worker.apps.endings"
SETTINGS = "RELOCK_TEST_SETTINGS"
SOON = {"RELOCK_TEST_TRANSPORT": '{"visibility_timeout": 1}'}


def _sent(worker, url, body="stays", kinds=(True, False), acks=ACKS):
    """Early and late, with and without a lock, all inside their bodies."""
    sent = [Case(worker, url, body, ack, locked, "chain") for ack in acks for locked in kinds]
    for case in sent:
        case.send()
    for case in sent:
        case.events("inside")
        if case.locked:
            case.await_stranger()
    return sent


def _free(row, sent, longest):
    """Every lock was free in time. Keeps the figures; outcomes are checked by `_later`."""
    for case in sent:
        if case.locked:
            seconds = case.seconds_until_free()
            assert seconds < longest
            record(row, "prefork", case.ack, [seconds], None)


def _later(start, sent, client, comes_back=True, **options):
    """What another worker makes of what is left: with a lock what it makes without one."""
    other = start(APP, concurrency=4, **options)
    for ack in ACKS:
        locked, plain = [case for case in sent if case.ack == ack]
        if ack == "late" and comes_back:
            for case in (locked, plain):
                wait_for(lambda case=case: case.outcome()[:2] == ("SUCCESS", "next"), 20)
                assert len(case.events("inside")) == 2
        wait_for(lambda a=locked, b=plain: a.outcome() == b.outcome(), what="the same outcome")
    for case in sent:
        case.left_nothing(client)
    return other


@row("warm shutdown")
def test_a_warm_shutdown_waits_for_the_body(new_worker, row, redis_url, client):
    doomed = new_worker(APP, concurrency=4)
    sent = _sent(doomed, redis_url)
    doomed.kill(signal.SIGTERM)
    doomed.wait_for_log("Warm shutdown")
    assert all(case.state_of_lock().holders for case in sent if case.locked)
    for case in sent:
        case.register.let_go(case.account)
    _free(row, sent, 15)
    for case in sent:
        wait_for(lambda case=case: case.outcome().state == "SUCCESS")
        assert len(case.events("inside")) == 1
        case.left_nothing(client)


@row("cold shutdown", "cold shutdown by `REMAP_SIGTERM`", "soft shutdown")
def test_a_shutdown_that_breaks_bodies_off_frees_their_locks(new_worker, row, redis_url, client):
    if row.since > celery.VERSION:
        pytest.skip(f"from Celery {row.since} on")
    env, sig = {}, signal.SIGQUIT
    if row.name == "soft shutdown":
        env = {SETTINGS: '{"worker_soft_shutdown_timeout": 1}'}
    elif "REMAP" in row.name:
        env, sig = {"REMAP_SIGTERM": "SIGQUIT"}, signal.SIGTERM
    doomed = new_worker(APP, concurrency=4, env=env)
    sent = _sent(doomed, redis_url)
    for case in sent:
        case.ends_now()
    doomed.stop(sig)
    _free(row, sent, 15)
    # Celery 5.4 takes the children that it ends for lost, and acknowledges their messages.
    _later(new_worker, sent, client, comes_back=celery.VERSION >= (5, 5))


@pytest.mark.parametrize(
    ("pool", "ack"), [("prefork", "early"), ("prefork", "late"), ("solo", "late")]
)
@row("prefork, solo: `MemoryError`")
def test_a_body_out_of_memory_ends_the_worker_and_its_lock(
    new_worker, row, pool, ack, redis_url, client
):
    for locked in (True, False):
        doomed = new_worker(APP, pool=pool, concurrency=1)
        case = Case(doomed, redis_url, "runs_out_of_memory", ack, locked, "chain")
        case.send()
        case.events("inside")
        if locked:
            case.await_stranger()
        case.register.let_go(case.account)
        if locked:
            seconds = case.seconds_until_free()
            assert seconds < 10
            record(row, pool, ack, [seconds], Outcome("FAILURE", "-", "-"))
        doomed.wait_for_log("Unrecoverable error: MemoryError")
        # Whether the errback still runs in the worker that ends is chance.
        assert case.outcome().state == "FAILURE"
        case.left_nothing(client)
        doomed.close()


@row("SIGKILL to the worker, another one on the host")
def test_another_worker_of_the_host_frees_what_a_killed_one_held(
    new_worker, row, redis_url, client
):
    new_worker(APP, concurrency=1, env={SETTINGS: '{"task_default_queue": "elsewhere"}'})
    doomed = new_worker(APP, concurrency=4, env=SOON)
    sent = _sent(doomed, redis_url)
    for case in sent:
        case.ends_now()
    doomed.close()  # SIGKILL; its children go with it
    _free(row, sent, 15)
    wait_for(lambda: all(case.seconds_ago("ending") > 1.2 for case in sent))
    _later(new_worker, sent, client, env=SOON)


@pytest.fixture(scope="module")
def another(module_worker):
    """Lives on beside those that are killed."""
    return module_worker(APP, concurrency=1, env={SETTINGS: '{"task_default_queue": "elsewhere"}'})


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "solo"])
@row("SIGKILL to the worker, another one on the host")
def test_it_is_enough_that_the_main_process_is_killed_in_every_pool(
    module_worker, another, row, pool, redis_url, client
):
    doomed = module_worker(APP, pool=pool, concurrency=2)
    (case,) = _sent(doomed, redis_url, kinds=(True,), acks=("early",))
    case.ends_now()
    doomed.kill()  # the children of prefork end with it
    seconds = case.seconds_until_free()
    assert seconds < 10
    case.left_nothing(client)
    record(row, pool, "early", [seconds], None)


@row("SIGKILL to the worker, the next one starts")
def test_a_worker_that_starts_frees_what_the_dead_of_its_host_held(
    new_worker, row, redis_url, client
):
    doomed = new_worker(APP, concurrency=4, env=SOON)
    sent = _sent(doomed, redis_url)
    doomed.close()
    assert all(case.state_of_lock().holders for case in sent if case.locked)
    for case in sent:
        case.ends_now()
    wait_for(lambda: all(case.seconds_ago("ending") > 1.2 for case in sent))
    _later(new_worker, sent, client, env=SOON)
    _free(row, sent, 15)


@row("the host is gone")
def test_without_anybody_on_the_host_the_lease_ends_it(new_worker, row, redis_url, client):
    doomed = new_worker(APP, concurrency=2)
    sent = _sent(doomed, redis_url, "stays_briefly", kinds=(True,))
    for case in sent:
        case.ends_now()
    doomed.close()
    _free(row, sent, 15)
    for case in sent:
        case.left_nothing(client)


@row("`max_tasks_per_child`", "`max_memory_per_child`")
def test_a_child_is_only_replaced_between_its_tasks(new_worker, row, redis_url, client):
    option = "--max-tasks-per-child" if "tasks" in row.name else "--max-memory-per-child"
    running = new_worker(APP, concurrency=4, arguments=(option, "1"))
    pids = set()
    for _ in range(2):
        sent = _sent(running, redis_url, "returns", kinds=(True,))
        for case in sent:
            pids.add(case.events("inside")[0].pid)
            case.register.let_go(case.account)
        _free(row, sent, 15)
        for case in sent:
            wait_for(lambda case=case: case.outcome().then == "next")
            case.left_nothing(client)
    assert len(pids) == 4


@row("autoscale")
def test_a_pool_that_shrinks_lets_its_bodies_end(new_worker, row, redis_url, client):
    running = new_worker(APP, arguments=("--autoscale=4,1",), env={"AUTOSCALE_KEEPALIVE": "1"})
    sent = _sent(running, redis_url)
    *first, last = (case for case in sent if case.locked)
    for case in sent:
        if case is not last:
            case.register.let_go(case.account)
    wait_for(lambda: len(running.children()) == 1, 20, "the pool to shrink")
    assert psutil.pid_exists(last.events("inside")[0].pid)
    assert last.state_of_lock().holders
    last.register.let_go(last.account)
    _free(row, [*first, last], 15)
    for case in sent:
        wait_for(lambda case=case: case.outcome().then == "next")
        case.left_nothing(client)


def test_a_worker_that_starts_frees_the_dead_and_leaves_the_living_alone(
    new_worker, redis_url, client
):
    alive, doomed = (
        new_worker(APP, concurrency=2, env={SETTINGS: f'{{"task_default_queue": "{name}"}}'})
        for name in ("one", "two")
    )
    (living,) = _sent(alive, redis_url, kinds=(True,), acks=("early",))
    (dead,) = _sent(doomed, redis_url, kinds=(True,), acks=("early",))
    # Alive, but it cannot do what the one that starts is to do.
    processes = [alive.pid, *alive.children()]
    for pid in processes:
        alive.kill(signal.SIGSTOP, pid=pid)
    doomed.close()
    assert dead.state_of_lock().holders
    new_worker(APP, concurrency=1, env={SETTINGS: '{"task_default_queue": "three"}'})
    dead.ends_now()
    assert dead.seconds_until_free() < 10
    assert living.state_of_lock().holders
    for pid in processes:
        alive.kill(signal.SIGCONT, pid=pid)
    living.register.let_go(living.account)
    assert living.seconds_until_free() < 10
    for case in (living, dead):
        case.left_nothing(client)


def test_the_locks_of_the_living_are_left_alone(new_worker, redis_url, client):
    running = new_worker(APP, concurrency=4)
    victim, other = [case for case in _sent(running, redis_url) if case.locked]
    running.kill(signal.SIGKILL, pid=victim.events("inside")[0].pid)
    victim.ends_now()
    assert victim.seconds_until_free() < 10
    new_worker(APP, concurrency=1)  # its first look goes over everything
    assert other.state_of_lock().holders
    other.register.let_go(other.account)
    assert other.seconds_until_free() < 10
