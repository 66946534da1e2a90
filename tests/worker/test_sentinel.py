"""A worker goes on through a failover of the Redis that has its broker, its results, its locks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

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


def one_after_another(events: list[Event]) -> dict[str, int]:
    """Hold the bodies of each account against the lock's promise. Returns how often tasks ran."""
    inside: dict[str, str] = {}
    fences: dict[str, int] = defaultdict(int)
    ran: dict[str, int] = defaultdict(int)
    for event in events:
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
    service.moved_from(service.take_away(how))
    every |= {tasks.parks.delay(f"account {i % 3}").id for i in range(3)}

    def all_are_out(events: list[Event]) -> bool:
        began, ended = ([e["task"] for e in events if e.name == name] for name in ("in", "out"))
        return set(ended) >= every and len(began) == len(ended)

    ran = one_after_another(worker.journal.wait_for(all_are_out, PATIENTLY))
    assert not worker.ended
    assert ran.keys() == every
    print(f"{how}: ran more than once: {[task for task, times in ran.items() if times > 1]}")
