"""Tasks that a hook of theirs puts back, once their bodies have ended."""

from __future__ import annotations

from celery import Task
from celery.exceptions import Reject

from celery_relock import LockedTask
from tests.support import Journal, make_app

app = make_app(__name__, task_acks_late=True)
journal = Journal.from_env()


class PutBack:
    """A task that is put back twice."""

    hook = ""

    def _again(self, hook):
        if hook == self.hook and len(journal.events(self.name)) < 3:
            raise Reject("once more", requeue=True)

    def on_success(self, *_):
        self._again("on_success")

    def on_failure(self, *_):
        self._again("on_failure")

    def after_return(self, *_):
        self._again("after_return")


class Locked(PutBack, LockedTask):
    abstract = True
    lock_key = "{account}"


class Plain(PutBack, Task):
    abstract = True


HOW = {
    "locked": {"base": Locked},
    "ordered": {"base": Locked, "lock_order": "sent"},
    "marked": {"base": Locked, "lock_dedup": "until_done"},
    "cools": {"base": Locked, "lock_cooldown": 60, "lock_on_conflict": "drop"},
    "plain": {"base": Plain},
    "step": {"base": Plain},
}


def _task(how, hook):
    name = f"{how} {hook}"

    @app.task(bind=True, hook=hook, name=name, **HOW[how])
    def body(self, account):
        journal.add(name, account=account)
        if hook == "on_failure" and len(journal.events(name)) < 3:
            raise ConnectionError("third time lucky")

    return body


HOOKS = ("on_success", "on_failure", "after_return")
tasks = {(how, hook): _task(how, hook) for how in HOW for hook in HOOKS}
HOW["last"] = {}
tasks["last", ""] = _task("last", "")
