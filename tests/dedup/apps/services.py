"""Two programs with one broker: one stores, and the other one knows its tasks by name alone.

RELOCK_TEST_SERVICE is "stores", "sends", or "plain": that one has never heard of celery-relock.
"""

from __future__ import annotations

import os

from celery import signature

from tests.support import Journal, make_app

SERVICE = os.environ["RELOCK_TEST_SERVICE"]

app = make_app("services", worker_prefetch_multiplier=1)
queue = app.conf.task_default_queue
app.conf.update(
    task_default_queue=f"{queue}-{SERVICE}",
    task_routes={"stores.*": {"queue": f"{queue}-stores"}},
)
journal = Journal.from_env()


def store(name, *more):
    """The step of the other service."""
    return signature("stores.store", args=(name, *more), app=app)


def total():
    return signature("stores.total", app=app)


if SERVICE != "plain":
    from celery_relock import LockedTask

if SERVICE == "stores":
    once = {"base": LockedTask, "lock_dedup": "until_done"}

    @app.task(name="stores.store", lock_key="store:{name}", **once)
    def stores(name, number=0):
        journal.add("stored", account=name, number=number)
        return number

    @app.task(name="stores.total", lock_key="total", **once)
    def totals(numbers):
        return sum(numbers)

else:

    @app.task(name=f"{SERVICE}.first")
    def first(name):
        return name

    @app.task(name=f"{SERVICE}.number")
    def number(value):
        return value

    # With a retry, so that the body is called by code of Celery's.
    @app.task(name=f"{SERVICE}.calls", autoretry_for=(LookupError,))
    def calls(name):
        """A call by name out of a body."""
        return store(name, 5).apply_async().id


if SERVICE == "sends":

    @app.task(base=LockedTask, name="sends.locked", autoretry_for=(LookupError,))
    def locked(name):
        """A call by name out of the body of a locked task."""
        return store(name, 6).apply_async().id
