"""A signal lands while a child waits: for the answer to its acquire, or to its release, for its
turn, or for the result backend."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from tests.support import new_namespace, wait_for
from tests.support.apps import LOOK_EVERY
from tests.support.endings import RECORD, record, row
from tests.support.parked import lock_of
from tests.support.proofs import Case
from tests.support.proxy import Proxy

APP = "tests.worker.apps.endings"
INSIDE_ACQUIRE, INSIDE_RELEASE = "a signal inside acquire", "a signal inside release"
WAITING = "a signal while it waits in its slot"
# The figures of the table are those of a worker that looks as it does by itself.
SOON = {} if RECORD in os.environ else {LOOK_EVERY: "0.3"}


@pytest.fixture(scope="module")
def worker(module_worker, proxy):
    env = {**SOON, "RELOCK_TEST_SETTINGS": json.dumps({"relock_url": proxy.url})}
    return module_worker(APP, concurrency=1, env=env)


@pytest.mark.parametrize("executed", [True, False], ids=["executed", "on its way"])
@pytest.mark.parametrize("sig", [signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL])
@row(INSIDE_ACQUIRE, INSIDE_RELEASE)
def test_nothing_is_left_when_the_command_was(worker, proxy, row, sig, executed, redis_url, client):
    case = Case(worker, redis_url, "returns", "early", True, "chain")
    # With its lock: the worker may be releasing that of the child killed before.
    verb = "acquire" if row.name == INSIDE_ACQUIRE else "release"
    command = proxy.hold(of=verb, text=case.account)
    case.register.let_go(case.account)
    case.send()
    assert command.arrived.wait(30)
    if executed:
        command.deliver()
    (child,) = worker.children()
    started = time.monotonic()
    os.kill(child, sig)
    wait_for(lambda: not case.state_of_lock().holders, 20, "the lock to be free")
    seconds = time.monotonic() - started
    # A soft time limit in the release comes after the body had its outcome.
    well = row.name == INSIDE_RELEASE and sig == signal.SIGUSR1
    expected = ("SUCCESS", "next") if well else ("FAILURE", "errback")
    # billiard may give a job whose child is gone ten seconds, and looks again some seconds later.
    with suppress(AssertionError):  # the next line tells more
        wait_for(lambda: case.outcome()[:2] == expected, 40)
    assert case.outcome()[:2] == expected, worker.log()
    if row.name == INSIDE_ACQUIRE and sig == signal.SIGUSR1:
        error = worker.module.app.backend.get_result(case.id)
        assert isinstance(error, SoftTimeLimitExceeded)
    if not executed:
        command.deliver()  # too late to take anything, or to take anything from anybody
    case.left_nothing(client)
    record(row, "prefork", "early", [seconds], None)


@pytest.fixture(scope="module")
def plain_worker(module_worker):
    names = new_namespace()
    return module_worker(APP, concurrency=2, namespace=names, env=SOON)


@pytest.mark.parametrize("how", ["SIGUSR1", "SIGTERM", "SIGQUIT", "SIGKILL", "revoke"])
@row(WAITING)
def test_an_execution_that_is_ended_while_it_waits_leaves_the_queue(
    plain_worker, row, how, redis_url, client
):
    case = Case(plain_worker, redis_url, "blocks", "early", True, "chain")
    with lock_of(plain_worker, case.account):
        case.send()
        waiter = wait_for(lambda: case.state_of_lock().waiters, 20, "the run to wait")[0]
        started = time.monotonic()
        if how == "revoke":
            plain_worker.module.app.control.revoke(case.id, terminate=True)
        else:
            os.kill(waiter.pid, signal.Signals[how])
        wait_for(lambda: not case.state_of_lock().waiting, 20, "nobody in line")
        seconds = time.monotonic() - started
        expected = ("REVOKED", "nothing") if how == "revoke" else ("FAILURE", "errback")
        wait_for(lambda: case.outcome()[:2] == expected, 20, f"{expected}")
    case.left_nothing(client)
    assert case.register.touches(case.account) == []
    record(row, "prefork", "early", [seconds], None)


@pytest.fixture(scope="module")
def results(redis_server):
    with Proxy(redis_server.port) as opened:
        yield opened


def test_a_time_limit_while_the_state_of_an_execution_is_stored_ends_it(
    module_worker, results, redis_url, client
):
    env = {"RELOCK_TEST_SETTINGS": json.dumps({"result_backend": results.url})}
    names = new_namespace()
    running = module_worker(APP, concurrency=1, namespace=names, env=env)
    case = Case(running, redis_url, "overruns_softly", "early", True, "chain")
    with lock_of(running, case.account):
        command = results.hold(of="GET")  # Celery looks at the state before it stores another
        case.send()
        assert command.arrived.wait(30)
        wait_for(lambda: case.outcome()[:2] == ("FAILURE", "errback"), 20, "the failure")
    case.left_nothing(client)
    assert case.register.touches(case.account) == []
