"""Classes whose own `__call__` handles every Exception."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from celery import Task

from celery_relock import LockedTask
from tests.support import Journal, make_app

app = make_app(__name__)
journal = Journal.from_env()


class Answers(LockedTask):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except Exception:
            return "an error"


class Retries(LockedTask):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except Exception as error:
            raise self.retry(exc=error, countdown=0.1) from error


class Translates(LockedTask):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except Exception as error:
            raise ValueError("of the application") from error


class TriesAgain:
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for _ in range(3):
            with contextlib.suppress(Exception):
                return super().__call__(*args, **kwargs)  # type: ignore[misc]
        return None


class Mixed(TriesAgain, LockedTask):
    pass


class AnswersToo(Task):  # type: ignore[misc]  # Celery ships no types
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except Exception:
            return "an error"


class Behind(LockedTask, AnswersToo):
    pass


def body(self: Any, account: str) -> str:
    journal.add("body", account=account)
    time.sleep(0.5)
    return account


def fails_once(self: Any, account: str) -> str:
    journal.add("body", account=account)
    if not self.request.retries:
        raise KeyError(account)
    return account


for kind in (Answers, Retries, Translates, Mixed, Behind):
    for policy in ("wait", "retry"):
        how = {"lock_key": "account:{account}", "lock_on_conflict": policy}
        app.task(body, name=f"{kind.__name__} {policy}", base=kind, bind=True, **how)
app.task(fails_once, name="fails once", base=Retries, bind=True, lock_key="account:{account}")


@app.task
def then(account: str) -> str:
    journal.add("then", account=account)
    return account


@app.task
def failed(account: str) -> None:
    journal.add("failed", account=account)
