"""What a task sees of its lock as `self.lock`, and the errors that reach whoever asked for it."""

from __future__ import annotations

import threading
from typing import Any

from celery import current_task

from celery_relock import LockedTask
from celery_relock.engines import engine_for
from celery_relock.errors import LockConflict, LockLost, RelockError
from tests.support import Journal, make_app

KEY = "account:{account}"

app = make_app(
    __name__,
    task_annotations={
        "tests.task.apps.declaration.annotated": {"lock_key": KEY, "lock_ttl": 7},
        "tests.task.apps.declaration.annotated_with_a_function": {
            "lock_key": lambda account: f"account:{account}"
        },
        "*": {"soft_time_limit": 30},
    },
    relock_ttl=11,
)
journal = Journal.from_env()


def everything(hold: Any) -> dict[str, Any]:
    hold.check()
    return {
        "name": hold.name,
        "owner": hold.owner,
        "fence": hold.fence,
        "reentered": hold.reentered,
        "continuous": hold.continuous,
        "lost": hold.lost,
        "remaining": hold.remaining,
    }


@app.task(base=LockedTask, bind=True, lock_key=KEY)
def shows(self, account):
    return everything(self.lock)


@app.task(base=LockedTask, lock_key=KEY)
def shows_unbound(account):
    return everything(current_task.lock)


@app.task(base=LockedTask)
def annotated(account):
    return everything(current_task.lock)


@app.task(base=LockedTask)
def annotated_with_a_function(account):
    return everything(current_task.lock)


@app.task(base=LockedTask, bind=True, lock_key=["account:{account}", "other:{account}"])
def shows_two(self, account):
    return {**everything(self.lock), "fences": self.lock.fences}


@app.task(base=LockedTask, bind=True, lock_key=False)
def has_no_lock(self, account):
    return everything(self.lock)


@app.task(base=LockedTask, bind=True, lock_key=KEY)
def asks_in_a_thread(self, account):
    said = []

    def ask():
        try:
            said.append(self.lock.name)
        except RelockError as error:
            said.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return said[0]


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_ttl=0.6)
def loses_its_lock(self, account):
    engine = engine_for(app.conf.relock_url, app.conf.relock_namespace)
    before = everything(self.lock)
    engine.backend.force_release(f"account:{account}")
    for _ in range(100):
        if self.lock.lost:
            break
        threading.Event().wait(0.02)
    inner = ""
    try:
        shows(account)
    except LockLost as error:
        inner = str(error)
    try:
        self.lock.check()
    except LockLost as error:
        return {
            "inner": inner,
            "before": before["lost"],
            "after": self.lock.lost,
            "remaining": self.lock.remaining,
            "continuous": self.lock.continuous,
            "error": str(error),
        }


@app.task(bind=True)
def raises_a_conflict(self, pickled=False):
    raise LockConflict("in the way", name="account:7", owner="somebody", remaining=1.5)


@app.task(base=LockedTask, bind=True, lock_key="account:{account}")
def set_afterwards(self, account):
    return self.lock.remaining


@app.task(base=LockedTask, bind=True, name="celery.shows", lock_key=KEY)
def named_like_one_of_celery(self, account):
    return everything(self.lock)


@app.on_after_finalize.connect
def set_up(sender, **_):
    set_afterwards.lock_ttl = 5
