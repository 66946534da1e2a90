"""Tasks of which Celery sends one when another has ended, with their locks in another Redis than
the messages."""

from __future__ import annotations

from celery_relock import LockedTask
from tests.support import Journal, make_app

app = make_app(__name__, worker_prefetch_multiplier=1)
journal = Journal.from_env()


def _ends(name):
    journal.add(f"began {name}")
    journal.wait_for(f"end {name}", 30)
    return name


@app.task
def first(name):
    return _ends(name)


@app.task(acks_late=True)
def fails(name):
    raise ValueError(_ends(name))


@app.task
def ping():
    return "pong"


@app.task(base=LockedTask, lock_key="ordered:{name}", lock_order="sent", lock_max_wait=1)
def ordered(name):
    journal.add("ordered", of=name)


@app.task(base=LockedTask, lock_key="calls:{name}")
def calls_another(name):
    """The body sends it, not Celery: it hears of the error."""
    _ends(name)
    (ordered.si(name) | ping.si()).delay()
