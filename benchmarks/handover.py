"""Contended: several processes that want one lock all the time."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import redis

from benchmarks.contenders import CONTENDED, RING, Make, TokenRing
from benchmarks.rounds import interleave, percentile, table

_fork = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Run:
    """The result of one run of one contender.

    Attributes:
        busy: the share of the time in which somebody held the lock.
        gaps: the seconds from a holder's call of `release` to the next holder's return from
            `acquire`.
        commands: the server's reads from its clients, for each hand-over.
        uneven: the most acquisitions of a process, divided by the fewest.
        again: the share of hand-overs from a process to itself.
    """

    busy: float
    gaps: list[float]
    commands: float
    uneven: float
    again: float


def measure(url: str, rounds: int, waiters: int, section: float, seconds: float) -> str:
    """A table for so many processes and sections of so many seconds."""
    # Each process acquires the lock about ten times, else max/min says nothing.
    seconds = max(seconds, 16 * waiters * section)
    cases = {
        name: functools.partial(_run, url, make, waiters, section, seconds)
        for name, make in CONTENDED.items()
    }
    runs = interleave(cases, rounds)
    ring = statistics.median(run.busy for run in runs[RING])
    head = ["contender", "busy %", "to the ring", "hand-over p50, ms", "p99, ms"]
    head += ["commands", "max/min", "to itself %"]
    return table(head, [_row(name, found, ring) for name, found in runs.items()])


def _row(name: str, runs: list[Run], ring: float) -> tuple[object, ...]:
    busy = statistics.median(run.busy for run in runs)
    p50, p99 = (
        statistics.median(percentile(run.gaps, share) for run in runs) * 1000
        for share in (0.5, 0.99)
    )
    commands, uneven, again = (
        statistics.median(getattr(run, what) for run in runs)
        for what in ("commands", "uneven", "again")
    )
    points = f"{(busy - ring) * 100:+.1f}"
    facts = [f"{busy:.1%}", points, f"{p50:.2f}", f"{p99:.2f}", f"{commands:.1f}", f"{uneven:.2f}"]
    return name, *facts, f"{again:.0%}"


def _run(url: str, make: Make, waiters: int, section: float, seconds: float) -> Run:
    name = f"hot-{os.urandom(4).hex()}"
    if make is TokenRing:
        with redis.Redis.from_url(url) as client:
            TokenRing(client, name).lay_out()
    gate = _fork.Barrier(waiters + 1, timeout=60)  # a member that fails breaks it
    ends = []
    members = []
    for _ in range(waiters):
        receiver, sender = _fork.Pipe(duplex=False)
        member = _fork.Process(
            target=_member, args=(url, make, name, section, gate, seconds, sender)
        )
        member.start()
        ends.append(receiver)
        members.append(member)
    gate.wait()
    with redis.Redis.from_url(url) as client:
        time.sleep(seconds * 0.25)  # until all processes are connected and wait
        before, since = _reads(client), time.monotonic()
        time.sleep(seconds * 0.7)
        reads, until = _reads(client) - before, time.monotonic()
        visits = [receiver.recv() for receiver in ends]
        for member in members:
            member.join()
    return _sum_up(visits, reads, since, until)


def _reads(client: redis.Redis) -> int:
    return int(client.info("stats")["total_reads_processed"])


def _member(
    url: str, make: Make, name: str, section: float, gate: Any, seconds: float, sender: Any
) -> None:
    lock = make(redis.Redis.from_url(url), name)
    visits = []
    gate.wait()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        lock.acquire()
        entered = time.monotonic()
        time.sleep(section)
        left = time.monotonic()
        lock.release()
        visits.append((entered, left))
    sender.send(visits)


def _sum_up(
    members: list[list[tuple[float, float]]], reads: int, since: float, until: float
) -> Run:
    entries = sorted(
        (entered, left, member)
        for member, visits in enumerate(members)
        for entered, left in visits
        if since <= entered and left <= until
    )
    handovers = list(itertools.pairwise(entries))
    counts = Counter(member for _, _, member in entries)
    fewest = min(counts[member] for member in range(len(members)))
    return Run(
        busy=sum(left - entered for entered, left, _ in entries) / (until - since),
        gaps=[later[0] - earlier[1] for earlier, later in handovers],
        commands=reads / max(1, len(entries)),
        uneven=max(counts.values()) / fewest if fewest else float("inf"),
        again=sum(a[2] == b[2] for a, b in handovers) / max(1, len(handovers)),
    )
