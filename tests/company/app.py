"""The tasks of the company suite. Every task tells the journal what it does, by its first argument.

In a worker the companions of RELOCK_COMPANY are set up first; in the tests' process there are none.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, partial, wraps
from typing import Any

from celery import signals
from celery.exceptions import SoftTimeLimitExceeded
from celery.schedules import schedstate, schedule

from celery_relock import Lock, LockedTask
from tests.company import instrument
from tests.support import Journal, make_app

instrument.set_up()


class Impatient(schedule):
    """Says that it is due each minute, and is so at once and again."""

    def is_due(self, last_run_at: Any) -> schedstate:
        return schedstate(True, 0.3)


app = make_app(__name__)
if "django" in instrument.CHOSEN:
    app.conf.result_backend = "django-db"
if key := os.environ.get("RELOCK_COMPANY_BEAT"):
    # Sentry watches intervals of whole minutes alone.
    interval = Impatient(60, app=app) if "sentry" in instrument.CHOSEN else 0.5
    app.conf.beat_schedule = {
        key: {"task": f"{__name__}.work", "schedule": interval, "args": (key, 1)}
    }


# A tenant as applications carry one: in a context variable while a task of it runs, in a header
# while a message is on its way.
tenant: ContextVar[str | None] = ContextVar("tenant", default=None)


@signals.task_prerun.connect
def enter_tenant(task: Any, **_: Any) -> None:
    tenant.set(task.request.get("tenant"))


@signals.before_task_publish.connect
def stamp_tenant(headers: dict[str, Any], **_: Any) -> None:
    if (current := tenant.get()) is not None:
        headers["tenant"] = current


@cache
def journal() -> Journal:
    return Journal.from_env()


def note(name: str, task: Any, key: str, **data: Any) -> None:
    journal().add(name, key=key, id=task.request.id, **data)


def wait_at_gate(key: str) -> None:
    journal().wait_for("gate", 60, key=key)


def told(body: Callable[..., Any]) -> Callable[..., Any]:
    """Note the begin of the body, and its end with what it returns, or the error."""

    @wraps(body)
    def run(self: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        note("begin", self, key, tenant=tenant.get(), traces=instrument.traces())
        try:
            answer = body(self, key, *args, **kwargs)
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:
            note("raised", self, key, error=f"{type(error).__name__}: {error}")
            raise
        note("end", self, key, **(answer or {}))
        return answer

    return run


plain = partial(app.task, bind=True)
exclusive = partial(app.task, bind=True, base=LockedTask, lock_key="{key}")


@exclusive
@told
def work(self: Any, key: str, gate: int = 0, seconds: float = 0.0) -> None:
    """Under the lock: wait at the gate, and for so long."""
    if gate:
        wait_at_gate(key)
    time.sleep(seconds)


@plain
@told
def free(self: Any, key: str) -> dict[str, Any]:
    """Without a lock. Tells what the companions see of it."""
    return {"seen": instrument.seen()}


@plain
@told
def plain_work(self: Any, key: str) -> None:
    """As `work` without a lock: wait at the gate."""
    wait_at_gate(key)


@exclusive
@told
def look(self: Any, key: str) -> dict[str, Any]:
    seen = instrument.seen()
    lock = self.lock
    return {"lock": [lock.name, lock.fence, lock.owner], "root": self.request.root_id, "seen": seen}


@exclusive
def inner(self: Any, key: str) -> int:
    return int(self.lock.fence)


@exclusive
@told
def outer(self: Any, key: str) -> dict[str, Any]:
    """Ask for the same lock by every way that stays on this call stack."""
    fences = {"own": self.lock.fence, "called": inner(key)}
    fences["applied"] = inner.apply(args=(key,)).result
    with Lock(os.environ["RELOCK_TEST_URL"], key, namespace=app.conf.relock_namespace) as lock:
        fences["with Lock"] = lock.fence
    fences["own, later"] = self.lock.fence
    return {"fences": fences}


@exclusive(lock_dedup="until_done")
@told
def once(self: Any, key: str) -> None:
    wait_at_gate(key)


@exclusive
def fail(self: Any, key: str) -> None:
    raise ValueError("on purpose")


@plain
@told
def relay(self: Any, mark: str, name: str, key: str, times: int = 1) -> None:
    """Send a task from here, inside this task's context; `sent` has the ids."""
    task = app.tasks[f"{__name__}.{name}"]
    sent = [task.delay(key).id for _ in range(times)]
    note("sent", self, mark, ids=sent, tenant=tenant.get(), traces=instrument.traces())


@plain
@told
def plain_step(self: Any, key: str, number: int) -> dict[str, Any]:
    note(f"step {number}", self, key)
    if number == 1:
        wait_at_gate(key)
    return {"of": "workflow"}


@exclusive
@told
def locked_step(self: Any, key: str, number: int) -> dict[str, Any]:
    note(f"step {number}", self, key, fence=self.lock.fence)
    return {"of": "workflow"}


@exclusive
@told
def die(self: Any, key: str) -> None:
    wait_at_gate(key)
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait(30)


@exclusive(soft_time_limit=1)
@told
def overlong(self: Any, key: str) -> None:
    threading.Event().wait(30)


@exclusive(time_limit=1)
@told
def endless(self: Any, key: str) -> None:
    threading.Event().wait(30)
