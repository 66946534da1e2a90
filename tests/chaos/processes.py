"""The processes of a campaign, in a folder with a log of each."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.support import reaper
from tests.support.journal import Event

ROOT = Path(__file__).parents[2]
#: Of a Redis server. Each write reaches the kernel before its answer is sent, so a killed server
#: has lost nothing.
DURABLE = ("--appendonly", "yes", "--appendfsync", "no")


class Processes:
    """Starts what a campaign needs; see `tidy` for what becomes of the folder.

    Args:
        name: of the campaign, whose workers have their tasks in `tests.chaos.<name>.app`.
        environment: for all processes, beside this one's without Celery's settings and ours.
    """

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"relock-{name}-"))
        self._app = f"tests.chaos.{name}.app"
        self._environment = {**_plain_environment(), **environment}
        self._workers = 0
        self._started: list[subprocess.Popen[Any]] = []

    def start(self, arguments: Iterable[object], log: str) -> subprocess.Popen[Any]:
        """Start `python -m <arguments>`. Its log goes on where one of this name has ended."""
        with (self.folder / f"{log}.log").open("a") as file:
            process = reaper.start(
                [sys.executable, "-m", *map(str, arguments)],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        self._started.append(process)
        return process

    def start_worker(self, children: int, *more: str) -> subprocess.Popen[Any]:
        self._workers += 1
        name = f"w{self._workers}"
        # With -E the main process sends an event when a child is killed, just as it forks the next.
        command = ["celery", "-A", self._app, "worker", "-c", children, "-l", "INFO", "-E"]
        command += ["-n", f"{name}@127.0.0.1", "--without-gossip", "--without-mingle"]
        return self.start([*command, *more], name)

    def end(self) -> None:
        """Kill all that is left."""
        for process in self._started:
            reaper.end(process)

    def tidy(self, violations: list[str], events: Iterable[Event] = ()) -> None:
        """Remove the folder, or say where it is if there are violations, with this journal."""
        if violations:
            if history := "\n".join(map(str, events)):
                (self.folder / "journal").write_text(history)
            violations.append(f"the journal and the logs are kept in {self.folder}")
            return
        for path in self.folder.iterdir():
            path.unlink()
        self.folder.rmdir()


def _plain_environment() -> dict[str, str]:
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("CELERY", "RELOCK"))}
    return {**plain, "PYTHONPATH": str(ROOT), "C_FORCE_ROOT": "1"}
