"""Tasks whose body is not called by way of `run`; and one that only looks locked."""

from __future__ import annotations

from celery_relock import LockedTask
from tests.celery.apps.private import make_app

KEY = "account:{account}"

app = make_app(__name__)


@app.task(base=LockedTask, lock_key=KEY)
def locked(account):
    return account


@app.task(base=LockedTask, lock_key=KEY)
def instrumented(account):
    return account


# As a library would that finds the body by way of Celery's own attribute.
instrumented.run = instrumented.__wrapped__


class AnswersItself(LockedTask):
    def __call__(self, *args, **kwargs):
        return "an answer of its own"


@app.task(base=AnswersItself, lock_key=KEY)
def answers_itself(account):
    return account


@app.task(base=AnswersItself, lock_key=False)
def takes_no_lock(account):
    return account


@app.task(lock_key=KEY, lock_ttl=60)
def looks_locked(account):
    return account
