"""A campaign with all kinds of calls at once: workers, a sender, faults, and a verdict."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import psutil

from celery_relock.admin import Locks
from tests.chaos.mixed import judge
from tests.chaos.parked.brokers import BROKERS, Broker
from tests.chaos.parked.settings import Settings
from tests.chaos.processes import Processes
from tests.support import Journal, RedisServer, leftovers, reaper, wait_for
from tests.support.journal import Event

_DURABLE = ("--appendonly", "yes", "--appendfsync", "no")
WORKERS, CHILDREN = 2, 3
#: Nothing has happened for so long, in seconds: what has not ended by then is lost. Longer than the
#: gap of a workflow.
STALLED = 45.0
#: So many kinds of fault are tried at least.
KINDS = 4
#: Between two faults, in seconds.
PAUSE = 0.3, 1.2
#: Between two faults that end a whole worker, in seconds: the next one is to come to work.
APART = 6.0
#: A worker that is told to end can take so long, in seconds (`tests.support.Worker.stop` says why).
ENDED = 70.0


class Campaign:
    """Runs one campaign; see `run`.

    Args:
        calls: so many, of every kind in turns.
        broker: of `BROKERS`.
        seed: of the calls and of the faults.
        pause: seconds between two calls, on average.
        worker: more arguments for the command line of a worker.
    """

    def __init__(
        self,
        calls: int,
        broker: str = "rabbitmq",
        seed: int = 1,
        pause: float = 0.1,
        worker: tuple[str, ...] = (),
    ) -> None:
        self._calls, self._make_broker = calls, BROKERS[broker]
        self._seed, self._pause, self._worker = seed, pause, worker
        self._random = random.Random(seed)
        self._workers: list[subprocess.Popen[Any]] = []
        self._laid: Counter[str] = Counter()
        self._ended_at = 0.0

    def run(self) -> judge.Report:
        """Start everything, lay faults while calls are sent, wait for the end, and judge."""
        self._locks, resource = RedisServer(*_DURABLE), RedisServer()
        self._broker: Broker = self._make_broker()
        self._settings = Settings(
            broker=self._broker.url,
            transport=self._broker.options,
            locks=self._locks.url,
            resource=resource.url,
            namespace=f"mixed{uuid.uuid4().hex[:8]}",
            late=True,
            lease=10.0,
        )
        self._client, self._app = self._locks.client(), self._settings.app()
        self._journal = Journal(resource.url, self._settings.namespace)
        self._processes = Processes("mixed", self._settings.environment())
        began = time.monotonic()
        try:
            self._revive()
            sender = ("tests.chaos.mixed.sender", self._calls, self._seed, self._pause)
            self._lay_faults(self._processes.start(sender, "sender"))
            self._wait_for_the_end()
            events = self._journal.events()
            report = judge.report(events, self._states(events))
            report.violations += [f"hygiene: {key} is left" for key in self._left()]
            if "all sent" not in self._journal.names():
                report.violations.append("the sender failed, see sender.log")
            report.faults, report.seconds = self._laid, time.monotonic() - began
        finally:
            self._processes.end()
            self._app.close()
            self._journal.close()
            for server in (self._broker, self._locks, resource):
                server.stop()
        self._processes.tidy(report.violations, events)
        return report

    def _lay_faults(self, sender: subprocess.Popen[Any]) -> None:
        acts: list[Callable[[], None]] = []
        # All calls can have been sent while one worker ended: their bodies are still to run then.
        while sender.poll() is None or len(self._laid) < KINDS:
            time.sleep(self._random.uniform(*PAUSE))
            if not acts:
                acts = [self._kill_child] * 6
                acts += [partial(self._end_worker, how) for how in ("kill", "terminate", "quit")]
                acts += [partial(self._cut_locks, kind) for kind in ("normal", "pubsub")]
                acts += [self._freeze_locks, self._restart_locks]
                self._random.shuffle(acts)
            acts.pop()()
            self._revive()

    def _revive(self) -> None:
        """Celery ends a worker that has lost a child before it began to work."""
        self._broker.bring_back(self._app)
        self._workers = [worker for worker in self._workers if worker.poll() is None]
        while len(self._workers) < WORKERS:
            self._workers.append(self._processes.start_worker(CHILDREN, *self._worker))

    def _kill_child(self) -> None:
        at_work = {event.pid for event in self._journal.events("received")}
        victims = [worker.pid for worker in self._workers if worker.pid in at_work]
        if not victims:
            return
        with suppress(psutil.Error):
            if children := psutil.Process(self._random.choice(victims)).children():
                self._random.choice(children).kill()
                self._laid["pool processes killed"] += 1

    def _end_worker(self, how: str) -> None:
        """Kill a whole worker, or let it end what it is about, or tell it to drop that; and start
        another one."""
        if (left := self._ended_at + APART - time.monotonic()) > 0:
            time.sleep(left)
        worker = self._workers.pop(0)
        if how == "kill":
            os.killpg(worker.pid, signal.SIGKILL)
            self._laid["workers killed"] += 1
        elif how == "quit":
            worker.send_signal(signal.SIGQUIT)
            self._laid["workers told to quit"] += 1
        else:
            worker.terminate()
            self._laid["workers ended"] += 1
        with suppress(subprocess.TimeoutExpired):
            worker.wait(ENDED)
        if worker.poll() is None:
            self._give_up(worker)
        reaper.end(worker)
        self._revive()
        self._ended_at = time.monotonic()

    def _give_up(self, worker: subprocess.Popen[Any]) -> None:
        """A worker does not end. Celery's main process waits for ever for the rest of a result, if
        a child was killed amid writing it (`ResultHandler._flush_outqueue` says so)."""
        worker.send_signal(signal.SIGUSR1)  # Celery logs what each thread is about
        logs = self._processes.folder
        wait_for(lambda: any("MainThread\n===" in log.read_text() for log in logs.glob("w*.log")))
        time.sleep(1)  # until all is written
        if not any("in _flush_outqueue" in log.read_text() for log in logs.glob("w*.log")):
            raise AssertionError(f"a worker is there after {ENDED:g} s; the logs are in {logs}")
        self._laid["workers that Celery could not end"] += 1

    def _cut_locks(self, kind: str) -> None:
        self._client.client_kill_filter(_type=kind, skipme=True)
        self._laid[f"locks: CLIENT KILL {kind}"] += 1

    def _freeze_locks(self) -> None:
        self._locks.pause()
        time.sleep(self._random.uniform(0.5, 4))
        self._locks.resume()
        self._laid["locks: SIGSTOP"] += 1

    def _restart_locks(self) -> None:
        self._locks.kill()
        self._locks.restart(keep_data=True)
        self._laid["locks: kill -9 and started again"] += 1

    def _wait_for_the_end(self) -> None:
        """Until every task has ended and nothing is left, or nothing has happened for long."""
        seen, changed = 0, time.monotonic()
        while time.monotonic() - changed < STALLED:
            events = self._journal.events()
            if len(events) != seen:
                seen, changed = len(events), time.monotonic()
            self._revive()
            states = self._states(events)
            if all(judge.ended(task, states, events) for task in states) and not self._left():
                return
            time.sleep(0.5)

    def _states(self, events: list[Event]) -> dict[str, str]:
        sent = [event["task"] for event in events if event.name == "sent"]
        return {task: self._app.AsyncResult(task).state for task in sent}

    def _left(self) -> list[str]:
        """Locks that are held or waited for, keys that no TTL ends, and messages that the broker
        has."""
        found = [str(lock) for lock in Locks(self._app).find()]
        names = leftovers(self._client, self._settings.namespace)
        kept = [name for name in names if not name.endswith(":meta")]
        found += [name for name in kept if self._client.pttl(name) == -1]
        return found + self._broker.left(self._app.conf.task_default_queue)
