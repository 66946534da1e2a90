"""Tasks whose locks are in a Redis Cluster; their messages and results are not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

from celery_relock import LockedTask
from tests.support import Journal, make_app
from tests.support.permits import holding

app = make_app(__name__, worker_prefetch_multiplier=1)
journal = Journal.from_env()


@contextmanager
def inside(hold: Any) -> Iterator[None]:
    """Tells of each lock that a hold has."""
    with ExitStack() as stack:
        for name, fence in hold.fences.items():
            one = SimpleNamespace(name=name, fence=fence, reentered=hold.reentered)
            stack.enter_context(holding(journal, one))
        yield


@app.task(base=LockedTask, bind=True, lock_key="account:{account}", lock_ttl=6)
def waits(self: Any, account: str) -> None:
    with inside(self.lock):
        journal.add("done", account=account)


@app.task(base=LockedTask, bind=True, lock_key="account:{account}", lock_on_conflict="block")
def blocks(self: Any, account: str) -> None:
    with inside(self.lock):
        journal.add("done", account=account)


@app.task(
    base=LockedTask, bind=True, lock_key=["{{{account}}}:in", "{{{account}}}:out"], lock_ttl=6
)
def transfers(self: Any, account: str) -> None:
    """Two locks that share a hash tag."""
    with inside(self.lock):
        journal.add("done", account=account)


@app.task(base=LockedTask, bind=True, lock_key="account:{account}", lock_hold="workflow")
def step(self: Any, account: str, number: int, gate: str = "") -> None:
    journal.add("step", account=account, number=number, fence=self.lock.fence)
    if gate:
        journal.wait_for(gate, 30)


@app.task(base=LockedTask, bind=True, lock_key="account:{account}")
def stays(self: Any, account: str) -> None:
    """Holds the lock until the test lets it go."""
    with inside(self.lock):
        journal.add("in", account=account)
        journal.wait_for("free", 60)


def by_day(account: str) -> str:
    """Another name from the moment on at which the test says so."""
    return f"{account}:{'tomorrow' if 'tomorrow' in journal.names() else 'today'}"


@app.task(base=LockedTask, bind=True, lock_key=by_day, lock_ttl=6)
def reports(self: Any, account: str, number: int) -> None:
    with inside(self.lock):
        journal.add("done", account=account, number=number)


@app.task(base=LockedTask, bind=True, lock_key="account:{account}", lock_debounce=2)
def merges(self: Any, account: str, number: int) -> None:
    with inside(self.lock):
        journal.add("done", account=account, number=number, task=self.request.id)
