"""Renewal: one process keeps many locks alive."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import redis

from benchmarks.contenders import LEASE
from benchmarks.rounds import interleave, ratios, spread, table
from celery_relock import engines
from celery_relock.engine import ids
from celery_relock.engine.protocol import Claim, Renewal

_fork = multiprocessing.get_context("fork")
PEXPIRE = "pipelined bare PEXPIRE"
_OURS = "celery-relock"


@dataclass(frozen=True)
class Sweep:
    """One renewal of all locks.

    Attributes:
        seconds: the duration.
        cpu: the seconds of processor time of this process and the server together.
        call: the seconds of the server's longest command.
        stall: the seconds of another client's longest PING.
    """

    seconds: float
    cpu: float
    call: float
    stall: float


def measure(url: str, rounds: int, locks: int) -> str:
    """Sweeps over so many locks, and over as many plain keys."""
    with redis.Redis.from_url(url) as client:
        client.config_set("slowlog-log-slower-than", 0)
        sweeps = {_OURS: _renew_locks(url, locks), PEXPIRE: _renew_keys(client, locks)}
        cases = {name: _watched(url, client, sweep) for name, sweep in sweeps.items()}
        for case in cases.values():
            case()
        found = interleave(cases, rounds)
        client.config_set("slowlog-log-slower-than", 10_000)
        client.flushdb()
    rows = []
    for name, each in found.items():
        base = found[PEXPIRE]
        rows.append(
            (
                name,
                spread(ratios([s.seconds for s in each], [s.seconds for s in base])),
                spread(ratios([s.cpu for s in each], [s.cpu for s in base])),
                f"{statistics.median(s.call for s in each) * 1000:.2f}",
                f"{statistics.median(s.stall for s in each) * 1000:.2f}",
            )
        )
    head = [f"{locks:,} locks", "time, ratio", "processor time of both ends, ratio"]
    return table([*head, "longest command, ms", "longest PING beside it, ms"], rows)


def _renew_locks(url: str, count: int) -> Callable[[], None]:
    backend = engines.engine_for(url).backend
    renewals = []
    for number in range(count):
        run, attempt_id, name = ids.new_id(), ids.new_attempt_id(), f"account:{number}"
        backend.acquire(Claim(run, attempt_id, run, (name,), (1,), LEASE * 100, "Lock host:1234"))
        renewals.append(Renewal(name, run, attempt_id, LEASE * 100))

    def sweep() -> None:
        assert all(backend.renew(renewals))

    return sweep


def _renew_keys(client: redis.Redis, count: int) -> Callable[[], None]:
    keys = [f"plain:{number}" for number in range(count)]
    for key in keys:
        client.set(key, "x" * 22, px=LEASE * 100_000)

    def sweep() -> None:
        with client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.pexpire(key, LEASE * 100_000)
            assert all(pipeline.execute())

    return sweep


def _watched(url: str, client: redis.Redis, sweep: Callable[[], None]) -> Callable[[], Sweep]:
    def run() -> Sweep:
        receiver, sender = _fork.Pipe(duplex=False)
        going = _fork.Event()
        ended = _fork.Event()
        prober = _fork.Process(target=_probe, args=(url, going, ended, sender))
        prober.start()
        going.wait()
        client.slowlog_reset()
        before, cpu = _server_cpu(client), time.process_time()
        started = time.perf_counter()
        sweep()
        seconds = time.perf_counter() - started
        cpu = time.process_time() - cpu + _server_cpu(client) - before
        ended.set()
        stall = receiver.recv()
        prober.join()
        slow = [entry["duration"] for entry in client.slowlog_get(128)]
        return Sweep(seconds, cpu, max(slow) / 1e6, stall)

    return run


def _server_cpu(client: redis.Redis) -> float:
    info = client.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


def _probe(url: str, going: Any, ended: Any, sender: Any) -> None:
    """Another client of the server, which sends a PING now and then."""
    with redis.Redis.from_url(url) as client:
        client.ping()
        going.set()
        longest = 0.0
        while not ended.is_set():
            started = time.perf_counter()
            client.ping()
            longest = max(longest, time.perf_counter() - started)
            time.sleep(0.001)
        sender.send(longest)
