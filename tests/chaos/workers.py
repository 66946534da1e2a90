"""What the campaigns with workers share: servers, an app, workers, and what is done to them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.parked.brokers import BROKERS, Broker
from tests.chaos.parked.settings import Settings
from tests.chaos.processes import DURABLE, Processes
from tests.support import Journal, RedisServer, leftovers, reaper, wait_for

#: A worker that is told to end can take so long, in seconds (`tests.support.Worker.stop` says why).
ENDED = 70.0


class WithWorkers:
    """Base class of a campaign with Celery workers.

    Args:
        workers, children: so many, and each with so many.
        arguments: more of them, for the command line of a worker.
    """

    def __init__(self, workers: int, children: int, *arguments: str) -> None:
        self._count, self._children, self._arguments = workers, children, arguments

    @contextmanager
    def _serving(self, broker: str) -> Iterator[None]:
        """The servers: of the locks and the results, of what nothing happens to, the broker."""
        self._locks, self._resource = RedisServer(*DURABLE), RedisServer()
        self._broker: Broker = BROKERS[broker]()
        self._client = self._locks.client()
        try:
            yield
        finally:
            for server in (self._broker, self._locks, self._resource):
                server.stop()

    @contextmanager
    def _staged(
        self,
        name: str,
        seed: int,
        lease: float,
        late: bool = True,
        transport: dict[str, Any] | None = None,
        **environment: str,
    ) -> Iterator[None]:
        """An app and its processes, as `Processes` and `Settings` say; in the end all are killed.

        `_laid` counts the faults, `_found` is for violations that show on the way.
        """
        self._settings = Settings(
            broker=self._broker.url,
            transport=self._broker.options if transport is None else transport,
            locks=self._locks.url,
            resource=self._resource.url,
            namespace=f"{name}{uuid.uuid4().hex[:8]}",
            late=late,
            lease=lease,
        )
        self._random = random.Random(seed)
        self._workers: list[subprocess.Popen[Any]] = []
        self._laid: Counter[str] = Counter()
        self._found: list[str] = []
        self._app = self._settings.app()
        self._journal = Journal(self._resource.url, self._settings.namespace)
        self._processes = Processes(name, {**self._settings.environment(), **environment})
        try:
            yield
        finally:
            self._processes.end()
            self._app.close()
            self._journal.close()

    def _revive(self) -> None:
        """Start the workers that are missing: also in the beginning, and as Celery ends one that
        has lost a child before it began to work."""
        self._broker.bring_back(self._app)
        self._workers = [worker for worker in self._workers if worker.poll() is None]
        while len(self._workers) < self._count:
            self._workers.append(self._processes.start_worker(self._children, *self._arguments))

    def _children_of(self, worker: subprocess.Popen[Any]) -> list[int]:
        with suppress(psutil.NoSuchProcess):
            return [each.pid for each in psutil.Process(worker.pid).children()]
        return []

    def _end(self, worker: subprocess.Popen[Any], how: signal.Signals) -> None:
        """Kill a worker with its children, or send it a signal by which it ends."""
        if how is signal.SIGKILL:
            os.killpg(worker.pid, how)
        else:
            worker.send_signal(how)
        self._wait_for_the_end_of(worker)

    def _wait_for_the_end_of(self, worker: subprocess.Popen[Any]) -> None:
        with suppress(subprocess.TimeoutExpired):
            worker.wait(ENDED)
        if worker.poll() is None:
            worker.send_signal(signal.SIGUSR1)  # Celery logs what each thread is about
            logs = self._logs()
            wait_for(lambda: any("MainThread\n===" in log.read_text() for log in logs))
            time.sleep(1)  # until all is written
            # Celery's main process waits for ever for the rest of a result, if a child was killed
            # amid writing it; or, told to quit amid a write to RabbitMQ, for its own lock.
            stuck = "in _flush_outqueue", "in on_cold_shutdown"
            if any(where in log.read_text() for log in logs for where in stuck):
                self._laid["workers that Celery could not end"] += 1
            else:
                self._found.append(f"shutdown: a worker is there after {ENDED:g} s")
        reaper.end(worker)

    def _logs(self) -> list[Path]:
        """Of the workers, in the order in which they were started."""
        logs = self._processes.folder.glob("w*.log")
        return sorted(logs, key=lambda log: int(log.stem[1:]))

    def _cut_locks(self, kind: str) -> None:
        self._client.client_kill_filter(_type=kind, skipme=True)
        self._laid[f"locks: CLIENT KILL {kind}"] += 1

    def _restart_locks(self) -> None:
        self._locks.kill()
        self._locks.restart(keep_data=True)
        self._laid["locks: kill -9 and started again"] += 1

    def _remaining(self) -> list[str]:
        """What is left in Redis besides that which all locks share."""
        names = leftovers(self._client, self._settings.namespace)
        return [name for name in names if not name.endswith(":meta")]

    def _endless(self) -> list[str]:
        """Keys that no TTL ends."""
        return [name for name in self._remaining() if self._client.pttl(name) == -1]
