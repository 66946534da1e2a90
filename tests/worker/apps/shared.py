"""Tasks that share a lock, and tasks that hold it alone."""

from __future__ import annotations

from typing import Any

from celery_relock import LockedTask, locked
from celery_relock.errors import LockConflict, LockDeadlock
from tests.support import Journal, make_app

KEY = "account:{account}"

app = make_app(__name__, worker_prefetch_multiplier=1)
journal = Journal.from_env()


def be_inside(task: Any, account: str) -> dict[str, Any]:
    """Until the test opens the gate of this task."""
    told = {"account": account, "id": task.request.id, "fence": task.lock.fence}
    journal.add("begun", **told)
    journal.wait_for(f"go {task.request.id}", 30)
    journal.add("done", **told)
    return told


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_mode="shared")
def reads(self, account):
    return be_inside(self, account)


@app.task(base=LockedTask, bind=True, lock_key=KEY)
def writes(self, account):
    return be_inside(self, account)


@app.task(
    base=LockedTask,
    bind=True,
    lock_key=KEY,
    lock_mode=lambda changes: "exclusive" if changes else "shared",
)
def either(self, account, changes):
    return be_inside(self, account)


@app.task(base=LockedTask, bind=True, lock_key=["tenant", KEY], lock_mode=["shared", "exclusive"])
def of_a_tenant(self, account):
    return be_inside(self, account)


@app.task(base=LockedTask, bind=True, lock_key=KEY)
def writes_and_lets_others_read(self, account):
    self.lock.downgrade()
    return be_inside(self, account)


@app.task(base=LockedTask, bind=True, lock_key=KEY)
def fence(self, account):
    return self.lock.fence


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_mode="shared")
def shared_fence(self, account):
    return self.lock.fence, self.lock.reentered


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_mode="shared")
def reads_and_then_writes(self, account):
    try:
        fence(account)
    except LockDeadlock as error:
        return error.reason


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_on_conflict="raise")
def fence_at_once(self, account):
    return self.lock.fence


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_on_conflict="retry")
def fence_sent_again(self, account):
    return self.lock.fence


@app.task(base=LockedTask, lock_key=KEY, lock_mode="shared")
def reads_and_then_writes_at_once(account):
    try:
        fence_at_once(account)
    except LockConflict as error:
        return type(error).__name__, error.reason


@app.task(base=LockedTask, bind=True, lock_key=KEY)
def writes_and_then_reads(self, account):
    return self.lock.fence, *shared_fence(account)


@app.task(base=LockedTask, bind=True, lock_key=KEY)
def downgrades_within(self, account, how):
    how(self.lock.downgrade)
    self.lock.downgrade()
    return self.lock.lost


@app.task(base=LockedTask, lock_key=KEY)
def calls(account, what):
    what()


@app.task
def plain(what):
    what()


@app.task(base=LockedTask, lock_key=KEY, lock_mode="shared")
def reads_by_a_workflow(account, meanwhile):
    meanwhile()
    flow = locked(shared_fence.si(account), key=KEY.format(account=account), mode="shared")
    return flow.apply().get()


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_hold="workflow", lock_on_gap="raise")
def downgrades_for_the_next_step(self, account):
    self.lock.downgrade()


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_keep_on_retry=True, max_retries=1)
def downgrades_and_retries(self, account, countdown):
    if not self.request.retries:
        self.lock.downgrade()
        be_inside(self, account)
        raise self.retry(countdown=countdown)
    return be_inside(self, account) | {"continuous": self.lock.continuous}


@app.task(bind=True)
def step(self, account):
    journal.add("begun", account=account, id=self.request.id, fence=0)
    journal.wait_for(f"go {self.request.id}", 30)


@app.task(bind=True)
def adds_a_writer(self, account):
    self.add_to_chord(fence.si(account))
    journal.add("begun", account=account, id=self.request.id, fence=0)
    journal.wait_for(f"go {self.request.id}", 30)
