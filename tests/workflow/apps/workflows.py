"""Steps of workflows that share one lock: locked and plain ones, which end in every way."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Task, chain, group
from celery.exceptions import Ignore, Reject, Retry
from celery.signals import after_task_publish, before_task_publish

from celery_relock import Lock, LockedTask, locked
from celery_relock.engine import reentrancy
from celery_relock.errors import LockLost
from celery_relock.signals import lock_acquired, lock_lost
from celery_relock.workflow import steps
from tests.support import Journal, make_app
from tests.support.overtaken import Overtaken

KEY = "account:{account}"

app = make_app(
    __name__,
    task_routes=(lambda name, args, kwargs, options, task: routes(name, args, task),),
)
if word := os.environ.get("RELOCK_TEST_CHOOSES"):
    app.conf.relock_on_conflict = lambda conflict: word
journal = Journal.from_env()


#: Where this process is to die, if anywhere.
fatal: set[str] = set()


def may_die(place: str) -> None:
    if place in fatal:
        os.kill(os.getpid(), signal.SIGKILL)


def _may_die_first(release: Any) -> Any:
    def releases(*args: Any, **kwargs: Any) -> None:
        may_die("release")
        release(*args, **kwargs)

    return releases


steps.release = _may_die_first(steps.release)
before_task_publish.connect(lambda **_: may_die("publish"), weak=False)


def _is_killed_by_what_it_sends(body: Any = None, **_: Any) -> None:
    if steps.holds_here() and body[1].get("do") == "kill the sender":
        os.kill(os.getpid(), signal.SIGKILL)


before_task_publish.connect(_is_killed_by_what_it_sends, weak=False)
after_task_publish.connect(lambda **_: may_die("published"), weak=False)


@lock_acquired.connect
def _tell_the_wait(names: Any, waited: float, of_workflow: bool, **_: Any) -> None:
    if of_workflow:
        journal.add("acquired", lock=names[0], waited=waited)


@lock_lost.connect
def _tell_the_loss(names: Any, held: float, of_workflow: bool, **_: Any) -> None:
    journal.add("lost", lock=names[0], held=held, of_workflow=of_workflow)


def permit_of(task: Any) -> tuple[int, bool]:
    """The fence under which a step runs, and whether the permit has been held all the time."""
    held = steps.holds_here()
    found = {fence for hold in held for fence in hold.lock.fences}
    unbroken = all(hold.lock.unbroken for hold in held)
    if isinstance(task, LockedTask):
        found.add(task.lock.fence)
        assert task.lock.continuous == unbroken
    assert len(found) < 2, found
    assert not any(hold.lease.lost for hold in held)
    return (found.pop() if found else 0), unbroken


@contextmanager
def inside(task: Any, account: str, name: str) -> Iterator[None]:
    fence, unbroken = permit_of(task)
    told = {"account": account, "fence": fence, "step": name, "unbroken": unbroken}
    journal.add("enter", **told, holds=reentrancy.executions())
    try:
        yield
    finally:
        journal.add("leave", **told)


def flat(values: Any) -> list[str]:
    if values is None:
        return []
    return [one for each in values for one in flat(each)] if isinstance(values, list) else [values]


def more(task: Any, account: str, name: str) -> Any:
    """Another step, sent to where this one came from."""
    place = task.request.delivery_info["routing_key"]
    return plain.s(account=account, name=name).set(queue=place)


class Again(Exception):
    """Celery's autoretry makes a retry of it."""


#: Options of the tasks that end in every way.
AUTORETRY = {
    "bind": True,
    "autoretry_for": (Again, LockLost),
    "retry_kwargs": {"countdown": 0, "max_retries": 1},
}


