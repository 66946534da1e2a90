"""What a scenario works with: a worker whose task one of the libraries makes unique."""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Callable
from typing import Any

import redis

from tests.support import new_namespace, wait_for
from tests.support.journal import Event
from tests.support.keys import BENCH_PREFIX
from tests.support.worker import Worker

# How long a blocked call is tried again, in seconds: less than any lease in the scenarios.
PATIENCE = 8.0


class Defect(AssertionError):
    """What a library does that its users did not ask for."""


class Bench:
    """A worker of `tests.peers.app` and what happened in it."""

    def __init__(self, url: str, peer: str):
        self._start: Callable[[], Worker] = lambda: Worker(
            "tests.peers.app", url, self._namespace, env={"RELOCK_TEST_PEER": peer}, concurrency=2
        )
        self._namespace = new_namespace()
        self._client = redis.Redis.from_url(url)
        self.worker = self._start()

    @property
    def m(self) -> Any:
        return self.worker.module

    def name(self, how: str = "") -> str:
        """A name of its own, whose runs do this."""
        name = uuid.uuid4().hex
        self.does(name, how)
        return name

    def does(self, name: str, how: str) -> None:
        self._client.set(f"{BENCH_PREFIX}how:{name}", how, ex=600)

    def events(self, name: str, kind: str = "began") -> list[Event]:
        return self.worker.journal.events(kind, task=name)

    def began(self, name: str, count: int = 1, seconds: float = 15.0) -> list[Event]:
        self.see(lambda: len(self.events(name)) >= count, seconds, f"fewer than {count} executions")
        return self.events(name)

    def ended(self, name: str, count: int = 1, seconds: float = 15.0) -> None:
        self.see(lambda: len(self.events(name, "ended")) >= count, seconds, "does not end")

    def see(self, what: Callable[[], Any], seconds: float, defect: str) -> None:
        try:
            wait_for(what, seconds)
        except AssertionError:
            raise Defect(defect) from None

    def send(self, task: Any, name: str, **options: Any) -> Any:
        """Call a task; what it raises is returned."""
        try:
            return task.apply_async((name,), **options)
        except Exception as error:
            return error

    def accepts(self, task: Any, name: str) -> None:
        """The same call again is run, before a lease could have ended."""
        self.does(name, "")
        before, until = len(self.events(name)), time.monotonic() + PATIENCE
        while time.monotonic() < until:
            self.send(task, name)
            pause = time.monotonic() + 1.0
            while time.monotonic() < pause:
                if len(self.events(name)) > before:
                    return
                time.sleep(0.05)
        raise Defect("LEAK: the same call is refused")

    def most_at_once(self, name: str) -> int:
        """How many runs of a name were inside at the same time."""
        inside = most = 0
        for event in self.worker.journal.events():
            if event.data.get("task") == name:
                inside += 1 if event.name == "began" else -1
                most = max(most, inside)
        return most

    def header(self, task_id: str) -> dict[str, Any]:
        """The header of celery-relock that a running task's message has; none for the others."""
        [began] = self.worker.journal.events("began", id=task_id)[:1]
        return {"relock": began["header"]} if began.data.get("header") else {}

    def alone(self, name: str) -> None:
        if self.most_at_once(name) > 1:
            raise Defect(f"{self.most_at_once(name)} run at the same time")

    def restart(self, sig: int, *, children: bool = False) -> None:
        """End the worker by a signal, and start another one."""
        family = self.worker.children() if children else []
        self.worker.kill(sig)
        for pid in family:
            self.worker.kill(signal.SIGKILL, pid=pid)
        self.worker._process.wait(20)
        self.worker.close()
        self.worker = self._start()

    def close(self) -> None:
        self.worker.close()
        self._client.close()
