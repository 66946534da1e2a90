"""How users write it. Never run: `mypy --strict` reads it, so that the public types stay usable."""

from __future__ import annotations

from celery import Celery, chain
from redis import Redis, RedisCluster
from redis.exceptions import LockError
from typing_extensions import assert_type

from celery_relock import Hold, Lock, LockedTask, is_dropped, locked
from celery_relock.asyncio import Lock as CoroutineLock
from celery_relock.doctor import Finding, examine, quick
from celery_relock.errors import (
    LockConfigError,
    LockConflict,
    LockDeadlock,
    LockLost,
    LockUnavailable,
    RelockError,
)

app = Celery("shop")


@app.task(base=LockedTask)
def on_all_arguments(account: int) -> None: ...


@app.task(base=LockedTask, lock_key="account:{account}", lock_ttl=60, lock_max_wait=5.5)
def charge(account: int, amount: int) -> int:
    return amount


@app.task(base=LockedTask, lock_key=lambda a, b: [f"account:{a}", f"account:{b}"], bind=True)
def transfer(self: LockedTask, a: int, b: int) -> int:
    hold: Hold = self.lock
    assert_type(hold.name, str)
    assert_type(self.lock.names, tuple[str, ...])
    assert_type(self.lock.owner, str)
    assert_type(self.lock.fence, int)
    assert_type(self.lock.fences, dict[str, int])
    assert_type(self.lock.reentered, bool)
    assert_type(self.lock.continuous, bool)
    assert_type(self.lock.in_order, bool | None)
    assert_type(self.lock.protected, bool)
    assert_type(self.lock.lost, bool)
    assert_type(self.lock.remaining, float)
    self.lock.check()
    with self.lock.fenced(object()):
        pass
    self.lock.downgrade()
    return self.lock.fence


flow = locked(chain(charge.s(1, 2), transfer.s(3)), key="account:{account}", gap_ttl=60)
assert_type(is_dropped(flow), bool)
flow.delay()


class Report(LockedTask):
    name = "report"
    lock_key = "report:{day}"
    lock_owner = "task"
    lock_reentrant = "inline"
    lock_limit = 2
    lock_ttl = 60
    lock_on_conflict = "raise"
    lock_max_wait = None
    lock_on_lost = "raise"
    lock_on_unavailable = "retry"

    def run(self, day: str) -> str:
        return f"{day}: {self.lock.fence}"


class PerRegion(LockedTask):
    lock_key = False

    @staticmethod
    def lock_limit(region: str) -> int:
        return 10 if region == "eu" else 1

    def lock_on_conflict(self, conflict: LockConflict) -> str:
        return "wait" if conflict.remaining else "drop"


class Misspelt(LockedTask):
    lock_hold = "workflows"  # type: ignore[assignment]
    lock_order = "send"  # type: ignore[assignment]
    lock_dedup = "until_begin"  # type: ignore[assignment]
    lock_mode = "exclusiv"  # type: ignore[assignment]
    lock_on_unavailable = "skip"  # type: ignore[assignment]


def outside(client: Redis) -> None:
    with Lock(client, "account:42") as lock:
        assert_type(lock, Lock)
        assert_type(lock.fence, int)
        lock.check()
        with lock.fenced(object()):
            pass
    with Lock("redis://localhost", "a", timeout=5, blocking_timeout=1.5, owner="me", limit=2):
        pass
    Lock(client, "a", mode="exclusiv")  # type: ignore[arg-type]
    plain = Lock("rediss://localhost", b"a", renew=False, namespace="shop")
    Lock(RedisCluster(), "a")
    Lock(lambda: RedisCluster(), "a")
    CoroutineLock(lambda: Redis(), "a")
    if plain.acquire(blocking=False):
        assert_type(plain.extend(10), bool)
        assert_type(plain.reacquire(), bool)
        assert_type(plain.locked(), bool)
        assert_type(plain.owned(), bool)
        assert_type(plain.lost, bool)
        assert_type(plain.remaining, float)
        plain.release()


def faults(lock: Lock) -> float | None:
    try:
        with lock:
            pass
    except (LockDeadlock, LockConflict) as conflict:
        assert_type(conflict.name, str | None)
        assert_type(conflict.owner, str | None)
        return conflict.remaining
    except (LockLost, LockUnavailable, LockConfigError) as error:
        raise RelockError("told", name=error.name) from error
    except LockError:
        return None
    return 0.0


async def coroutine(lock: CoroutineLock) -> bool:
    async with lock as one, one.fenced(object()):
        assert_type(one.fence, int)
    async with on_all_arguments.async_lock_for(42):
        pass
    await lock.release()
    return await lock.acquire(blocking_timeout=5) and await lock.extend(5)


def worst(app: Celery) -> Finding | None:
    assert_type(quick(app), tuple[Finding, ...])
    return next(iter(examine(app).findings), None)
