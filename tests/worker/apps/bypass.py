"""Tasks whose body is not called by way of `run`; and one that only looks locked."""

from __future__ import annotations

import pickle
from traceback import walk_tb

from celery.signals import task_failure

from celery_relock import LockedTask
from tests.support import Journal, make_app

KEY = "account:{account}"

app = make_app(__name__)
journal = Journal.from_env()


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


@app.task
def calls_directly(name, account):
    return app.tasks[name](account)


@app.task(base=AnswersItself, lock_key=False)
def takes_no_lock(account):
    return account


@app.task(lock_key=KEY, lock_ttl=60)
def looks_locked(account):
    return account


@app.task(base=LockedTask, key=KEY)
def misnames_its_key(account):
    return account


def fails(account):
    raise ValueError(account)


fails_plain = app.task(name="fails_plain")(fails)
fails_locked = app.task(
    name="fails_locked", base=LockedTask, lock_key=KEY, lock_order="sent", lock_dedup="until_done"
)(fails)
refused = app.task(name="refused", base=LockedTask, lock_key=KEY, lock_on_conflict="raise")(fails)


@task_failure.connect
def _tell_failure(sender, args, einfo, traceback, **_):
    """What the pool sends, and what a tracer reads."""
    frames = [frame.f_code.co_name for frame, _ in walk_tb(traceback)]
    size = len(pickle.dumps(einfo))
    journal.add("failed", account=args[0], task=sender.name, size=size, frames=frames)
