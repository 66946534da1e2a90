"""`Lock(mode="shared")`: beside other shared holders, and `downgrade`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from celery_relock.backends.redis.backend import RedisBackend
from celery_relock.backends.redis.urls import transport_for_url
from celery_relock.engine.engine import Engine
from celery_relock.engine.protocol import SHARED, Downgraded
from celery_relock.errors import LockConfigError, LockUnavailable
from celery_relock.lock import Lock, LockNeverFree, LockNotOwned, LockNotTaken
from tests.support import wait_for

MakeLock = Callable[..., Lock]


@pytest.fixture(params=["redis", "memory"])
def make(request: pytest.FixtureRequest, lock: MakeLock) -> MakeLock:
    """Make a lock, in Redis and in memory."""
    where = {"redis": "memory://"} if request.param == "memory" else {}
    return lambda **options: lock(**where, **options)


def _fence(lock: Lock) -> int:
    with lock:
        return lock.fence


def _waiting(lock: Lock) -> int:
    return lock._engine.inspect(lock.name).waiting


def test_shared_holders_are_beside_each_other_and_an_exclusive_one_alone(
    make: MakeLock, in_thread: Callable[..., Any]
) -> None:
    with make(mode="shared") as one:
        fence = in_thread(lambda: _fence(make(mode="shared")))
        assert fence == one.fence
        assert not make().acquire(blocking=False)
    with make(blocking=False) as alone:
        assert alone.fence > fence
        assert not make(mode="shared").acquire(blocking=False)


def test_a_shared_waiter_acquires_when_the_holder_downgrades(make: MakeLock) -> None:
    one, two, entered, fences = make(), make(mode="shared"), threading.Event(), []

    def share() -> None:
        with two:
            fences.append(two.fence)
            entered.set()

    with one:
        thread = threading.Thread(target=share)
        thread.start()
        wait_for(lambda: _waiting(one) == 1, what="the waiter")
        one.downgrade()
        assert entered.wait(20)
        thread.join(20)
        assert fences == [one.fence]
        assert one.owned()
        assert one.reacquire()
        assert not make().acquire(blocking=False)
    with make(blocking=False):
        pass


def test_whoever_shares_a_lock_cannot_wait_to_be_alone(make: MakeLock) -> None:
    with make(mode="shared"):
        with pytest.raises(
            LockNeverFree, match="this very call stack, which shares it: acquire it ex"
        ):
            make().acquire()
        assert not make().acquire(blocking_timeout=0.01)


def test_what_was_downgraded_is_not_re_entered_to_be_alone(make: MakeLock) -> None:
    one = make()
    with one:
        one.downgrade()
        one.downgrade()
        with pytest.raises(LockNeverFree):
            one.acquire()
        assert one.owned()


def test_a_lock_that_somebody_relies_on_is_not_downgraded(make: MakeLock) -> None:
    one, other = make(owner="o"), make(owner="o")
    with one:
        with one, pytest.raises(LockConfigError, match="an outer block relies on it"):
            one.downgrade()
        with other, pytest.raises(LockConfigError, match="have re-entered it"):
            one.downgrade()
        assert not make(mode="shared").acquire(blocking=False)
        one.downgrade()
        with make(mode="shared"):
            pass


def test_an_extend_that_fails_leaves_a_lock_shared_that_was_downgraded_meanwhile(
    make: MakeLock, in_thread: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make(thread_local=False)

    def unanswered(*_: Any, **__: Any) -> None:
        in_thread(one.downgrade)
        raise LockUnavailable("no answer")

    with one:
        with monkeypatch.context() as away:
            away.setattr(one._engine.backend, "renew", unanswered)
            with pytest.raises(LockUnavailable):
                one.extend(60)
        assert one._lease.shares("a")
        assert one._lease.claim.lease == 30.0


def test_what_is_not_held_is_not_downgraded(make: MakeLock) -> None:
    one = make()
    with pytest.raises(LockNotTaken):
        one.downgrade()
    one.acquire()
    one._engine.backend.force_release("a")
    with pytest.raises(LockNotOwned):
        one.downgrade()
    with pytest.raises(LockNotOwned):
        one.release()


def test_of_a_command_that_was_sent_twice_a_copy_may_share_the_lock_later(
    redis_url: str, namespace: str
) -> None:
    class Answers(RedisBackend):
        """Its first answer was lost."""

        def downgrade(self, *args: Any, **more: Any) -> Downgraded:
            return super().downgrade(*args, **more)._replace(repeated=True)

    engine = Engine(Answers(transport_for_url(redis_url), namespace))
    one, other = Lock(engine, "a", owner="o"), Lock(engine, "a", owner="o")
    with one:
        with other, pytest.raises(LockUnavailable, match="might become shared"):
            one.downgrade()
        assert one._grip("").lease.claim.limits == (SHARED,), "nobody here relies on being alone"
        one.downgrade()


@pytest.mark.parametrize("how", [{"mode": "read"}, {"mode": "shared", "limit": 2}])
def test_what_means_nothing_is_refused(lock: MakeLock, how: dict[str, Any]) -> None:
    with pytest.raises(LockConfigError, match="cannot be used"):
        lock(**how)


def test_a_semaphore_is_not_downgraded(make: MakeLock) -> None:
    with make(limit=2) as one, pytest.raises(LockConfigError, match="several permits"):
        one.downgrade()