def act(task: Any, do: str, account: str, name: str) -> None:  # noqa: C901  # one line an ending
    first = task.request.retries == 0
    if do.startswith("wait"):
        journal.wait_for(f"go on {account}")
    if do.startswith("fail"):
        raise ValueError(name)
    if do.endswith("autoretry in vain") or (do.endswith("autoretry") and first):
        raise Again(name)
    if do.endswith("retry") and first:
        raise task.retry(countdown=0)
    if do == "ignore":
        raise Ignore
    if do.startswith("reject"):
        raise Reject(name, requeue=do.endswith("put back"))
    if do == "replace":
        raise task.replace(more(task, account, f"{name}'"))
    if do == "replace by a chain":
        raise task.replace(chain(more(task, account, f"{name}{tail}") for tail in "'\""))
    if do == "replace by a group":
        raise task.replace(group(more(task, account, f"{name}{tail}") for tail in "'\""))
    if do == "replace by a locked group":
        both = group(more(task, account, f"{name}{tail}") for tail in "'\"")
        raise task.replace(locked(both, key=f"account:{account}"))
    if do == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if "kill at " in do:
        fatal.add(do.partition("kill at ")[2])
    if do == "tell its state":
        journal.add("state", account=account, is_now=task.AsyncResult(task.request.id).state)
    if do == "slow":
        time.sleep(0.3)


def body(task: Any, previous: Any, account: str, name: str, do: str) -> list[str]:
    with inside(task, account, name):
        act(task, do, account, name)
    return [*flat(previous), name]


@app.task(**AUTORETRY)
def plain(self, previous=None, *, account, name, do=""):
    return body(self, previous, account, name, do)


class StoresLate(Task):
    """Time passes between the end of its hold and the state RETRY."""

    def __call__(self, *args, **kwargs):
        try:
            return super().__call__(*args, **kwargs)
        except Retry:
            time.sleep(1.0)
            journal.add("over", **kwargs)
            raise


@app.task(base=StoresLate, bind=True)
def stores_late(self, previous=None, *, account, name, do=""):
    return body(self, previous, account, name, do)


@app.task(acks_late=True)
def leaves_no_result(account):
    raise Ignore


class OvertakenPlain(Overtaken, Task):
    abstract = True


@app.task(base=OvertakenPlain)
def is_overtaken(previous=None, *, account, name, do=""):
    raise ValueError(account)


class EndsLate(Task):
    """Its hold is left to the next step long after that was sent."""

    def after_return(self, status, retval, task_id, args, kwargs, einfo):
        journal.wait_for(f"go on {kwargs['account']}", 30)


@app.task(base=EndsLate, bind=True)
def ends_late(self, previous=None, *, account, name, do=""):
    return body(self, previous, account, name, do)


class Recovers(Task):
    """Handles what its body raises, outside of the body's lock."""

    def __call__(self, *args, **kwargs):
        try:
            return super().__call__(*args, **kwargs)
        except ValueError:
            fine = {**kwargs, "do": ""}
            if kwargs["do"].endswith("calls it again"):
                return super().__call__(*args, **fine)
            if kwargs["do"].endswith("retries"):
                raise self.retry(countdown=0.3, kwargs=fine) from None
            return [kwargs["name"]]


class RecoversLocked(Recovers, LockedTask):
    abstract = True


@app.task(base=Recovers, bind=True)
def recovers(self, previous=None, *, account, name, do=""):
    return body(self, previous, account, name, do)


@app.task(base=RecoversLocked, bind=True, lock_key=KEY)
def recovers_locked(self, previous=None, *, account, name, do=""):
    return body(self, previous, account, name, do)


@app.task(base=LockedTask, lock_key=KEY)
def rescues(request, error, traceback, account):
    """An error callback that Celery calls where the step has failed."""
    with inside(rescues, account, "rescue"):
        pass


@app.task(base=LockedTask, lock_key=KEY, **AUTORETRY)
def locking(self, previous=None, *, account, name, do=""):
    return body(self, previous, account, name, do)


@app.task(base=LockedTask, lock_key=KEY, lock_hold="workflow", **AUTORETRY)
def holding(self, previous=None, *, account, name, do=""):
    return body(self, previous, account, name, do)


#: Nothing but its message shows that it has yet to run.
UNSTORED = {"bind": True, "acks_late": True, "ignore_result": True}


