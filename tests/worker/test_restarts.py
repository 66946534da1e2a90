"""The Redis of the locks is restarted while a worker is busy, with all it had and with nothing, and
its clock is set.

Locks alone, with more faults, are `scripts/chaos`; parked work is `scripts/parked`.
"""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery.result import AsyncResult

from tests.chaos.checker import lost_updates
from tests.chaos.parked.judge import overlaps
from tests.chaos.register import Register
from tests.support import RedisServer, Worker, leftovers, new_namespace, wait_for
from tests.support.clock import server_with_a_clock
from tests.support.journal import Event
from tests.support.parked import state_of

pytestmark = pytest.mark.slow

HOUR = 3600.0
NOTHING = ("--save", "", "--appendonly", "no")
PARKS, BLOCKS = "wait", "block"


def kill(server: RedisServer, keep_data: bool = True) -> None:
    server.kill()
    server.restart(keep_data)


def kill_when_written(server: RedisServer) -> None:
    """Else it can have answered to what it has not written: while an fsync lasts, it puts off what
    it writes, and answers all the same (aof.c, flushAppendOnlyFile)."""
    client = server.client()
    client.client_pause(20_000, all=False)
    wait_for(lambda: client.info("persistence")["aof_buffer_length"] == 0)
    kill(server)


def shut_down(server: RedisServer) -> None:
    server.shut_down()
    server.restart(keep_data=True)


KEEPS: dict[str, tuple[tuple[str, ...], Callable[[RedisServer], None]]] = {
    "AOF, fsync always": (("--appendonly", "yes", "--appendfsync", "always"), kill),
    "AOF, fsync every second": (
        ("--appendonly", "yes", "--appendfsync", "everysec"),
        kill_when_written,
    ),
    "RDB, saved at the end": (("--save", "3600", "1"), shut_down),
}


@pytest.fixture(scope="module")
def locks(redis_binary: str) -> Iterator[RedisServer]:
    """The Redis of the locks; broker, results, register and journal are elsewhere."""
    server = RedisServer(*NOTHING, binary=redis_binary)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def worker_of(module_worker: Callable[..., Worker]) -> Callable[[RedisServer], Worker]:
    def start(locks: RedisServer) -> Worker:
        own = {"namespace": new_namespace(), "env": {"RELOCK_TEST_LOCKS": locks.url}}
        return module_worker("tests.worker.apps.restarts", concurrency=4, **own)

    return start


@pytest.fixture(scope="module")
def worker(worker_of: Callable[[RedisServer], Worker], locks: RedisServer) -> Worker:
    return worker_of(locks)


class Load(threading.Thread):
    """Sends tasks for two accounts, some that park and some that block, until it is told to end.

    Attributes:
        sent: the results, with the policy of their task, in order.
        most: so many are unfinished at a time.
    """

    def __init__(self, worker: Worker, url: str) -> None:
        super().__init__(daemon=True)
        self.worker, self.register = worker, Register(url)
        self.accounts = [f"{letter}-{uuid.uuid4().hex[:8]}" for letter in "ab"]
        self.sent: list[tuple[str, AsyncResult[Any]]] = []
        self.most = 12
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        # Nobody waits for results here: what is collected after its Redis has gone looks for it.
        # The backend is this thread's.
        consumer = self.worker.module.app.backend.result_consumer
        consumer.consume_from = consumer.cancel_for = lambda *_: None
        number = 0
        while not self._over.wait(0.01):
            if len(self.sent) - self.done() < self.most:
                # Fewer that block than the worker has slots: else those that parked find none.
                policy = BLOCKS if number % 5 == 0 else PARKS
                task = self.worker.module.parks if policy == PARKS else self.worker.module.blocks
                self.sent.append((policy, task.delay(self.accounts[number % 2])))
                number += 1

    def end(self) -> None:
        self._over.set()
        self.join()

    def done(self) -> int:
        return sum(self.register.count("fenced", account) for account in self.accounts)

    def wait_until_busy(self, more: int = 8) -> None:
        """Until so many more are done, and somebody is parked."""
        done = self.done()
        wait_for(lambda: self.done() >= done + more, 40, what=f"{more} more")
        wait_for(self.somebody_is_parked)

    def somebody_is_parked(self) -> bool:
        return any(state_of(self.worker, f"account:{each}").parked for each in self.accounts)

    def events(self, name: str = "") -> list[Event]:
        every = self.worker.journal.events(name or None)
        return [event for event in every if event["lock"] in self.accounts]

    def unfinished(self) -> list[tuple[str, AsyncResult[Any]]]:
        return [(policy, result) for policy, result in self.sent if result.state != "SUCCESS"]

    def violations(self) -> list[str]:
        """What was not as it must be, whatever becomes of the server."""
        found = overlaps(self.events())
        for account in self.accounts:
            if count := lost_updates(self.register.log("fenced", account)):
                found.append(f"update: {count} lost in {account}")
        return found


