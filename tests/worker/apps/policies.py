"""The same task under every policy, and canvas around it."""

from __future__ import annotations

import uuid
from typing import Any

from celery import chain, chord, group

from celery_relock import LockedTask
from celery_relock.errors import LockConflict
from celery_relock.options import POLICIES
from tests.support import Journal, make_app

KEY = "account:{account}"

app = make_app(__name__)
journal = Journal.from_env()


def work(account: str) -> str:
    return "ran"


def as_the_name_says(conflict: Any) -> str:
    return str(conflict.name).rpartition("-")[2]


def fails(conflict: Any) -> str:
    raise KeyError(conflict.name)


def locked_task(name: str, policy: Any) -> Any:
    return app.task(name=name, base=LockedTask, lock_key=KEY, lock_on_conflict=policy)(work)


locked = {policy: locked_task(f"locked.{policy}", policy) for policy in POLICIES}
locked["callable"] = locked_task("locked.callable", as_the_name_says)
locked["nonsense"] = locked_task("locked.nonsense", lambda conflict: "nonsense")
locked["fails"] = locked_task("locked.fails", fails)


class AnswersForItself(LockedTask):
    def __call__(self, *args, **kwargs):
        try:
            return super().__call__(*args, **kwargs)
        except LockConflict:
            return "busy"


locked["answered"] = app.task(
    name="locked.answered", base=AnswersForItself, lock_key=KEY, lock_on_conflict="raise"
)(work)


@app.task
def value(number):
    return number


@app.task
def note(result, account):
    journal.add("noted", account=account)
    return [result, account]


@app.task
def collect(results):
    return results


@app.task(bind=True)
def replaces(self, name, account):
    raise self.replace(locked[name].si(account))


@app.task
def calls(name, account):
    return ["after", locked[name](account)]


def plain(task, account):
    sent = task.apply_async((account,), link=note.s(account), link_error=note.si("", account))
    return sent, sent


def chain_step(task, account):
    last = chain(value.si(1), task.si(account), note.s(account)).apply_async()
    return last.parent, last


def chord_member(task, account):
    body = chord([value.si(1), task.si(account), value.si(3)], collect.s()).apply_async()
    return body.parent[1], body


def group_member(task, account):
    whole = group(value.si(1), task.si(account), value.si(3)).apply_async()
    return whole[1], whole


def link(task, account):
    task_id = str(uuid.uuid4())
    caller = value.apply_async((1,), link=task.si(account).set(task_id=task_id))
    return app.AsyncResult(task_id), caller


def replaced_task(task, account):
    name = task.name.partition(".")[2]
    last = chain(replaces.si(name, account), note.s(account)).apply_async()
    return last.parent, last


def inline_call(task, account):
    sent = calls.delay(task.name.partition(".")[2], account)
    return sent, sent


#: Each sends its canvas; the result of the locked run, and that of the canvas.
PLACES = {
    "plain task": plain,
    "step of a chain": chain_step,
    "member of a chord": chord_member,
    "member of a group": group_member,
    "link": link,
    "replacement (`self.replace`)": replaced_task,
    "inline call": inline_call,
}


def nested(task, account):
    """Canvas in which more than one result is still to come when the locked run is dropped."""
    return {
        "group at the end": chain(task.si(account), group(value.si(1), value.si(2))),
        "chord at the end": chain(task.si(account), group(value.si(1), value.si(2)), collect.s()),
        "chain in a chord": chord([chain(task.si(account), value.s()), value.si(2)], collect.s()),
        "group in a chain in a chord": chord(
            [chain(task.si(account), group(value.s(), value.s())), value.si(2)], collect.s()
        ),
        "long chain": chain(value.si(1), task.si(account), value.s(), value.s(), value.s()),
    }
