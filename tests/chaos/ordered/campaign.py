"""A campaign on the order of calls: senders, workers, faults, and a verdict."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty
from typing import Any

from tests.chaos.ordered import judge
from tests.chaos.workers import WithWorkers

#: As in the workers' app.
BEGUN, RECEIVED = "ordered:begun", "ordered:received"
#: Nothing has ended for so long, in seconds: what has not by then is lost. Longer than a late call
#: holds up those behind it.
STALLED = 45.0
#: The same where neither the broker nor Redis has a message any more, for as long.
IDLE = 2.0


class Campaign(WithWorkers):
    """Runs one campaign; see `run`.

    Args:
        calls, keys, senders, workers: so many; each worker has two children.
        faults: so many, spread over the calls: in turns a sender, a worker with all its processes,
            a pool process and one that runs a retry are killed, and a message is taken away from
            the broker.
        broker: of `BROKERS`.
        gap: seconds for which a late call holds up those behind it: longer than the messages of a
            killed worker need to come back, so that those alone are passed over that were lost.
        seed: of the senders' keys, and of the faults.
    """

    def __init__(
        self,
        calls: int,
        keys: int,
        senders: int,
        workers: int,
        faults: int,
        broker: str = "redis",
        gap: float = 20.0,
        seed: int = 1,
    ) -> None:
        super().__init__(workers, 2)
        self._calls, self._keys, self._faults = calls, keys, faults
        self._on, self._gap, self._seed = broker, gap, seed
        self._senders: list[subprocess.Popen[Any] | None] = [None] * senders
        self._killed: set[int] = set()
        self._taken: set[str] = set()
        self._left_at = 0.0  #: when a message was last seen, while nothing ended

    def run(self) -> judge.Report:
        """Start everything, lay the faults, wait for the end, and judge."""
        gap = {"RELOCK_CHAOS_GAP": str(self._gap)}
        with self._serving(self._on), self._staged("ordered", self._seed, lease=5.0, **gap):
            began = time.monotonic()
            self._truth = self._resource.client()
            self._work()
            report = self._judge()
            report.seconds = time.monotonic() - began
        self._processes.tidy(report.violations)
        return report

    def _work(self) -> None:
        acts: list[Callable[[], bool]] = []
        done, changed = 0, time.monotonic()
        while not self._is_over(time.monotonic() - changed):
            before, done = done, self._truth.llen(BEGUN)
            changed = time.monotonic() if done != before else changed
            self._revive()
            if self._laid.total() < min(self._faults * done / (2 * self._calls), self._faults):
                if not acts:
                    acts = [self._kill_sender, self._kill_worker, self._kill_child, self._take]
                    acts.append(self._kill_retry)
                    self._random.shuffle(acts)
                act = acts.pop()
                if not act():
                    acts.insert(0, act)  # it has to wait: a retry that runs is rare, say
            time.sleep(0.05)

    def _is_over(self, idle: float) -> bool:
        """All has run that was sent; or nothing happens any more."""
        if idle > STALLED:
            return True
        if any(each is None or each.poll() is None for each in self._senders):
            return False
        if idle > IDLE:
            parked = f"{self._settings.namespace}:{{0}}:parked"
            if self._broker.left(self._app.conf.task_default_queue) or self._client.exists(parked):
                self._left_at = time.monotonic()
            elif time.monotonic() > self._left_at + IDLE:  # else its body can run yet
                return True
        if self._truth.llen(BEGUN) < 1.9 * self._calls:
            return False
        ended = {each.id for each in self._begins() if each.what == "ended"}
        sent = judge.calls_in(self._sent()).values()
        return {each.id for each in sent if each.until < float("inf")} <= ended | self._taken

    def _revive(self) -> None:
        super()._revive()
        share = self._calls // len(self._senders)
        for number, sender in enumerate(self._senders):
            if sender is None or sender.poll() not in (None, 0):
                arguments = [str(self._sent_by(number)), str(share), str(self._keys)]
                module = "tests.chaos.ordered.sender"
                command = [module, *arguments, str(self._seed * 1000 + number)]
                self._senders[number] = self._processes.start(command, f"s{number}")

    # Each kills or takes something, and says whether there was anything.

    def _kill_sender(self) -> bool:
        alive = [each for each in self._senders if each is not None and each.poll() is None]
        if not alive:
            return True  # all is sent
        victim = self._random.choice(alive)
        victim.kill()
        victim.wait()
        self._laid["senders killed"] += 1
        return True

    def _kill_worker(self) -> bool:
        victim = self._random.choice(self._workers)
        self._killed.update(self._children_of(victim))
        self._end(victim, signal.SIGKILL)
        self._laid["workers killed"] += 1
        return True

    def _kill_child(self) -> bool:
        children = self._children_of(self._random.choice(self._workers))
        if not children:
            return False
        self._kill_process(self._random.choice(children))
        self._laid["pool processes killed"] += 1
        return True

    def _kill_retry(self) -> bool:
        last = judge.begins_in(map(json.loads, self._truth.lrange(BEGUN, -20, -1)))
        over = {each.id for each in last if each.what == "ended"}
        running = [each for each in last if each.retries and each.id not in over]
        if not running or running[-1].pid in self._killed:
            return False
        self._kill_process(running[-1].pid)
        self._laid["retries killed while they ran"] += 1
        return True

    def _kill_process(self, victim: int) -> None:
        self._killed.add(victim)
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)

    def _take(self) -> bool:
        """Take a message away, as a broker does that loses one."""
        with self._app.connection_for_read() as connection:
            queue = connection.SimpleQueue(self._app.conf.task_default_queue)
            try:
                message = queue.get(block=False)
            except Empty:
                return False
            self._taken.add(message.headers["id"])
            message.ack()
        self._laid["messages taken away"] += 1
        return True

    def _sent_by(self, number: int) -> Path:
        return self._processes.folder / f"sender-{number}"

    def _sent(self) -> list[str]:
        paths = map(self._sent_by, range(len(self._senders)))
        return [path.read_text() for path in paths if path.exists()]

    def _begins(self) -> list[judge.Begin]:
        return judge.begins_in(map(json.loads, self._truth.lrange(BEGUN, 0, -1)))

    def _judge(self) -> judge.Report:
        calls, begins = judge.calls_in(self._sent()), self._begins()
        lines = (member.decode().split() for member in self._truth.smembers(RECEIVED))
        received = {(call, int(retries)) for call, retries in lines}
        report = judge.report(calls, begins, self._taken, self._killed, received)
        report.faults = self._laid
        if report.violations:
            (self._processes.folder / "begins").write_text("\n".join(map(str, begins)))
        return report
