"""An app whose class for tasks ignores results, and has a `__call__` that handles every error."""

from __future__ import annotations

from typing import Any

from celery import Task, chain

from celery_relock import locked
from tests.support import Journal, make_app

journal = Journal.from_env()


class Own(Task):
    abstract = True
    ignore_result = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except Exception:
            return "an error"


app = make_app(__name__)
app.task_cls = Own


@app.task(ignore_result=False)
def step(account: str, name: str) -> str:
    journal.add(name, account=account)
    return name


def flow(account: str, **options: Any) -> chain:
    return locked(
        chain(step.si(account, "first"), step.si(account, "last")), key=account, **options
    )
