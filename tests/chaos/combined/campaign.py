"""Rounds of random tasks and calls, each with workers, a sender and a twin without locks, and
judged."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from celery_relock.admin import Locks
from tests.chaos.combined import judge
from tests.chaos.combined.workload import Round
from tests.chaos.workers import WithWorkers
from tests.support import reaper, wait_for
from tests.support.journal import Event

WORKERS, CHILDREN = 2, 3
#: Nothing has happened for so long, in seconds: what has not ended by then is lost. Longer than a
#: call waits in its slot.
STALLED = 75.0
#: A round can take so long, in seconds; the machine may have other things to do.
LONGEST = 300.0
#: The same where nobody has anything to do any more; and between two looks at that.
IDLE, LOOK = 1.0, 0.5
#: Where Celery on Redis keeps a queue's messages of another priority.
PRIORITIES = "", "\x06\x163", "\x06\x166", "\x06\x169"
#: Errors that a round asks for, or that its kills and limits cause.
ASKED_FOR = re.compile(
    r"asked of|Lock(Conflict|Deadlock|Lost)|DuplicateTask|WorkerLostError|TimeLimit|Terminated|"
    r"MaxRetriesExceeded|ChordError|TaskRevokedError|Reject|Ignore|celery.exceptions.TimeoutError|"
    r"does not implement kill_job|Retry in|Hard time limit|exited with|Retrying inf|"
    r"Connection to Redis lost"
)


class Campaign(WithWorkers):
    """Rounds on one broker and in one pool; see `rounds`.

    Args:
        broker: of `BROKERS`.
        pool: of the workers.
        kills: whether bodies kill their processes, and workers are ended and killed.
        cuts: whether the connections to the Redis of the locks and results are cut.
        items: so many in each round.
    """

    def __init__(
        self,
        broker: str = "redis",
        pool: str = "prefork",
        kills: bool = False,
        cuts: bool = False,
        items: int = 20,
    ) -> None:
        super().__init__(WORKERS, CHILDREN)
        self._on, self._pool = broker, pool
        self._kills, self._cuts, self._items = kills, cuts, items

    def rounds(self, seed: int) -> Iterator[tuple[Round, judge.Report]]:
        """Run a round of this seed and judge it, then of the next one, …, until it is closed."""
        with self._serving(self._on):
            while True:
                of = Round(seed, self._pool, self._kills, self._items)
                yield of, self._try(of)
                seed += 1

    def _try(self, of: Round) -> judge.Report:
        try:
            return self._run(of)
        except AssertionError as error:
            return judge.Report(violations=[f"round: {error}"])

    def _run(self, of: Round) -> judge.Report:
        self._client.flushall()
        self._workload, self._ended = of.workload(), False
        # Not the short visibility timeout: a message that a worker keeps would come twice.
        transport = {} if self._on == "redis" else None
        more = of.environment()
        with self._staged("combined", of.seed, lease=5.0, late=False, transport=transport, **more):
            self._app.conf.update(self._workload.conf)
            self._workers = [self._start_worker(number) for number in range(WORKERS)]
            self._wait_for_workers()
            self._work(self._processes.start(("tests.chaos.combined.sender",), "sender"))
            events = self._journal.events()
            report = judge.report(events, self._workload, self._states(events), not self._ended)
            report.faults = self._laid
            for worker in self._workers:
                worker.terminate()
            for worker in self._workers:
                self._wait_for_the_end_of(worker)
            report.violations += self._found + self._errors()
            if "all sent" not in self._journal.names():
                report.violations.append("the sender failed, see sender.log")
        self._processes.tidy(report.violations, events)
        return report

    def _start_worker(self, number: int) -> subprocess.Popen[Any]:
        queue = self._app.conf.task_default_queue
        queues = f"{queue},{queue}-other" if number == 0 else queue
        more = ["-P", self._pool, "-Q", queues, *self._workload.arguments]
        return self._processes.start_worker(CHILDREN, *more)

    def _wait_for_workers(self) -> None:
        logs = self._logs()
        wait_for(lambda: all(_has_begun(log) for log in logs), 60, "that the workers are ready")

    def _work(self, sender: subprocess.Popen[Any]) -> None:
        """Until all is sent, nobody has anything to do and nothing is left, or nothing has happened
        for long."""
        faults = self._faults()
        began = changed = time.monotonic()
        seen, clean, left = 0, 0, ["?"]
        while clean < 2 or sender.poll() is None or faults:
            time.sleep(LOOK)
            if faults and time.monotonic() - began > faults[0][0]:
                faults.pop(0)[1]()
                changed = time.monotonic()
            self._revive()
            if (count := len(self._journal.events())) != seen:
                seen, changed, clean = count, time.monotonic(), 0
            idle = time.monotonic() - changed
            if idle > IDLE:
                left = self._left() or self._busy()
                clean = 0 if left else clean + 1
            if idle > STALLED:
                self._give_up(left)
                break
            if time.monotonic() - began > LONGEST:
                self._found.append(f"endless: after {LONGEST:g} s there is still {left}")
                break
        queue = self._app.conf.task_default_queue
        kept = [key for key in self._endless() if queue not in key]
        self._found += [f"hygiene: the key {key!r} has no end" for key in kept]

    def _give_up(self, left: list[str]) -> None:
        """Celery can keep a message for ever, if a child was killed amid writing its result."""
        if self._kills and not Locks(self._app).find():
            self._laid["rounds in which Celery kept a message"] += 1
        else:
            self._found.append(f"stalled: nothing happens, and there is {left}")

    def _faults(self) -> list[tuple[float, Callable[[], None]]]:
        """What is done when, in seconds."""
        found: list[tuple[float, Callable[[], None]]] = []
        if self._cuts:
            cuts = [partial(self._cut_locks, kind) for kind in ("normal", "normal", "pubsub")]
            found += [(self._random.uniform(0, 8), self._random.choice(cuts)) for _ in range(20)]
        if self._kills:
            how = [signal.SIGTERM]
            # The other pools break off some bodies, and leave them without an end.
            how += [signal.SIGQUIT] * (self._pool == "prefork")
            # Celery's Redis transport loses what a killed worker has just popped.
            how += [signal.SIGKILL] * (self._on == "rabbitmq")
            for _ in range(self._random.choice((1, 1, 2))):
                which = self._random.randrange(WORKERS), self._random.choice(how)
                found.append((self._random.uniform(0.3, 4), partial(self._end_one, *which)))
        return sorted(found, key=lambda fault: fault[0])

    def _end_one(self, number: int, how: signal.Signals) -> None:
        self._laid[f"workers: {how.name}"] += 1
        self._ended = True
        self._end(self._workers[number], how)

    def _revive(self) -> None:
        for number, worker in enumerate(self._workers):
            if worker.poll() is not None:
                if not self._kills:
                    self._found.append(f"worker: one has ended by itself: {worker.poll()}")
                reaper.end(worker)
                self._workers[number] = self._start_worker(number)

    def _left(self) -> list[str]:
        """Locks that are held or waited for, and messages that the broker has."""
        queue = self._app.conf.task_default_queue
        left = [str(lock) for lock in Locks(self._app).find()]
        for each in (queue, f"{queue}-other"):
            for priority in PRIORITIES if self._on == "redis" else PRIORITIES[:1]:
                left += self._broker.left(f"{each}{priority}")
        return left

    def _busy(self) -> list[str]:
        """What workers say that they have."""
        found = []
        inspect = self._app.control.inspect(timeout=2, limit=WORKERS)
        for what in (inspect.active, inspect.reserved, inspect.scheduled):
            for worker, tasks in (what() or {}).items():
                for task in tasks:
                    of = task.get("request", task)
                    found.append(f"{what.__name__} {of['name']} {of['id']} of {worker}")
        return found

    def _states(self, events: list[Event]) -> dict[str, str]:
        tasks = {task for event in events if event.name == "sent" for task in event["tasks"]}
        tasks |= {event["task"] for event in events if event.name == "over"}
        return {task: self._app.backend.get_state(task) for task in tasks}

    def _errors(self) -> list[str]:
        """Tracebacks and errors in the workers' logs that nobody asked for."""
        found = []
        for log in [*self._logs(), self._processes.folder / "sender.log"]:
            for record in re.split(r"(?m)^(?=\[\d{4}-\d\d-\d\d )", log.read_text()):
                is_error = "Traceback" in record or re.match(r"\[[^]]*: (ERROR|CRITICAL)/", record)
                if is_error and not ASKED_FOR.search(record):
                    found.append(f"log: {log.name}: {record[:300]} … {record.strip()[-300:]}")
        return found


def _has_begun(log: Path) -> bool:
    text = log.read_text()
    if "celery_relock.errors" in text:
        raise AssertionError(f"a worker did not begin: {text[-500:]}")
    return " ready." in text
