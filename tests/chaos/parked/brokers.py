"""The brokers of a campaign: what is done to each, and what it still has."""

from __future__ import annotations

import time
from typing import Any, Protocol

import amqp
from celery import Celery

from celery_relock.worker.parking import resume_queue
from tests.chaos.processes import DURABLE
from tests.support import RedisServer
from tests.support.rabbitmq import RabbitServer


class Broker(Protocol):
    """A server of its own.

    Attributes:
        url: for Celery.
        options: Celery's `broker_transport_options`.
        fault: what `cut` does, for people.
    """

    url: str
    options: dict[str, Any]
    fault: str

    def cut(self) -> None: ...
    def bring_back(self, app: Celery) -> None:
        """Let the broker deliver again what dead workers had, once it is due. Called often."""

    def left(self, queue: str) -> list[str]:
        """Where it still has messages: in a queue, or in the resume queue beside it."""

    def stop(self) -> None: ...


class OnRedis:
    fault = "broker: CLIENT KILL normal"
    #: A killed worker's messages come back within seconds; see `bring_back`.
    options = {
        "visibility_timeout": 6,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
        "unacked_mutex_expire": 2,
    }
    #: Seconds between two looks for such messages.
    _LOOK_EVERY = 1.0

    def __init__(self) -> None:
        self._server = RedisServer(*DURABLE)
        self.url = self._server.url
        self._client = self._server.client()
        self._looked_at = 0.0

    def cut(self) -> None:
        self._client.client_kill_filter(_type="normal", skipme=True)

    def bring_back(self, app: Celery) -> None:
        # Before kombu 5.7 a worker does so when it starts, which is too early, and then every
        # 100 s, whatever the options say.
        if time.monotonic() - self._looked_at < self._LOOK_EVERY:
            return
        self._looked_at = time.monotonic()
        with app.connection_for_read() as connection:
            connection.default_channel.qos.restore_visible(num=None, interval=1)

    def left(self, queue: str) -> list[str]:
        names = "unacked", queue, resume_queue(queue)
        pipe = self._client.pipeline(transaction=True)  # one that moves is seen here or there
        for name in names:
            pipe.exists(name)
        return [name for name, there in zip(names, pipe.execute(), strict=True) if there]

    def stop(self) -> None:
        self._server.stop()


class OnRabbitMQ:
    fault = "broker: kill -9 and started again"
    options = {"confirm_publish": True}

    def __init__(self) -> None:
        self._server = RabbitServer()
        self.url = self._server.url

    def cut(self) -> None:
        self._server.restart()

    def bring_back(self, app: Celery) -> None:
        """RabbitMQ sees by itself that a worker is gone."""

    def left(self, queue: str) -> list[str]:
        return [name for name in (queue, resume_queue(queue)) if self._has_messages(name)]

    def _has_messages(self, queue: str) -> bool:
        # Those that a worker has are not counted: it has a lock then, or is about to.
        with amqp.Connection(f"127.0.0.1:{self._server.port}") as connection:
            try:
                found = connection.channel().queue_declare(queue, passive=True)
            except amqp.NotFound:
                return False
        return bool(found.message_count)

    def stop(self) -> None:
        self._server.stop()


BROKERS = {"redis": OnRedis, "rabbitmq": OnRabbitMQ}
