"""Parked work survives what happens to whoever was to send it, to its queue and to its Redis."""

from __future__ import annotations

import signal
import uuid
from types import SimpleNamespace

import pytest

from celery_relock.errors import LockUnavailable
from tests.support import RedisServer, wait_for
from tests.support.parked import is_consumed, lock_of, state_of, wait_until_parked
from tests.support.proxy import Proxy


@pytest.fixture(scope="module")
def locks(redis_binary):
    """The Redis of the locks, which can be cut off; broker, results and journal are elsewhere."""
    server = RedisServer(binary=redis_binary)
    with Proxy(server.port) as proxy:
        yield SimpleNamespace(server=server, proxy=proxy)
    server.stop()


@pytest.fixture(scope="module")
def start(module_worker, locks):
    def start():
        return module_worker(
            "tests.worker.apps.parked_faults",
            concurrency=4,
            env={"RELOCK_TEST_LOCKS": locks.proxy.url},
        )

    return start


@pytest.fixture(scope="module")
def worker(start):
    return start()


def _held_by(worker, task, account):
    """The lock of this account is held by a task of this name."""
    result = getattr(worker.module, task).delay(account)
    worker.journal.wait_for("held", account=account)
    return result


@pytest.fixture(scope="module")
def unsent(worker):
    """Three runs whose message goes wrong at the same time, as each is sent anew after 5 s."""
    task, app, results = worker.module.takes, worker.module.app, {}
    for how in ("killer", "no-broker", "purged"):
        account = f"{how}-{uuid.uuid4().hex}"
        _held_by(worker, "holds_without_a_broker" if how == "no-broker" else "hold", account)
        queue = {"queue": "quiet"} if how == "purged" else {}
        results[how] = task.apply_async((account,), **queue)
        wait_until_parked(worker, f"account:{account}")
        if how == "purged":
            app.control.cancel_consumer("quiet", reply=True, limit=1)
            wait_for(lambda: not is_consumed(worker, "quiet"))
        worker.journal.add(f"free {account}")
        if how == "purged":
            _purge(app, "quiet")
            app.control.add_consumer("quiet", reply=True, limit=1)
    return results


def _purge(app, queue):
    with app.connection_for_write() as connection:
        wait_for(lambda: connection.default_channel.queue_purge(queue) == 1, what=f"one in {queue}")


def test_a_releaser_that_is_killed_before_it_sends_loses_nothing(worker, unsent):
    assert unsent["killer"].get(timeout=20) == "ran"
    assert worker.journal.events("killed")


def test_a_releaser_that_cannot_reach_the_broker_loses_nothing(worker, unsent):
    worker.wait_for_log("no-broker.* could not be resumed")
    assert unsent["no-broker"].get(timeout=20) == "ran"


def test_a_message_that_is_lost_in_the_broker_is_sent_again(worker, unsent):
    assert unsent["purged"].get(timeout=20) == "ran"
    result = unsent["purged"]
    assert len(worker.journal.events("took", id=result.id)) == 1


def test_a_soft_time_limit_while_parking_leaves_nothing_that_could_run_later(worker, account):
    name = f"account:limited-{account}"
    lock = lock_of(worker, name)
    with lock:
        result = worker.module.is_limited_while_parking.delay(f"limited-{account}")
        worker.journal.wait_for("parked")
        wait_until_parked(worker, name)
        with pytest.raises(Exception, match="SoftTimeLimitExceeded"):
            result.get(timeout=30)
        wait_for(lambda: state_of(worker, name).waiting == 0)


def test_a_child_that_is_killed_before_it_knows_that_it_has_parked_loses_nothing(worker, account):
    # Acknowledged at its start: nobody delivers this message again.
    with lock_of(worker, f"account:unheard-{account}"):
        task_id = worker.module.takes.delay(f"unheard-{account}").id
        worker.journal.wait_for("died")
        worker.wait_for_log("a dead process|is dead|WorkerLostError")
        wait_until_parked(worker, f"account:unheard-{account}")
        wait_for(lambda: worker.module.app.AsyncResult(task_id).state == "FAILURE")
    worker.journal.wait_for("took", account=f"unheard-{account}")
    wait_for(lambda: worker.module.app.AsyncResult(task_id).state == "SUCCESS")


@pytest.fixture
def cut_off(worker, locks, account):
    """Run a task that is parked, resumed, and finds the Redis of its lock away."""

    def run(policy):
        name = f"account:{account}"
        with lock_of(worker, name):
            result = worker.module.finds_redis_away[policy].delay(account)
            wait_until_parked(worker, name)
        worker.journal.wait_for("arrived", count=2, account=account)
        locks.proxy.refuse()
        worker.journal.add(f"go {account}")
        return result

    yield run
    locks.proxy.accept()


def test_a_parked_execution_that_fails_as_redis_is_away_does_not_run_later(
    worker, account, locks, cut_off
):
    result = cut_off("raise")
    with pytest.raises(LockUnavailable):
        result.get(timeout=20)
    locks.proxy.accept()
    wait_for(lambda: state_of(worker, f"account:{account}").waiting == 0)
    assert not worker.journal.events("took", account=account)
    assert result.state == "FAILURE"


def test_a_parked_execution_that_runs_without_its_lock_does_so_once(
    worker, account, locks, cut_off
):
    assert cut_off("run").get(timeout=20) == "ran"
    locks.proxy.accept()
    wait_for(lambda: state_of(worker, f"account:{account}").waiting == 0)
    assert len(worker.journal.events("took", account=account)) == 1


def test_a_parked_execution_that_comes_back_when_redis_does_runs_once(
    worker, account, locks, cut_off
):
    result = cut_off("retry")
    worker.wait_for_log(rf"{result.id}\] retry: ")
    locks.proxy.accept()
    assert result.get(timeout=20) == "ran"
    assert len(worker.journal.events("took", account=account)) == 1
    wait_for(lambda: state_of(worker, f"account:{account}").waiting == 0)


def test_a_starting_worker_resumes_what_lies_there(worker, start, account):
    # The last test: it ends the worker of this module.
    lock = lock_of(worker, f"account:{account}")
    lock.acquire()
    result = worker.module.takes.delay(account)
    wait_until_parked(worker, lock.name)
    children = worker.children()
    worker.kill(signal.SIGKILL)
    for pid in children:
        worker.kill(signal.SIGKILL, pid=pid)
    lock.release()
    assert not result.ready()
    start()
    assert result.get(timeout=30) == "ran"
