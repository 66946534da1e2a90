"""Tasks whose broker can be taken away, and their locks: the test sits between them and these.
Results are on the Redis behind."""

from __future__ import annotations

from celery_relock import LockedTask
from tests.support import Journal, make_app
from tests.support.overtaken import OvertakenLocked

app = make_app(
    __name__,
    task_publish_retry_policy={"max_retries": 1, "interval_start": 0.05},
    worker_prefetch_multiplier=4,
)
journal = Journal.from_env()


class Arrives(LockedTask):
    """Asks for its lock when the test says so."""

    lock_key = "account:{account}"
    lock_ttl = 2.0

    def before_start(self, task_id, args, kwargs):
        journal.add("arrived", account=args[0])
        journal.wait_for(f"ask {args[0]}", 30)


def work(self, account):
    journal.add("ran", account=account, retries=self.request.retries)
    return self.request.id


def work_until_told(self, account):
    """Ends when the test says so."""
    ran = work(self, account)
    journal.wait_for(f"end {account}", 30)
    return ran


@app.task(name="comes_back", base=Arrives, bind=True, lock_on_conflict="retry", max_retries=0)
def comes_back(self, account):
    return work_until_told(self, account)


@app.task(
    name="comes_back_late",
    base=Arrives,
    bind=True,
    lock_on_conflict="retry",
    max_retries=0,
    acks_late=True,
)
def comes_back_late(self, account):
    return work_until_told(self, account)


@app.task(
    name="comes_back_in_time", base=Arrives, bind=True, lock_on_conflict="retry", soft_time_limit=6
)
def comes_back_in_time(self, account):
    return work(self, account)


@app.task(
    name="waits_for_redis_in_time",
    base=Arrives,
    bind=True,
    lock_on_unavailable="retry",
    soft_time_limit=6,
)
def waits_for_redis_in_time(self, account):
    return work(self, account)


@app.task(base=OvertakenLocked, lock_key="account:{account}", lock_on_unavailable="retry")
def is_overtaken(account):
    raise ValueError(account)


@app.task(name="parked", base=Arrives, bind=True)
def parked(self, account):
    return work(self, account)


@app.task(name="parked_late", base=Arrives, bind=True, acks_late=True)
def parked_late(self, account):
    return work(self, account)


def work_twice(self, account):
    """The first time it is sent again, when the test says so."""
    if not self.request.retries:
        journal.add("arrived", account=account)
        journal.wait_for(f"ask {account}", 30)
        journal.add("ran", account=account, retries=0)
        if hasattr(self, "autoretry_for"):
            raise LookupError(account)
        # Not at once: a state RETRY that is stored late would replace that of the end.
        raise self.retry(countdown=0.5)
    return work(self, account)


def work_once(self, account):
    """Ends when the test says so."""
    journal.add("arrived", account=account)
    journal.wait_for(f"ask {account}", 30)
    return work(self, account)


# Longer than the test waits: what is free before has been released.
LOCKED = {"base": LockedTask, "bind": True, "lock_key": "account:{account}", "lock_ttl": 120}
app.task(work_twice, name="retries", **LOCKED)
app.task(work_twice, name="retries_late", acks_late=True, **LOCKED)
app.task(work_twice, name="retries_and_keeps", lock_keep_on_retry=True, **LOCKED)
app.task(work_twice, name="retries_and_holds", lock_hold="workflow", **LOCKED)
app.task(work_twice, name="retries_once", lock_dedup="until_done", **LOCKED)
app.task(work_twice, name="retries_in_order", lock_order="sent", **LOCKED)
AUTORETRY = {"autoretry_for": (LookupError,), "retry_kwargs": {"countdown": 0.5}}
app.task(work_twice, name="autoretries_and_keeps", lock_keep_on_retry=True, **AUTORETRY, **LOCKED)
app.task(work_twice, name="autoretries_and_holds", lock_hold="workflow", **AUTORETRY, **LOCKED)
app.task(work_twice, name="autoretries_once", lock_dedup="until_done", **AUTORETRY, **LOCKED)
app.task(work_twice, name="autoretries_in_order", lock_order="sent", **AUTORETRY, **LOCKED)
REJECTED = {"acks_late": True, "acks_on_failure_or_timeout": False, "ignore_result": True}
autoretries_or_is_rejected = app.task(
    work_twice, name="autoretries_or_is_rejected", **REJECTED, **AUTORETRY, **LOCKED
)
app.task(work_once, name="goes_on", **LOCKED)
app.task(work_once, name="goes_on_for_the_workflow", lock_hold="workflow", **LOCKED)


@app.task
def note(value, account):
    journal.add("noted", account=account, value=value)
    return value


@app.task
def ping():
    return "pong"
