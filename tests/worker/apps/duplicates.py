"""Tasks whose message is delivered more than once."""

from __future__ import annotations

import os
import signal
from typing import Any

from celery.exceptions import Ignore, Reject
from celery.signals import task_failure, task_postrun

from celery_relock import LockedTask
from celery_relock.errors import LockConflict
from tests.support import Journal, make_app
from tests.support.permits import holding
from tests.support.without_broker import WithoutABroker

KEY = "account:{account}"
ACKS_LATE = {"acks_late": True, "reject_on_worker_lost": True}

app = make_app(
    __name__,
    worker_prefetch_multiplier=1,
    worker_cancel_long_running_tasks_on_connection_loss=True,
)
journal = Journal.from_env()


def work(self: Any, account: str) -> str:
    """Runs until the test lets it go; `second`, `third` … where the body ran before."""
    with holding(journal, self.lock):
        journal.add("inside", account=account, header=(self.request.headers or {}).get("relock"))
        journal.wait_for(f"free {account}", 30)
        return f"run {len(runs(account))}"


def runs(account: str) -> list[Any]:
    return journal.events("inside", account=account)


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_ttl=4.0)
def works(self, account):
    return work(self, account)


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_ttl=4.0, lock_on_conflict="raise")
def works_or_raises(self, account):
    return work(self, account)


@app.task(base=WithoutABroker, bind=True, lock_key=KEY, lock_ttl=4.0, lock_on_conflict="raise")
def works_or_stays_in_its_slot(self, account):
    return work(self, account)


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_ttl=4.0, lock_on_conflict="block")
def works_or_blocks(self, account):
    return work(self, account)


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_ttl=4.0, **ACKS_LATE)
def works_acked_late(self, account):
    return work(self, account)


@app.task(base=LockedTask, bind=True, lock_key=KEY, **ACKS_LATE, ignore_result=True)
def works_without_a_result(self, account):
    return work(self, account)


@app.task(base=LockedTask, bind=True, lock_key=KEY, **ACKS_LATE)
def ignores_acked_late(self, account):
    work(self, account)
    raise Ignore


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_ttl=4.0, lock_on_conflict="drop")
def works_or_drops(self, account):
    return work(self, account)


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_ttl=4.0, track_started=True)
def fails_and_tracks(self, account):
    raise ValueError(work(self, account))


@app.task(
    base=LockedTask,
    bind=True,
    lock_key=KEY,
    lock_ttl=4.0,
    track_started=True,
    lock_on_conflict="retry",
    **ACKS_LATE,
)
def fails_and_tracks_or_comes_back(self, account):
    raise ValueError(work(self, account))


def retries_once(self: Any, account: str, **how: Any) -> str:
    result = work(self, account)
    if len(runs(account)) == 1:
        raise self.retry(countdown=3, **how)
    return result


@app.task(base=LockedTask, bind=True, lock_key=KEY, **ACKS_LATE)
def retries_acked_late(self, account):
    return retries_once(self, account)


class RetriesOutside(LockedTask):
    """Sends its retry when its body has ended."""

    abstract = True

    def __call__(self, account: str) -> Any:
        result = super().__call__(account)
        if len(runs(account)) == 1:
            raise self.retry(countdown=3)
        return result


@app.task(base=RetriesOutside, bind=True, lock_key=KEY, **ACKS_LATE)
def retries_after_its_body(self, account):
    return work(self, account)


@app.task(base=LockedTask, bind=True, lock_key=KEY, **ACKS_LATE)
def retries_for_a_conflict_of_its_own(self, account):
    return retries_once(self, account, exc=LockConflict("another lock is held"))


@app.task(base=LockedTask, bind=True, lock_key=KEY, **ACKS_LATE, lock_keep_on_retry=True)
def retries_with_its_lock(self, account):
    return retries_once(self, account)


@app.task(base=LockedTask, bind=True, lock_key=KEY, **ACKS_LATE, lock_hold="workflow")
def retries_with_the_lock_of_its_workflow(self, account):
    return retries_once(self, account)


@app.task(base=LockedTask, bind=True, lock_key=KEY, **ACKS_LATE, lock_order="sent")
def retries_in_its_order(self, account):
    return retries_once(self, account)


@app.task(base=LockedTask, bind=True, lock_key=KEY, **ACKS_LATE)
def retries_and_runs_on(self, account):
    result = work(self, account)
    if len(runs(account)) == 1:
        raise self.retry(countdown=3)
    journal.wait_for(f"end {account}", 30)
    return result


def twice_for_nothing(self: Any, account: str, error: Exception) -> str:
    result = work(self, account)
    if len(runs(account)) < 3:
        raise error
    return result


