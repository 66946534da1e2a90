"""A broker delivers a message again while its execution lives: the copy never runs beside it."""

from __future__ import annotations

import os
import signal

import celery
import pytest

from tests.support import wait_for
from tests.support.endings import record, row
from tests.support.proofs import Case
from tests.support.tcp import TcpProxy

pytestmark = pytest.mark.slow

APP = "tests.worker.apps.endings"
TRANSPORT, SETTINGS = "RELOCK_TEST_TRANSPORT", "RELOCK_TEST_SETTINGS"
BROKER = "RELOCK_TEST_BROKER"
SOON = {TRANSPORT: '{"visibility_timeout": 1}'}


def _case(worker, url, ack="late", locked=True, body="stays"):
    return Case(worker, url, body, ack, locked, "chain")


def _ran(case, times, client, then="next"):
    """The case is over, its body ran so often, and the next step was sent once."""

    def is_over():
        state, went_on, *_ = case.outcome()
        return state == "SUCCESS" and went_on == then

    wait_for(is_over, 30, f"the end of {case.account}")
    assert len(case.events("inside")) == times
    case.left_nothing(client)
    assert len(case.events("next")) == 1


@row("visibility timeout, the first execution lives on")
def test_a_copy_by_visibility_timeout_waits_and_is_discarded(new_worker, row, redis_url, client):
    first = new_worker(APP, concurrency=2, env=SOON)
    case, plain = _case(first, redis_url), _case(first, redis_url, locked=False)
    for one in (case, plain):
        one.send()
        one.events("inside")
    wait_for(lambda: plain.seconds_ago("inside") > 1.2)
    new_worker(APP, concurrency=4, env=SOON)  # it looks for lost messages when it starts
    plain.events("inside", count=2)  # without a lock both run at once
    case.events("over")  # the copy was looked at, and put off
    assert len(case.events("inside")) == 1
    case.register.let_go(case.account)
    plain.register.let_go(plain.account)
    _ran(case, 1, client)
    record(row, "prefork", "late", [0.0], case.outcome())


@row("visibility timeout, the first execution dies")
def test_a_copy_by_visibility_timeout_takes_over_from_the_dead(new_worker, row, redis_url, client):
    first = new_worker(APP, concurrency=2, env=SOON)
    case = _case(first, redis_url, body="stays_until_it_is_told_of")
    case.send()
    case.events("inside")
    wait_for(lambda: case.seconds_ago("inside") > 1.2)
    new_worker(APP, concurrency=4, env=SOON)
    case.events("over")
    case.ends_now()
    os.kill(case.events("inside")[0].pid, signal.SIGKILL)
    again = case.events("inside", count=2, timeout=30)[1]
    seconds = again.at - case.events("ending")[0].at
    _ran(case, 2, client, "next+errback")
    record(row, "prefork", "late", [seconds], case.outcome())


@row("visibility timeout before its ETA")
def test_of_two_copies_that_wait_for_their_eta_one_runs(new_worker, row, redis_url, client):
    first = new_worker(APP, concurrency=2, env=SOON)
    case = _case(first, redis_url, "early", body="returns")
    case.register.let_go(case.account)
    case.send(countdown=6)
    first.wait_for_log(rf"{case.id}\] received")
    marker = _case(first, redis_url, "early", locked=False)
    marker.send()
    marker.events("inside")
    wait_for(lambda: marker.seconds_ago("inside") > 1.2)
    second = new_worker(APP, concurrency=2, env=SOON)
    received = f"{case.id}] received"
    wait_for(lambda: (first.log() + second.log()).count(received) == 2, what="the copy")
    marker.register.let_go(marker.account)
    _ran(case, 1, client)
    record(row, "prefork", "early", [0.0], case.outcome())


@pytest.fixture(params=["Redis", "RabbitMQ"])
def broker(request, redis_server):
    """A way to a broker that can be cut."""
    if request.param == "Redis":
        port, url = redis_server.port, "redis://127.0.0.1:{}/0"
    else:
        port, url = request.getfixturevalue("rabbitmq").port, "amqp://guest:guest@127.0.0.1:{}//"
    with TcpProxy(port) as proxy:
        proxy.url = url.format(proxy.port)
        yield proxy


@pytest.mark.skipif(
    celery.VERSION < (5, 7), reason="Celery begins the copy only when the first execution is over"
)
@row("connection to the broker lost")
def test_a_copy_after_a_lost_connection_waits_and_is_discarded(
    new_worker, broker, row, redis_url, client
):
    running = new_worker(APP, concurrency=4, env={BROKER: broker.url})
    case, plain = _case(running, redis_url), _case(running, redis_url, locked=False)
    for one in (case, plain):
        one.send()
        one.events("inside")
    broker.cut()
    plain.events("inside", count=2)  # without a lock both run at once
    case.events("over")
    assert len(case.events("inside")) == 1
    case.register.let_go(case.account)
    _ran(case, 1, client)
    record(row, "prefork", "late", [0.0], case.outcome())


