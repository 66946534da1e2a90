"""Tasks whose body is not called by way of `run`; and one that only looks locked."""

from __future__ import annotations

from celery_relock import LockedTask
from tests.support import make_app

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


class CalledByAnotherWay(LockedTask):
    pass


@app.task(base=CalledByAnotherWay, lock_key=KEY)
def called_by_another_way(account):
    return account


# As a tracer would that puts a call of its own into the class and finds the body by itself.
type(called_by_another_way._get_current_object()).__call__ = lambda self, *args: args


@app.task(base=AnswersItself, lock_key=False)
def takes_no_lock(account):
    return account


@app.task(lock_key=KEY, lock_ttl=60)
def looks_locked(account):
    return account
