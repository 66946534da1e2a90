"""Tasks whose options are callables that a time limit strikes, or that end their task."""

from __future__ import annotations

import time
from typing import Any

from celery import current_task
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded

from celery_relock import LockedTask
from tests.support import make_app

app = make_app(__name__)


def once_slow(answer: Any) -> Any:
    """Hangs until the time limit strikes, and answers when the task is tried again."""
    if not current_task.request.retries:
        time.sleep(30)
    return answer


class OnceSlow(LockedTask):
    """Reads slowly what a template asks for."""

    @property
    def region(self):
        return once_slow("north")


CALLABLES: dict[str, dict[str, Any]] = {
    "lock_key": {"lock_key": lambda account: once_slow(f"account:{account}")},
    "lock_key_of_self": {"lock_key": "account:{account}:{self.region}", "base": OnceSlow},
    "lock_limit": {"lock_limit": lambda account: once_slow(2)},
    "lock_mode": {"lock_mode": lambda account: once_slow("shared")},
    "lock_owner": {"lock_owner": lambda request: once_slow("owner")},
    "lock_on_conflict": {"lock_on_conflict": lambda conflict: once_slow("wait")},
}


def declare(kind: str, **options: Any) -> Any:
    options = {"base": LockedTask, "lock_key": "account:{account}", **options}

    @app.task(
        bind=True,
        name=f"{kind}.slow",
        soft_time_limit=1,
        autoretry_for=(SoftTimeLimitExceeded,),
        retry_kwargs={"max_retries": 1, "countdown": 0},
        **options,
    )
    def slow(self, account):
        return self.request.retries

    return slow


slow = {kind: declare(kind, **options) for kind, options in CALLABLES.items()}


def end(how: str) -> None:
    if how == "retry" and not current_task.request.retries:
        current_task.retry(countdown=0)
    if how in ("ignore", "reject"):
        current_task.update_state(state="ENDED BY ITS CALLABLE")
        raise Ignore if how == "ignore" else Reject("by its callable")


def key_that_ends(account, how):
    if how == "ignore_here":
        raise Ignore
    end(how)
    return f"account:{account}"


@app.task(bind=True, base=LockedTask, lock_key=key_that_ends, max_retries=1)
def ends_by_key(self, account, how):
    return self.request.retries


@app.task(base=LockedTask, lock_key=key_that_ends, lock_dedup="until_start")
def ends_by_key_where_it_is_sent(account, how):
    raise AssertionError


def policy_that_ends(conflict):
    end(current_task.request.args[1])
    return "wait"


@app.task(
    bind=True,
    base=LockedTask,
    lock_key="account:{account}",
    lock_on_conflict=policy_that_ends,
    max_retries=1,
)
def ends_by_policy(self, account, how):
    return self.request.retries
