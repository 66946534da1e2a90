"""The message at the head of an error's page is the one that it has, and no fault is left out."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from celery import Celery

from celery_relock import Lock, LockedTask, errors
from celery_relock.admin import Locks
from celery_relock.backends.redis.errors import _FAULTS, _Fault
from tests.docs.pages import text
from tests.support import wait_for

Open = Callable[..., Lock]


def lock_conflict(app: Celery, lock: Open) -> None:
    def wait() -> None:
        with lock("account:42", blocking_timeout=0.2):
            pass

    with lock("account:42"), ThreadPoolExecutor(1) as pool:
        pool.submit(wait).result(30)


def lock_deadlock(app: Celery, lock: Open) -> None:
    both_hold = threading.Barrier(2)

    def acquire(first: str, second: str) -> None:
        with lock(first):
            both_hold.wait(30)
            with lock(second):
                pass

    with ThreadPoolExecutor(2) as pool:
        names = ("account:1", "account:2")
        sides = [pool.submit(acquire, *names), pool.submit(acquire, *names[::-1])]
    for side in sides:
        side.result()


def lock_lost(app: Celery, lock: Open) -> None:
    @app.task(bind=True, base=LockedTask, lock_key="account:42")
    def charge(self: Any) -> None:
        Locks(app).release("account:42")
        wait_for(lambda: self.lock.lost, 30, "the task to hear of it")
        self.lock.check()

    charge.apply(throw=True)


def lock_unavailable(app: Celery, lock: Open) -> None:
    app.conf.relock_url = "redis://127.0.0.1:1"

    @app.task(base=LockedTask, lock_key="account:42")
    def charge() -> None: ...

    charge.apply(throw=True)


def lock_config_error(app: Celery, lock: Open) -> None:
    @app.task(name="app.charge", base=LockedTask, lock_key="account:{acount_id}")
    def charge(account_id: int) -> None: ...

    charge.lock_for(42)


def duplicate_task(app: Celery, lock: Open) -> None:
    options = {"lock_dedup": "until_start", "lock_on_duplicate": "raise"}

    @app.task(name="app.build_report", base=LockedTask, lock_key="report:{customer_id}", **options)
    def build_report(customer_id: int) -> None: ...

    for _ in range(2):
        build_report.delay(42)


@pytest.mark.parametrize(
    "provoke",
    [lock_conflict, lock_deadlock, lock_lost, lock_unavailable, lock_config_error, duplicate_task],
)
def test_an_error_says_what_its_page_shows(
    provoke: Callable[[Celery, Open], None], redis_url: str, namespace: str
) -> None:
    app = Celery("app", broker="memory://", set_as_current=False)
    app.conf.update(relock_url=redis_url, relock_namespace=namespace)
    kind = getattr(errors, provoke.__name__.title().replace("_", ""))

    with pytest.raises(kind) as raised:
        provoke(app, partial(Lock, redis_url, namespace=namespace))

    shown = re.match(r"# \w+\n\n((?:> .+\n)+)", text(f"errors/{kind.__name__}"))
    assert shown, "the page begins with a message"
    message = " ".join(line.removeprefix("> ") for line in shown[1].splitlines())
    assert _general(raised.value.reason) == _general(message)


@pytest.mark.parametrize(
    ("page", "when"),
    [
        ("LockUnavailable", {"soon": ["within seconds"], "later": ["later"]}),
        ("LockConfigError", {"never": []}),
    ],
)
def test_an_errors_page_has_each_fault_that_a_server_reports(
    page: str, when: dict[str, list[str]]
) -> None:
    names: dict[_Fault, list[str]] = {}
    for name, fault in _FAULTS.items():
        if fault.passes in when:
            names.setdefault(fault, []).append(name)

    rows = _rows(f"errors/{page}", "What Redis reports")
    assert len(rows) == len(names)
    for fault, each in names.items():
        codes = ", ".join(f"`{name}`" for name in each if name.isupper())
        told = [cells for says, *cells in rows if fault.says.startswith(says)]
        assert told == [[codes, *when[fault.passes]]], fault.says


def _rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table under a heading."""
    (table,) = re.findall(rf"^## {heading}\n[^|]*((?:\|.*\n)+)", text(page), flags=re.MULTILINE)
    return [[cell.strip() for cell in row[1:-1].split("|")] for row in table.splitlines()[2:]]


def _general(message: str) -> str:
    """Without what differs from time to time: who, how long, at which step."""
    message = re.sub(r"held by \S+ \S+:\d+( \(workflow \S+\))?", "held by somebody", message)
    message = re.sub(r"as task [\w…-]+", "as task", message)
    return re.sub(r"\d+(\.\d+)?", "N", message)
