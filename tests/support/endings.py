"""The endings that are proven: one row each, in the tests, and in the table of docs/endings.md."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import billiard
import celery
import pytest

# Where each measurement goes as a line of JSON, when the table is to be written.
RECORD = "RELOCK_ENDINGS_RECORD"
ACKS = ("early", "late")
# The time limit of the bodies that have one, seconds: a child has begun with a body by then, on a
# machine that is short of time as well.
LIMIT = 4


class Outcome(NamedTuple):
    """What Celery makes of an ending, with a lock as without.

    Attributes:
        state: of the task, by its result.
        then: what was sent in a chain: "next", "errback" or "nothing".
        chord: state of the body of a chord that the task is a member of.
    """

    state: str
    then: str
    chord: str


GOES_ON = Outcome("SUCCESS", "next", "SUCCESS")
FAILS = Outcome("FAILURE", "errback", "FAILURE")
REVOKED = Outcome("REVOKED", "nothing", "FAILURE")
EITHER = Outcome("REVOKED or FAILURE", "errback", "FAILURE")
STOPS = Outcome("PENDING", "nothing", "PENDING")
REJECTED = FAILS if celery.VERSION >= (5, 7) else STOPS
# Celery calls the errback, and puts the message back. Older ones reject it.
OVERRUN = Outcome("SUCCESS", "next+errback", "FAILURE") if celery.VERSION >= (5, 7) else FAILS
# Older ones fail to store what billiard tells them of an exit since 4.3.
EXITED = FAILS if celery.VERSION >= (5, 7) or billiard.VERSION < (4, 3) else STOPS


@dataclass(frozen=True)
class Row:
    """One ending.

    Attributes:
        name: what happens, as the table says it.
        part: the heading that it is under.
        body: in tests/worker/apps/endings.py, where one body does.
        early, late: the outcome for early and late acknowledgement.
        how: what the test does to it: `kill <signal>`, `revoke <signal>`, or nothing.
        after: seconds until the ending comes by itself.
        since: the oldest Celery that has it.
        so_since: the oldest Celery that ends it so.
    """

    name: str
    part: str
    body: str = ""
    early: Outcome = GOES_ON
    late: Outcome = GOES_ON
    how: str = ""
    after: float = 0.0
    since: tuple[int, int] = (5, 4)
    so_since: tuple[int, int] = (5, 4)


BODY, SIGNAL, CHILD, GREEN, WORKER, AGAIN = (
    "The body ends",
    "The body is broken off",
    "The process of the body ends",
    "In the pools without processes",
    "The worker ends",
    "The message comes again",
)

_ROWS = (
    Row("returns", BODY, "returns"),
    Row("raises", BODY, "raises", FAILS, FAILS),
    Row("`self.retry()`", BODY, "retries"),
    Row("`autoretry_for`", BODY, "retries_by_itself"),
    Row("`Ignore`", BODY, "ignores", STOPS, STOPS),
    Row("`Reject(requeue=False)`", BODY, "rejects", REJECTED, REJECTED, so_since=(5, 7)),
    Row("`Reject(requeue=True)`", BODY, "goes_back", STOPS),
    Row("`self.replace()`", BODY, "is_replaced"),
    Row("soft time limit", SIGNAL, "overruns_softly", FAILS, FAILS, after=LIMIT),
    Row("`sys.exit()`", SIGNAL, "exits", EXITED, EXITED, so_since=(5, 7)),
    Row("SIGUSR1 to the child", SIGNAL, "stays", FAILS, FAILS, "kill SIGUSR1"),
    # The main process writes REVOKED, the child FAILURE: which of them is last is chance.
    Row("revoke with SIGUSR1", SIGNAL, "stays", EITHER, EITHER, "revoke SIGUSR1"),
    Row("revoke with SIGINT", SIGNAL),
    Row("a signal inside acquire", SIGNAL),
    Row("a signal inside release", SIGNAL),
    Row("a signal while it waits in its slot", SIGNAL),
    Row("revoked before its start", SIGNAL),
    Row("expired", SIGNAL),
    Row("SIGTERM to the child", CHILD, "stays", FAILS, FAILS, "kill SIGTERM"),
    Row("SIGQUIT to the child", CHILD, "stays", FAILS, FAILS, "kill SIGQUIT"),
    Row("revoke with SIGTERM", CHILD, "stays", REVOKED, REVOKED, "revoke SIGTERM"),
    Row("revoke with SIGQUIT", CHILD, "stays", REVOKED, REVOKED, "revoke SIGQUIT"),
    Row("revoke with SIGKILL", CHILD, "stays", REVOKED, REVOKED, "revoke SIGKILL"),
    Row("SIGKILL, as when out of memory", CHILD, "stays", FAILS, FAILS, "kill SIGKILL"),
    Row("segmentation fault", CHILD, "stays", FAILS, FAILS, "kill SIGSEGV"),
    Row(
        "SIGKILL, `reject_on_worker_lost`", CHILD, "stays_or_comes_back", FAILS, how="kill SIGKILL"
    ),
    Row(
        "SIGKILL, `retry_on_worker_lost`",
        CHILD,
        "stays_or_is_sent_again",
        how="kill SIGKILL",
        since=(5, 7),
    ),
    Row("hard time limit, SIGTERM ignored", CHILD, "overruns", FAILS, FAILS, after=LIMIT),
    Row(
        "hard time limit, not acknowledged",
        CHILD,
        "overruns_again",
        FAILS,
        OVERRUN,
        after=LIMIT,
        so_since=(5, 7),
    ),
    Row("gevent: hard time limit", GREEN, "overruns_in_its_pool", FAILS, FAILS, after=LIMIT),
    Row("threads, solo: a time limit, which they do not have", GREEN),
    Row("gevent: revoke with terminate", GREEN, "stays", REVOKED, REVOKED, since=(5, 7)),
    Row("threads, solo: revoke with terminate, which they do not have", GREEN),
    Row("threads, gevent: `MemoryError`", GREEN, "runs_out_of_memory", FAILS, FAILS),
    Row("threads, gevent: `sys.exit()`", GREEN, "exits", STOPS, STOPS),
    Row("threads, gevent, solo: SIGQUIT to the worker", GREEN),
    Row("prefork, solo: `MemoryError`", WORKER),
    Row("warm shutdown", WORKER),
    Row("cold shutdown", WORKER),
    Row("cold shutdown by `REMAP_SIGTERM`", WORKER),
    Row("soft shutdown", WORKER, since=(5, 5)),
    Row("SIGKILL to the worker, another one on the host", WORKER),
    Row("SIGKILL to the worker, the next one starts", WORKER),
    Row("the host is gone", WORKER),
    Row("`max_tasks_per_child`", WORKER),
    Row("`max_memory_per_child`", WORKER),
    Row("autoscale", WORKER),
    Row("visibility timeout, the first execution lives on", AGAIN),
    Row("visibility timeout, the first execution dies", AGAIN),
    Row("visibility timeout before its ETA", AGAIN),
    Row("connection to the broker lost", AGAIN),
    Row("… with `worker_cancel_long_running_tasks_on_connection_loss`", AGAIN),
    Row("RabbitMQ: warm shutdown, a child begins all the same", AGAIN, since=(5, 6)),
    Row("RabbitMQ: child killed, `reject_on_worker_lost`", AGAIN),
    Row("RabbitMQ: worker killed", AGAIN),
    Row("RabbitMQ: `Reject(requeue=True)`", AGAIN),
)
ROWS = {row.name: row for row in _ROWS}


def rows(part: str) -> Any:
    """Run a test for every row of a part that has a body."""
    found = [row for row in _ROWS if row.part == part and row.body]
    return pytest.mark.parametrize("row", found, ids=lambda row: row.name)


def row(*names: str) -> Any:
    """Run a test for the rows that it is written for."""
    return pytest.mark.parametrize("row", [ROWS[name] for name in names], ids=lambda row: row.name)


def record(
    row: Row, pool: str, ack: str, seconds: Sequence[float], outcome: Outcome | None
) -> None:
    """Keep a measurement for the table, if one is to be written."""
    if path := os.environ.get(RECORD):
        line = {"row": row.name, "pool": pool, "ack": ack, "outcome": outcome}
        with Path(path).open("a") as file:
            file.write(json.dumps({**line, "seconds": max(seconds) - row.after}) + "\n")
