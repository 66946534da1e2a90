"""What the private servers of the tests have in common."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.support import reaper
from tests.support.waiting import wait_for


class Server:
    """A program with a folder of its own, where its log is."""

    def __init__(self, kind: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=f"relock-{kind}-"))
        self.log_file = self._folder / "log"
        self._process: subprocess.Popen[Any] | None = None

    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def kill(self) -> None:
        """SIGKILL: what was not saved is gone."""
        if self._process is not None:
            reaper.end(self._process)
            self._process = None

    def stop(self) -> None:
        """End the server for good and remove its files; may be repeated."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _launch(self, command: list[str], timeout: float = 30.0, **options: Any) -> bool:
        """Start the program; whether it answers then, or has ended."""
        with self.log_file.open("a") as log:
            process = reaper.start(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **options
            )
        self._process = process
        wait_for(
            lambda: process.poll() is not None or self._answers(),
            timeout,
            f"{command[0]} to answer",
        )
        return process.poll() is None

    def _answers(self) -> bool:
        raise NotImplementedError
