"""A campaign with all kinds of calls at once: workers, a sender, faults, and a verdict."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from celery_relock.admin import Locks
from tests.chaos.mixed import judge
from tests.chaos.workers import WithWorkers
from tests.support.journal import Event

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
#: A worker is killed with its children, or ends what it is about, or drops that.
ENDS = {
    signal.SIGKILL: "workers killed",
    signal.SIGTERM: "workers ended",
    signal.SIGQUIT: "workers told to quit",
}


class Campaign(WithWorkers):
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
        super().__init__(WORKERS, CHILDREN, *worker)
        self._calls, self._on, self._seed, self._pause = calls, broker, seed, pause
        self._ended_at = 0.0

    def run(self) -> judge.Report:
        """Start everything, lay faults while calls are sent, wait for the end, and judge."""
        with self._serving(self._on), self._staged("mixed", self._seed, lease=10.0):
            began = time.monotonic()
            self._revive()
            sender = ("tests.chaos.mixed.sender", self._calls, self._seed, self._pause)
            self._lay_faults(self._processes.start(sender, "sender"))
            self._wait_for_the_end()
            events = self._journal.events()
            report = judge.report(events, self._states(events))
            report.violations += self._found
            report.violations += [f"hygiene: {key} is left" for key in self._left()]
            if "all sent" not in self._journal.names():
                report.violations.append("the sender failed, see sender.log")
            report.faults, report.seconds = self._laid, time.monotonic() - began
        self._processes.tidy(report.violations, events)
        return report

    def _lay_faults(self, sender: subprocess.Popen[Any]) -> None:
        acts: list[Callable[[], None]] = []
        # All calls can have been sent while one worker ended: their bodies are still to run then.
        while sender.poll() is None or len(self._laid) < KINDS:
            time.sleep(self._random.uniform(*PAUSE))
            if not acts:
                acts = [self._kill_child] * 6
                acts += [partial(self._end_one, how) for how in ENDS]
                acts += [partial(self._cut_locks, kind) for kind in ("normal", "pubsub")]
                acts += [self._freeze_locks, self._restart_locks]
                self._random.shuffle(acts)
            acts.pop()()
            self._revive()

    def _kill_child(self) -> None:
        at_work = {event.pid for event in self._journal.events("received")}
        victims = [worker for worker in self._workers if worker.pid in at_work]
        if not victims:
            return
        if children := self._children_of(self._random.choice(victims)):
            with suppress(ProcessLookupError):
                os.kill(self._random.choice(children), signal.SIGKILL)
                self._laid["pool processes killed"] += 1

    def _end_one(self, how: signal.Signals) -> None:
        """End a whole worker, and start another one."""
        if (left := self._ended_at + APART - time.monotonic()) > 0:
            time.sleep(left)
        self._laid[ENDS[how]] += 1
        self._end(self._workers.pop(0), how)
        self._revive()
        self._ended_at = time.monotonic()

    def _freeze_locks(self) -> None:
        self._locks.pause()
        time.sleep(self._random.uniform(0.5, 4))
        self._locks.resume()
        self._laid["locks: SIGSTOP"] += 1

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
        found += self._endless()
        return found + self._broker.left(self._app.conf.task_default_queue)
