"""Nodes that are processes of this machine: for where there is no container engine.

They answer what pytest-celery asks of a container. All are on one host and run this interpreter;
the network of a worker is a proxy that can hold back what is on its way.
"""

from __future__ import annotations

import contextlib
import os
import signal as signals
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.docker.nodes import READY, WORKER, Cluster, SmokeWorker, config, urls
from tests.support import RedisServer, reaper, wait_for
from tests.support.rabbitmq import RabbitServer, find_rabbitmq_server
from tests.support.tcp import TcpProxy

ROOT = Path(__file__).parents[2]


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
        self._ways = {port: TcpProxy(port) for port in ports}
        self._env = {name: self._by_proxy(value) for name, value in env.items()}
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
        for way in self._ways.values():
            way.hold()

    def mend(self) -> None:
        for way in self._ways.values():
            way.go_on()

    def teardown(self) -> None:
        reaper.end(self._process)
        for way in self._ways.values():
            way.close()

    def _by_proxy(self, value: str) -> str:
        for port, way in self._ways.items():
            value = value.replace(f":{port}", f":{way.port}")
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
