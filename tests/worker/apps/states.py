"""Tasks whose start is tracked, asked for in every way there is."""

from __future__ import annotations

from typing import Any

from celery.contrib.abortable import AbortableTask
from celery.exceptions import Ignore

from celery_relock import LockedTask
from tests.support import Journal, make_app

app = make_app(
    __name__,
    task_track_started=True,
    task_annotations={f"{__name__}.by_annotation": {"track_started": True}},
)
journal = Journal.from_env()


def work(account: str) -> str:
    journal.add("inside", account=account)
    journal.wait_for(f"free {account}", 30)
    return account


@app.task(base=LockedTask, lock_key="{account}")
def parks(account: str) -> str:
    return work(account)


class AbortableLockedTask(LockedTask, AbortableTask):
    abstract = True


@app.task(base=AbortableLockedTask, bind=True, lock_key="{account}")
def can_be_aborted(self, account: str) -> bool:
    return self.is_aborted()


@app.task(base=LockedTask, lock_key="{account}", lock_on_conflict="block")
def blocks(account: str) -> str:
    return work(account)


@app.task(base=LockedTask, lock_key="{account}", lock_on_conflict="retry")
def comes_back(account: str) -> str:
    return work(account)


@app.task(base=LockedTask, lock_key=False)
def without_a_lock(account: str) -> str:
    return work(account)


@app.task(base=LockedTask, lock_key="{account}", track_started=False)
def by_annotation(account: str) -> str:
    return work(account)


class Tracked(LockedTask):
    abstract = True
    track_started = True


@app.task(base=Tracked, lock_key="{account}")
def inherits(account: str) -> str:
    return work(account)


@app.task(base=Tracked, lock_key="{account}", track_started=False)
def does_not_track(account: str) -> str:
    return work(account)


@app.task(base=LockedTask, lock_key="{account}", acks_late=True)
def is_acknowledged_late(account: str) -> str:
    return work(account)


class Gate:
    """A result backend that has stored BLOCKED when the test says so."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def store_result(self, task_id: str, result: Any, state: str, **more: Any) -> Any:
        stored = self._backend.store_result(task_id, result, state, **more)
        if state == "BLOCKED":
            journal.wait_for(f"open {task_id}", 30)
        return stored


class ParksThroughAGate(LockedTask):
    abstract = True

    @property
    def backend(self) -> Any:
        return Gate(super().backend)


@app.task(base=ParksThroughAGate, lock_key="{account}", track_started=False)
def goes_on_in_its_slot(account: str) -> str:
    return work(account)


@app.task(base=Tracked, lock_key="{account}", track_started=False)
def ignores(account: str) -> None:
    work(account)
    raise Ignore


@app.task(base=LockedTask, lock_key="{account}", ignore_result=True)
def ignores_its_result(account: str) -> str:
    return work(account)


@app.task(base=LockedTask, lock_key="{account}")
def calls(account: str) -> Any:
    return parks(account)
