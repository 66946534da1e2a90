"""Nodes that are containers. `scripts/smoke` makes the images and says where they are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_celery import CeleryTestContainer, RabbitMQContainer, RedisContainer
from pytest_docker_tools import container, fxtr

from tests.docker.nodes import READY, WORKER, Cluster, SmokeWorker, urls
from tests.support import wait_for
from tests.support.ports import free_port

HERE = Path(__file__).parent
NETWORK = "{default_pytest_celery_network.name}"
REDIS_IMAGE = os.environ.get("REDIS_IMAGE", "redis:7-alpine")
RABBITMQ_IMAGE = os.environ.get("RABBITMQ_IMAGE", "rabbitmq:3")
WORKER_IMAGE = os.environ.get("WORKER_IMAGE", "celery-relock/worker")


class Soon:
    """Looks for the prompt in the log more often than once a second, and tells a container that has
    ended: what pytest-celery does would poll the log of a dead one for minutes."""

    _starts = 1

    def wait_until_up(self: Any) -> None:
        def up() -> bool:
            self.reload()
            assert self.status != "exited", f"{self.name} ended:\n{self.logs()[-2000:]}"
            return self.logs().count(self.ready_prompt) >= self._starts

        wait_for(up, 100, f"{self.name} to be ready")

    def restart(self: Any, timeout: int) -> None:
        self._starts += 1
        self._container.restart(timeout=timeout)
        self.wait_until_up()


class Server(Soon):
    """Is asked at the port that this machine has for it."""

    def ready(self) -> bool:
        self.wait_until_up()
        return True

    def _wait_port(self: Any, port: str) -> int:
        # get_addr() of pytest-docker-tools tells the container's own where it takes this machine
        # for a container.
        return int(self.ports[port][0])


class Redis(Server, RedisContainer):
    """A Redis. Restarted, it has its data and its port."""


class RabbitMQ(Server, RabbitMQContainer):
    pass


class Worker(Soon, CeleryTestContainer):
    ready_prompt = READY

    def ready(self) -> bool:
        """Not waited for before the next one is started."""
        return True

    def cut(self) -> None:
        """Take the container from its network. It has open connections, and nobody tells it."""
        (self._network,) = self.attrs["NetworkSettings"]["Networks"]
        self._container.client.networks.get(self._network).disconnect(self._container)

    def mend(self) -> None:
        self._container.client.networks.get(self._network).connect(self._container)


@pytest.fixture
def redis_ports() -> dict[str, Any]:
    # A chosen one: Docker chooses another at each start.
    return {"6379/tcp": ("127.0.0.1", free_port())}


default_redis_broker = container(
    image=REDIS_IMAGE,
    command=["redis-server", "--save", "", "--appendonly", "yes", "--protected-mode", "no"],
    ports=fxtr("redis_ports"),
    network=NETWORK,
    wrapper_class=Redis,
)

default_rabbitmq_broker = container(
    image=RABBITMQ_IMAGE,
    environment={
        "RABBITMQ_LOGS": "-",
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-rabbit loopback_users [] +S 2:2 +sbwt none",
    },
    ports={"5672/tcp": ("127.0.0.1", None)},
    network=NETWORK,
    wrapper_class=RabbitMQ,
)


@pytest.fixture
def worker_environment(
    celery_worker_cluster_config: dict[str, Any], worker_settings: dict[str, str]
) -> dict[str, str]:
    return {**urls(celery_worker_cluster_config), **worker_settings, "PYTHONPATH": "/app"}


def _worker() -> Any:
    return container(
        image=WORKER_IMAGE,
        command=[*WORKER, "smoke@%h"],
        environment=fxtr("worker_environment"),
        network=NETWORK,
        volumes={str(HERE): {"bind": "/app/tests/docker", "mode": "ro"}},
        wrapper_class=Worker,
    )


one_worker = _worker()
other_worker = _worker()


@pytest.fixture
def celery_worker_cluster(
    worker_settings: dict[str, str], one_worker: Worker, other_worker: Worker
) -> Iterator[Cluster]:
    cluster = Cluster(*(SmokeWorker(each, app=None) for each in (one_worker, other_worker)))
    for each in (one_worker, other_worker):
        each.wait_until_up()
    yield cluster
    print(cluster.logs())
