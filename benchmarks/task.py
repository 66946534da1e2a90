"""The cost for users: an uncontended locked task, in Celery's tracer and in a prefork worker,
beside a plain task and the locks of other libraries; the cost of publishing it, and of importing
the library.

celery-once and celery-singleton lock when a task is published: in the worker they only release.
"""

from __future__ import annotations

import functools
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import psutil
import redis
from celery.app.trace import build_tracer, setup_worker_optimizations

from benchmarks.rounds import interleave, ratios, table
from tests.support import Worker

PLAIN, LOCKED, HAND = "plain", "locked", "by_hand"
#: The tasks of `task_app`, and what the tables call them.
CASES = {
    PLAIN: "plain task",
    LOCKED: "`LockedTask`",
    "dedup": '`LockedTask`, `lock_dedup="until_start"`',
    "ordered": '`LockedTask`, `lock_order="sent"`',
    HAND: "redis-py's `Lock` by hand in the body",
    "once": "celery-once",
    "singleton": "celery-singleton",
}
# Without the garbage collector: its next pass over all that Celery has loaded would fall into one
# import or into another.
_IMPORTS = """
import gc
gc.disable()
import time
began = time.process_time()
from celery import Celery, Task, chain, signals
Celery("c", broker="redis://").connection_for_write().transport  # and so redis-py
loaded = time.process_time()
from celery_relock import LockedTask
print(loaded - began, time.process_time() - loaded)
"""


class Cost(NamedTuple):
    """Seconds for each task: by the clock, and of processor time; 0 if not measured."""

    clock: float
    child: float
    main: float
    redis: float


def measure(url: str, rounds: int, tasks: int) -> list[tuple[str, str]]:
    """The tables, each with its title."""
    worker = Worker("benchmarks.task_app", url, f"bench{os.urandom(4).hex()}", concurrency=1)
    # In the tracer each call with `lock_order` comes without a place, which is a warning.
    logging.getLogger("celery_relock").setLevel(logging.ERROR)
    try:
        setup_worker_optimizations(worker.module.app, worker.module.app.main)
        measures = {"in Celery's tracer": _trace, "in a prefork worker": _deliver}
        found = []
        for where, one in measures.items():
            cases = {case: functools.partial(one, url, worker, case, tasks) for case in CASES}
            for case in cases.values():
                case()  # connections, scripts
            found.append((f"One task {where}", _costs(interleave(cases, rounds))))
        published = {case: functools.partial(_publish, worker, case, tasks) for case in CASES}
        found.append(("Publishing one task", _published(interleave(published, rounds))))
        found.append(("Importing", _imported(rounds)))
        return found
    finally:
        worker.close()


def _trace(url: str, worker: Worker, case: str, tasks: int) -> Cost:
    """In this process, without a broker."""
    task, app = getattr(worker.module, case), worker.module.app
    trace = build_tracer(task.name, task, app=app)
    requests = []
    for _ in range(tasks):
        account = uuid.uuid4().hex
        made = str(uuid.uuid4()), task.name, (account,), {}
        sent = app.amqp.create_task_message(*made, ignore_result=True)
        header = {"v": 2, "execution_id": uuid.uuid4().hex[:22]}
        ours = {"relock": header, "delivery_info": {}, "hostname": "bench"}
        requests.append(({**sent.headers, **ours}, (account,)))
    with redis.Redis.from_url(url, socket_timeout=None) as client:
        server, cpu, clock = _of_server(client), time.process_time(), time.perf_counter()
        for request, args in requests:
            trace(request["id"], args, {}, request)
        clock, cpu = time.perf_counter() - clock, time.process_time() - cpu
        server = _of_server(client) - server
    return Cost(*(each / tasks for each in (clock, cpu, 0.0, server)))


