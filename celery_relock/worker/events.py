"""Celery events of what happens to the locks of a worker's tasks, for its monitors.

They are sent as Celery's own are, where the worker was started with `-E` or
`worker_send_task_events` and the task has `send_events`. Their names begin with `lock-`: what
begins with `task-` is a state of the task in Flower and `celery events` (`show`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from celery.exceptions import SoftTimeLimitExceeded
from celery.signals import worker_init

from ..engine import events
from ..engine.events import LockEvent, Work, logger
from ..engine.interrupt import let_through
from ..engine.lease import Lease
from ..engine.protocol import LINE, Message
from ..errors import LockLost
from .broker import producer_of
from .message import work_for
from .spawned import hand_on

#: The state of a task whose message is parked. Not a ready one: `get()` goes on waiting.
BLOCKED = "BLOCKED"

# Each event is a message to the broker, so the others are signals alone: a monitor can tell them
# from Celery's own events of a task.
_SENT = ("acquired", "released", "conflict", "lost", "reclaimed", "duplicate")
# These come from a native thread, which under gevent cannot use the sockets of others: it must not
# touch Celery's pool of connections.
_OTHER_THREADS = ("lock-lost", "lock-reclaimed")

# An event that cannot be sent must not hold up a task for long, nor each time. In some releases
# Celery itself would try for ever to reach the broker.
_ONCE = {"max_retries": 1, "interval_start": 0}
_SILENCE = 30.0

_worker: Any = None
_told: set[str] = set()
_silent_until: WeakKeyDictionary[Any, float] = WeakKeyDictionary()


def tell_reentered(task: Any, request: Any | None, leases: Mapping[str, Lease]) -> None:
    """An inline call of a task has re-entered locks that its call stack holds, by these leases."""
    if events.wanted("reentered"):
        claim = next(iter(leases.values())).claim
        fence = max((max(each.fences, default=0) for each in leases.values()), default=0)
        event = LockEvent(
            "reentered",
            tuple(leases),
            claim.execution_id,
            claim.owner,
            fence=fence,
            work=work_for(task, request),
            reentered=True,
        )
        events.tell(event)


def tell_resumed(app: Any, message: Message, headers: Mapping[str, Any]) -> None:
    """A parked message was published again."""
    if events.wanted("resumed"):
        name, task_id = str(headers.get("task") or ""), str(headers.get("id") or "")
        work = Work(app.tasks.get(name), name, task_id)
        names = (message.name.removeprefix(LINE),)
        events.tell(LockEvent("resumed", names, message.execution_id, "", work=work))


def _remember(worker: Any) -> None:
    global _worker
    _worker = worker
    _told.clear()
    if worker.task_events:
        _told.update(_SENT)


def _begins(sender: Any = None, **_: Any) -> None:
    # Before the pool starts, so that its children know.
    _remember(sender)
    hand_on(sender.app, _begins_spawned, sender.hostname, bool(sender.task_events))


def _begins_spawned(hostname: str, task_events: bool, app: Any) -> None:
    _remember(SimpleNamespace(app=app, hostname=hostname, task_events=task_events))


def forget(worker: Any) -> None:
    """The worker has ended, perhaps in a thread of a process that goes on, as in tests."""
    global _worker
    if worker is _worker:
        _worker = None
        _told.clear()


def _send(event: LockEvent) -> None:
    work = event.work
    if work is None or _worker is None:
        return
    fields = {
        "name": work.name,
        "locks": list(event.names),
        "owner": event.owner,
        "fence": event.fence,
        "reason": event.reason,
        "since": event.since,
    }
    node = work.node or _worker.hostname
    _dispatch(_worker.app, work.task, f"lock-{event.kind}", work.id, fields, node)


def send(task: Any, task_id: str, name: str, fields: dict[str, Any]) -> None:
    """Send an event of a task.

    A process that is no worker sends it if `task_send_sent_event` is set, as Celery's `task-sent`.
    """
    if _worker is None:
        wanted, node = task.app.conf.task_send_sent_event, None
    else:
        wanted, node = bool(_told), _worker.hostname
    if wanted:
        _dispatch(task.app, task, name, task_id, {"name": task.name, **fields}, node)


def show(task: Any, task_id: str, state: str, **told: Any) -> None:
    """Let monitors show a task as BLOCKED; or, if it was so, in another state.

    They take an event of an unknown type, `task-blocked`, for a state of that name, which none but
    SUCCESS and FAILURE can follow: not Celery's own events of a task that begins, or is revoked.
    `task-pending` is of the lowest state there is, and of such an event all fields are taken as
    they are, `state` among them.
    """
    name = "task-blocked" if state == BLOCKED else "task-pending"
    send(task, task_id, name, {"state": state, **told})


def _dispatch(
    app: Any, task: Any, name: str, task_id: str, fields: dict[str, Any], node: str | None
) -> None:
    silent = time.monotonic() < _silent_until.get(app, 0.0)
    if silent or not getattr(task, "send_events", True):
        return
    try:
        with dispatcher(app, name, node) as sender:
            sender.send(name, uuid=task_id, **fields)
    except (SoftTimeLimitExceeded, LockLost):
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the task goes on
        _silent_until[app] = time.monotonic() + _SILENCE
        text = "lock events cannot be sent, none are tried for the next %.0f s: %s"
        logger.warning(text, _SILENCE, error)


@contextmanager
def dispatcher(app: Any, name: str, node: str | None = None) -> Iterator[Any]:
    """What sends an event to monitors; by a connection of its own where another thread sends."""
    if name in _OTHER_THREADS:
        with app.connection_for_write() as connection:
            connection.ensure_connection(**_ONCE)
            yield app.events.Dispatcher(connection, hostname=node)
    else:
        with producer_of(app) as producer:
            producer.connection.ensure_connection(**_ONCE)
            yield app.events.Dispatcher(producer.connection, node, True, producer.channel)


let_through(SoftTimeLimitExceeded)
events.subscribe(_send, _told)
worker_init.connect(_begins, weak=False, dispatch_uid="celery_relock.telling")
