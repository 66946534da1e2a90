"""Growth: what a step costs the server as the number of something grows.

The server's time for a step is given as a multiple of its time for an uncontended pair, measured in
the same rounds: whatever else the machine does slows both.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import redis

from benchmarks.rounds import interleave, ratios, table
from celery_relock import engines
from celery_relock.backends.redis.backend import RedisBackend
from celery_relock.engine.protocol import (
    LINE,
    SHARED,
    Claim,
    Held,
    Parked,
    ParkRequest,
    PlaceRequest,
    Queued,
    Release,
    Successor,
)

_LONG = 3600.0
_STEPS, _NAMES = 60, 3
ORDER = f"{LINE}account"
FREE = "a pair of a free lock"


class Bench:
    """A namespace for one measurement, and steps in it."""

    def __init__(self, url: str, namespace: str) -> None:
        self.client = redis.Redis.from_url(url)
        self.backend: Any = engines.engine_for(url, namespace).backend
        assert isinstance(self.backend, RedisBackend)
        self._numbers = itertools.count()
        # Grants are told only where somebody hears: nobody has to read what is heard.
        self._ears = self.client.pubsub()
        self._ears.subscribe(self.backend.keys.inbox("ear"))
        # What some steps use up, it puts there again; outside of what is measured.
        self.refill: Callable[[], object] = lambda: None

    def close(self) -> None:
        self._ears.close()
        self.client.close()

    def new(self) -> str:
        return f"e{next(self._numbers):07}"

    def claim(self, execution: str, *names: str, limit: int = 1, owner: str = "") -> Claim:
        limits = (limit,) * len(names)
        return Claim(execution, "n", owner or execution, names, limits, _LONG, "bench host:1234")

    def acquire(self, execution: str, *names: str, wait: float = 0.0, **more: Any) -> Any:
        return self.backend.acquire(self.claim(execution, *names, **more), wait, "ear")

    def held(self, execution: str, *names: str, **more: Any) -> str:
        answer = self.acquire(execution, *names, **more)
        assert isinstance(answer, Held), answer
        return execution

    def release(self, execution: str, *names: str, **more: Any) -> Any:
        return self.backend.release(Release(names, execution, "n", **more))

    def sharers(self, count: int) -> Callable[[], object]:
        for _ in range(count):
            self.held(self.new(), "shared", limit=SHARED)
        return partial(self.pair, "shared", limit=SHARED)

    def shared_locks(self, count: int) -> Callable[[], object]:
        for number in range(count):
            self.held(self.new(), f"lock-{number}", limit=SHARED)
        return partial(self.pair, "one-more", limit=SHARED)

    def pair(self, *names: str, limit: int = 1) -> None:
        self.release(self.held(self.new(), *names, limit=limit), *names)

    # Each method prepares a situation, and returns the step to measure in it.

    def locks_held(self, count: int) -> Callable[[], object]:
        for number in range(count):
            self.held(self.new(), f"lock-{number}")
        return partial(self.pair, "one-more")

    def holders(self, count: int) -> Callable[[], object]:
        for _ in range(count):
            self.held(self.new(), "semaphore", limit=count + 1)
        return partial(self.pair, "semaphore", limit=count + 1)

    def successors(self, count: int) -> Callable[[], object]:
        keeper, flow = self.held("keeper", "flow", owner="w"), list[str]()

        def refill() -> None:
            missing = [self.new() for _ in range(count - len(flow))]
            flow.extend(missing)
            self.release(keeper, "flow", successor=Successor(" ".join([*missing, keeper]), _LONG))
            self.held(keeper, "flow", owner="w")

        def step() -> None:
            self.release(self.held(flow.pop(0), "flow", owner="w"), "flow")

        self.refill = refill
        return step

    def chained(self, count: int) -> Callable[[], object]:
        flow, first = [self.new() for _ in range(count)], self.held(self.new(), "flow", owner="w")
        self.release(first, "flow", successor=Successor(" ".join(flow), _LONG))

        def step() -> None:
            execution = self.held(flow.pop(0), "flow", owner="w")
            flow.append(self.new())
            self.release(execution, "flow", successor=Successor(flow[-1], _LONG))

        return step

    def waiters(self, count: int) -> Callable[[], object]:
        name = f"line-{count}"
        line = [self.held(self.new(), name)]
        line += [self._queued(name) for _ in range(count)]

        def step() -> None:
            self.release(line.pop(0), name)  # which lets the next one in
            line.append(self._queued(name))

        return step

    def _queued(self, name: str) -> str:
        execution = self.new()
        assert isinstance(self.acquire(execution, name, wait=_LONG), Queued)
        return execution

    def parked(self, count: int) -> Callable[[], object]:
        name = f"parked-{count}"
        line = [self.held(self.new(), name)]
        line += [self._parked(name) for _ in range(count)]

        def step() -> None:
            (message,) = self.release(line.pop(0), name, home="h").messages
            assert message.execution_id == line[0]
            self.held(line[0], name)
            line.append(self._parked(name))

        return step

    def _parked(self, name: str, execution: str = "") -> str:
        execution = execution or self.new()
        request = ParkRequest("x" * 500, "h", execution, None, 100_000)
        assert isinstance(self.backend.park(self.claim(execution, name), request), Parked)
        return execution

    def placed(self, count: int) -> Callable[[], object]:
        line = [self._placed() for _ in range(count)]

        def step() -> None:
            line.append(self._placed())
            self.release(self.held(line.pop(0), ORDER), ORDER, ended="execution", remember=60.0)

        return step

    def early(self, count: int) -> Callable[[], object]:
        line = [self._placed() for _ in range(count)]
        for execution in line[1:]:
            self._parked(ORDER, execution)

        def step() -> None:
            execution = self._placed()
            line.append(execution)
            self._parked(ORDER, execution)
            self.release(
                self.held(line.pop(0), ORDER), ORDER, ended="execution", remember=60.0, home="h"
            )

        return step

    def _placed(self) -> str:
        execution = self.new()
        self.backend.place(PlaceRequest(ORDER, execution, execution, "bench", _LONG, 0, 0, _LONG))
        return execution

    def names(self, count: int) -> Callable[[], object]:
        return partial(self.pair, *[f"name-{number}" for number in range(count)])


CASES: dict[str, tuple[str, Callable[[Bench, int], Callable[[], object]]]] = {
    "locks held": ("a pair of another lock", Bench.locks_held),
    "shared locks held": ("a shared pair of another lock", Bench.shared_locks),
    "who shares one lock": ("a shared pair of it", Bench.sharers),
    "holders of one semaphore": ("a pair of it", Bench.holders),
    "successors of one workflow": ("a pair of one of them", Bench.successors),
    "successors, in a chain": ("one acquires, and leaves its hold to a new one", Bench.chained),
    "waiters of one lock": ("the next one gets it, one more comes", Bench.waiters),
    "parked for one lock": ("the next one is resumed and gets it, one more parks", Bench.parked),
    "calls in one line": ("one is placed, the first comes and ends", Bench.placed),
    "calls in one line, here early": ("the same, each parked before its turn", Bench.early),
    "names of one task": ("a pair of all of them", Bench.names),
}


def measure(url: str, rounds: int, sizes: Sequence[int]) -> str:
    """The multiples by case and size."""
    with redis.Redis.from_url(url) as client:
        rows = [
            (name, step, *[_times(client, url, prepare, size, rounds) for size in sizes])
            for name, (step, prepare) in CASES.items()
        ]
    return table(["beside", "a step", *[f"{size:,}" for size in sizes]], rows)


def _times(
    client: redis.Redis,
    url: str,
    prepare: Callable[[Bench, int], Callable[[], object]],
    size: int,
    rounds: int,
) -> str:
    client.flushdb()
    bench = Bench(url, "growth")
    try:
        step = prepare(bench, size)
        free = partial(bench.pair, "free")
        few = _NAMES if prepare is Bench.names else _STEPS
        few = min(few, size) if prepare is Bench.successors else few
        cases = {
            FREE: partial(_micros, client, free, _STEPS),
            "": partial(_micros, client, step, few, bench),
        }
        for case in cases.values():
            case()
        found = interleave(cases, rounds)
        return f"{statistics.median(ratios(found[''], found[FREE])):.1f}"
    finally:
        bench.close()


def through(url: str, executions: int, permits: int = 10) -> str:
    """Executions, one after another, through one semaphore of which all permits but one are held;
    each leaves its tombstone. Ten parts of the way: is a step slower at the end?"""
    with redis.Redis.from_url(url) as client:
        client.flushdb()
        bench = Bench(url, "growth")
        for _ in range(permits - 1):
            bench.held(bench.new(), "through", limit=permits)
        free = partial(bench.pair, "free")

        def step() -> None:
            execution = bench.held(bench.new(), "through", limit=permits)
            bench.release(execution, "through", ended="execution", remember=_LONG)

        parts: Iterator[tuple[float, float]] = (
            (_micros(client, step, executions // 10), _micros(client, free, 1000))
            for _ in range(10)
        )
        times = [f"{part / base:.2f}" for part, base in parts]
        bench.close()
        client.flushdb()
    head = [f"{executions:,} executions", *[f"to {10 * part} %" for part in range(1, 11)]]
    return table(head, [("a step, to a pair of a free lock", *times)])


def _micros(
    client: redis.Redis, step: Callable[[], object], count: int, bench: Bench | None = None
) -> float:
    """The server's time for a step, in microseconds."""
    if bench:
        bench.refill()
    client.config_resetstat()
    for _ in range(count):
        step()
    stats: Any = client.info("commandstats")
    return sum(each["usec"] for name, each in stats.items() if "eval" in name) / count