@app.task(**UNSTORED)
def unstored(self, previous=None, *, account, name, do=""):
    body(self, previous, account, name, do)


@app.task(base=LockedTask, lock_key=KEY, lock_hold="workflow", **UNSTORED)
def holding_unstored(self, previous=None, *, account, name, do=""):
    body(self, previous, account, name, do)


@app.task(bind=True, base=LockedTask, lock_key=KEY, lock_hold="workflow", lock_gap_ttl=0.5)
def holding_shortly(self, previous=None, *, account, name, do=""):
    return body(self, previous, account, name, do)


@app.task(bind=True, base=LockedTask, lock_key=KEY, lock_hold="workflow", lock_max_wait=60)
def holding_patiently(self, previous=None, *, account, name, do=""):
    return body(self, previous, account, name, do)


@app.task(bind=True, base=LockedTask, lock_key="member:{account}")
def excluding(self, previous=None, *, account, name, do=""):
    """Takes another lock inside of the workflow's."""
    with inside(type("_", (), {}), f"member {account}", name):
        time.sleep(0.05)
    return [*flat(previous), name]


@app.task(base=LockedTask, lock_key=[KEY, "member:{account}"])
def wants_both(account):
    return account


def tells_the_gap(task: Any, account: str, name: str) -> None:
    """It tells whether its permit was held all the time, and so does each task that it calls."""
    journal.add("told", account=account, step=name, unbroken=task.lock.continuous)
    if "of" not in name:
        for each in (tells_by_the_same, tells_by_one_more, tells_by_another):
            each(account=account, name=f"{each.__name__} of {name}")


@app.task(bind=True, base=LockedTask, lock_key=KEY)
def tells_by_the_same(self, previous=None, *, account, name, do=""):
    tells_the_gap(self, account, name)


@app.task(bind=True, base=LockedTask, lock_key=[KEY, "more:{account}"])
def tells_by_one_more(self, previous=None, *, account, name, do=""):
    tells_the_gap(self, account, name)


@app.task(bind=True, base=LockedTask, lock_key="another:{account}")
def tells_by_another(self, previous=None, *, account, name, do=""):
    tells_the_gap(self, account, name)


@app.task(bind=True)
def joined(self, results, *, account, name):
    return body(self, sorted(flat(results)), account, name, "")


@app.task(bind=True)
def adds_a_member(self, *, account, name):
    with inside(self, account, name):
        self.add_to_chord(more(self, account, f"{name}+"))
    return [name]


@app.task
def of_item(item):
    return item * 2


@app.task
def adds(x, y=0):
    return x + y


@app.task
def is_routed(to="of-the-routes"):
    pass


def routes(name, args, task):
    if name != is_routed.name:
        return None
    assert task.name == name
    return {"queue": args[0] if args else "of-the-routes"}


@app.task
def probes(previous, key):
    """Whether a stranger could take the lock now."""
    lock = Lock(app.conf.relock_url, key, namespace=app.conf.relock_namespace, owner="stranger")
    taken = []

    def try_it():
        taken.append(lock.acquire(blocking=False))
        if taken[0]:
            lock.release()  # else whoever comes next waits until the lease is over

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    return [previous, taken[0]]


@app.task(bind=True)
def tells_its_stamps(self, previous):
    held = steps.holds_here()
    return self.request.stamps, [fence for each in held for fence in each.lock.fences]


@app.task(bind=True)
def tells_when(self):
    """Where it was sent to, and for when."""
    return self.request.delivery_info["routing_key"], self.request.eta


@app.task(bind=True)
def adds_nothing(self, previous=None, *, account, name, do=""):
    """A step of two workflow locks: it has no fence that is the fence."""
    journal.add("enter", account=f"two {account}", step=name)
    act(self, do, account, name)
    return flat(previous)


@app.task
def meets(account, count):
    """Comes back when so many are in at the same time."""
    journal.add("met", account=f"meets {account}", step="")
    journal.wait_for(
        lambda events: sum(e.data.get("account") == f"meets {account}" for e in events) >= count
    )
    return "met"
