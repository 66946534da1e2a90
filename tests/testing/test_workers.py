"""Locks in memory and workers: those in a thread of this process share them, others are told."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain
from celery.contrib.testing.worker import start_worker
from celery.result import allow_join_result

from celery_relock import Lock, LockedTask, is_dropped, locked
from celery_relock.errors import LockConfigError
from celery_relock.testing import Relock
from tests.support import programs, wait_for
from tests.support.long import LONG


class Shop(Celery):
    """What its tasks have seen; `held` asks the test's fixture."""

    seen: list[Any]
    held: Any


@pytest.fixture(scope="module")
def shop() -> Iterator[Shop]:
    app = Shop("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(
        relock_url="memory://",
        worker_hijack_root_logger=False,
        broker_transport_options={"polling_interval": 0.01},  # instead of a second
    )

    @app.task(bind=True, base=LockedTask, lock_key="account:{account}", shared=False)
    def charge(self: Any, account: int, number: int) -> int:
        app.seen.append(number)
        assert app.held(f"account:{account}")
        app.seen.append(number)
        return int(self.lock.fence)

    @app.task(bind=True, base=LockedTask, lock_key="told", max_retries=1, shared=False)
    def told(self: Any) -> list[Any]:
        if not self.request.retries:
            raise self.retry(countdown=0)
        return [self.request.id, self.request.is_eager, self.request.retries]

    @app.task(shared=False)
    def step(number: int) -> None:
        app.seen.append((number, app.held("workflow")))

    @app.task(base=LockedTask, lock_key="account:{account}", lock_order="sent", shared=False)
    def ship(account: int, number: int) -> None:
        app.seen.append(number)

    @app.task(base=LockedTask, lock_key="shed", lock_on_conflict="drop", shared=False)
    def sweep() -> None:
        app.seen.append("swept")

    @app.task(base=LockedTask, lock_key="report", lock_dedup="until_done", shared=False)
    def report() -> str:
        return "done"

    @app.task(base=LockedTask, lock_key="index", lock_debounce=1.0, shared=False)
    def index(what: int) -> int:
        app.seen.append(what)
        return what

    yield app
    app.close()


@pytest.fixture
def relock_app(shop: Shop) -> Shop:
    return shop


@pytest.fixture
def task(shop: Shop, relock: Relock, worker: None) -> Callable[[str], Any]:
    """A task of the shop, by the name of its function."""
    shop.seen, shop.held = [], relock.held
    return lambda name: shop.tasks[f"{__name__}.{name}"]


@pytest.fixture(scope="module", params=["threads", *(["solo"] if LONG else [])])
def worker(request: pytest.FixtureRequest, shop: Celery) -> Iterator[None]:
    """For all tests: its end takes some seconds, without a lock as well."""
    with _worker(shop, str(request.param)):
        yield


def _worker(app: Celery, pool: str) -> Any:
    more = {"loglevel": "WARNING", "perform_ping_check": False, "shutdown_timeout": 20.0}
    return start_worker(app, pool=pool, concurrency=3, **more)


def test_tasks_in_a_worker_take_turns_are_parked_and_resumed(
    shop: Shop, relock: Relock, task: Callable[[str], Any]
) -> None:
    charge, sent = task("charge"), []
    with relock.hold("account:42") as token:
        for number in range(4):
            sent.append(charge.delay(42, number))
            wait_for(lambda: relock.waiting("account:42") == len(sent))
        assert charge.delay(7, 9).get(timeout=30) > token, "the slots are free"
    fences = [result.get(timeout=30) for result in sent]

    assert shop.seen == [9, 9, 0, 0, 1, 1, 2, 2, 3, 3]
    assert fences == sorted({token, *fences})[1:]


def test_who_waits_in_the_order_of_a_lock_is_counted(
    shop: Shop, relock: Relock, task: Callable[[str], Any]
) -> None:
    ship, sent = task("ship"), []
    with relock.hold("account:42"):
        for number in range(4):
            sent.append(ship.delay(42, number))
            wait_for(lambda: relock.waiting("account:42") == len(sent))
        assert relock.waiting("account:7") == 0
    for result in sent:
        result.get(timeout=30)

    assert shop.seen == [0, 1, 2, 3]
    assert relock.waiting("account:42") == 0


def test_a_dedup_marker_lives_in_memory(relock: Relock, task: Callable[[str], Any]) -> None:
    report = task("report")
    with relock.hold("report"):
        first, second = report.delay(), report.delay()
        assert first.id == second.id
        assert len(relock.sent(report)) == 1
    assert first.get(timeout=30) == "done"
    wait_for(lambda: report.delay().id != first.id)


