"""Locked tasks that call locked tasks, in every way in which the caller waits for the callee."""

from __future__ import annotations

import time
from typing import Any

from celery import Task, current_task
from celery.signals import task_postrun, task_prerun

from celery_relock import Lock, LockedTask
from celery_relock.declaration import engine_of
from celery_relock.worker.message import workflow
from tests.support import Journal, make_app
from tests.support.permits import holding

KEY = "account:{account}"

app = make_app(__name__)
journal = Journal.from_env()


def holds(lock: str) -> int:
    engine = engine_of(app)
    return len(engine.inspect(lock).holds)


def told(work: Any = None) -> dict[str, Any]:
    """What the running task sees of its lock, before and after `work`."""
    hold = current_task.lock
    with holding(journal, hold):
        inner = work() if work is not None else None
        assert not hold.lost
        return {
            "fence": hold.fence,
            "reentered": hold.reentered,
            "owner": hold.owner,
            "workflow": workflow(),
            "inner": inner,
            "holds": holds(hold.name) if len(hold.names) == 1 else None,
        }


@app.task(base=LockedTask, lock_key=KEY)
def take(account, seconds=0.0):
    return told(lambda: time.sleep(seconds))


@app.task(base=LockedTask, lock_key=KEY, lock_max_wait=0.2)
def impatient(account):
    return told()


@app.task(base=LockedTask, lock_key=KEY)
def another_type(account, deeper=0):
    """Another task type with the same lock name; calls itself `deeper` times in all."""
    return told(lambda: another_type(account, deeper - 1) if deeper else take(account))


@app.task(base=LockedTask, lock_key=KEY)
def calls_directly(account):
    return told(lambda: another_type(account))


@app.task(base=LockedTask, lock_key=KEY)
def calls_three_deep(account):
    return told(lambda: another_type(account, 3))


@app.task(base=LockedTask, lock_key=KEY)
def applies(account):
    return told(lambda: take.apply((account,)).get(disable_sync_subtasks=False))


@app.task(base=LockedTask, lock_key=KEY)
def applies_under_a_direct_call(account):
    return told(lambda: calls_an_apply(account))


@app.task(base=LockedTask, lock_key=KEY)
def calls_an_apply(account):
    return told(lambda: take.apply((account,)).get(disable_sync_subtasks=False))


@app.task(base=LockedTask, lock_key=KEY, bind=True)
def calls_itself(self, account, deep=3):
    return told(lambda: self(account, deep - 1) if deep else None)


@app.task(base=LockedTask, lock_key=KEY, bind=True, lock_max_wait=0.3)
def calls_itself_for_another(self, account, *more):
    return told(lambda: self(*more) if more else None)


@app.task(base=LockedTask, lock_key=KEY)
def calls_a_signature(account):
    return told(lambda: take.s(account)())


@app.task(base=LockedTask, lock_key=KEY)
def maps(account):
    return told(lambda: app.tasks["celery.starmap"](take.s(), [(account,), (account,)]))


@app.task(base=LockedTask, lock_key=KEY)
def enters_a_lock_object(account):
    def work():
        conf = app.conf
        lock = Lock(conf.relock_url, f"account:{account}", namespace=conf.relock_namespace)
        with lock:
            return {"fence": lock.fence, "reentered": True, "inner": take(account)}

    return told(work)


@app.task(base=LockedTask, lock_key=KEY)
def survives_the_failure_of_a_callee(account):
    def work():
        try:
            fails(account)
        except ValueError:
            return take(account)
        raise AssertionError("the callee did not fail")

    return told(work)


@app.task(base=LockedTask, lock_key=KEY)
def fails(account):
    raise ValueError(account)


@app.task(base=LockedTask, lock_key=KEY)
def calls_run_of_another(account):
    """`run` is what the lock lies around."""
    return told(lambda: another.run(account))


@app.task(base=LockedTask, lock_key="other:{account}")
def another(account):
    return {"holds": holds(f"other:{account}")}


@app.task(base=LockedTask, lock_key=["account:{account}", "account:{second}"])
def takes_two(account, second):
    hold = current_task.lock
    return {"fences": hold.fences, "reentered": hold.reentered, "holds": holds(f"account:{second}")}


@app.task(base=LockedTask, lock_key=KEY)
def half_covers(account, second):
    return told(lambda: [takes_two(account, second), {"after": holds(f"account:{second}")}])


@app.task
def unlocked(account):
    """Not a locked task: what it calls takes the lock for itself."""
    return {"workflow": workflow(), "inner": take(account)}


@app.task(base=LockedTask, lock_key=KEY, lock_owner="task")
def owned_by_the_task(account):
    return told(lambda: take(account))


@app.task(base=LockedTask, lock_key=KEY, lock_owner=lambda request: f"of-{request.args[0][:10]}")
def owned_by_a_callable(account):
    return told(lambda: take(account))


@app.task(base=LockedTask, lock_key=KEY, lock_owner=lambda request: None)
def owned_by_nobody(account):
    return told()


def lock_of_a_task(account: str) -> Lock:
    conf = app.conf
    return Lock(conf.relock_url, f"account:{account}", namespace=conf.relock_namespace)


kept: list[Lock] = []


@app.task
def leaves_a_lock(account, where):
    """Acquires a lock and does not release it."""
    lock = lock_of_a_task(account)
    assert lock.acquire(blocking=False)
    if where == "in a variable":
        kept.append(lock)


@app.task
def asks_for_the_lock(account):
    lock = lock_of_a_task(account)
    if acquired := lock.acquire(blocking=False):
        lock.release()
    return acquired


def asks_inside(account: str) -> bool:
    """Whether a lock that lies around the running body is re-entered by it."""
    lock = lock_of_a_task(account)
    if acquired := lock.acquire(blocking_timeout=1):
        lock.release()
    return acquired


class _Around:
    """A `__call__` of the class's own, which lies outside of the task's lock."""

    def __call__(self, account):
        with lock_of_a_task(account):
            return super().__call__(account)


class AroundALockedTask(_Around, LockedTask):
    pass


class AroundAPlainTask(_Around, Task):
    pass


@app.task(base=AroundALockedTask, lock_key=KEY, lock_max_wait=1)
def called_under_its_lock(account):
    return asks_inside(account)


@app.task(base=AroundALockedTask, lock_key="other:{account}", lock_max_wait=1)
def called_under_another_lock(account):
    return asks_inside(account)


@app.task(base=AroundAPlainTask)
def plain_called_under_a_lock(account):
    return asks_inside(account)


@app.task(base=LockedTask, lock_key=KEY, lock_max_wait=1)
def begins_under_its_lock(account):
    return asks_inside(account)


@task_prerun.connect(sender=begins_under_its_lock)
def acquire_before(args, **_):
    kept.append(lock_of_a_task(*args))
    assert kept[-1].acquire()


@task_postrun.connect(sender=begins_under_its_lock)
def release_after(**_):
    kept.pop().release()
