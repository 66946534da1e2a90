"""A worker beside a companion, and one scenario on it."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest

from celery_relock import Lock
from tests.company.companions import Companion
from tests.support import Worker, reaper, wait_for
from tests.support.journal import Event
from tests.support.ports import free_port
from tests.support.worker import ROOT, environment_of

MODULE = "tests.company.app"
SLOTS = 2
# As soon as the dead child of one scenario is missed, the next one has both slots again. What frees
# the lock is asked for within seconds, so Celery's own five would not show in it.
LOOK_EVERY = {"RELOCK_TEST_LOOK_EVERY": "0.5"}


class Company:
    """One companion in one pool: its worker, started when it is first wanted."""

    def __init__(self, companion: Companion, pool: str, url: str, folder: Path):
        self.companion, self.pool, self.url = companion, pool, url
        self.namespace = f"company{uuid.uuid4().hex[:12]}"
        self.database = folder / f"{self.namespace}.sqlite3"
        self._worker: Worker | None = None
        self._processes: list[Process] = []
        self._flower: Flower | None = None
        if "django" in companion.instruments:
            self.run("tests.company.migrate")

    @property
    def env(self) -> dict[str, str]:
        return {**LOOK_EVERY, "RELOCK_COMPANY_DATABASE": str(self.database)}

    @property
    def worker(self) -> Worker:
        if self._worker is None:
            self._worker = Worker(
                MODULE,
                self.url,
                self.namespace,
                pool=self.pool,
                concurrency=SLOTS,
                arguments=self.companion.arguments,
                env=self.env,
                program=self.companion.program(),
            )
        return self._worker

    def celery(self, *arguments: str, env: dict[str, str] | None = None) -> Process:
        """Start `celery -A … <arguments>` beside the companion: beat, Flower."""
        program = self.companion.program()[:-1]
        command = [*program, "celery", "-A", MODULE, *arguments]
        log = self.database.with_suffix(f".{len(self._processes)}.log")
        process = Process(command, self._own(env), log)
        self._processes.append(process)
        return process

    def flower(self) -> Flower:
        """One for all its scenarios."""
        if self._flower is None:
            port = free_port()
            process = self.celery("flower", f"--port={port}", "--address=127.0.0.1")
            self._flower = Flower(process, f"http://127.0.0.1:{port}")
        return self._flower

    def result_state(self, task_id: str) -> str | None:
        """What django-celery-results has written."""
        query = "select status from django_celery_results_taskresult where task_id = ?"
        with closing(sqlite3.connect(self.database, timeout=10)) as database:
            found = database.execute(query, (task_id,)).fetchone()
        return found and str(found[0])

    def run(self, module: str) -> None:
        command = [*self.companion.program()[:-1], module]
        subprocess.run(command, cwd=ROOT, env=self._own(), check=True, timeout=60)

    def idle(self) -> bool:
        """Whether both slots are free and nothing waits for one."""
        worker = self.worker
        if self.pool == "prefork" and len(worker.children()) < SLOTS:
            return False
        # Of this one worker: the answer comes as soon as it is there.
        ask = worker.module.app.control.inspect([f"{self.namespace}@127.0.0.1"], timeout=2)
        return all(answer and not any(answer.values()) for answer in (ask.active(), ask.reserved()))

    def close(self) -> None:
        for process in self._processes:
            process.close()
        self._processes.clear()
        self._flower = None
        if self._worker is not None:
            worker, self._worker = self._worker, None
            worker.close()
            print(worker.log())

    def _own(self, env: dict[str, str] | None = None) -> dict[str, str]:
        names = {"RELOCK_TEST_URL": self.url, "RELOCK_TEST_NAMESPACE": self.namespace}
        return environment_of({**names, **self.env, **(env or {})})


class Process:
    """Another program; its output is in a file."""

    def __init__(self, command: list[str], env: dict[str, str], log: Path):
        self._log = log
        with log.open("ab") as output:
            self._process = reaper.start(
                command,
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        reaper.end(self._process)
        print(self.log())


class Flower:
    def __init__(self, process: Process, url: str):
        self._process, self._url = process, url
        wait_for(lambda: process.ended or self._ask("/api/workers") is not None, 20, "Flower")

    def state(self, task_id: str) -> str | None:
        found = self._ask(f"/api/task/info/{task_id}")
        return found and found.get("state")

    def _ask(self, path: str) -> dict[str, Any] | None:
        try:
            with urlopen(self._url + path, timeout=10) as answer:
                return dict(json.load(answer))
        except HTTPError as error:
            error.close()
            return None
        except URLError:
            return None


class Bench:
    """One scenario: a lock name of its own, and what its tasks have told.

    Attributes:
        key: the lock name, the first argument of every task, and the mark of its events.
        tasks: the module of the tasks; what is sent by it goes to this worker.
    """

    def __init__(self, company: Company):
        self.company = company
        self.worker = company.worker
        self.tasks: ModuleType = self.worker.module
        self.key = f"lock-{uuid.uuid4().hex[:8]}"
        self._is_the_last = False

    def events(self, name: str, key: str | None = None) -> list[Event]:
        return self.worker.journal.events(name, key=key or self.key)

    def wait_for(
        self, name: str, count: int = 1, timeout: float = 30.0, key: str | None = None
    ) -> list[Event]:
        """So many events of this scenario; the test fails at once when a body has raised."""

        def there(every: list[Event]) -> bool:
            own = [event for event in every if event["key"] == (key or self.key)]
            for event in own:
                if event.name == "raised":
                    pytest.fail(f"the body of {event['id']} raised {event['error']}")
            return sum(event.name == name for event in own) >= count

        self._wait(there, timeout, f"no {name!r}, or fewer than {count}")
        return self.events(name, key)

    def _wait(self, there: Callable[[list[Event]], bool], timeout: float, missing: str) -> None:
        try:
            self.worker.journal.wait_for(there, timeout)
        except AssertionError:
            lines = "\n".join(f"  {event}" for event in self.worker.journal.events(key=self.key))
            raise AssertionError(f"after {timeout} s {missing}\n{lines}") from None

    def open_gate(self) -> None:
        self.worker.journal.add("gate", key=self.key)

    def lock(self) -> Lock:
        return Lock(self.company.url, self.key, namespace=self.company.namespace)

    def hold(self, task: str = "work", arguments: tuple[Any, ...] = (1,), **options: Any) -> str:
        """Send a task that stops at the gate with the lock; its id when it is there."""
        ours = getattr(self.tasks, task).apply_async((self.key, *arguments), **options)
        self.wait_for("begin")
        self.assert_held()
        return str(ours.id)

    def relay(self, task: str, times: int = 1, key: str | None = None, **options: Any) -> Event:
        """Send a task by way of another, without a lock, in the worker; what that one tells."""
        mark = f"relay-{uuid.uuid4().hex[:8]}"
        self.tasks.relay.apply_async((mark, task, key or self.key, times), **options)
        return self.wait_for("sent", key=mark)[0]

    def carried(self) -> set[str]:
        """The companions that carry a trace from a sender to a task without a lock."""
        key = f"plain-{uuid.uuid4().hex[:8]}"
        sent = self.relay("free", key=key)
        (begun,) = self.wait_for("begin", key=key)
        return {name for name, trace in sent["traces"].items() if begun["traces"][name] == trace}

    def start_beat(self) -> Process:
        """A beat that sends `work` with this key, again and again."""
        scheduler = ("-s", str(self.company.database.with_suffix(".beat")))
        if "django" in self.company.companion.instruments:
            scheduler = ("-S", "django_celery_beat.schedulers:DatabaseScheduler")
        arguments = ("beat", "--pidfile=", "--loglevel", "INFO", "--max-interval", "1", *scheduler)
        return self.company.celery(*arguments, env={"RELOCK_COMPANY_BEAT": self.key})

    def start_flower(self) -> Flower:
        """A Flower that hears the worker."""
        flower = self.company.flower()
        sent: list[str] = []

        def heard() -> bool:
            sent.append(self.tasks.free.delay("for Flower").id)
            return any(map(flower.state, sent[-3:]))

        wait_for(heard, 20, "Flower's ear")
        return flower

    def assert_held(self) -> None:
        assert self.lock().locked(), "the body runs and its lock is not held"

    def assert_free(self, within: float) -> None:
        lock = self.lock()
        assert lock.acquire(blocking_timeout=within), f"the lock was not free within {within} s"
        lock.release()

    def send_free(self) -> str:
        """Send an unrelated task without a lock; the mark of its events."""
        other = f"other-{uuid.uuid4().hex[:8]}"
        self.tasks.free.delay(other)
        return other

    def others_are_served(self, timeout: float = 30.0) -> None:
        """An unrelated task comes to its end: what was sent before it has been dealt with, and one
        slot is free."""
        other = self.send_free()
        begun = len(self.events("begin"))

        def there(every: list[Event]) -> bool:
            ended = any(event.name == "end" and event["key"] == other for event in every)
            return ended or len(self.events("begin")) > begun

        self._wait(there, timeout, "an unrelated task was not run: the slots are taken")
        assert len(self.events("begin")) == begun, "a second body runs beside the holder's"

    def assert_one_after_another(self, count: int, key: str | None = None) -> None:
        """So many bodies have begun and ended, and never two at once."""
        self.wait_for("end", count, key=key)
        names = [
            event.name
            for event in self.worker.journal.events(key=key or self.key)
            if event.name in ("begin", "end")
        ]
        assert names == ["begin", "end"] * count, "two bodies ran at once"

    def be_the_last(self) -> None:
        """Leave the worker to nobody, as a companion in it is not as it was."""
        self._is_the_last = True

    def finish(self) -> None:
        """Leave the worker to the next scenario: idle, or not at all."""
        self.open_gate()
        if self._is_the_last:
            self.company.close()
            return
        try:
            wait_for(self.company.idle, 10, "the worker to be idle")
        except AssertionError:
            self.company.close()
