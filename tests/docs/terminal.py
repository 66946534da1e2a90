"""A terminal in an empty folder, where a page's commands are typed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from celery_relock.admin import Locks
from tests.docs.pages import URL, blocks, text
from tests.support import nursery, reaper, wait_for
from tests.support.ports import free_port
from tests.support.worker import environment_of

DATABASE = "postgresql://localhost/shop"

# Ours is there as an installed plugin. Of the others none that takes its time.
PLUGINS = "-p no:cacheprovider -p no:hypothesispytest -p no:xdist -p no:valkey -p no:anyio"


class Terminal:
    """What a reader types, in an empty folder with the page's files.

    Attributes:
        log: what the newest worker writes.
    """

    def __init__(self, page: str, redis_url: str, database: str, namespace: str, folder: Path):
        self._folder, self._port, self._started = folder, free_port(), []
        self._addresses = {URL: redis_url, DATABASE: database}
        self._locks = Locks(redis_url, namespace=namespace)
        self._settings = f'app.conf.update(task_default_queue="{namespace}")'
        if "relock_namespace" not in text(page).lower():
            self._settings += f'; app.conf.relock_namespace = "{namespace}"'
        for code in blocks(page):
            self.save(code)
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        own = {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_ADDOPTS": PLUGINS}
        self._environment = environment_of(own)
        self._environment["PYTHONPATH"] += os.pathsep + str(folder)

    def save(self, code: str) -> None:
        """A file of the page, with addresses and names of this test's own."""
        name = re.match(r"# (\w+\.py)\n", code)
        assert name, "the first line of a file is its name"
        for written, real in self._addresses.items():
            code = code.replace(written, real)
        code = re.sub(r"^(app = .+(?:\napp\..+)*)$", rf"\1\n{self._settings}", code, flags=re.M)
        (self._folder / name[1]).write_text(code)

    def type(self, command: str) -> str:
        """What a command prints; a worker or a server goes on in the background."""
        command = command.removeprefix(". .venv/bin/activate && ")
        program, *arguments = command.split()
        if program == "celery" and "worker" in arguments:
            self.log = self._folder / f"log{len(self._started)}"
            more = ["--loglevel", "INFO", "--logfile", str(self.log), "--without-mingle"]
            arguments = ["--workdir", str(self._folder), *arguments, *more]
            self._worker = nursery.start(arguments, self._environment)
            self._started.append(self._worker)
            return self._wait(self.log, " ready.")
        if program == "uvicorn":
            log = self._folder / "web"
            with log.open("w") as out:
                command = [sys.executable, "-m", program, *arguments, "--port", str(self._port)]
                self._started.append(self._run(reaper.start, command, stdout=out, stderr=out))
            return self._wait(log, "running on")
        command = command.replace("localhost:8000", f"localhost:{self._port}")
        plain = {"shell": True, "text": True, "timeout": 60, "capture_output": True}
        done = self._run(subprocess.run, command, **plain)
        assert done.returncode == 0, done.stdout + done.stderr
        if "-X POST" in command:
            wait_for(lambda: any(self._locks.find()), what="the call to begin, as a reader would")
        return done.stdout

    def begin(self, command: str) -> subprocess.Popen[str]:
        """A command that is not waited for, as before `&`."""
        program = [sys.executable, *command.removeprefix("python ").split()]
        self._started.append(self._run(reaper.start, program, stdout=subprocess.PIPE, text=True))
        return self._started[-1]

    def stop_worker(self) -> None:
        """The newest one."""
        self._started.remove(self._worker)
        self._end(self._worker)

    def close(self) -> None:
        for process in self._started:
            self._end(process)

    def _end(self, process: Any) -> None:
        reaper.end(process)
        if process.stdout:
            process.stdout.close()

    def _run(self, start: Any, command: Any, **options: Any) -> Any:
        return start(command, cwd=self._folder, env=self._environment, **options)

    def _wait(self, log: Path, word: str) -> str:
        wait_for(lambda: log.exists() and word in log.read_text(), 60, f"{word!r} in the log")
        return ""