def test_a_burst_waits_in_memory(shop: Shop, relock: Relock, task: Callable[[str], Any]) -> None:
    index = task("index")
    results = [index.delay(number) for number in range(5)]
    assert {each.get(timeout=20) for each in results} == {4}
    assert shop.seen == [4]
    assert [one.args for one in relock.sent(index)] == [(4,)]
    assert index.delay(5).get(timeout=20) == 5


def test_a_workflow_lock_lives_in_memory(
    shop: Shop, relock: Relock, task: Callable[[str], Any]
) -> None:
    step = task("step")
    locked(chain(step.si(1), step.si(2)), key="workflow").delay().get(timeout=30)
    wait_for(lambda: not relock.held("workflow"))
    assert shop.seen == [(1, True), (2, True)]


@pytest.mark.parametrize("what", ["chain", "link", "canvas"])
def test_nothing_comes_after_what_is_dropped(
    shop: Shop, relock: Relock, task: Callable[[str], Any], what: str
) -> None:
    """No Celery worker protects the task here: its body sees a copy of the tracer's request."""
    step, sweep = task("step"), task("sweep")
    with relock.hold("shed"):
        if what == "chain":
            sent = chain(sweep.si(), step.si(1)).delay()
        elif what == "link":
            sent = sweep.apply_async(link=step.si(1))
        else:
            steps = chain(step.si(1), step.si(2))
            sent = locked(steps, key="shed", on_conflict="drop").delay()
        assert is_dropped(sent.get(timeout=30))
        while sent.parent:
            sent = sent.parent
        # The first step's result is stored when what comes after it is published.
        assert is_dropped(sent.get(timeout=30))
    step.delay(3).get(timeout=30)
    assert shop.seen == [(3, False)]


def test_a_loss_interrupts_a_body_that_asks_for_it(relock_app: Shop, relock: Relock) -> None:
    """In the main thread, by a signal: here that is where an eager task runs."""
    never = threading.Event()

    @relock_app.task(base=LockedTask, lock_key="a", lock_on_lost="raise", shared=False)
    def interrupted() -> None:
        relock.expire("a")
        never.wait(20)

    result = interrupted.apply(throw=False)
    assert "LockLost" in repr(result.result)


def test_a_locked_task_knows_its_message_where_no_celery_worker_protects_it(
    shop: Shop, relock: Relock, task: Callable[[str], Any]
) -> None:
    """As a task without a lock: eager, and in the thread of `start_worker`."""
    told = [task("told").apply(), task("told").delay()]
    assert [each.get(timeout=30) for each in told] == [
        [told[0].id, True, 1],
        [told[1].id, False, 1],
    ]


def test_a_worker_with_processes_is_told_that_they_share_no_memory(relock_app: Shop) -> None:
    with (
        allow_join_result(),  # the worker forbids that here, before it ends
        pytest.raises(LockConfigError, match="Use the threads or the solo pool"),
        _worker(relock_app, "prefork"),
    ):
        pass


def test_a_worker_that_is_a_process_of_its_own_is_told_so_and_ends(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        """
from celery import Celery
from celery_relock import LockedTask

app = Celery("shop", broker="memory://")
app.conf.relock_url = "memory://"

@app.task(base=LockedTask, lock_key="a")
def charge():
    pass
"""
    )
    command = [sys.executable, "-m", "celery", "-A", "shop", "worker", "-P", "solo"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    assert done.returncode != 0
    assert "this worker is a process of its own" in done.stderr


def test_a_forked_child_is_told_that_it_shares_no_memory(redis_url: str, namespace: str) -> None:
    said = programs.run(
        """
        from celery_relock import Lock
        from celery_relock.errors import LockConfigError
        lock = Lock("memory://", "a", namespace=NAMESPACE)
        with lock:
            child = os.fork()
            if child == 0:
                try:
                    Lock("memory://", "a", namespace=NAMESPACE).acquire(blocking=False)
                except LockConfigError as error:
                    say(error)
                os._exit(0)
            os.waitpid(child, 0)
            assert lock.owned()
        """,
        redis_url,
        namespace,
    )
    assert len(said) == 1
    assert "was forked from it" in said[0]


def test_fakeredis_is_refused_and_told_what_to_use() -> None:
    import fakeredis

    for place in (fakeredis.FakeRedis(), lambda: fakeredis.FakeRedis()):
        with pytest.raises(LockConfigError, match=r"relock_url='memory://'"):
            Lock(place, "a")
