"""Holders that are frozen longer than their lease, and a database: with the fence, and without.

    python -m tests.contrib.frozen --updates 10000 --write docs/reliability.md

Worker processes add to a register: acquire its lock, read, write what was read plus one, commit.
Now and then one stops itself (SIGSTOP) at some moment of that, and goes on when its lease is over
and others have worked. Each commit also leaves a line in a ledger, so an update that a later one
has overwritten is a line too many.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import click
import psycopg

from celery_relock import Lock
from celery_relock.contrib.sql import create_table, fence
from celery_relock.errors import LockLost
from tests.support import RedisServer, page, reaper
from tests.support.databases import Postgres
from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[2]
LEASE = 0.2
#: How an update is protected: by the lock alone; by `fence` too, which knows nothing of the lock's
#: own state; and by `lock.fenced`, which looks at that as well.
WAYS = ("lock alone", "fence", "lock.fenced")
# Where a worker is frozen, in turns.
_MOMENTS = ("begun", "read", "written", "acquired")


def campaign(
    redis_url: str,
    database: Postgres,
    way: str,
    *,
    updates: int,
    freeze_each: int,
    registers: int,
    workers: int = 4,
) -> dict[str, int]:
    """Make so many updates, protected in one of `WAYS`, with some workers, each of which is frozen
    once in `freeze_each`. Returns what was counted."""
    with database.connect(autocommit=True) as connection:
        for table in ("relock_fence", "register", "ledger"):
            connection.execute(f"DROP TABLE IF EXISTS {table}")
        connection.execute(create_table())
        connection.execute("CREATE TABLE register (id int PRIMARY KEY, value int NOT NULL)")
        connection.execute("CREATE TABLE ledger (id int NOT NULL)")
        connection.execute(
            "INSERT INTO register SELECT n, 0 FROM generate_series(1, %s) n", [registers]
        )
        working = _work(
            workers, redis_url, database.url, uuid.uuid4().hex, way, str(updates), str(freeze_each),
            str(registers),
        )  # fmt: skip
        counted: Counter[str] = Counter()
        for worker in working:
            counted.update(json.loads(worker.communicate()[0]))
            reaper.end(worker)
        (kept,) = connection.execute("SELECT sum(value) FROM register").fetchone() or (0,)
        (done,) = connection.execute("SELECT count(*) FROM ledger").fetchone() or (0,)
    return {"updates": done, "lost updates": done - kept, **counted}


def _has_stopped(worker: subprocess.Popen[str]) -> bool:
    with suppress(ChildProcessError):  # it has just ended
        stopped = os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WNOHANG)
        return worker.poll() is None and stopped is not None
    return False


def _work(count: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """Start the workers, and wake those that freeze themselves, until all have ended."""
    command = [sys.executable, "-m", "tests.contrib.frozen", "--worker", *arguments]
    workers = [
        reaper.start(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]
    wake_at: dict[int, float] = {}

    def all_ended() -> bool:
        for worker in workers:
            if _has_stopped(worker):
                wake_at[worker.pid] = time.monotonic() + LEASE * random.uniform(1.5, 3)
            if wake_at.get(worker.pid, math.inf) < time.monotonic():
                del wake_at[worker.pid]
                os.kill(worker.pid, signal.SIGCONT)
        return all(worker.poll() is not None for worker in workers)

    wait_for(all_ended, 3000, "the workers' end")
    return workers


def work(
    redis_url: str, database_url: str, namespace: str, way: str, updates: str, freeze_each: str,
    registers: str,
) -> Counter[str]:  # fmt: skip
    """One worker. Returns what it counted."""
    counted: Counter[str] = Counter()
    turns = 0

    def perhaps_freeze(moment: str) -> None:
        freezes, rest = divmod(turns, int(freeze_each))
        if rest == 0 and moment == _MOMENTS[freezes % len(_MOMENTS)]:
            counted["freezes"] += 1
            os.kill(os.getpid(), signal.SIGSTOP)

    def protect(connection: Any, lock: Lock) -> AbstractContextManager[None]:
        if way == "lock.fenced":
            return lock.fenced(connection)
        if way == "fence":
            fence(connection, lock.name, lock.fence)
        return nullcontext()

    with psycopg.connect(database_url) as connection:
        while _done(connection) < int(updates):
            turns += 1
            number = random.randint(1, int(registers))
            lock = Lock(redis_url, f"register:{number}", timeout=LEASE, namespace=namespace)
            try:
                with lock:
                    perhaps_freeze("acquired")
                    with connection.transaction(), protect(connection, lock):
                        perhaps_freeze("begun")
                        read = "SELECT value FROM register WHERE id = %s"
                        row = connection.execute(read, [number]).fetchone()
                        assert row is not None
                        perhaps_freeze("read")
                        write = "UPDATE register SET value = %s WHERE id = %s"
                        connection.execute(write, [row[0] + 1, number])
                        connection.execute("INSERT INTO ledger VALUES (%s)", [number])
                        perhaps_freeze("written")
            except LockLost as error:
                by_database = "the database has seen" in str(error)
                counted["refused by the database" if by_database else "told by the lock"] += 1
    return counted


def _done(connection: psycopg.Connection[Any]) -> int:
    with connection.transaction():
        row = connection.execute("SELECT count(*) FROM ledger").fetchone()
    return int(row[0]) if row else 0


@click.command()
@click.option("--updates", default=10_000, show_default=True, help="Of each way.")
@click.option("--freeze-each", default=50, show_default=True, help="Update of a worker.")
@click.option("--registers", default=3, show_default=True)
@click.option("--write", type=click.Path(path_type=Path), help="Put the figures into this page.")
def main(updates: int, freeze_each: int, registers: int, write: Path | None) -> None:
    """Freeze holders for longer than their lease, and count the updates that are lost."""
    redis_server, database = RedisServer(), Postgres()
    options = {"updates": updates, "freeze_each": freeze_each, "registers": registers}
    try:
        found = [campaign(redis_server.url, database, way, **options) for way in WAYS]
    finally:
        redis_server.stop()
        database.stop()
    lines = [f"| | {' | '.join(WAYS)} |", "|---" * 4 + "|"]
    for name in dict.fromkeys(name for counted in found for name in counted):
        lines.append(f"| {name} | {' | '.join(str(each.get(name, 0)) for each in found)} |")
    print("\n".join(lines))
    page.write(write, "fenced writes", "\n".join(lines), "scripts/fenced-writes")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        logging.disable()  # of losses
        print(json.dumps(work(*sys.argv[2:])))
    else:
        main()
