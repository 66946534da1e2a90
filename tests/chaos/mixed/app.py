"""The workers' and the sender's side of a campaign: a task for each way to need a lock, all of them
for the same few locks."""

from __future__ import annotations

import os
import random
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from celery import chain, chord, group
from celery.signals import task_postrun, task_received

from celery_relock import Lock, LockedTask, locked
from tests.chaos.mixed.judge import COOLDOWN, LIMIT
from tests.chaos.parked.settings import Settings
from tests.support import Journal

KEYS = "account:0", "account:1", "account:2"

settings = Settings.from_environment()
app = settings.app()
# The rest of a workflow whose message a broker has lost would be waited for.
app.conf.update(relock_gap_ttl=20, relock_on_unavailable="retry")
_journals: dict[int, Journal] = {}


def tell(what: str, **told: Any) -> None:
    if os.getpid() not in _journals:
        _journals[os.getpid()] = Journal(settings.resource, settings.namespace)
    _journals[os.getpid()].add(what, **told)


@contextmanager
def _inside(task: Any, lock: str, fence: int, owner: str, mode: str) -> Iterator[None]:
    told = {"entry": uuid.uuid4().hex, "task": task.request.id, "lock": lock}
    told |= {"fence": fence, "owner": owner, "mode": mode}
    tell("enter", **told)
    yield
    tell("leave", **told)


def _work(task: Any, mode: str = "exclusive") -> None:
    fences = list(task.lock.fences.items())

    def within(number: int) -> None:
        if number == len(fences):
            short = (0, 0, 0.005, 0.02, 0.05)
            time.sleep(random.choice(short) if mode in ("exclusive", "cooled") else 0.05)
            return
        with _inside(task, *fences[number], task.lock.owner, mode):
            within(number + 1)

    within(0)


def _task(name: str, key: str | list[str] = "{key}", **options: Any) -> Callable[..., Any]:
    return app.task(name=name, base=LockedTask, bind=True, lock_key=key, **options)


@_task("single")
def single(self: Any, key: str) -> None:
    _work(self)


@_task("pair", ["{key}", "{other}"])
def pair(self: Any, key: str, other: str) -> None:
    _work(self)


@_task("limited", "limited:{key}", lock_limit=LIMIT)
def limited(self: Any, key: str) -> None:
    _work(self, "limited")


@_task("reader", lock_mode="shared")
def reader(self: Any, key: str) -> None:
    _work(self, "shared")


@_task("downgraded")
def downgraded(self: Any, key: str) -> None:
    _work(self)
    self.lock.downgrade()
    _work(self, "shared")


@_task("keeper", lock_keep_on_retry=True)
def keeper(self: Any, key: str) -> None:
    _work(self)
    if not self.request.retries:
        raise self.retry(countdown=0.2)


@_task("retrier")
def retrier(self: Any, key: str) -> None:
    _work(self)
    if self.request.retries < 2:
        raise self.retry(countdown=0.2)


@_task(
    "fragile",
    autoretry_for=(ValueError,),
    retry_backoff=False,
    default_retry_delay=0.1,
    max_retries=2,
)
def fragile(self: Any, key: str) -> None:
    _work(self)
    if random.random() < 0.5:
        raise ValueError(key)


@_task("nested")
def nested(self: Any, key: str) -> None:
    _work(self)
    single(key)
    _work(self)


@_task("child", lock_reentrant="descendants")
def child(self: Any, key: str) -> None:
    _work(self)


@_task("parent")
def parent(self: Any, key: str) -> None:
    child.delay(key)
    _work(self)


@_task("first", lock_hold="workflow")
def first(self: Any, key: str) -> None:
    _work(self)


@_task("drop", lock_on_conflict="drop")
def drop(self: Any, key: str) -> None:
    _work(self)


@_task("patient", lock_on_conflict="retry")
def patient(self: Any, key: str) -> None:
    _work(self)


@_task("impatient", lock_max_wait=1)
def impatient(self: Any, key: str) -> None:
    _work(self)


@_task("dedup", "dedup:{key}", lock_dedup="until_start")
def dedup(self: Any, key: str) -> None:
    _work(self)


@_task("burst", "burst:{key}", lock_debounce=0.2)
def burst(self: Any, key: str) -> None:
    _work(self)


@_task("cooled", "cooled:{key}", lock_cooldown=COOLDOWN)
def cooled(self: Any, key: str) -> None:
    _work(self, "cooled")


