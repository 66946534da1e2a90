"""What Redis has for a message: cleared away where the message does not come (again).

    Leftovers       who clears away what; and which of it an execution has that ends early
    clear_away      frees it
    the receivers   of a message that was revoked, or has expired, before it was executed; and of
                    one that was lost with the process of its task

What a body itself holds is released by its process, or by the reaper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

from celery.app.task import Context
from celery.exceptions import TimeLimitExceeded, WorkerLostError
from celery.signals import task_failure, task_retry, task_revoked
from celery.states import REVOKED

from ..declaration import engine_of
from ..dedup import worker as dedup
from ..engine.engine import Engine
from ..engine.events import logger
from ..engine.protocol import MAY_COME
from ..errors import LockConfigError, RelockError
from ..order import worker as order
from ..workflow import steps
from . import cooldown, retry
from . import events as worker_events
from .conflict import again_of
from .consumer import consumes_here
from .ending import end_unexecuted, locks_of, puts_back, remember_for, withdraw_later
from .message import ENTER, ended_request, has_begun, header_of, is_lockable, is_redelivered


def is_ours(task: Any, request: Any) -> bool:
    """Whether Redis may have something for a message of this task."""
    return is_lockable(task) or header_of(request).has_any_leftovers


def _parked_as(request: Any) -> Iterator[str]:
    """The ids by which an execution can be parked: for its own locks, or for one of its workflow's;
    and a late copy of it that has to run."""
    for each in (header_of(request).execution_id, *steps.hold_ids(request)):
        yield each
        yield again_of(each)


def _withdraw(engine: Engine, request: Any, remember: float | None, **_: Any) -> None:
    for each in _parked_as(request) if header_of(request).parked_at else ():
        if engine.parking.withdraw(each, remember):
            return


# What Redis can have for a message: who clears it away, and what becomes of it if that is refused.
Leftovers: TypeAlias = tuple[tuple[Callable[..., None], str], ...]
_PARKED = (_withdraw, "the place of %s in its queue, its message will come again")
_KEPT = (retry.clear_away, "the lock kept for %s, its lease ends it")
_LINE = (order.clear_away, "the place of %s in its order, it will be passed over")
_MARKER = (dedup.clear_away, "the dedup marker of %s, it ends by itself")
_COOLDOWN = (cooldown.clear_away, "the lock that cools down after %s, it does so in its time")
_WORKFLOW = (steps.clear_away, "the hold left to %s, it ends after its gap")
#: What is left for an execution that ends before it has asked for its locks, its line, its marker.
#: It asks in the other order: first for its marker. Who asks ends by itself what it has there.
BEFORE_LOCKS: Leftovers = (_PARKED, _KEPT)
BEFORE_LINE: Leftovers = (*BEFORE_LOCKS, _LINE)
BEFORE_MARKER: Leftovers = (*BEFORE_LINE, _MARKER)
_BUT_PARKED: Leftovers = (_KEPT, _LINE, _MARKER, _COOLDOWN, _WORKFLOW)
#: Also of one that has not acquired the locks of its workflow, or that has begun.
ALL: Leftovers = (_PARKED, *_BUT_PARKED)


def _end_own(engine: Engine, request: Any, remember: float | None, task: Any, **_: Any) -> None:
    """The execution's own locks."""
    header = header_of(request)
    if header.own:
        enters = task is not None and task.name == ENTER
        if enters:
            names = task.names_of(request.args[0], request)
        else:
            _, names = locks_of(task, request)
        end_unexecuted(engine, names, header.execution_id, remember)


def comes_again(app: Any, request: Any, task: Any) -> None:
    """A hook of a task (`on_success`, `on_failure`, `after_return`) has rejected its message, whose
    execution has ended: what is remembered of its end is forgotten, as the message may be brought
    back, and then it is to run."""
    own = (_end_own, "the memory of %s: if it comes again, it is taken for a late copy")
    # For a millisecond: with `MAY_COME` the memory that is there would stay.
    clear_away(app, request, task, (own, *_BUT_PARKED), remember=0.001, began=True)


def _revoked(sender: Any = None, request: Any = None, terminated: Any = None, **_: Any) -> None:
    if not is_ours(sender, request):
        return
    header, was_running = header_of(request), bool(terminated)
    if header.attempts and not was_running:
        worker_events.show(sender, request.id, REVOKED)
    again = header.attempts or is_redelivered(request)
    # Else it has never been executed, so it is not parked: thousands may expire together.
    if header.parked_at or was_running or again:
        with suppress(LockConfigError):  # told when the worker began
            for each in _parked_as(request):
                withdraw_later(engine_of(sender.app), each)
    clear_soon(sender.app, request, sender, leftovers=_BUT_PARKED, began=was_running)


def clear_soon(app: Any, request: Any, task: Any = None, **how: Any) -> None:
    """As `clear_away`, but not in the worker's loop: Redis can be silent."""
    clear = partial(clear_away, app, request, task, **how)
    with suppress(LockConfigError):
        engine = engine_of(app)
        engine.later.add(clear) if consumes_here() else clear()


def clear_away(
    app: Any,
    request: Any,
    task: Any = None,
    leftovers: Leftovers = ALL,
    remember: float | None = None,
    began: bool = False,
) -> None:
    """Free what Redis has for a message that is not executed, or not under its locks.

    Args:
        task: its task, if that is known: a locked one tells more than the message.
        leftovers: what there can be, such as `BEFORE_MARKER`.
        remember: see `end_unexecuted`.
        began: its body has begun, or may have.
    """
    if not is_lockable(task):
        task = None
    for clear, what in leftovers:
        try:
            engine = engine_of(app)
            of = engine, request, remember
            engine.later.try_now(partial(clear, *of, task=task, began=began))
        except RelockError as error:
            logger.warning("Cannot release " + what + ": %s", request.id, error)


def _lost(sender: Any = None, exception: Any = None, **_: Any) -> None:
    """A task's process is gone, or is about to go. Its message comes again if Celery puts it back,
    as it does after some time limits; else it was acknowledged, or rejected."""
    # Not by the task id, which is also that of a retry. None in a child, whose body may raise such
    # an error itself.
    request = ended_request()
    is_lost = isinstance(exception, WorkerLostError | TimeLimitExceeded)
    if not is_lost or request is None or puts_back(sender, exception):
        return
    told = Context(request.request_dict, args=request.args, kwargs=request.kwargs)
    if is_ours(sender, told):
        clear_soon(sender.app, told, sender, remember=remember_for(sender, exception), began=True)


def _retried_lost(sender: Any = None, request: Any = None, reason: Any = None, **_: Any) -> None:
    """A task's process is gone, and Celery has sent a retry in the place of its message
    (`retry_on_worker_lost`). Or a cold shutdown ends the process, and Celery has stored RETRY: the
    message comes again if it is acknowledged late, or was parked."""
    is_lost = isinstance(getattr(reason, "exc", None), WorkerLostError)
    is_cancelled = reason is None and not sender.acks_late and not header_of(request).parked_at
    if (is_lost or is_cancelled) and not has_begun(request) and is_ours(sender, request):
        # One that is cancelled may have just been parked.
        remember = MAY_COME if is_cancelled else None
        clear_soon(sender.app, request, sender, remember=remember, began=True)


task_revoked.connect(_revoked, weak=False, dispatch_uid="celery_relock")
task_failure.connect(_lost, weak=False, dispatch_uid="celery_relock")
task_retry.connect(_retried_lost, weak=False, dispatch_uid="celery_relock.leftovers")
