"""`relock_enabled=False`: nothing is locked, nothing is asked, and `self.lock` answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, chain

from celery_relock import LockedTask, locked
from celery_relock.admin import Locks
from celery_relock.errors import LockConfigError
from tests.support import Worker

ANSWERS = {
    "names": ["account:42"],
    "fence": 0,
    "protected": False,
    "lost": False,
    "continuous": True,
    "reentered": False,
}


@pytest.fixture(scope="module")
def off(module_worker: Callable[..., Worker]) -> Worker:
    return module_worker("tests.backends.apps.off")


@pytest.fixture
def app() -> Iterator[Celery]:
    made = Celery("shop", broker="memory://", set_as_current=False)
    made.conf.update(relock_enabled=False, relock_url="redis://127.0.0.1:1")
    yield made
    made.close()


def test_tasks_of_one_name_run_side_by_side_and_see_their_lock(off: Worker) -> None:
    sent = [off.module.together.delay(42, 2) for _ in range(2)]

    assert [result.get(timeout=20) for result in sent] == [ANSWERS] * 2


def test_no_call_is_a_duplicate_and_retries_go_on(off: Worker) -> None:
    first, second = off.module.report.delay(), off.module.report.delay()

    assert first.id != second.id
    assert first.get(timeout=20) == second.get(timeout=20) == [1, True]


def test_a_locked_canvas_runs(off: Worker) -> None:
    steps = chain(off.module.report.si(), off.module.report.si())

    assert locked(steps, key="workflow").delay().get(timeout=20) == [1, True]


def test_the_worker_says_so(off: Worker) -> None:
    assert "relock_enabled=False" in off.log()


def test_a_name_that_cannot_be_made_is_found_all_the_same(app: Celery) -> None:
    @app.task(base=LockedTask, lock_key="order:{order.id}", shared=False)
    def ship(order: Any) -> None:
        pass

    with pytest.raises(LockConfigError, match=r"order\.id"):
        ship(object())


@pytest.mark.parametrize("value", ["False", 0, None])
def test_anything_but_true_and_false_is_refused(app: Celery, value: object) -> None:
    app.conf.relock_enabled = value

    @app.task(base=LockedTask, lock_key="a", shared=False)
    def charge() -> None:
        pass

    with pytest.raises(LockConfigError, match="Use True or False"):
        charge()


def test_who_has_acquired_a_lock_owns_it_and_nothing_is_lost(app: Celery) -> None:
    @app.task(base=LockedTask, lock_key="account:{account}", bind=True, shared=False)
    def charge(self: Any, account: int) -> list[bool]:
        with charge.lock_for(account) as lock:
            return [lock.owned(), self.lock.lost]

    async def main() -> bool:
        async with charge.async_lock_for(42) as lock:
            return await lock.owned()

    lock = charge.lock_for(42)
    assert not lock.owned()
    with lock:
        assert lock.owned()
    assert not lock.owned()
    assert asyncio.run(main())
    assert charge(42) == [True, False]


def test_there_are_no_locks_to_list(app: Celery) -> None:
    with pytest.raises(LockConfigError, match="no locks outside of the process"):
        Locks(app)
