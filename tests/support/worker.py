"""A real Celery worker in processes of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest import mock

import psutil

from tests.support import nursery, reaper
from tests.support.journal import Journal

ROOT = Path(__file__).parents[2]
_READY = re.compile(r"@\S+ ready\.")


CELERY = (sys.executable, "-m", "celery")


class Worker:
    """`celery -A <module> worker`, ready to take tasks when the constructor returns.

    Args:
        module: dotted name of a module with an `app` from `make_app`, such as
            "tests.worker.apps.basic".
        url, namespace: the Redis and the namespace that the module's app uses.
        folder: for its temporary files. Each process of a worker reads the journals of the dead
            that are there, and a suite leaves hundreds of them.
        pool, concurrency, arguments: as on Celery's command line.
        env: more environment variables for the worker and for `module`.
        program: what runs the worker, instead of Celery.

    Attributes:
        module: the same module, imported afresh into the test's process with the same settings:
            `worker.module.add.delay(1, 2)` sends to this worker.
        settings: the environment that the module's app is made by.
        namespace: the prefix of its keys.
        journal: what the tasks write with `Journal.from_env()`.
        node: its node name. The commands of `app.control` are for this worker alone: a RabbitMQ has
            the workers of other tests, too.
        pid: the worker's main process.
    """

    def __init__(
        self,
        module: str,
        url: str,
        namespace: str,
        *,
        folder: str | None = None,
        pool: str = "prefork",
        concurrency: int = 2,
        arguments: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        program: tuple[str, ...] = CELERY,
    ):
        own = {"RELOCK_TEST_URL": url, "RELOCK_TEST_NAMESPACE": namespace, **(env or {})}
        if folder is not None:
            own["TMPDIR"] = folder
        self.settings, self.namespace = own, namespace
        self.module = _import_afresh(module, own)
        self.journal = Journal(url, namespace)
        self.node = f"{namespace}@127.0.0.1"
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        arguments = [
            *("-A", module, "worker", "-P", pool, "-c", str(concurrency)),
            *("-n", self.node, "--loglevel", "INFO"),
            *("--without-gossip", "--without-mingle", *arguments),
        ]
        start = nursery.start if _is_plain(pool, own, program) else partial(_start_afresh, program)
        self._process = start(arguments, environment_of(own))
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.wait_for_log(_READY, timeout)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether its main process is gone."""
        return self._process.poll() is not None

    def log(self) -> str:
        """All that the worker has written so far."""
        with self._changed:
            return "".join(self._lines)

    def wait_for_log(self, pattern: str | re.Pattern[str], timeout: float = 30.0) -> re.Match[str]:
        """Wait for a line in the log; AssertionError with the log when it does not come."""
        found: re.Match[str] | None = None

        def seen() -> bool:
            nonlocal found
            found = re.search(pattern, "".join(self._lines))
            return found is not None or self._ended

        with self._changed:
            self._changed.wait_for(seen, timeout)
        if found is None:
            state = "the worker ended" if self._ended else f"not within {timeout} s"
            raise AssertionError(f"{pattern!r} is not in the log ({state}):\n{self.log()}")
        return found

    def children(self) -> list[int]:
        """Process ids of the pool's children, oldest first; empty for pools without processes."""
        found = []
        for child in psutil.Process(self.pid).children():
            with suppress(psutil.NoSuchProcess):  # it ends while it is looked at
                if child.status() != psutil.STATUS_ZOMBIE:
                    found.append((child.create_time(), child.pid))
        return [pid for _, pid in sorted(found)]

    def kill(self, sig: int = signal.SIGKILL, pid: int | None = None) -> None:
        """Send a signal to the main process, or to one child of it."""
        os.kill(self.pid if pid is None else pid, sig)

    def stop(self, sig: int = signal.SIGTERM, timeout: float = 60.0) -> int:
        """Ask the worker to end (SIGTERM: after its running tasks) and return its exit status.

        Celery forgets what no child has accepted by then, and a child that has begun with it waits
        30 s for somebody to read its result (billiard, `Worker._ensure_messages_consumed`): so did
        2 of 6 workers with plain tasks of 1 ms.
        """
        self.kill(sig)
        return int(self._process.wait(timeout))

    def close(self) -> None:
        """Kill whatever is left of the worker; may be repeated."""
        reaper.end(self._process)
        self.module.app.close()
        self.journal.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with self._changed:
                    self._lines.append(line)
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def _is_plain(pool: str, own: Mapping[str, str], program: tuple[str, ...]) -> bool:
    """Whether it may come from the nursery."""
    plain = pool in ("prefork", "threads", "solo") and program == CELERY
    return plain and all(name.startswith("RELOCK_TEST_") or name == "TMPDIR" for name in own)


def _start_afresh(
    program: tuple[str, ...], arguments: list[str], env: Mapping[str, str]
) -> subprocess.Popen[str]:
    return reaper.start(
        [*program, *arguments],
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def environment_of(own: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process of a test's, without settings from outside."""
    outside = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("CELERY", "RELOCK", "C_FORCE_ROOT"))
    }
    path = os.pathsep.join(filter(None, [str(ROOT), outside.get("PYTHONPATH")]))
    return {**outside, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "C_FORCE_ROOT": "1", **own}


def _import_afresh(name: str, env: Mapping[str, str]) -> ModuleType:
    """A new copy of a module, outside sys.modules: each worker has settings of its own."""
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"no module {name}"
    assert spec.loader is not None, f"{name} is a folder"
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(os.environ, env):
        spec.loader.exec_module(module)
    return module