@pytest.fixture
def start(redis_url: str) -> Iterator[Callable[[Worker], Load]]:
    loads: list[Load] = []

    def start(worker: Worker) -> Load:
        loads.append(Load(worker, redis_url))
        return loads[-1]

    yield start
    for one in loads:
        one.end()
        one.register.close()


def nothing_is_left(locks: RedisServer, worker: Worker) -> bool:
    client = locks.client()
    names = leftovers(client, worker.namespace)
    return all(name.endswith(":meta") or client.pttl(name) > 0 for name in names) and not any(
        ":l:" in name or ":q:" in name for name in names
    )


def test_a_worker_warns_of_a_server_that_keeps_nothing(worker: Worker) -> None:
    worker.wait_for_log(
        "the server keeps nothing on disk. Parked tasks are lost when the server restarts"
    )


def test_a_restart_that_loses_its_data_loses_what_is_parked_and_nothing_else(
    worker: Worker, locks: RedisServer, start: Callable[[Worker], Load]
) -> None:
    locks.restart(False, *NOTHING)
    busy = start(worker)
    busy.wait_until_busy()
    kill(locks, keep_data=False)
    before = [result for _, result in busy.sent]
    busy.most *= 2  # those that are lost are no longer on their way
    busy.wait_until_busy()
    busy.end()
    wait_for(lambda: nothing_is_left(locks, worker), 40)
    wait_for(lambda: {result.state for _, result in busy.unfinished()} <= {"BLOCKED"})
    gone = busy.unfinished()
    assert {policy for policy, _ in gone} <= {PARKS}
    assert [result for _, result in gone if result not in before] == []
    # Whoever was in is forgotten and may have stayed: the register refuses what comes late.
    assert [found for found in busy.violations() if not found.startswith("overlap")] == []


@pytest.mark.parametrize("how", list(KEEPS))
def test_a_restart_that_keeps_its_data_is_a_pause(
    how: str, worker: Worker, locks: RedisServer, start: Callable[[Worker], Load]
) -> None:
    config, restart = KEEPS[how]
    locks.restart(False, *config)
    busy = start(worker)
    for _ in range(2):
        busy.wait_until_busy()
        restart(locks)
    busy.end()
    wait_for(lambda: not busy.unfinished(), 40)
    wait_for(lambda: nothing_is_left(locks, worker), 20)
    assert busy.violations() == []
    assert busy.events("refused") == []
    assert set(Counter(event["task"] for event in busy.events("leave")).values()) == {1}


@pytest.fixture
def clock(redis_binary: str) -> Iterator[RedisServer]:
    server = server_with_a_clock()
    yield server
    server.stop()


def test_a_clock_that_is_set_forward_and_back_stops_nobody(
    clock: RedisServer, worker_of: Callable[[RedisServer], Worker], start: Callable[[Worker], Load]
) -> None:
    worker = worker_of(clock)
    busy = start(worker)
    for seconds in (HOUR, 0, -HOUR, 0):
        busy.wait_until_busy(more=4)
        clock.set_clock(seconds)
    busy.end()
    wait_for(lambda: not busy.unfinished(), 40)
    wait_for(lambda: nothing_is_left(clock, worker), 20)
    # Set forward, it ends every lease: whoever was in may have stayed, as after a loss of the data.
    assert [found for found in busy.violations() if not found.startswith("overlap")] == []
