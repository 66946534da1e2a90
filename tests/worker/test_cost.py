"""What a lock costs: two script calls for a task that nobody disturbs, and nothing without one."""

from __future__ import annotations

import time
import uuid

import pytest

from tests.support.programs import said_by


@pytest.fixture(scope="module")
def worker(module_worker, locks):
    # One child, so that what it has done once (connect, load scripts) is not done again.
    return module_worker(
        "tests.worker.apps.faults", concurrency=1, env={"RELOCK_TEST_LOCKS": locks.url}
    )


class Meter:
    """What the server was asked since the last look: script calls, and reads from any client."""

    def __init__(self, locks):
        self._client = locks.client()
        self.look()
        self.look()

    def look(self):
        info = self._client.info("everything")
        scripts = sum(
            info.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval")
        )
        now = (scripts, info["total_reads_processed"])
        before, self._before = getattr(self, "_before", now), now
        # One read was this very look.
        return now[0] - before[0], now[1] - before[1] - 1


def test_a_task_that_nobody_disturbs_costs_two_script_calls_and_nothing_else(worker, locks):
    task = worker.module.raises
    task.delay("warm").get(timeout=20)
    meter = Meter(locks)
    for number in range(20):
        task.delay(f"account-{number}").get(timeout=20)
    assert [each // 20 for each in meter.look()] == [2, 2]


@pytest.mark.parametrize("until", ["until_start", "until_done"])
def test_looking_for_duplicates_costs_four_more_script_calls(worker, locks, until):
    task = worker.module.raises
    task.apply_async(("warm",), lock_dedup=until).get(timeout=20)
    meter = Meter(locks)
    for number in range(20):
        task.apply_async((f"{until}-{number}",), lock_dedup=until).get(timeout=20)
    # The worker says every two seconds that it consumes its resume queue: less than once a task.
    assert [each // 20 for each in meter.look()] == [6, 6]


@pytest.mark.parametrize(("limit", "calls"), [(1, 4), (2, 5)])
def test_a_retry_looks_for_its_predecessor_only_where_that_may_not_be_in_its_way(
    worker, locks, limit, calls
):
    task = worker.module.app.tasks[f"keeps_one_of_{limit}"]
    task.delay("warm").get(timeout=20)
    meter = Meter(locks)
    for each in [task.delay(f"{limit}-{number}") for number in range(20)]:
        each.get(timeout=20)
    assert [each // 20 for each in meter.look()] == [calls, calls]


def test_a_task_without_a_lock_never_speaks_to_the_redis_of_the_locks(worker, locks):
    meter, began = Meter(locks), time.monotonic()
    for _ in range(20):
        assert worker.module.never_locks.delay("anything").get(timeout=20) == "anything"
    # An idle worker asks 14 times in ten seconds, for its queues: sometimes twice in a row.
    assert max(meter.look()) <= 2 + 2 * (time.monotonic() - began)


def test_a_task_without_options_locks_on_its_arguments(worker):
    task = worker.module.locks_on_its_arguments
    account = uuid.uuid4().hex
    positional = task.delay(account).get(timeout=20)
    assert positional == task.delay(account=account).get(timeout=20)
    assert positional.startswith(f"{task.name}:")
    assert positional != task.delay("another").get(timeout=20)


def test_nothing_starts_before_the_first_lock():
    code = """
import threading
import celery_relock
from celery_relock import LockedTask, Lock
from celery import Celery
app = Celery("quiet", broker="redis://127.0.0.1:1/0")
@app.task(base=LockedTask, lock_key="account:{account}")
def locked(account): ...
@app.task(base=LockedTask, lock_key=False)
def unlocked(account): return account
app.finalize()
assert unlocked(7) == 7
assert threading.active_count() == 1, threading.enumerate()
with open("/proc/self/status") as status:
    assert "Threads:\\t1\\n" in status.read()
print("quiet")
"""
    assert said_by(code) == "quiet\n"
