"""Tasks that send and call others, for a tenant: in each way, and at each place."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context

from celery import chain, chord, group
from celery.exceptions import Reject

from celery_relock import LockedTask, locked
from tests.support import Journal
from tests.support.apps import make_app

#: Of the process that sends. A worker has no tenant of its own.
tenant: ContextVar[str] = ContextVar("tenant", default="")

app = make_app(__name__, relock_prefix=tenant.get, task_track_started=True)


@app.task(bind=True, base=LockedTask, lock_key="account:{account}")
def look(self, account):
    Journal.from_env().add("looked", name=self.lock.name, account=account)
    return self.lock.name


@app.task
def plain():
    """No locked task: what is behind it in a chain may be one."""


def send(way, account):
    """Send `look` in one of these ways."""
    return WAYS[way](account)


@app.task
def sends(way, account):
    send(way, account)


@app.task(base=LockedTask, lock_key="nightly:{account}")
def sends_under_lock(way, account):
    send(way, account)


@app.task
def sends_for(name, way, account):
    token = tenant.set(name)
    try:
        send(way, account)
    finally:
        tenant.reset(token)


@app.task(base=LockedTask, lock_key="nightly:{account}")
def sends_for_under_lock(name, way, account):
    sends_for(name, way, account)


@app.task
def sends_chord(member, body):
    chord([app.signature(member)], app.signature(body)).delay()


@app.task
def leaves(name):
    """Celery's next task in this process has the same context."""
    tenant.set(name)


WAYS = {
    "delay": look.delay,
    "by its name": lambda account: app.send_task(look.name, (account,)),
    "behind a plain step": lambda account: chain(plain.si(), look.si(account)).delay(),
    "behind two": lambda account: chain(plain.si(), plain.si(), look.si(account)).delay(),
    "as a link": lambda account: plain.apply_async(link=look.si(account)),
    "in a group": lambda account: group(plain.si(), look.si(account)).delay(),
    "as a chord's body": lambda account: chord([plain.si()], look.si(account)).delay(),
    "in a locked canvas": lambda account: locked(
        chain(plain.si(), look.si(account)), key=f"all:{account}"
    ).delay(),
}


# -- In threads ----------------------------------------------------------------------------------


@app.task
def in_a_thread(how, account):
    return THREADS[how](account)


@app.task(base=LockedTask, lock_key="batch:{account}")
def in_a_thread_under_lock(how, account):
    return THREADS[how](account)


@app.task(base=LockedTask, lock_key="batch:{account}")
def calls_one_that_does(how, account):
    return in_a_thread(how, account)


def _to_thread(call, *args):
    return asyncio.run(asyncio.to_thread(call, *args))


def _submit(call, *args):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(copy_context().run, call, *args).result()


def _eagerly(account):
    return plain_that_calls.apply((account,)).get(disable_sync_subtasks=False)


@app.task
def plain_that_calls(account):
    return look(account)


THREADS = {
    "to_thread": lambda account: _to_thread(look, account),
    "an executor": lambda account: _submit(look, account),
    "apply": lambda account: _submit(_eagerly, account),
    "lock_for": lambda account: _submit(lambda: look.lock_for(account).name),
    "delay": lambda account: _wait(_to_thread(look.delay, account)),
    "by its name": lambda account: _wait(_submit(app.send_task, look.name, (account,))),
}


@app.task(base=LockedTask, lock_key="batch:{account}")
def looks_without_tenant(how, account):
    tenant.set("")
    return THREADS[how](account)


@app.task(base=LockedTask, lock_key="nightly:{account}")
def applies_for(name, how, account):
    """What it applies is for another tenant than it is itself."""
    token = tenant.set(name)
    try:
        applied = looks_without_tenant.apply((how, account))
    finally:
        tenant.reset(token)
    return applied.get(disable_sync_subtasks=False)


def _wait(sent):
    return sent.get(timeout=20, disable_sync_subtasks=False)


# -- When a task ends otherwise than by its body --------------------------------------------------


class Hooked(LockedTask):
    abstract = True

    def on_failure(self, exc, task_id, args, kwargs, einfo):
        look.delay(f"{args[1]}-on_failure")


def _end(how):
    if how == "fails":
        raise ValueError
    if how == "is rejected":
        raise Reject("", requeue=False)
    if how == "exits":
        raise SystemExit(2)
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


@app.task(base=Hooked, lock_key="work:{account}")
def works(how, account):
    _end(how)


@app.task
def works_without_lock(how, account):
    _end(how)


@app.task
def called_back(request, exc, traceback):
    """Celery calls it where it stores the failure: it has the request as its first argument."""
    account = request.kwargs["account"] if "account" in request.kwargs else request.args[-1]
    look(f"{account}-called")
    look.delay(f"{account}-sent")


@app.task(base=LockedTask, lock_key="callbacks")
def called_back_under_lock(request, exc, traceback):
    Journal.from_env().add("looked", name=called_back_under_lock.lock.name)
    called_back(request, exc, traceback)
