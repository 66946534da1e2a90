"""Tasks with a cooldown that do not succeed though their bodies return, or that re-enter a lock."""

from __future__ import annotations

import os
import signal
from typing import Any

from celery.backends.redis import RedisBackend
from celery.exceptions import BackendStoreError
from celery.result import allow_join_result
from celery.states import SUCCESS

from celery_relock import LockedTask
from tests.support import Journal, make_app, wait_for

LATE = {"acks_late": True, "reject_on_worker_lost": True}
OPTIONS: dict[str, Any] = {
    "bind": True,
    "lock_key": "{account}",
    "lock_cooldown": 60,
    "lock_on_conflict": "drop",
}

app = make_app(__name__)
journal = Journal.from_env()


def ran(self: Any, account: str) -> int:
    """How often a body of it has run."""
    journal.add("ran", account=account, task=self.name)
    return len(journal.events("ran", account=account))


class Retried(LockedTask):
    """Sends a retry when its first body has returned."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = super().__call__(*args, **kwargs)
        if not self.request.retries:
            raise self.retry(countdown=0)
        return result

    def on_retry(self, exc, task_id, args, kwargs, einfo):
        # Celery is in no hurry to tell of the retry.
        wait_for(lambda: len(journal.events("ran", account=args[0])) == 2, 5, "the retry")


class Limited(RedisBackend):
    """Refuses large results, as many do."""

    def _store_result(self, task_id, result, state, *args, **kwargs):
        if len(str(result)) > 1000 and state == SUCCESS:
            raise BackendStoreError("too large")
        super()._store_result(task_id, result, state, *args, **kwargs)


class Hangs(LockedTask):
    """Does not end when its body has returned."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = super().__call__(*args, **kwargs)
        journal.add("hangs", account=args[0])
        journal.wait_for(f"never {args[0]}", 60)
        return result


class Killed(LockedTask):
    """Its process is killed when its first body has returned."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = super().__call__(*args, **kwargs)
        if result == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return result


@app.task(base=LockedTask, **OPTIONS)
def returns_what_cannot_be_stored(self, account):
    ran(self, account)
    return object()


@app.task(base=LockedTask, **OPTIONS, backend=Limited(app=app, url=app.conf.result_backend))
def returns_too_much(self, account):
    ran(self, account)
    return "x" * 1001


@app.task(base=Retried, **OPTIONS)
def is_retried(self, account):
    return ran(self, account)


@app.task(base=Retried, lock_keep_on_retry=True, **OPTIONS)
def is_retried_and_kept(self, account):
    return ran(self, account)


@app.task(base=LockedTask, **OPTIONS)
def goes_on(self, account):
    if not self.request.retries:
        self.retry(countdown=0.2, throw=False)
    return ran(self, account)


@app.task(base=Hangs, **OPTIONS)
def hangs(self, account):
    return ran(self, account)


@app.task(base=Killed, **OPTIONS)
def is_killed(self, account):
    return ran(self, account)


@app.task(base=Killed, **OPTIONS, **LATE)
def is_killed_and_comes_again(self, account):
    return ran(self, account)


@app.task
def after(result, account):
    journal.add("after", account=account)
    return result


# -- Re-entry ------------------------------------------------------------------------------------

KEYS = ["{account}", "{account} too"]


@app.task(base=LockedTask, lock_key="{account}")
def holds(account, child):
    """Waits for what it has sent."""
    with allow_join_result():
        return app.tasks[child].delay(account).get(timeout=20)


def reenters(self: Any, account: str) -> bool:
    return self.lock.reentered


def _child(name: str, **options: Any) -> None:
    app.task(name=name, base=LockedTask, bind=True, lock_cooldown=60, **options)(reenters)


_child("descendant", lock_key="{account}", lock_reentrant="descendants")
_child("of the workflow", lock_key="{account}", lock_reentrant="workflow")
_child("descendant with another lock", lock_key=KEYS, lock_reentrant="descendants")
