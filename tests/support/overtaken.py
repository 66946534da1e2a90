"""Tasks whose message is sent again, and comes and fails before Celery is done with the delivery
that has sent it."""

from __future__ import annotations

from typing import Any

from celery.exceptions import Retry

from celery_relock import LockedTask

from .journal import Journal


class Overtaken:
    """The first delivery ends when the second one has failed. To be put before the class of a
    task."""

    request: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        except Retry:
            if not self.request.headers["relock"].get("attempts"):
                journal, account = Journal.from_env(), _account(args, kwargs)
                journal.add("sent again", account=account)
                journal.wait_for("failed", 30, account=account)
            raise

    def on_failure(self, _exc: Any, _task_id: str, args: Any, kwargs: Any, _einfo: Any) -> None:
        Journal.from_env().add("failed", account=_account(args, kwargs))  # that is stored by now

    def on_retry(self, _exc: Any, _task_id: str, args: Any, kwargs: Any, _einfo: Any) -> None:
        attempts = self.request.headers["relock"].get("attempts", 0)
        Journal.from_env().add("retried", account=_account(args, kwargs), attempts=attempts)


class OvertakenLocked(Overtaken, LockedTask):
    """The same, of a locked task."""

    abstract = True


def _account(args: Any, kwargs: Any) -> str:
    return str(kwargs.get("account") or args[0])
