"""The pytest plugin: locks in memory, for tests of an application's tasks."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

import celery_relock.asyncio
from celery_relock import Lock, LockedTask
from celery_relock.declaration import forget_settings
from celery_relock.engine.renewal import keepalive
from celery_relock.errors import LockConfigError, LockConflict, LockDeadlock, LockLost
from celery_relock.testing import Relock
from tests.support import wait_for
from tests.support.programs import said_by

MODULE = "celery_relock.testing"


@pytest.fixture
def relock_app() -> Iterator[Celery]:
    """An app as a project has it: with a Redis that is not there."""
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(relock_url="redis://127.0.0.1:1", task_eager_propagates=True)
    yield app
    app.close()


@pytest.fixture
def eager(relock_app: Celery) -> Celery:
    relock_app.conf.task_always_eager = True
    return relock_app


def _charge(app: Celery, **options: Any) -> Any:
    @app.task(bind=True, base=LockedTask, lock_key="account:{account_id}", shared=False, **options)
    def charge(self: Any, account_id: int) -> int:
        return int(self.lock.fence)

    return charge


def test_a_task_has_its_lock_while_it_runs_and_no_longer(eager: Celery, relock: Relock) -> None:
    seen = []

    @eager.task(base=LockedTask, lock_key="account:{account_id}", shared=False)
    def charge(account_id: int) -> None:
        seen.append(relock.held("account:42"))

    charge.delay(42)
    assert seen == [True]
    assert not relock.held("account:42")


@pytest.mark.parametrize("how", ["called", "eager"])
@pytest.mark.parametrize("policy", ["wait", "block", "retry", "raise"])
def test_a_lock_that_the_test_holds_is_a_conflict_at_once(
    eager: Celery, relock: Relock, policy: str, how: str
) -> None:
    charge = _charge(eager, lock_on_conflict=policy, lock_reentrant="workflow")
    with relock.hold("account:42") as token:
        with pytest.raises(LockConflict, match="account:42"):
            charge(42) if how == "called" else charge.delay(42)
        assert charge(7) > token
    assert charge(42) > token


@pytest.mark.parametrize("number", [1, 2])
def test_the_locks_are_those_of_the_settings_that_a_test_overrides(
    eager: Celery, relock: Relock, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    charge = _charge(eager)
    monkeypatch.setitem(eager.conf, "relock_namespace", "overridden")
    forget_settings()  # as Django's override_settings has it done
    assert not relock.held("account:42")  # the first test leaves it held
    with relock.hold("account:42"), pytest.raises(LockConflict, match="account:42"):
        charge(42)
    charge.lock_for(42).acquire()
    assert relock.held("account:42")


@pytest.mark.parametrize("name", ["", "tab\tx", None, b"bytes"])
def test_what_no_lock_is_called_is_held_by_no_test(relock: Relock, name: Any) -> None:
    with pytest.raises(LockConfigError), relock.hold(name):
        pass


def test_a_lock_that_the_test_holds_is_a_conflict_for_a_lock(relock: Relock) -> None:
    lock = Lock("memory://", "account:42")
    with relock.hold("account:42"):
        assert not lock.acquire(blocking=False)
        with pytest.raises(LockDeadlock):
            lock.acquire()
    with lock, pytest.raises(LockConflict, match="account:42"), relock.hold("account:42"):
        pass


def test_of_a_lock_with_several_permits_the_test_holds_as_many_as_it_likes(
    eager: Celery, relock: Relock
) -> None:
    charge = _charge(eager, lock_limit=2, lock_on_conflict="raise")
    with relock.hold("account:42"):
        charge(42)
    with relock.hold("account:42", permits=2), pytest.raises(LockConflict):
        charge(42)


@pytest.mark.parametrize("asked", ["held", "waiting", "expire", "hold"])
def test_what_is_no_lock_name_is_not_taken_for_a_lock_that_nobody_holds(
    eager: Celery, relock: Relock, asked: str
) -> None:
    for given in (_charge(eager), 42):
        said = pytest.raises(LockConfigError, match=rf"^{asked}\(.* Use a lock name, as text")
        with said, getattr(relock, asked)(given):
            pass


@pytest.mark.parametrize("permits", [0, 1.5, True, None])
def test_a_number_of_permits_that_is_none_is_told(relock: Relock, permits: Any) -> None:
    with (
        pytest.raises(ValueError, match=f"permits={permits!r} cannot be used"),
        relock.hold("account:42", permits=permits),
    ):
        pass
    assert not relock.held("account:42")


def test_a_lease_that_expires_is_lost_under_the_body_and_free_for_others(
    eager: Celery, relock: Relock
) -> None:
    @eager.task(bind=True, base=LockedTask, lock_key="account:{account_id}", shared=False)
    def charge(self: Any, account_id: int) -> None:
        relock.expire("account:42")
        assert not relock.held("account:42")
        assert self.lock.lost
        self.lock.check()

    with pytest.raises(LockLost):
        charge.delay(42)
    with pytest.raises(LookupError, match="account:42"):
        relock.expire("account:42")


def test_a_lease_of_a_coroutine_expires_as_well(relock_app: Celery, relock: Relock) -> None:
    charge = _charge(relock_app)

    async def main() -> None:
        async with charge.async_lock_for(42) as lock:
            relock.expire("account:42")
            assert lock.lost
            assert not relock.held("account:42")
            lock.check()

    with pytest.raises(LockLost):
        asyncio.run(main())


def test_a_lease_of_another_threads_loop_expires_and_is_forgotten(
    relock_app: Celery, relock: Relock
) -> None:
    charge, got, expired = _charge(relock_app), threading.Event(), threading.Event()

    async def main() -> None:
        lock = charge.async_lock_for(42)
        await lock.acquire()
        got.set()
        await asyncio.to_thread(expired.wait, 30)
        assert lock.lost
        assert lock._lease not in keepalive.leases()
        with pytest.raises(LockLost):
            await lock.release()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(asyncio.run, main())
        assert got.wait(30)
        relock.expire("account:42")
        expired.set()
        done.result(30)


@pytest.fixture(scope="module")
def loop_of_all_tests() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


_kept: list[celery_relock.asyncio.Lock] = []


@pytest.mark.parametrize("number", [1, 2])
def test_a_coroutines_lock_that_a_test_has_left_is_held_no_more(
    relock_app: Celery,
    relock: Relock,
    loop_of_all_tests: asyncio.AbstractEventLoop,
    number: int,
) -> None:
    assert not any(lock.fence or lock.lost for lock in _kept)
    lock = _charge(relock_app).async_lock_for(42)
    assert loop_of_all_tests.run_until_complete(lock.acquire(blocking=False))
    assert lock.fence
    _kept.append(lock)


def test_all_who_share_a_lock_that_expires_have_lost_it(relock: Relock) -> None:
    """More than are told of where nobody asks for all."""
    locks = [Lock("memory://", "account:42", mode="shared") for _ in range(15)]
    for lock in locks:
        lock.acquire()

    relock.expire("account:42")

    assert all(lock.lost for lock in locks)
    assert not relock.held("account:42")


def test_who_waits_is_counted_and_gets_a_lock_that_expires(relock: Relock) -> None:
    entered = threading.Event()

    def wait() -> None:
        with Lock("memory://", "account:42"):
            entered.set()

    with relock.hold("account:42"):
        assert relock.waiting("account:42") == 0
        waiter = threading.Thread(target=wait)
        waiter.start()
        wait_for(lambda: relock.waiting("account:42") == 1)
        relock.expire("account:42")
        assert entered.wait(30)
    waiter.join(30)


def test_a_duplicate_sends_nothing(relock_app: Celery, relock: Relock) -> None:
    charge = _charge(relock_app, lock_dedup="until_start")
    first, again = charge.delay(42), charge.delay(account_id=42)
    charge.delay(7)

    assert again.id == first.id
    assert [(one.args, one.kwargs) for one in relock.sent(charge)] == [((42,), {}), ((7,), {})]
    assert relock.sent(charge.name)[0].task_id == first.id
    assert relock.sent("another") == []


def test_nobody_is_told_what_eager_tasks_have_sent(eager: Celery, relock: Relock) -> None:
    with pytest.raises(RuntimeError, match="task_always_eager"):
        relock.sent("charge")


@pytest.mark.parametrize("number", [1, 2])
def test_each_test_begins_with_no_lock_held(eager: Celery, relock: Relock, number: int) -> None:
    charge, lock = _charge(eager, lock_on_conflict="raise"), Lock("memory://", "account:42")
    assert not relock.held("account:42")
    token = charge(42)
    assert lock.acquire(blocking=False)
    assert charge(42) == lock.fence > token, "inside of the Lock, and of nothing before"


@pytest.fixture
def asked_by_name(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue("relock")


def test_a_fixture_can_ask_for_it_by_its_name(asked_by_name: Relock) -> None:
    with asked_by_name.hold("account:42"):
        assert asked_by_name.held("account:42")


def test_in_a_folder_of_its_own_it_takes_the_app_that_was_made(tmp_path: Path) -> None:
    test = """
        {made}

        def test_a_lock(relock):
            with relock.hold("account:42"):
                assert relock.held("account:42")
    """
    said = []
    # An app that names no Redis, as a developer's machine may have none; and none at all.
    for made in ('import celery; app = celery.Celery("shop", broker="amqp://")', ""):
        (tmp_path / "test_shop.py").write_text(textwrap.dedent(test.format(made=made)))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", MODULE]
        alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # others take seconds to load
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=alone)
        said.append(done.stdout)
    assert "1 passed" in said[0]
    assert "relock: no Celery app has been made yet. Import yours" in said[1]


@pytest.mark.parametrize(
    ("worker", "asks", "cure"),
    [
        # pytest makes the fixtures of a session first, in whatever order a test names them.
        ("celery_session_worker", "relock", "in the test's settings"),
        ("celery_worker", "relock", "in the test's settings, or name relock first"),
        ("celery_worker", "locks", "in the test's settings, or name relock first"),
    ],
)
def test_a_worker_that_starts_before_relock_is_an_error_with_a_cure_that_helps(
    tmp_path: Path, worker: str, asks: str, cure: str
) -> None:
    test = f"""
        import pytest

        @pytest.fixture(scope="session")
        def celery_config():
            return {{"broker_url": "memory://", "relock_url": "redis://127.0.0.1:1"}}

        @pytest.fixture(scope="session")
        def celery_session_worker(): ...

        @pytest.fixture
        def celery_worker(): ...

        @pytest.fixture
        def locks(request):
            return request.getfixturevalue("relock")

        def test_a_lock(celery_session_app, {worker}, {asks}): ...
    """
    (tmp_path / "test_shop.py").write_text(textwrap.dedent(test))
    plugins = ["-p", "no:cacheprovider", "-p", MODULE, "-p", "celery.contrib.pytest"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=alone)
    assert f"{worker} starts before relock" in done.stdout
    assert f"set relock_url='memory://' {cure}\n" in done.stdout


def test_the_plugin_is_there_by_itself_and_loads_no_celery() -> None:
    """Not even redis-py: pytest loads it in every run of an environment."""
    (point,) = (each for each in entry_points(group="pytest11") if each.module == MODULE)
    assert point.name == MODULE, "else pytest_plugins would load it once more"
    program = f"""
import sys, {point.module}
print(sorted({{"celery", "kombu", "redis"}} & set(sys.modules)))
"""
    assert said_by(program) == "[]\n"


def test_memory_takes_no_address(relock: Relock) -> None:
    for url in ("memory://localhost", "memory:/", "memory://?db=1"):
        with pytest.raises(LockConfigError, match="no host, path or option"):
            Lock(url, "a")
    with pytest.raises(LockConfigError, match="relock_namespace"):
        Lock("memory://", "a", namespace="not this one")
