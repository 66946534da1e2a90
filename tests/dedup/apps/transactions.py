"""Calls from a transaction that is rolled back, or has failed, and from a coroutine, where their
states go through Django's connection: `python -m tests.dedup.apps.transactions` makes them, and
says what became of each. A worker with this app executes them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import uuid
from contextlib import suppress

import django
from celery.backends.base import KeyValueStoreBackend
from django.conf import settings
from django.db import connection, transaction
from django.db.backends.signals import connection_created

from celery_relock import LockedTask
from tests.dedup.apps.calls import REPLACE, work
from tests.support import make_app, wait_for


class Results(KeyValueStoreBackend):
    """A result backend as that of django-celery-results is: in the transaction of its caller, and
    for no coroutine."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        configure()

    def get(self, key):
        with connection.cursor() as cursor:
            cursor.execute("SELECT value FROM results WHERE key = %s", [_text(key)])
            found = cursor.fetchone()
        return found and found[0]

    def set(self, key, value):
        with connection.cursor() as cursor:
            cursor.execute("REPLACE INTO results VALUES (%s, %s)", [_text(key), value])

    def mget(self, keys):
        return [*map(self.get, keys)]


def _text(key):
    return key.decode() if isinstance(key, bytes) else key


def configure():
    if not settings.configured:
        name = os.environ["RELOCK_TEST_DATABASE"]
        database = {"ENGINE": "django.db.backends.sqlite3", "NAME": name}
        settings.configure(DATABASES={"default": database}, USE_TZ=True)
        django.setup()


app = make_app(__name__, worker_prefetch_multiplier=1)
app.conf.result_backend = f"{__name__}:Results"


def task(name, **options):
    of = {"base": LockedTask, "bind": True, "lock_key": "account:{account}", "name": name}
    return app.task(**of, **options)(work)


replaces = {
    "early": task("early", **REPLACE),
    "late": task("late", acks_late=True, **REPLACE),
    "until_done": task("until_done", acks_late=True, **{**REPLACE, "lock_dedup": "until_done"}),
    "seconds": task("seconds", acks_late=True, **{**REPLACE, "lock_dedup": 60}),
}
starts = task("starts", lock_dedup="until_start")


def _write():
    """So that nobody else writes until the transaction is over: SQLite refuses a transaction that
    has only read to write after somebody else."""
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM results WHERE key = ''")


def rolled_back(call):
    with suppress(LookupError), transaction.atomic():
        _write()
        called = call()
        raise LookupError
    return called


def failed(call):
    with transaction.atomic():
        transaction.set_rollback(True)
        return call()


def in_a_coroutine(call):
    async def view():
        return call()

    return asyncio.run(view())


def committed(call):
    with transaction.atomic():
        _write()
        return call()


WAYS = {each.__name__: each for each in (rolled_back, failed, in_a_coroutine, committed)}


def replaced(task, way):
    """What becomes of a call that is replaced before it is due."""
    account = uuid.uuid4().hex
    # A busy machine can take a second or more between the two.
    first = task.apply_async((account, "first"), countdown=5)
    second = way(lambda: task.delay(account, "second"))
    return account, first, second


def states_of(account, *calls):
    with suppress(AssertionError):  # the test says what is amiss
        wait_for(lambda: all(each.ready() for each in calls), 20)
    told = {"account": account, "ids": [each.id for each in calls]}
    return {**told, "states": [each.state for each in calls]}


def revoked_before(way):
    """Whether a call is sent after one that was revoked, and what that leaves behind."""
    account = uuid.uuid4().hex
    first = starts.apply_async((account,), countdown=60)
    app.backend.mark_as_revoked(first.id, "by somebody")
    opened.clear()
    second = way(lambda: starts.delay(account))
    left = [each for each in opened if each.connection is not None]
    return {"sent": second.id != first.id, "left": len(left)}


opened = []


def _opened(connection, **_):
    opened.append(connection)


if __name__ == "__main__":
    said = logging.Handler(logging.WARNING)
    texts = []
    said.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("celery_relock").addHandler(said)
    connection_created.connect(_opened)
    configure()
    calls = {
        f"{name} {way}": replaced(each, WAYS[way])
        for name, each in replaces.items()
        for way in WAYS
    }
    became = {
        "replaced": {name: states_of(*called) for name, called in calls.items()},
        "revoked": {name: revoked_before(way) for name, way in WAYS.items()},
        "said": texts,
    }
    print(json.dumps(became))
