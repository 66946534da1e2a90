"""A campaign: processes at work on a few locks, faults meanwhile, and a verdict at the end."""

from __future__ import annotations

import subprocess
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from celery_relock import engines
from tests.chaos.checker import STILL, check, entries_of, longest_wait, lost_updates, most_beside
from tests.chaos.client import GUARDED, LOCKS, PATIENCE, Settings
from tests.chaos.faults import Faults
from tests.chaos.history import Fault, History, Recorder, load
from tests.chaos.processes import DURABLE, Processes
from tests.chaos.register import KINDS, Register
from tests.support import RedisServer, leftovers, pauses


@dataclass
class Report:
    """What a campaign found. `writes` and `lost` count updates of the registers by kind."""

    seconds: float = 0.0
    visits: int = 0
    entries: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    writes: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    longest_wait: float = 0.0
    shared: int = 0
    most_beside: int = 0
    violations: list[str] = field(default_factory=list)


class Campaign:
    """Runs one campaign in a folder of its own; see `run`."""

    def __init__(
        self, seconds: float, processes: int, threads: int, lease: float, seed: int
    ) -> None:
        self._seconds, self._count, self._threads = seconds, processes, threads
        self._lease, self._seed = lease, seed
        self._processes = Processes("chaos", {})
        self._namespace = f"chaos{uuid.uuid4().hex[:8]}"
        self._clients: dict[int, subprocess.Popen[Any]] = {}
        self._started = 0
        self._began = self._until = 0.0

    def run(self) -> Report:
        """Start everything, let it run for the time, end it, and judge."""
        self._server, self._resource = RedisServer(*DURABLE), RedisServer()
        report = Report()
        pauses.watch()
        self._began = time.monotonic()
        self._until = self._began + self._seconds
        try:
            for _ in range(self._count):
                self._spawn()
            while len(list(self._processes.folder.glob("*.jsonl"))) < self._count:
                time.sleep(0.05)  # what follows is to find all of them at work
            recorder = Recorder(self._processes.folder / "faults.jsonl")
            faults = Faults(
                self._server, recorder, self._pids, self._respawn, self._lease, self._seed
            )
            faults.run(self._until)
            report.violations += self._end()
            report.seconds = time.monotonic() - self._began
            report.violations += self._left_behind()
            self._judge(report, load(self._processes.folder))
        finally:
            self._processes.end()
            self._server.stop()
            self._resource.stop()
        self._processes.tidy(report.violations)
        return report

    def _spawn(self) -> None:
        self._started += 1
        settings = Settings(
            url=self._server.url,
            register=self._resource.url,
            namespace=self._namespace,
            folder=str(self._processes.folder),
            until=self._until,
            lease=self._lease,
            threads=self._threads,
            name=f"p{self._started}",
        )
        process = self._processes.start(settings.arguments(), settings.name)
        self._clients[process.pid] = process

    def _pids(self) -> list[int]:
        return [pid for pid, process in self._clients.items() if process.poll() is None]

    def _respawn(self, pid: int) -> None:
        del self._clients[pid]
        self._spawn()

    def _end(self) -> list[str]:
        """Every process gets each lock once more and ends by itself, or it hangs."""
        found = []
        deadline = time.monotonic() + (PATIENCE + 2) * 2
        for process in self._clients.values():
            try:
                status: int | str = process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                status = "it hangs"
            if status != 0:
                found.append(f"progress: process {process.pid} ended badly: {status}")
        logs = [path.read_text()[-2000:] for path in self._processes.folder.glob("*.log")]
        return found + [log for log in logs if "Traceback" in log]

    def _left_behind(self) -> list[str]:
        """Nobody is in or waits any more, and every key but the fence's goes by itself."""
        found = []
        engine = engines.engine_for(self._server.url, self._namespace)
        for name in LOCKS:
            state = engine.inspect(name)
            if state.holds or state.waiting:
                found.append(f"hygiene: lock {name!r} is left with {state}")
        client = self._server.client()
        for key in leftovers(client, self._namespace):
            if not key.endswith(":meta") and client.pttl(key) == -1:
                found.append(f"hygiene: the key {key!r} stays for ever")
        return found

    def _judge(self, report: Report, history: History) -> None:
        history.faults += [Fault(STILL, *each) for each in pauses.seen() if each[1] >= self._began]
        report.violations += map(str, check(history, self._lease))
        report.visits = len(history.visits)
        report.outcomes = Counter(visit.outcome for visit in history.visits)
        report.faults = Counter(fault.kind for fault in history.faults)
        report.longest_wait = longest_wait(history.visits)
        report.shared = sum(each.shared and each.fence > 0 for each in history.visits)
        report.most_beside = most_beside(history.visits)
        for name in LOCKS:
            visits = [visit for visit in history.visits if visit.lock == name]
            report.entries += len(entries_of(visits))
        register = Register(self._resource.url)
        for name in GUARDED:
            for kind in KINDS:
                writes = register.log(kind, name)
                report.writes[kind] += len(writes)
                report.lost[kind] += lost_updates(writes)
        register.close()
        if report.lost["fenced"]:
            report.violations.append(f"update: {report.lost['fenced']} lost in spite of fences")
