"""Messages for tasks that have no lock, in a worker where others have one.

A step of a workflow keeps the workflow's locks, whether it is a `LockedTask` or not. And a message
can have been sent, and parked, for a lock that its task has no more, as a deploy has taken it away.
It is executed without. Or Celery discards it, as it cannot read it, or does not know its task. What
Redis has of it is cleared away then: else it would be published again and again, as one that was
lost on its way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from celery.app.task import Context
from celery.signals import task_rejected, task_unknown

from ..declaration import engine_of
from ..engine import ids
from ..engine.events import label_of, logger
from ..engine.lease import QuietLease
from ..engine.protocol import MAY_COME, Claim, Ended
from ..errors import RelockError
from . import leftovers
from .conflict import release
from .delivery import afterwards
from .ending import ended_as, is_acknowledged
from .message import HEADER, header_of, parse
from .states import Late

# Of the hold of an execution whose task has no lock any more, in seconds.
_LEASE = 30.0


@contextmanager
def alone(task: Any, message: Any) -> Iterator[None]:
    """Around the body for a message that is executed without the locks for which it was sent: clear
    away what Redis has of it, and let no copy of it run, too. It was parked, and can have been
    published twice.

    Raises:
        Late: the execution has ended.
    """
    header, error = header_of(message), None
    if not header.has_leftovers:
        yield
        return
    if not header.workflow_locks:  # else it may have been parked for them
        text = "Task %s[%s] was sent for a lock that its code declares no more: it runs without"
        logger.warning(text, message.task, message.id)
    engine, me = engine_of(task.app), header.execution_id
    label = label_of(task.name, message.id)
    claim = Claim(me, ids.new_attempt_id(), me, (f"execution:{me}",), (1,), _LEASE, label)
    lease = QuietLease(claim, engine.backend)
    try:
        with suppress(RelockError):  # then it runs all the same, as it has no lock any more
            if isinstance(engine.acquire(lease, None), Ended):  # after a copy that runs now
                raise Late("is a late copy of an execution that has ended")
        # If its process dies, it comes again, perhaps where its task has a lock.
        of = leftovers.BEFORE_MARKER
        leftovers.clear_away(task.app, message, leftovers=of, remember=MAY_COME)
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        over = isinstance(error, Exception | None) and is_acknowledged(task, error)
        # When its result is stored: until then a copy may have to run.
        afterwards(partial(release, engine, lease, ended_as(message) if over else ""))


def _discarded(sender: Any = None, message: Any = None, **_: Any) -> None:
    """Celery discards a message whose task it does not know, or that it cannot read."""
    header = parse((message.headers or {}).get(HEADER))
    if header is not None and header.has_any_leftovers:
        # It was rejected, and may be brought back, also to a worker that knows its task.
        leftovers.clear_soon(sender.app, Context(message.headers), remember=MAY_COME)


def note_unreadable(consumer: Any) -> None:
    """Hear also of a message whose body a worker's consumer cannot decode: for that Celery has no
    signal."""
    discard = consumer.on_decode_error

    def on_decode_error(message: Any, error: Exception) -> None:
        discard(message, error)
        _discarded(consumer, message)

    consumer.on_decode_error = on_decode_error


task_unknown.connect(_discarded, weak=False, dispatch_uid="celery_relock")
task_rejected.connect(_discarded, weak=False, dispatch_uid="celery_relock")
