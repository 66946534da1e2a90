"""Calls in order for each key: `lock_order="sent"` beside one queue and one worker with
concurrency 1 for each key, which is what people do without it."""

from __future__ import annotations

import functools
import itertools
import os
import random
import statistics
import time
from typing import NamedTuple

import psutil
import redis

from benchmarks.rounds import interleave, ratios, table
from tests.support import Worker, wait_for

KEYS, SLOTS = 20, 4
OWN = f"{KEYS} queues, each with a worker of concurrency 1"


class Case(NamedTuple):
    """A task of `ordering_app`, the queues of its calls, and the workers that execute them."""

    task: str
    queue: str  # with the key's number
    workers: list[Worker]


class Run(NamedTuple):
    """The result of one run.

    Attributes:
        sending: the seconds in which the calls were sent, while the workers were stopped.
        total: the seconds from when the workers continue to the end of the last body.
        swaps: how many bodies began directly after a body of the same key that was sent later.
    """

    sending: float
    total: float
    swaps: int


def measure(url: str, rounds: int, tasks: int, section: float) -> str:
    """A table for so many calls with bodies of so many seconds, spread over the keys by chance."""
    cases: dict[str, Case] = {}
    namespace = f"bench{os.urandom(4).hex()}"
    try:
        own = cases[OWN] = Case("plain", "own-{}", [])
        own.workers.extend(_worker(url, namespace, own.queue.format(key), 1) for key in range(KEYS))
        for name, task, slots in (
            (f'one worker, {SLOTS} processes, `lock_order="sent"`', "ordered", SLOTS),
            (f'one worker, {KEYS} processes, `lock_order="sent"`', "ordered", KEYS),
            (f"one worker, {KEYS} processes, no order at all", "plain", KEYS),
        ):
            queue = f"shared-{len(cases)}"
            cases[name] = Case(task, queue, [_worker(url, namespace, queue, slots)])
        runs = {
            name: functools.partial(_run, url, case, tasks, section) for name, case in cases.items()
        }
        for run in runs.values():
            run()  # connections, scripts, queues
        found = interleave(runs, rounds)
        taken = {name: _taken(case.workers) for name, case in cases.items()}
    finally:
        for worker in itertools.chain.from_iterable(case.workers for case in cases.values()):
            worker.close()
    head = [f"{tasks} calls of {section * 1000:g} ms, {KEYS} keys"]
    head += ["total, s", "to own workers", "sending, s", "processes", "memory, MB", "swaps"]
    return table(head, [_row(name, found, *taken[name]) for name in found])


def _worker(url: str, namespace: str, queue: str, slots: int) -> Worker:
    return Worker(
        "benchmarks.ordering_app",
        url,
        namespace,
        concurrency=slots,
        arguments=("-Q", queue, "-n", f"{queue}@127.0.0.1"),
    )


def _processes(workers: list[Worker]) -> list[psutil.Process]:
    mains = [psutil.Process(worker.pid) for worker in workers]
    return [*mains, *(child for main in mains for child in main.children(recursive=True))]


def _taken(workers: list[Worker]) -> tuple[int, float]:
    """The number of processes, and the MB of memory that they do not share."""
    every = _processes(workers)
    return len(every), sum(each.memory_full_info().uss for each in every) / 1e6


def _row(name: str, every: dict[str, list[Run]], processes: int, mb: float) -> tuple[object, ...]:
    runs = every[name]
    to_own = ratios([run.total for run in runs], [run.total for run in every[OWN]])
    total, sending = (
        statistics.median(getattr(run, what) for run in runs) for what in ("total", "sending")
    )
    shown = f"{total:.2f}", f"{statistics.median(to_own):.2f}", f"{sending:.2f}"
    return name, *shown, processes, f"{mb:.0f}", sum(run.swaps for run in runs)


def _run(url: str, case: Case, tasks: int, section: float) -> Run:
    run, task = os.urandom(6).hex(), getattr(case.workers[0].module, case.task)
    chance = random.Random(1)
    with redis.Redis.from_url(url) as client:
        stopped, began = _processes(case.workers), time.time()
        for process in stopped:
            process.suspend()
        try:
            for number in range(tasks):
                key = chance.randrange(KEYS)
                task.apply_async((run, key, number, section), queue=case.queue.format(key))
            sent = time.time()
        finally:
            for process in stopped:
                process.resume()
        wait_for(lambda: client.llen(f"bench:{run}") == tasks, 120, f"all calls of {case.task}")
        ends = map(float, client.lrange(f"bench:{run}", 0, -1))
        orders = [client.lrange(f"bench:{run}:{key}", 0, -1) for key in range(KEYS)]
    swaps = sum(int(b) < int(a) for order in orders for a, b in itertools.pairwise(order))
    return Run(sent - began, max(ends) - sent, swaps)
