"""Django's tasks, locked: `python -m tests.dedup.apps.on_commit` says what became of each call.

A process of its own, as Django can be set up once in a process.
"""

from __future__ import annotations

import json

import django
from celery.contrib.django.task import DjangoTask
from celery.signals import after_task_publish
from django.conf import settings
from django.db import transaction

from celery_relock import LockedTask
from celery_relock.errors import DuplicateTask
from tests.support import make_app


class Task(LockedTask, DjangoTask):
    abstract = True


app = make_app(__name__)
sent = []


@app.task(base=Task, lock_key="order:{order}", lock_dedup="until_done")
def ship(order): ...


@app.task(base=Task, lock_key="order:{order}", lock_dedup="until_done", lock_on_duplicate="raise")
def strict(order): ...


def marked(task, order):
    return task.marked(order) is not None


@after_task_publish.connect(weak=False)
def _sent(**_):
    sent.append(True)


def rolled_back():
    try:
        with transaction.atomic():
            ship.delay_on_commit(1)
            before = marked(ship, 1)
            raise LookupError
    except LookupError:
        return {"before": before, "after": marked(ship, 1)}


def committed():
    with transaction.atomic():
        ship.delay_on_commit(2)
        ship.apply_async_on_commit((2,), countdown=5)
        before = marked(ship, 2)
    return {"before": before, "after": marked(ship, 2), "sent": len(sent)}


def twice_where_that_is_an_error():
    try:
        with transaction.atomic():
            strict.delay_on_commit(3)
            strict.delay_on_commit(3)
    except DuplicateTask:
        return {"raises": True, "after": marked(strict, 3)}
    return {"raises": False}


if __name__ == "__main__":
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    settings.configure(DATABASES={"default": database}, USE_TZ=True)
    django.setup()
    ways = (rolled_back, committed, twice_where_that_is_an_error)
    print(json.dumps({way.__name__: way() for way in ways}))
