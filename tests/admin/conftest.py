"""One worker for all that people look at; each test has lock names of its own."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from celery_relock.admin import Locks
from celery_relock.backends.redis.connections import Connections
from tests.support import Worker, wait_for

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def worker(module_worker: Callable[..., Worker]) -> Worker:
    return module_worker("tests.admin.apps.desk", pool="threads", concurrency=6)


@pytest.fixture
def locks(worker: Worker) -> Locks:
    return Locks(worker.module.app, by="alice", origin="desk 3")


@pytest.fixture
def key() -> str:
    return f"account:{next(_numbers)}"


@pytest.fixture
def held(worker: Worker, locks: Locks, key: str) -> Iterator[Any]:
    """A lock that a task holds. `park()` parks an execution for it, which is then in no worker;
    `go()` lets the task end."""
    sent = [worker.module.hold.delay(key)]
    worker.journal.wait_for(f"inside {key}")
    inspect = worker.module.app.control.inspect([worker.node], timeout=20)

    def park(task: Any = worker.module.take, **options: Any) -> str:
        task_id = wait(task, "parked", **options)
        # The worker's main process has it a moment longer than it takes to park it.
        wait_for(lambda: not is_active(task_id), what=f"the worker to be rid of {task_id}")
        return task_id

    def is_active(task_id: str) -> bool:
        return any(each["id"] == task_id for each in inspect.active()[worker.node])

    def wait(task: Any, state: str, **options: Any) -> str:
        result = task.apply_async((key,), **options)
        sent.append(result)

        def is_there() -> bool:
            return any(
                each.task_id == result.id and each.state == state for each in locks.get(key).waiters
            )

        wait_for(is_there, what=f"{result.id} to be {state}")
        return str(result.id)

    def go() -> None:
        worker.journal.add(f"go {key}")

    yield SimpleNamespace(id=sent[0].id, result=sent[0], park=park, wait=wait, go=go)
    go()
    for each in sent:
        each.get(timeout=20, propagate=False)


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fills with each exchange of the test itself with the Redis of the locks: the first command's
    first words. Not with those of the thread that renews what other tests have left."""
    seen: list[str] = []
    exchange = Connections.exchange

    def count(self: Connections, commands: Any, *rest: Any, **options: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            seen.append(commands[0][0])
        return exchange(self, commands, *rest, **options)

    monkeypatch.setattr(Connections, "exchange", count)
    return seen
