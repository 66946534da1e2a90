"""Tasks whose locks are measured: by the modules beside this one, which workers load with `-I`."""

from __future__ import annotations

import gc
from typing import Any

from celery_relock import LockedTask
from tests.support import Journal, make_app

KEY = "account:{account}"

app = make_app(__name__, worker_prefetch_multiplier=1)
journal = Journal.from_env()


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_ttl=1.5)
def holds(self: Any, account: str) -> int:
    """Until the test says that it may go."""
    journal.add(f"held {account}")
    journal.wait_for(f"free {account}", 60)
    return self.lock.fence


@app.task(base=LockedTask, lock_key=KEY)
def waits(account: str) -> int:
    return 1


@app.task(base=LockedTask, lock_key=KEY, lock_on_conflict="block")
def blocks(account: str) -> int:
    return waits(account)


@app.task(base=LockedTask, lock_key=KEY, lock_on_conflict=lambda conflict: "block")
def chooses_to_block(account: str) -> int:
    return 1


@app.task(base=LockedTask, lock_key=(KEY, "stock:{account}"))
def both(account: str) -> int:
    return 1


@app.task(base=LockedTask, lock_key=KEY)
def nests(account: str) -> int:
    return both(account)


@app.task(base=LockedTask, lock_key=KEY, lock_on_conflict="drop")
def drops(account: str) -> int:
    return 1


@app.task(base=LockedTask, lock_key=KEY, lock_on_conflict="raise")
def raises(account: str) -> int:
    return 1


@app.task(base=LockedTask, lock_key=KEY, lock_dedup="until_start")
def once(account: str) -> int:
    return 1


@app.task
def plain() -> int:
    return 1


@app.task
def living_spans() -> int:
    """How many spans this process keeps, among them that of this task."""
    from opentelemetry.sdk.trace import Span

    gc.collect()
    # By its type: `isinstance` asks a proxy what it stands for, and not all of Celery's know.
    return sum(issubclass(type(each), Span) for each in gc.get_objects())
