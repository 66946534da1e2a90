"""An app whose every task is a LockedTask, Celery's own among them; and the same tasks without."""

from __future__ import annotations

from celery import Task, chain, chord, group

from celery_relock import LockedTask
from tests.support import make_app

app = make_app(__name__)
app.task_cls = LockedTask


def declare(kind: str, **options):
    """The same tasks as locked and as plain ones."""

    def task(function):
        return app.task(name=f"{kind}.{function.__name__}", **options)(function)

    @task
    def add(x, y=0):
        return x + y

    @task
    def total(numbers):
        return sum(numbers)

    @task
    def fails(*_):
        raise ValueError("as it has to")

    return add, total, fails


locked = declare("locked")
plain = declare("plain", base=Task)


def canvases(add, total, fails):
    """Every kind of canvas, by name. Made anew for each use: sending one freezes its ids."""
    return {
        "chain": chain(add.s(1, 1), add.s(2), add.s(3)),
        "group": group(add.s(i, i) for i in range(4)),
        "chord": chord((add.s(i, i) for i in range(4)), total.s()),
        "chord of chains": chord([chain(add.s(i, 1), add.s(1)) for i in range(3)], total.s()),
        "chain with a group": chain(add.s(1, 1), group(add.s(1), add.s(2)), total.s()),
        "chord with a failing member": chord([add.s(1, 1), fails.s()], total.s()),
        "chain with a failing step": chain(add.s(1, 1), fails.s(), add.s(1)),
        "map": add.map([1, 2, 3]),
        "starmap": add.starmap([(1, 2), (3, 4)]),
        "chunks": add.chunks([(i, i) for i in range(6)], 2),
        "chunks as a group": add.chunks([(i, i) for i in range(6)], 2).group(),
    }
