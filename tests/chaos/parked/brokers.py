"""The brokers of a campaign: what is done to each, and what it still has."""

from __future__ import annotations

from typing import Any, Protocol

import amqp

from celery_relock.worker.parking import resume_queue
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
    def left(self, queue: str) -> list[str]:
        """Where it still has messages: in a queue, or in the resume queue beside it."""

    def stop(self) -> None: ...


class OnRedis:
    fault = "broker: CLIENT KILL normal"
    #: A killed worker's messages come back within seconds.
    options = {
        "visibility_timeout": 6,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
        "unacked_mutex_expire": 2,
    }

    def __init__(self) -> None:
        self._server = RedisServer("--appendonly", "yes", "--appendfsync", "no")
        self.url = self._server.url
        self._client = self._server.client()

    def cut(self) -> None:
        self._client.client_kill_filter(_type="normal", skipme=True)

    def left(self, queue: str) -> list[str]:
        names = "unacked", queue, resume_queue(queue)
        return [name for name in names if self._client.exists(name)]

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
