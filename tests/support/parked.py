"""The locks of a worker's app, and what waits for them, looked at from the test."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery_relock import Lock, engines
from celery_relock.engine.engine import Engine
from celery_relock.engine.inspection import Holder, LockInfo
from celery_relock.worker import parking
from tests.support.waiting import wait_for


def survey_of(engine: Any, name: str) -> LockInfo:
    """A lock, with its holders and waiters."""
    ask = engine.backend.inspection()
    return ask.survey(ask.keys_of(name), 1000, 1000)[0]


def engine_here(app: Any) -> Engine:
    """Where an app's locks are, for the test's own process, which can send no message."""
    return engines.engine_for(app.conf.relock_url, app.conf.relock_namespace)


def state_of(worker: Any, name: str) -> LockInfo:
    """A lock of a worker's app, with its holders and waiters."""
    return survey_of(engine_here(worker.module.app), name)


def label_of(holder: Holder) -> str:
    """The holder as conflicts, states and workers name it: with its process."""
    return f"{holder} {holder.host}:{holder.pid}"


def is_consumed(worker: Any, queue: str = "") -> bool:
    """Whether a live worker consumes the resume queue beside a queue, by default the app's own."""
    app = worker.module.app
    engine = engine_here(app)
    queue = queue or app.conf.task_default_queue
    return engine.backend.consumed(parking.channel(parking.home(app), queue))


def wait_until_parked(worker: Any, name: str, count: int = 1) -> None:
    """Wait until so many messages are parked for a lock, none of them on its way."""
    wait_for(lambda: state_of(worker, name).parked == count, what=f"{count} parked for {name}")


def wait_until_requeued(worker: Any) -> None:
    """Wait until the only worker has no slot for the one message that was resumed: that waits in
    its queue, for a task to end from now on."""
    app = worker.module.app
    name = parking.resume_queue(app.conf.task_default_queue)
    prefix = app.conf.broker_transport_options.get("global_keyprefix")

    def is_requeued() -> bool:
        if prefix:
            waiting = channel.client.execute_command("LRANGE", prefix + name, 0, -1)
            return [json.loads(each)["headers"].get("redelivered") for each in waiting] == [True]
        queue = channel.queue_declare(name, passive=True)
        return (queue.message_count, queue.consumer_count) == (1, 0)

    with app.connection_for_read() as connection:
        channel = connection.default_channel
        wait_for(is_requeued, what=f"a message that waits in {name} for a slot")


def lock_of(worker: Any, name: str, **options: Any) -> Lock:
    """A plain `Lock` with this name in the test's own process, which can send no message."""
    conf = worker.module.app.conf
    return Lock(conf.relock_url, name, namespace=conf.relock_namespace, **options)


@contextmanager
def held_here(worker: Any, name: str) -> Iterator[Lock]:
    """The lock is this process's, which can send no message, until it is released."""
    lock = lock_of(worker, name)
    assert lock.acquire(blocking=False)
    try:
        yield lock
    finally:
        if lock.owned():
            lock.release()


def wait_until_free(worker: Any, name: str, timeout: float = 30.0) -> None:
    lock = lock_of(worker, name)
    wait_for(lambda: not lock.locked(), timeout, f"{name} to be free")