@_task("ordered", "ordered:{key}", lock_order="sent")
def ordered(self: Any, key: str, number: int) -> None:
    tell("begun", lock=key, number=number, in_order=self.lock.in_order)
    _work(self)
    if number % 3 == 0 and not self.request.retries:
        raise self.retry(countdown=0.1)


@_task("broken")
def broken(self: Any, key: str) -> None:
    _work(self)
    raise KeyError(key)


@app.task(name="by_hand", bind=True)
def by_hand(self: Any, key: str) -> None:
    lock = Lock(settings.locks, key, namespace=settings.namespace)
    # It waits in its slot, which those before it in the queue may need.
    if lock.acquire(blocking_timeout=0.3):
        try:
            with _inside(self, key, lock.fence, self.request.id, "exclusive"):
                time.sleep(0.005)
        finally:
            lock.release()


@app.task(name="plain")
def plain() -> None:
    time.sleep(0.005)


class Call(NamedTuple):
    """A way to use the library.

    Attributes:
        made: the signature for a key, another key, and the number of the call.
        ends: the states in which it may end.
        options: of `apply_async`.
        retries: its body may send a retry.
        revoked: as soon as it was sent.
        times: so often in a row.
    """

    made: Callable[[str, str, int], Any]
    ends: tuple[str, ...] = ("SUCCESS",)
    options: Callable[[], dict[str, Any]] = dict
    retries: bool = False
    revoked: bool = False
    times: int = 1


_EITHER = "SUCCESS", "FAILURE"
CALLS = {
    "plain": Call(lambda key, other, n: plain.si()),
    "by hand": Call(lambda key, other, n: by_hand.si(key)),
    "single": Call(lambda key, other, n: single.si(key), times=2),
    "pair": Call(lambda key, other, n: pair.si(key, other)),
    "limited": Call(lambda key, other, n: limited.si(key), times=LIMIT + 2),
    "reader": Call(lambda key, other, n: reader.si(key), times=3),
    "downgraded": Call(lambda key, other, n: downgraded.si(key)),
    "kept by a retry": Call(lambda key, other, n: keeper.si(key), retries=True),
    "retried": Call(lambda key, other, n: retrier.si(key), retries=True),
    "retried by Celery": Call(lambda key, other, n: fragile.si(key), _EITHER, retries=True),
    "nested": Call(lambda key, other, n: nested.si(key)),
    "descendant": Call(lambda key, other, n: parent.si(key)),
    "dropped": Call(lambda key, other, n: drop.si(key)),
    "lock_on_conflict='retry'": Call(lambda key, other, n: patient.si(key)),
    "lock_max_wait": Call(lambda key, other, n: impatient.si(key), _EITHER),
    "dedup": Call(lambda key, other, n: dedup.si(key), times=2),
    "debounce": Call(lambda key, other, n: burst.si(key), times=2),
    "cooldown": Call(lambda key, other, n: cooled.si(key), times=2),
    "ordered": Call(lambda key, other, n: ordered.si(key, n), retries=True, times=2),
    "failed": Call(lambda key, other, n: broken.si(key), ("FAILURE",)),
    "countdown": Call(
        lambda key, other, n: single.si(key),
        options=lambda: {"countdown": random.choice((0.1, 1, 2))},
    ),
    "revoked": Call(lambda key, other, n: single.si(key), ("SUCCESS", "REVOKED"), revoked=True),
    "lock_hold": Call(lambda key, other, n: chain(first.si(key), plain.si(), single.si(key))),
    "locked chain": Call(
        lambda key, other, n: locked(
            chain(single.si(key), limited.si(key), keeper.si(key), plain.si()), key=key
        )
    ),
    "locked chain that fails": Call(
        lambda key, other, n: locked(chain(single.si(key), broken.si(key), plain.si()), key=key),
        ("FAILURE",),
    ),
    "locked chord": Call(
        lambda key, other, n: locked(
            chord([plain.si(), limited.si(key), plain.si()], single.si(key)), key=key
        ),
        # Celery lets a chord fail if the connection is cut by which it counts a member.
        _EITHER,
    ),
    "locked group": Call(
        lambda key, other, n: locked(group([plain.si(), single.si(key)]), key=key)
    ),
}


@task_received.connect
def _received(request: Any, **_: Any) -> None:
    tell("received", task=request.id)


@task_postrun.connect
def _over(task_id: str = "", state: str | None = "", **_: Any) -> None:
    if isinstance(sys.exc_info()[1], SystemExit):  # the result may be stored by now
        state = app.AsyncResult(task_id).state
    tell("over", task=task_id, state=state)
