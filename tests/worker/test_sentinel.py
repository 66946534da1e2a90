"""A worker goes on through a failover of the Redis that has its broker, its results, its locks."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress

import pytest
import redis

from celery_relock.declaration import engine_of
from celery_relock.settings import backend_settings
from tests.support import Worker
from tests.support.journal import Event
from tests.support.long import LONG
from tests.support.sentinel import PATIENTLY, Watched

pytestmark = pytest.mark.skipif(
    redis.__version__ == "5.0.0",
    reason="with redis-py 5.0.0, Celery cannot subscribe to a result by way of a Sentinel",
)


@pytest.fixture
def service(watched: Callable[..., Watched]) -> Watched:
    return watched(down_after=2.0)


@pytest.fixture
def start(service: Watched, new_worker: Callable[..., Worker]) -> Callable[..., Worker]:
    def begin(replicas: int = 0) -> Worker:
        env = {
            "RELOCK_TEST_SENTINELS": service.url,
            "RELOCK_TEST_SERVICE": service.service,
            "RELOCK_TEST_REPLICAS": str(replicas),
        }
        return new_worker("tests.worker.apps.sentinel", concurrency=4, env=env)

    return begin


def one_after_another(worker: Worker) -> dict[str, int]:
    """Hold the bodies of each account against the lock's promise. Returns how often tasks ran."""
    inside: dict[str, str] = {}
    fences: dict[str, int] = defaultdict(int)
    ran: dict[str, int] = defaultdict(int)
    for event in worker.journal.events():
        if event.name == "in":
            account, task = event["account"], event["task"]
            assert account not in inside, f"{task} came in while {inside[account]} was in"
            assert event["fence"] > fences[account]
            inside[account], fences[account] = task, event["fence"]
            ran[task] += 1
        elif event.name == "out":
            assert inside.pop(event["account"]) == event["task"]
    assert not inside
    return ran


def test_the_locks_are_where_the_results_are(
    service: Watched, start: Callable[..., Worker]
) -> None:
    worker = start()
    app = worker.module.app
    found = backend_settings(app)
    assert (found.source, found.url) == ("result_backend", service.url)
    assert worker.module.parks.delay("a", 0.0).get(timeout=30) is None
    assert engine_of(app).inspect("account:a").holds == ()
    meta = f"{app.conf.relock_namespace}:{{0}}:meta"
    assert service.master().client().exists(meta)


@pytest.mark.parametrize(
    ("how", "replicas"), [("killed", 1), *([("killed", 0), ("told", 1)] if LONG else [])]
)
def test_of_twenty_tasks_and_a_burst_all_run_and_none_beside_another_when_the_master_goes(
    service: Watched, start: Callable[..., Worker], how: str, replicas: int
) -> None:
    worker = start(replicas)
    tasks = worker.module
    kinds = [tasks.parks, tasks.blocks, tasks.outer, *[tasks.parks] * 7]
    # The results themselves ask the broker's server when they are dropped, so none is kept.
    every = {kinds[i % 10].delay(f"account {i % 3}").id for i in range(20)}
    merged = {tasks.merges.delay("account of a burst").id for _ in range(3)}
    assert len(merged) == 1
    every |= merged
    worker.journal.wait_for("out", 60, count=5)
    started = time.monotonic()
    service.take_away(how)
    before = len(worker.journal.events("in"))

    def gone_on(events: list[Event]) -> bool:
        return len([event for event in events if event.name == "in"]) > before + 3

    def all_ran(events: list[Event]) -> bool:
        return {event["task"] for event in events if event.name == "out"} >= every

    worker = looked_after(worker, lambda: start(replicas), gone_on)
    print(f"{how}: tasks go on after {time.monotonic() - started:.1f} s")
    worker = looked_after(worker, lambda: start(replicas), all_ran)
    ran = one_after_another(worker)
    assert ran.keys() == every
    print(f"ran more than once: {[task for task, times in ran.items() if times > 1]}")


def looked_after(
    worker: Worker, again: Callable[[], Worker], seen: Callable[[list[Event]], bool]
) -> Worker:
    """Wait as somebody who starts a worker that has ended: kombu's often does at a failover, with
    AttributeError, when it puts back what was not acknowledged. Returns the one that runs."""
    until = time.monotonic() + PATIENTLY
    while not seen(worker.journal.events()):
        assert time.monotonic() < until, worker.journal.events()
        with suppress(AssertionError):
            worker.journal.wait_for(seen, 1.0)
        if worker.ended:
            print("the worker ended and is started again")
            worker = again()
    return worker