@row("… with `worker_cancel_long_running_tasks_on_connection_loss`")
def test_a_copy_after_a_cancelled_execution_takes_over(new_worker, broker, row, redis_url, client):
    cancel = '{"worker_cancel_long_running_tasks_on_connection_loss": true}'
    running = new_worker(APP, concurrency=4, env={BROKER: broker.url, SETTINGS: cancel})
    case = _case(running, redis_url)
    case.send()
    case.events("inside")
    case.ends_now()
    broker.cut()
    again = case.events("inside", count=2, timeout=30)[1]
    seconds = again.at - case.events("ending")[0].at
    _ran(case, 2, client)
    record(row, "prefork", "late", [seconds], case.outcome())


@pytest.mark.skipif(
    celery.VERSION < (5, 6), reason="Celery does not put back what a child has and may begin with"
)
@row("RabbitMQ: warm shutdown, a child begins all the same")
def test_what_a_child_begins_when_its_worker_has_put_the_message_back_runs_once(
    new_worker, rabbitmq, row, redis_url, client
):
    env = {BROKER: rabbitmq.url}
    doomed = new_worker(APP, concurrency=4, env=env, arguments=("--loglevel", "DEBUG"))
    sent = [
        _case(doomed, redis_url, ack, locked, body="returns")
        for ack in ("early", "late")
        for locked in (True, False)
    ]
    inspect = doomed.module.app.control.inspect([doomed.node], timeout=10, limit=1)

    def takes_tasks():
        """How many children have told their worker that they have started: it sends to no other."""
        (stats,) = inspect.stats().values()
        return stats["pool"]["writes"]["inqueues"]["total"]

    wait_for(lambda: takes_tasks() == 4)
    for child in doomed.children():
        os.kill(child, signal.SIGSTOP)
    for case in sent:
        case.register.let_go(case.account)
        case.send()
        doomed.wait_for_log(rf"{case.id}\] received")
    for _ in range(2):  # by then its loop has come round: each child has its task
        assert inspect.ping()
    doomed.kill(signal.SIGTERM)
    doomed.wait_for_log("Worker: Stopping Pool")
    for child in doomed.children():
        os.kill(child, signal.SIGCONT)
    for case in sent:
        wait_for(lambda case=case: case.outcome().state == "SUCCESS", what="the first execution")
    os.killpg(doomed.pid, signal.SIGKILL)  # it would wait for 30 s
    other = new_worker(APP, concurrency=4, env=env, arguments=("-n", "other@127.0.0.1"))
    for case in sent:
        if case.locked:
            other.wait_for_log(rf"{case.id}\] is a late copy of an execution that has ended")
            _ran(case, 1, client)
            record(row, "prefork", case.ack, [0.0], case.outcome())
        else:
            case.events("inside", count=2)


@row("RabbitMQ: child killed, `reject_on_worker_lost`", "RabbitMQ: worker killed")
def test_rabbitmq_delivers_again_and_the_copy_takes_over(
    new_worker, rabbitmq, row, redis_url, client
):
    env = {BROKER: rabbitmq.url}
    doomed = new_worker(APP, concurrency=1, env=env)
    case = _case(doomed, redis_url, body="stays_or_comes_back")
    case.send()
    case.events("inside")
    if row.name.endswith("worker killed"):
        new_worker(APP, concurrency=2, env=env, arguments=("-n", "other@127.0.0.1"))
        case.ends_now()
        os.killpg(doomed.pid, signal.SIGKILL)
    else:
        case.ends_now()
        os.kill(case.events("inside")[0].pid, signal.SIGKILL)
    again = case.events("inside", count=2, timeout=30)[1]
    seconds = again.at - case.events("ending")[0].at
    _ran(case, 2, client)
    record(row, "prefork", "late", [seconds], case.outcome())


@row("RabbitMQ: `Reject(requeue=True)`")
def test_rabbitmq_takes_a_message_back_and_its_next_execution_is_no_copy(
    new_worker, rabbitmq, row, redis_url, client
):
    # A late copy is looked at for so many seconds before it may run.
    env = {BROKER: rabbitmq.url, "RELOCK_TEST_STORING": "30"}
    running = new_worker(APP, concurrency=1, env=env)
    case = _case(running, redis_url, body="goes_back")
    case.send()
    case.events("inside")
    case.await_stranger()
    case.register.let_go(case.account)
    seconds = case.seconds_until_free()
    again = case.events("inside", count=2, timeout=40)[1]
    assert again.at - case.events("ending")[0].at < 20
    _ran(case, 2, client)
    record(row, "prefork", "late", [seconds], case.outcome())
