"""What a worker's main process looks after: the locks of its dead, and the runs that are parked.

Whether and how Celery notices a death is left aside: a child that is killed makes no signal at all
when its message is requeued, and a hard time limit calls the failure hooks while the child is still
alive. What counts is that the process is gone (`engine.crash`).
"""

from __future__ import annotations

import logging
from typing import Any

from celery.signals import worker_init, worker_ready, worker_shutdown

from ..declaration import locked_tasks
from ..engine.crash import Reaper, journal
from ..errors import RelockError
from . import company
from .resuming import Forwarder

logger = logging.getLogger("celery_relock")

_watchers: list[Reaper | Forwarder] = []


def _begin(**_: Any) -> None:
    # Before the pool forks, so that its children know.
    journal.on = True


def _start(sender: Any, **_: Any) -> None:
    company.tell(sender.app)
    locked = locked_tasks(sender.app)
    if not locked:
        return
    try:
        engine = locked[0].engine  # one app, one Redis
    except RelockError as error:
        logger.warning(
            "this worker frees no locks of killed processes and sends no parked runs on: %s", error
        )
        return
    for watcher in (Reaper(engine.backend, engine.parking), Forwarder(engine)):
        watcher.start()
        _watchers.append(watcher)


def _stop(**_: Any) -> None:
    while _watchers:
        _watchers.pop().stop()


worker_init.connect(_begin, weak=False, dispatch_uid="celery_relock.reaping")
worker_ready.connect(_start, weak=False, dispatch_uid="celery_relock.reaping")
worker_shutdown.connect(_stop, weak=False, dispatch_uid="celery_relock.reaping")
