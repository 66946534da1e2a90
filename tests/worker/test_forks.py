"""A process that a body forks publishes by no connection of its parent's; a child of a worker by
those of Celery's pool. A child that is forked at any moment finds no lock of others locked."""

from __future__ import annotations

import os
import signal

import pytest
from celery import Celery

from celery_relock.worker.broker import producer_of
from tests.support.parked import wait_until_parked
from tests.support.tcp import TcpProxy

APP = "tests.worker.apps.forks"
REPLACED = "tests.worker.apps.replaced"


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12, on purpose
def test_a_forked_process_has_a_connection_to_the_broker_of_its_own():
    app = Celery("forks", broker="memory://", set_as_current=False)
    with producer_of(app) as producer:
        theirs = producer.connection
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        with producer_of(app) as producer:
            os._exit(7 if producer.connection is not theirs else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    with producer_of(app) as producer:
        assert producer.connection is theirs
    app.close()


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_what_a_body_forks_resumes_the_next_task_by_a_connection_of_its_own(
    new_worker, rabbitmq, account, pool
):
    with TcpProxy(rabbitmq.port) as broker:
        env = {"RELOCK_TEST_BROKER": f"amqp://guest:guest@127.0.0.1:{broker.port}//"}
        working = new_worker(APP, pool=pool, env=env)
        journal, module = working.journal, working.module
        forks = module.forks.delay(account)
        [held] = journal.wait_for("held", account=account)
        takes = module.takes.delay(account)
        wait_until_parked(working, f"account:{account}")
        before = broker.taken
        journal.add(f"free {account}")
        [resumed] = journal.wait_for("resumed", names=[f"account:{account}"])
        assert resumed.pid == held.pid
        assert broker.taken == before + 1
        assert takes.get(timeout=10) == account
        assert forks.get(timeout=10) == 7
        working.close()


def test_each_child_of_a_worker_publishes_by_celerys_pool(new_worker):
    one_each = new_worker(APP, concurrency=1, arguments=("--max-tasks-per-child=1",))
    publishes = one_each.module.publishes_twice
    told = [publishes.delay().get(timeout=20) for _ in range(2)]
    assert [by_one for _, by_one in told] == [True, True]
    assert len({pid for pid, _ in told}) == 2


@pytest.mark.parametrize(
    "of", ["kombu", "a receiver of lock_resumed", "a receiver of lock_reclaimed"]
)
def test_a_child_in_the_place_of_a_killed_one_finds_no_lock_of_others_locked(
    new_worker, account, of
):
    """The main process resumes what waits for the lock of the child that was killed, in a thread,
    while Celery forks another child."""
    working = new_worker(REPLACED, env={"RELOCK_TEST_LOCKED": of})
    journal, module = working.journal, working.module
    module.holds.delay(account)
    [held] = journal.wait_for("holds", account=account)
    takes = module.takes.delay(account)
    wait_until_parked(working, f"account:{account}")
    stays = module.stays.delay(account)
    [stayed] = journal.wait_for("stays", account=account)
    working.kill(signal.SIGKILL, pid=held.pid)
    assert takes.get(timeout=20) not in (held.pid, stayed.pid)
    journal.add(f"end {account}")
    stays.get(timeout=20)
