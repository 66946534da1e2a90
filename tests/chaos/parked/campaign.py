"""A campaign on parked work: workers, tasks that all want a few locks, faults, and a verdict."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from functools import partial

from tests.chaos.checker import lost_updates
from tests.chaos.parked import judge
from tests.chaos.parked.settings import TASK
from tests.chaos.parked.steps import BEFORE_SEND, CHILD, MAIN, MESSAGE, STEPS, WORKER, fault_key
from tests.chaos.register import Register
from tests.chaos.workers import WithWorkers
from tests.support.journal import Event

RECEIVED = re.compile(r"\[([-0-9a-f]+)\] received")
_KINDS = ("normal", "pubsub")
CHILDREN = 3
#: Nothing is finished for so long, in seconds: what is not done by then is lost. The second: if
#: neither a lock nor the broker has anything left, either.
STALLED, IDLE = 45.0, 5.0
#: So many are on their way or parked at the same time.
CROWD = 200


class Campaign(WithWorkers):
    """Runs one campaign; see `run`.

    Args:
        tasks, keys: so many tasks on so many locks.
        faults: so many, spread over the tasks. A round has a child killed at every step, a main
            process and a whole worker at one, a message lost, each server's connections cut, and
            the locks' server killed and started again.
        workers: each with three children.
        late: whether messages are acknowledged late. Early, killed processes lose what they run.
        broker: of `BROKERS`.
        cut_broker: whether the broker is cut off, too.
        seed: of the order of the faults.
    """

    def __init__(
        self,
        tasks: int,
        keys: int,
        faults: int,
        workers: int,
        late: bool = True,
        broker: str = "redis",
        cut_broker: bool = True,
        seed: int = 1,
    ) -> None:
        super().__init__(workers, CHILDREN)
        self._tasks, self._keys, self._faults = tasks, keys, faults
        self._late, self._on, self._cut_broker, self._seed = late, broker, cut_broker, seed
        self._sent: list[str] = []
        self._steps: list[str] = []

    def run(self) -> judge.Report:
        """Start everything, send the tasks, lay the faults, wait for the end, and judge."""
        with (
            self._serving(self._on),
            self._staged("parked", self._seed, lease=5.0, late=self._late),
            closing(Register(self._resource.url)) as self._register,
        ):
            began = time.monotonic()
            self._marks = self._resource.client()
            self._revive()
            self._work()
            seconds = time.monotonic() - began
            left = self._left_behind()
            events = self._journal.events()
            report = self._judge(events)
            report.seconds = seconds
            report.violations += left
        self._processes.tidy(report.violations, events)
        return report

    def _work(self) -> None:
        faults = self._sequence()
        done, changed = 0, time.monotonic()
        while done < self._tasks and not self._stalled(time.monotonic() - changed):
            before, done = done, self._done()
            changed = time.monotonic() if done != before else changed
            self._send(done)
            self._revive()
            due = self._faults * (done + 1) / self._tasks
            if len(self._steps) + self._laid.total() < due:
                next(faults)()
            time.sleep(0.05)
        self._marks.delete(*(fault_key(step) for step in STEPS))

    def _stalled(self, seconds: float) -> bool:
        return seconds > STALLED or (seconds > IDLE and not self._unfinished())

    def _done(self) -> int:
        return len(
            {line.wrote for key in self._names() for line in self._register.log("fenced", key)}
        )

    def _names(self) -> list[str]:
        return [f"account:{number}" for number in range(self._keys)]

    def _send(self, done: int) -> None:
        names = self._names()
        while len(self._sent) < min(self._tasks, done + CROWD):
            task = str(uuid.uuid4())
            self._sent.append(task)
            self._app.send_task(TASK, (self._random.choice(names),), task_id=task)

    def _sequence(self) -> Iterator[Callable[[], None]]:
        cuts: list[Callable[[], None]] = [partial(self._cut_locks, each) for each in _KINDS]
        cuts += [self._restart_locks, *[self._cut_off_broker] * self._cut_broker]
        while True:
            laid = [(step, CHILD) for step in STEPS]
            laid += [(self._random.choice(STEPS), victim) for victim in (MAIN, WORKER)]
            laid.append((BEFORE_SEND, MESSAGE))
            acts = [partial(self._lay, *each) for each in laid] + cuts
            self._random.shuffle(acts)
            yield from acts

    def _lay(self, step: str, victim: str) -> None:
        # One that nobody has come by yet stays where it is.
        if self._marks.set(fault_key(step), victim, nx=True):
            self._steps.append(step)

    def _cut_off_broker(self) -> None:
        self._broker.cut()
        self._laid[self._broker.fault] += 1

    def _left_behind(self) -> list[str]:
        """Copies that are still on their way may come to their end; then nothing may be left."""
        deadline = time.monotonic() + STALLED / 2
        while self._unfinished() or self._unstored():
            if time.monotonic() > deadline:
                return [f"hygiene: {key} is left" for key in self._unfinished()]
            self._revive()
            time.sleep(0.1)
        return []

    def _unfinished(self) -> list[str]:
        """Keys that no TTL ends, locks that are held, and messages that the broker has."""
        found = [name for name in self._remaining() if ":l:" in name] + self._endless()
        return found + self._broker.left(self._app.conf.task_default_queue)

    def _unstored(self) -> list[str]:
        """Acknowledged late, a run whose process died before its result was stored comes again."""
        if not self._late:
            return []
        return self._wrong_states({*self._sent} - self._received())

    def _judge(self, events: list[Event]) -> judge.Report:
        report = judge.report(self._sent, events, self._received(), self._late, CHILDREN)
        report.faults += self._laid
        for key in self._names():
            if count := lost_updates(self._register.log("fenced", key)):
                report.violations.append(f"update: {count} lost in {key}")
        report.violations += self._wrong_states(report.unfinished)
        return report

    def _wrong_states(self, but: Collection[str]) -> list[str]:
        states = {task: self._app.AsyncResult(task).state for task in self._sent}
        wrong = {task: state for task, state in states.items() if state != "SUCCESS"}
        return [f"state: {task} is {wrong[task]}" for task in wrong if task not in but]

    def _received(self) -> set[str]:
        logs = (path.read_text() for path in self._processes.folder.glob("*.log"))
        return {task for log in logs for task in RECEIVED.findall(log)}
