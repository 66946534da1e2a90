"""Nodes that are processes of this machine: for where there is no container engine.

They answer what pytest-celery asks of a container. All are on one host and run this interpreter;
the network of a worker is a cable that can be unplugged.
"""

from __future__ import annotations

import contextlib
import os
import signal as signals
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.docker.nodes import READY, WORKER, Cluster, SmokeWorker, config, urls
from tests.support import RedisServer, reaper, wait_for
from tests.support.rabbitmq import RabbitServer, find_rabbitmq_server

ROOT = Path(__file__).parents[2]


class Cable:
    """A way for bytes to a port of 127.0.0.1, from a port of its own.

    Unplugged, it holds back what is on its way, and no connection ends: as a network does that is
    cut and mended before TCP gives up.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._plugged = threading.Event()
        self._plugged.set()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def unplug(self) -> None:
        self._plugged.clear()

    def plug(self) -> None:
        self._plugged.set()

    def close(self) -> None:
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):  # shut down, so that whoever reads from it wakes
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self.plug()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        self._open.append(client)
        self._plugged.wait()
        try:
            server = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            client.close()
            return
        self._open.append(server)
        back = threading.Thread(target=self._pass_on, args=(server, client), daemon=True)
        back.start()
        self._pass_on(client, server)
        back.join()
        client.close()
        server.close()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._plugged.wait()
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class Process:
    """The part of a container that pytest-celery's nodes use."""

    def __init__(self, name: str) -> None:
        self.id = uuid.uuid4().hex
        self.name = f"{name}-{self.id[:12]}"

    def reload(self) -> None:
        pass

    def ready(self) -> bool:
        return True


class RedisProcess(Process):
    """A Redis. Restarted, it has its data."""

    def __init__(self) -> None:
        super().__init__("redis")
        self._server = RedisServer()
        self.celeryconfig = config(self._server.url, self._server.port)

    def restart(self, timeout: float) -> None:
        self._server.restart(keep_data=True)

    def teardown(self) -> None:
        self._server.stop()


class RabbitProcess(Process):
    def __init__(self) -> None:
        super().__init__("rabbitmq")
        self._server = RabbitServer()
        self.celeryconfig = config(self._server.url, self._server.port)

    def teardown(self) -> None:
        self._server.stop()


class WorkerProcess(Process):
    """A worker, with its children in a group of their own."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        super().__init__("worker")
        self._log = folder / f"{self.name}.log"
        ports = {urlsplit(url).port or 0 for url in env.values() if "://" in url}
        self._cables = {port: Cable(port) for port in ports}
        self._env = {name: self._through_cable(value) for name, value in env.items()}
        self._starts = 0
        self.start()

    @property
    def status(self) -> str:
        return "running" if self._process.poll() is None else "exited"

    def start(self) -> None:
        self._starts += 1
        with self._log.open("a") as log:
            self._process = reaper.start(
                [sys.executable, "-m", *WORKER, f"smoke@{self.id[:12]}"],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "C_FORCE_ROOT": "1", **self._env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait_until_up(self) -> None:
        def up() -> bool:
            assert self.status == "running", f"the worker ended:\n{self.logs()}"
            return self.logs().count(READY) >= self._starts

        wait_for(up, 60, f"{self.name} to be ready")

    def logs(self) -> str:
        return self._log.read_text(errors="replace")

    def kill(self, signal: str) -> None:
        """With SIGKILL everything that runs in it is gone at once."""
        if signal == "SIGKILL":
            reaper.end(self._process)
        else:
            os.kill(self._process.pid, signals.Signals[signal])

    def restart(self, timeout: float) -> None:
        self.kill("SIGTERM")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        reaper.end(self._process)
        self.start()
        self.wait_until_up()

    def cut(self) -> None:
        for cable in self._cables.values():
            cable.unplug()

    def mend(self) -> None:
        for cable in self._cables.values():
            cable.plug()

    def teardown(self) -> None:
        reaper.end(self._process)
        for cable in self._cables.values():
            cable.close()

    def _through_cable(self, value: str) -> str:
        for port, cable in self._cables.items():
            value = value.replace(f":{port}", f":{cable.port}")
        return value


@pytest.fixture
def default_redis_broker(redis_binary: str) -> RedisProcess:
    return RedisProcess()


@pytest.fixture
def default_rabbitmq_broker() -> RabbitProcess:
    if find_rabbitmq_server() is None:
        pytest.skip("no rabbitmq-server")
    return RabbitProcess()


@pytest.fixture
def celery_worker_cluster(
    celery_worker_cluster_config: dict[str, Any],
    worker_settings: dict[str, str],
    tmp_path: Path,
) -> Iterator[Cluster]:
    env = {**urls(celery_worker_cluster_config), **worker_settings}
    two = [WorkerProcess(tmp_path, env) for _ in range(2)]
    cluster = Cluster(*(SmokeWorker(each, app=None) for each in two))
    try:
        for each in two:
            each.wait_until_up()
        yield cluster
        print(cluster.logs())
    finally:
        for each in two:
            each.teardown()
