"""A private RabbitMQ server on free ports of 127.0.0.1."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import amqp

from tests.support import reaper
from tests.support.ports import free_port
from tests.support.servers import Server
from tests.support.waiting import wait_for


def find_rabbitmq_server() -> str | None:
    """Path of a rabbitmq-server, or None."""
    # The script itself: Debian's wrapper on the path changes to another user.
    for folder in sorted(Path("/usr/lib/rabbitmq").glob("lib/rabbitmq_server-*/sbin")):
        if (folder / "rabbitmq-server").exists():
            return str(folder / "rabbitmq-server")
    return shutil.which("rabbitmq-server")


def _is_decided(epmd: subprocess.Popen[Any], command: list[str], silent: dict[str, Any]) -> bool:
    """Whether a port mapper has ended, as its port is taken, or answers."""
    if epmd.poll() is not None:
        return True
    with suppress(subprocess.TimeoutExpired):
        return subprocess.call([*command, "-names"], timeout=2, **silent) == 0
    return False


class RabbitServer(Server):
    """A running server with its own node, port mapper and data. What was killed comes back on the
    same port, with its durable queues, by `restart`.

    Args:
        mate: a server with which it forms a cluster. It has to stop first.

    Attributes:
        port: of AMQP on 127.0.0.1, the same after `restart`.
        url: `amqp://…//`.
    """

    def __init__(self, binary: str | None = None, mate: RabbitServer | None = None):
        found = binary or find_rabbitmq_server()
        if found is None:
            raise FileNotFoundError("no rabbitmq-server")
        super().__init__("rabbit")
        self.binary = found
        self._node = f"relock-{uuid.uuid4().hex[:8]}"
        self.port, self._distribution = free_port(), free_port()
        self._names: subprocess.Popen[Any] | None = None
        self._config = ""
        if mate is None:
            self._mapper, self._names = self._map_names()
        else:
            self._mapper = mate._mapper
            shutil.copy2(mate._folder / ".erlang.cookie", self._folder)
            self._config = f"cluster_formation.classic_config.nodes.1 = {mate._node}@localhost\n"
        try:
            self._start_somewhere()
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    def restart(self) -> None:
        self.kill()
        self._start()

    def stop(self) -> None:
        self.kill()
        if self._names is not None:
            reaper.end(self._names)
        super().stop()

    def _map_names(self) -> tuple[int, subprocess.Popen[Any]]:
        """A port mapper and its port. By itself the server would start one that outlives it."""
        while True:  # another process may take a free port first: then it ends
            port = free_port()
            command = ["epmd", "-address", "127.0.0.1", "-port", str(port)]
            with self.log_file.open("a") as log:
                silent = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                process = reaper.start(command, **silent)
                wait_for(partial(_is_decided, process, command, silent), 30, "epmd to answer")
            if process.poll() is None:
                return port, process
            reaper.end(process)

    def _start_somewhere(self) -> None:
        for _ in range(3):  # another process may take a free port first
            try:
                return self._start()
            except RuntimeError:
                if "eaddrinuse" not in self.log():
                    raise
                self.port, self._distribution = free_port(), free_port()
        return self._start()

    def _start(self) -> None:
        environment = {**os.environ, **self._environment()}
        if not self._launch([self.binary], 120, env=environment, cwd=self._folder):
            raise RuntimeError(f"{self.binary} did not start:\n{self.log()}")

    def _environment(self) -> dict[str, str]:
        folder = str(self._folder)
        (self._folder / "plugins").write_text("[].\n")
        (self._folder / "rabbitmq.conf").write_text(self._config)
        return {
            "HOME": folder,  # for the cookie
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._mapper),
            # Few threads: the machine runs other tests meanwhile.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2 +sbwt none +A 8",
            "RABBITMQ_NODENAME": f"{self._node}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._distribution),
            "RABBITMQ_MNESIA_BASE": folder,
            "RABBITMQ_LOG_BASE": folder,
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_CONFIG_FILE": f"{folder}/rabbitmq.conf",
            "RABBITMQ_CONF_ENV_FILE": f"{folder}/none",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/plugins",
        }

    def _answers(self) -> bool:
        try:
            with amqp.Connection(f"127.0.0.1:{self.port}", connect_timeout=1):
                return True
        except (OSError, amqp.AMQPError):
            return False
