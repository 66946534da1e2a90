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
from celery_relock.declaration import engine_of
from celery_relock.engine.protocol import DEBOUNCE
from celery_relock.errors import DuplicateTask
from tests.support import make_app


class Task(LockedTask, DjangoTask):
    abstract = True


app = make_app(__name__)
sent = []


MODES = {
    "until_start": {"lock_dedup": "until_start"},
    "until_done": {"lock_dedup": "until_done"},
    "seconds": {"lock_dedup": 60},
    "raise": {"lock_dedup": "until_done", "lock_on_duplicate": "raise"},
    "replace": {"lock_dedup": "until_start", "lock_on_duplicate": "replace"},
    "debounce": {"lock_debounce": 600},
}


def _ship(order): ...


ships = {
    mode: app.task(base=Task, name=f"ship {mode}", lock_key="order:{order}", **options)(_ship)
    for mode, options in MODES.items()
}


def counts(mode, order):
    """Whether a call counts by now: for those that come, or as the first of a burst."""
    if mode == "debounce":
        name = f"{DEBOUNCE}{ships[mode].name}\torder:{order}"
        return engine_of(app).backend.burst(name, whole=False) is not None
    return ships[mode].marked(order) is not None


@after_task_publish.connect(weak=False)
def _sent(**_):
    sent.append(True)


def rolled_back(mode):
    try:
        with transaction.atomic():
            ships[mode].delay_on_commit(1)
            before = counts(mode, 1)
            raise LookupError
    except LookupError:
        return {"before": before, "after": counts(mode, 1)}


def committed(mode):
    raises, sent[:] = False, []
    # A burst takes no countdown.
    options = {} if mode == "debounce" else {"countdown": 5}
    try:
        with transaction.atomic():
            ships[mode].delay_on_commit(2)
            ships[mode].apply_async_on_commit((2,), **options)
            before = counts(mode, 2)
    except DuplicateTask:
        raises = True
    return {"before": before, "after": counts(mode, 2), "sent": len(sent), "raises": raises}


if __name__ == "__main__":
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    settings.configure(DATABASES={"default": database}, USE_TZ=True)
    django.setup()
    became = {mode: {way.__name__: way(mode) for way in (rolled_back, committed)} for mode in MODES}
    print(json.dumps(became))
