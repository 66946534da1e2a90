"""Whole workers, a broker and a Redis: killed, restarted and cut off.

Each test has two workers of its own, as containers or as processes (SMOKE_NODES).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from celery.result import AsyncResult
from pytest_celery import CeleryTestSetup
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_relock.admin import Locks
from tests.docker.ledger import Ledger
from tests.docker.nodes import APP, Cluster
from tests.support import wait_for

LOAD = 12
Send = Callable[..., AsyncResult]


@pytest.fixture
def send(celery_setup: CeleryTestSetup) -> Send:
    """Send a task of the app by its short name: `send("book", account="a")`."""

    def send(name: str, **arguments: Any) -> AsyncResult:
        tasks = celery_setup.app.tasks
        task = tasks[name] if name in tasks else tasks[f"{APP}.{name}"]
        return task.apply_async(kwargs=arguments)

    return send


@pytest.fixture
def workers(celery_setup: CeleryTestSetup) -> Cluster:
    return celery_setup.worker_cluster


@pytest.fixture
def wait_until_parked(celery_setup: CeleryTestSetup) -> Callable[..., None]:
    """Wait until these calls for account a are parked. Until then, one that its worker has
    acknowledged is lost with that worker, as without a lock."""
    locks = Locks(celery_setup.app)

    def wait(*results: AsyncResult) -> None:
        def parked() -> bool:
            waiters = locks.get("account:a").waiters
            here = {each.task_id for each in waiters if each.state == "parked"}
            return here.issuperset(result.id for result in results)

        wait_for(parked, 30, "the calls to be parked")

    return wait


def ends(results: Sequence[AsyncResult], timeout: float = 60.0) -> list[dict[str, Any]]:
    """What the tasks have returned, when all have ended well. Redis may be away meanwhile."""

    def ended(result: AsyncResult) -> bool:
        try:
            return bool(result.ready())
        except (RedisConnectionError, RedisTimeoutError):
            return False

    for result in results:
        wait_for(lambda result=result: ended(result), timeout, f"the end of {result.id}")
    return [result.get(timeout=10) for result in results]


def never_two(events: list[dict[str, Any]], killed: str = "") -> bool:
    """Whether nobody came in while another was in, the killed node's excepted."""
    inside: set[str] = set()
    for event in events:
        if event["name"] == "in":
            if inside:
                return False
            if event["node"] != killed:
                inside.add(event["run"])
        else:
            inside.discard(event["run"])
    return True


def rising(fences: Sequence[int]) -> bool:
    return all(one < two for one, two in pairwise(fences))


def test_a_locked_task_runs_on_two_workers_one_after_the_other(
    send: Send, workers: Cluster, ledger: Ledger
) -> None:
    held = send("settle_at_leisure", account="a")
    (first,) = ledger.wait_for("in", "a")
    rest = [send("book", account="a", seconds=0.05) for _ in range(11)]
    beside = ends([send("book", account="b")])  # another lock, and both workers are not stuck
    assert len(ledger.events("in", "a")) == 1

    ledger.let_go("a")

    ran = [*beside, *ends([held, *rest])]
    both = {worker.hostname() for worker in workers}
    while {each["node"] for each in ran} != both:  # who takes a message is chance
        ran += ends([send("book", account="a")])
    assert all(each["written"] and not each["lost"] for each in ran)
    assert never_two(ledger.events(account="a"))
    fences = [event["fence"] for event in ledger.events("in", "a")]
    assert len(fences) == len(ran) - 1
    assert fences[0] == first["fence"]
    assert rising(fences)


@pytest.mark.parametrize(
    ("broker", "worker_settings"),
    [("redis", {"SMOKE_VISIBILITY": "2"}), ("rabbitmq", {})],
    ids=["redis", "rabbitmq"],
)
def test_the_work_of_a_killed_worker_is_taken_over_by_the_other(
    send: Send, workers: Cluster, ledger: Ledger, wait_until_parked: Callable[..., None]
) -> None:
    result = send("settle_surely", account="a")
    (first,) = ledger.wait_for("in", "a")
    victim = workers.named(first["node"])
    stranger = send("book", account="a")
    wait_until_parked(stranger)

    victim.kill()
    assert victim.container.status == "exited"

    survivor = workers.other(victim)
    # The stranger may be before the copy of the message: that one comes when the broker knows.
    ledger.let_go("a")
    again, other = ends([result, stranger])
    assert again["node"] == other["node"] == survivor.hostname()
    assert again["run"] == first["run"] == result.id
    assert again["written"]
    assert other["written"]
    assert first["fence"] < min(again["fence"], other["fence"])
    assert never_two(ledger.events(account="a"), killed=victim.hostname())
    assert len(ledger.events("in", "a")) == 3


def test_a_restart_of_redis_costs_no_lock_and_no_parked_message(
    send: Send,
    celery_setup: CeleryTestSetup,
    ledger: Ledger,
    wait_until_parked: Callable[..., None],
) -> None:
    held = send("settle_at_leisure", account="a")
    (first,) = ledger.wait_for("in", "a")
    parked = [send("book", account="a") for _ in range(2)]
    wait_until_parked(*parked)

    celery_setup.broker.restart()

    later = send("book", account="a")
    assert len(ledger.events("in", "a")) == 1  # the one that was in has it still
    ledger.let_go("a")
    ran = ends([held, *parked, later])
    assert ran[0]["fence"] == first["fence"]
    assert all(each["written"] and not each["lost"] for each in ran)
    assert never_two(ledger.events(account="a"))
    assert rising([event["fence"] for event in ledger.events("in", "a")])


def test_a_worker_that_was_cut_off_finds_its_lock_lost_and_its_late_write_refused(
    send: Send, workers: Cluster, ledger: Ledger
) -> None:
    send("settle_soon", account="a")
    (first,) = ledger.wait_for("in", "a")
    away = workers.named(first["node"])

    away.cut()
    # Its messages are as far away as it is: some go to the other.
    sent = [send("book", account="a") for _ in range(4)]
    second = ledger.wait_for("out", "a")[0]
    assert second["node"] == workers.other(away).hostname()
    assert second["written"]
    assert second["fence"] > first["fence"]

    away.mend()
    ledger.let_go("a")

    late = next(
        event for event in ledger.wait_for("out", "a", count=5) if event["run"] == first["run"]
    )
    assert late == {**first, "name": "out", "written": False, "lost": True}
    assert all(each["written"] for each in ends(sent))


@pytest.mark.timeout(240)  # a pool of Celery's may take 30 s for a warm end
def test_a_rolling_restart_under_load_loses_nothing_and_runs_nothing_twice(
    send: Send, workers: Cluster, ledger: Ledger
) -> None:
    results: list[AsyncResult] = []
    enough = threading.Event()

    def load() -> None:
        while not enough.wait(0.02):
            # As much as is always there to do, on a slow machine too.
            if len(results) - len(ledger.events("out")) < LOAD:
                results.append(send("book", account=f"{len(results) % 3}", seconds=0.1))

    sender = threading.Thread(target=load)
    sender.start()
    try:
        for worker in workers:
            seen = len(ledger.events("out"))
            wait_for(lambda seen=seen: len(ledger.events("out")) > seen + 5, 30, "work to be done")
            worker.restart()
    finally:
        enough.set()
        sender.join()

    ran = ends(results)
    assert all(each["written"] and not each["lost"] for each in ran)
    assert Counter(event["run"] for event in ledger.events("in")) == {
        result.id: 1 for result in results
    }
    for account in "012":
        assert never_two(ledger.events(account=account))
        assert rising([event["fence"] for event in ledger.events("in", account)])