@app.task(base=LockedTask, bind=True, lock_key=KEY, acks_late=True)
def rejects(self, account):
    return twice_for_nothing(self, account, Reject("not now", requeue=False))


@app.task(
    base=LockedTask, bind=True, lock_key=KEY, acks_late=True, acks_on_failure_or_timeout=False
)
def fails_unacknowledged(self, account):
    return twice_for_nothing(self, account, ValueError("not now"))


AUTORETRIED = {
    "bind": True,
    "acks_late": True,
    "acks_on_failure_or_timeout": False,
    "autoretry_for": (ValueError,),
}


@app.task(
    base=LockedTask, lock_key=KEY, retry_kwargs={"countdown": 3, "max_retries": 2}, **AUTORETRIED
)
def autoretries_unacknowledged(self, account):
    result = work(self, account)
    if len(runs(account)) == 1:
        raise ValueError("not now")
    return result


@app.task(base=LockedTask, lock_key=KEY, retry_kwargs={"max_retries": 0}, **AUTORETRIED)
def autoretries_in_vain_unacknowledged(self, account):
    return twice_for_nothing(self, account, ValueError("not now"))


# A task with each is refused its lock, if that is held.
REFUSED = {
    "raises": {"lock_on_conflict": "raise"},
    "drops": {"lock_on_conflict": "drop"},
    "blocks": {"lock_on_conflict": "block", "lock_max_wait": 0.3},
    "waits": {"lock_on_conflict": "wait", "lock_max_wait": 0.3},
    "retries": {"lock_on_conflict": "retry", "lock_max_wait": 0.3},
    "is one too many": {"lock_max_parked": 1},
    "waits in its order": {"lock_order": "sent", "lock_max_wait": 0.3},
    "is misled": {"lock_on_conflict": lambda conflict: "somewhere"},
}


def refused(**options: Any) -> Any:
    name = str(options.pop("name"))

    @app.task(base=LockedTask, bind=True, lock_key=KEY, name=name, **options)
    def task(self: Any, account: str) -> str:
        return work(self, account)

    return task


may_be_refused = {
    acks: {
        how: refused(name=f"{how}, acked {acks}", **kinds, **also) for how, kinds in REFUSED.items()
    }
    for acks, also in (("early", {}), ("late", ACKS_LATE))
}
IN_VAIN = {"lock_on_conflict": "raise", "acks_late": True, "acks_on_failure_or_timeout": False}
is_refused_unacknowledged = refused(name="is_refused_unacknowledged", **IN_VAIN)
retries_its_conflict = refused(
    name="retries_its_conflict",
    **IN_VAIN,
    autoretry_for=(LockConflict,),
    retry_kwargs={"countdown": 3, "max_retries": 1},
)


class KeepsWhoStoresIt:
    """A result that is long in being stored: until then the lock is free, and nobody knows."""

    def __init__(self, account: str) -> None:
        self.account = account

    def __json__(self):
        journal.add("storing", account=self.account)
        journal.wait_for(f"end {self.account}", 30)


@app.task(base=LockedTask, bind=True, lock_key=KEY, **ACKS_LATE)
def is_long_in_storing_its_result(self, account):
    result = work(self, account)
    return KeepsWhoStoresIt(account) if len(runs(account)) == 1 else result


class KillsWhoStoresIt:
    """A result whose process dies between the release of the lock and the end of its storing."""

    def __json__(self):
        os.kill(os.getpid(), signal.SIGKILL)


def dies_or_works(self: Any, account: str) -> Any:
    work(self, account)
    return KillsWhoStoresIt() if len(runs(account)) == 1 else f"run {len(runs(account))}"


@app.task(base=LockedTask, bind=True, lock_key=KEY, **ACKS_LATE)
def dies_before_its_result_is_stored(self, account):
    return dies_or_works(self, account)


@app.task(base=LockedTask, bind=True, lock_key=KEY, **ACKS_LATE, lock_on_conflict="retry")
def comes_back_and_dies_before_its_result_is_stored(self, account):
    return dies_or_works(self, account)


@app.task(base=LockedTask, bind=True, lock_key=KEY, **ACKS_LATE)
def retries_and_dies_before_its_result_is_stored(self, account):
    work(self, account)
    number = len(runs(account))
    if number == 1:
        raise self.retry(countdown=0)
    return KillsWhoStoresIt() if number == 2 else f"run {number}"


@task_postrun.connect
def over(args=(), state=None, **_):
    """At the end of each delivery, also of one whose body did not run."""
    journal.add("over", account=args[0], state=state)


@task_failure.connect
def failed(args=(), **_):
    """Its state is stored."""
    journal.add("failed", account=args[0])
