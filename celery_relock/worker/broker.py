"""The broker of an app: what it can do, whether it answers, and a producer for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from celery import Celery
from celery.signals import worker_process_init
from kombu.exceptions import LimitExceeded

# Seconds for a connection to a broker that has failed. Celery sets no limit under gevent.
_CONNECTING = 4.0
# Seconds to wait for a connection of the app's pool.
_PATIENCE = 1.0


def is_amqp(connection: Any) -> bool:
    """Whether a connection of kombu is one to RabbitMQ."""
    return bool(connection.transport.driver_type == "amqp")


def has_remote_control(app: Celery) -> bool:
    """Whether the workers of an app can hear and answer remote control; not on SQS, where to ask
    would make a queue for their answers."""
    with app.connection_for_write() as connection:
        return bool(app.conf.worker_enable_remote_control) and bool(
            connection.supports_exchange_type("fanout")
        )


def remote_control(app: Celery) -> Any:
    """Celery's remote control of the workers of an app; None if they do not hear it.

    Raises:
        Exception: the broker cannot be reached; whatever its client raises. At once, where Celery
            tries for six seconds.
    """
    if not has_remote_control(app):
        return None
    _reach(app)
    return app.control


def answers(app: Celery) -> bool:
    """Whether its broker can be reached."""
    try:
        _reach(app)
    except Exception:  # noqa: BLE001  # whatever the broker's client raises
        return False
    return True


def _reach(app: Celery) -> None:
    with app.connection_for_write(connect_timeout=_CONNECTING) as connection:
        # Each of its hosts once.
        connection.ensure_connection(
            max_retries=len(connection.alt) or 1, interval_start=0, interval_step=0
        )


# The process whose connections to the broker are those in the pools of its apps. What a body forks
# has a copy of its parent's, and RabbitMQ ends a connection to which two processes write. Celery
# empties its pools in the children of a worker alone (by billiard's hooks).
_has_pools = os.getpid()


def _child_begins(**_: Any) -> None:
    """Celery has begun this process, and emptied what it had of its parent's pools."""
    global _has_pools
    _has_pools = os.getpid()


@contextmanager
def producer_of(app: Any) -> Iterator[Any]:
    """A producer by a connection of the app's pool; by one of its own in a process that was forked
    (see `_has_pools`), or if all are in use.

    The caller may have them all: there can be a single one (`broker_pool_limit=1`), and a lock is
    released, or a task sent, where it is held. Celery's pool of producers waits for ever for it.
    """
    with _connection_of(app) as connection:  # back to the pool, or closed
        yield app.amqp.Producer(connection)


def _connection_of(app: Any) -> Any:
    if _has_pools == os.getpid():
        with suppress(LimitExceeded):
            return app.pool.acquire(block=True, timeout=_PATIENCE)
    return app.connection_for_write()


worker_process_init.connect(_child_begins, weak=False, dispatch_uid="celery_relock.pools")
