"""Waiting in Celery: many short tasks want one lock, beside unrelated tasks."""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import redis

from benchmarks.rounds import interleave, percentile, ratios, table
from tests.support import Worker, wait_for

IDLE = "nothing else"
WAIT, BLOCK = "`wait`: parked", "`block`: in the slot"
#: The cases, and the task of `waiting_app` for each.
CASES = {
    IDLE: "",
    "no lock at all": "free",
    WAIT: "wait",
    BLOCK: "block",
    "`retry`: sent again": "retry",
    "by hand: SET NX, `self.retry`": "poll",
}
#: Seconds between two unrelated tasks, and for how many seconds to send them if nothing else runs.
PACE, QUIET = 0.05, 3.0


@dataclass(frozen=True)
class Run:
    """The result of one run: the seconds for all tasks, the deliveries of each, how many began
    directly after a task that was sent later, and the seconds that each unrelated task waited."""

    total: float
    deliveries: float
    swaps: int
    delays: list[float]


def measure(url: str, rounds: int, tasks: int, section: float) -> str:
    """A table for so many tasks with sections of so many seconds, on a worker of four processes."""
    worker = Worker(
        "benchmarks.waiting_app",
        url,
        f"bench{os.urandom(4).hex()}",
        concurrency=4,
        env={"RELOCK_BENCH_WORK": str(section)},
    )
    try:
        cases = {
            name: functools.partial(_run, url, worker, task, tasks) for name, task in CASES.items()
        }
        for case in cases.values():
            case()  # connections, scripts, queues
        runs = interleave(cases, rounds)
    finally:
        worker.close()
    head = ["200 tasks", "total, s", "to blocking", "deliveries", "swaps"]
    head[0] = f"{tasks} tasks of {section * 1000:g} ms"
    head += ["unrelated p50, ms", "p95, ms", "p50 to idle", "p95 to idle"]
    return table(head, [_row(name, runs) for name in runs])


def _row(name: str, every: dict[str, list[Run]]) -> tuple[object, ...]:
    runs = every[name]
    delays = [f"{_delay(runs, share) * 1000:.1f}" for share in (0.5, 0.95)]
    delays += [f"{_delay(runs, share) / _delay(every[IDLE], share):.2f}" for share in (0.5, 0.95)]
    if name == IDLE:
        return name, "", "", "", "", *delays
    totals = [run.total for run in runs]
    to_blocking = statistics.median(ratios(totals, [run.total for run in every[BLOCK]]))
    deliveries, swaps = (
        statistics.median(getattr(run, what) for run in runs) for what in ("deliveries", "swaps")
    )
    total = f"{statistics.median(totals):.2f}"
    return name, total, f"{to_blocking:.2f}", f"{deliveries:.2f}", f"{swaps:.0f}", *delays


def _delay(runs: list[Run], share: float) -> float:
    return statistics.median(percentile(run.delays, share) for run in runs)


def _run(url: str, worker: Worker, task: str, tasks: int) -> Run:
    run = os.urandom(6).hex()
    with redis.Redis.from_url(url) as client, _unrelated(worker, run) as sent:
        began = time.time()
        if task:
            contended = getattr(worker.module, task)
            for number in range(tasks):
                contended.apply_async((run, number, time.time()))
            wait_for(lambda: _count(client, run, "out") == tasks, 120, f"all {task} tasks")
        else:
            time.sleep(QUIET)
        # Tasks that are sent from now on would meet an idle system.
        until = len(sent)
    with redis.Redis.from_url(url) as client:
        wait_for(lambda: _count(client, run, "unrelated") == len(sent), 60, "the unrelated tasks")
        entered, ended, beside = (_notes(client, run, kind) for kind in ("in", "out", "unrelated"))
        deliveries = int(client.hget("bench:deliveries", run) or 0) - len(sent)
    ends = [at for _, _, at in ended]
    order = [number for number, _, _ in entered]
    return Run(
        total=max(ends, default=began) - began,
        deliveries=deliveries / tasks,
        swaps=sum(later < earlier for earlier, later in itertools.pairwise(order)),
        delays=[at - sent for number, sent, at in beside if number < until],
    )


def _notes(client: redis.Redis, run: str, kind: str) -> list[tuple[int, float, float]]:
    lines: list[bytes] = client.lrange(f"bench:{run}:{kind}", 0, -1)  # type: ignore[assignment]
    parts = [line.decode().split() for line in lines]
    return [(int(number), float(sent), float(at)) for number, sent, at in parts]


def _count(client: redis.Redis, run: str, kind: str) -> int:
    return int(client.llen(f"bench:{run}:{kind}"))  # type: ignore[arg-type]


@contextmanager
def _unrelated(worker: Worker, run: str) -> Iterator[list[Any]]:
    """Send unrelated tasks at a steady pace in the background."""
    sent: list[Any] = []
    over = threading.Event()

    def send() -> None:
        while not over.wait(PACE):
            number = len(sent)
            sent.append(number)
            worker.module.unrelated.apply_async((run, number, time.time()))

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield sent
    finally:
        over.set()
        thread.join()