def _deliver(url: str, worker: Worker, case: str, tasks: int) -> Cost:
    """Through the broker. The worker begins when all tasks are in its queue."""
    main = psutil.Process(worker.pid)
    child = main.children()[0]
    both, task, key = (main, child), getattr(worker.module, case), f"bench:{uuid.uuid4().hex}"
    for process in both:
        process.suspend()
    try:
        for _ in range(tasks):
            task.delay(uuid.uuid4().hex)
        worker.module.say.delay(key)
        before = [_of(process) for process in both]
    finally:
        for process in both:
            process.resume()
    with redis.Redis.from_url(url, socket_timeout=None) as client:
        server, clock = _of_server(client), time.perf_counter()
        assert client.blpop([key], 120), f"the worker took too long over {tasks} of {case}"
        clock, server = time.perf_counter() - clock, _of_server(client) - server
    main_cpu, child_cpu = (
        _of(process) - since for process, since in zip(both, before, strict=True)
    )
    return Cost(*(each / tasks for each in (clock, child_cpu, main_cpu, server)))


def _of(process: psutil.Process) -> float:
    # The clock of clock_getcpuclockid(3): what /proc and psutil tell is counted in ticks of 10 ms.
    return time.clock_gettime(~process.pid << 3 | 2)


def _of_server(client: redis.Redis) -> float:
    cpu: Any = client.info("cpu")
    return float(cpu["used_cpu_user"] + cpu["used_cpu_sys"])


def _costs(found: dict[str, list[Cost]]) -> str:
    """The cost beyond that of a plain task, round by round."""
    head = ["", "extra time, µs", "to `Lock`", "extra processor time of the child, µs", "to `Lock`"]
    head += ["of the main process", "of Redis"]
    parts: dict[str, Callable[[Cost], float]] = {
        "clock": lambda cost: cost.clock,
        "cpu": lambda cost: cost.child,
        "main": lambda cost: cost.main,
        "redis": lambda cost: cost.redis,
    }

    def extra(case: str, part: str) -> list[float]:
        pairs = zip(found[case], found[PLAIN], strict=True)
        return [(parts[part](one) - parts[part](base)) * 1e6 for one, base in pairs]

    def row(case: str) -> list[str]:
        shown = [CASES[case]]
        for part in ("clock", "cpu"):
            own, hand = statistics.median(extra(case, part)), extra(HAND, part)
            shown += [f"{own:.0f}", f"{own / statistics.median(hand):.2f}"]
        return [
            *shown,
            *(f"{statistics.median(extra(case, each)):.0f}" for each in ("main", "redis")),
        ]

    base = {part: statistics.median(map(of, found[PLAIN])) * 1e6 for part, of in parts.items()}
    first = [f"{CASES[PLAIN]}: itself", *(f"{base['clock']:.0f}", "", f"{base['cpu']:.0f}", "")]
    first += [f"{base['main']:.0f}", f"{base['redis']:.0f}"]
    return table(head, [first, *(row(case) for case in CASES if case != PLAIN)])


def _publish(worker: Worker, case: str, tasks: int) -> float:
    task = getattr(worker.module, case)
    accounts = [uuid.uuid4().hex for _ in range(tasks)]
    main = psutil.Process(worker.pid)
    child = main.children()[0]
    for process in (main, child):
        process.suspend()
    try:
        began = time.process_time()
        for account in accounts:
            task.delay(account)
        return (time.process_time() - began) / tasks
    finally:
        for process in (main, child):
            process.resume()


def _published(found: dict[str, list[float]]) -> str:
    rows = []
    for case, seconds in found.items():
        ratio = statistics.median(ratios(seconds, found[PLAIN]))
        rows.append((CASES[case], f"{statistics.median(seconds) * 1e6:.0f}", f"{ratio:.2f}"))
    return table(("", "processor time, µs", "to a plain task"), rows)


def _imported(rounds: int) -> str:
    command = [sys.executable, "-c", _IMPORTS]
    with tempfile.TemporaryDirectory() as compiled:
        # As where it is installed: compiled once.
        env = {**os.environ, "PYTHONPYCACHEPREFIX": compiled}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        outputs = [
            subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
            for _ in range(max(rounds, 3) + 1)
        ]
    times = zip(*(map(float, each.split()) for each in outputs[1:]), strict=True)
    theirs, ours = (statistics.median(each) * 1000 for each in times)
    return (
        f"`LockedTask`, where Celery and redis-py are loaded: {ours:.0f} ms of processor time. "
        f"These two take {theirs:.0f} ms."
    )
