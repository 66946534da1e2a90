"""What else is at work in this process, and whether it keeps a locked task from its lock.

The lock lies around a task's `run`, so it does not matter who wraps `__call__`, the tracer or the
task. Should something call the body by another way all the same, that task fails: no lock is left
out in silence.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from types import FrameType, TracebackType
from typing import Any

from celery import current_app
from celery.states import SUCCESS

from ..declaration import locked_tasks, misnamed
from ..engine.events import logger
from ..errors import LockConfigError, RelockError
from ..options import OPTION_NAMES
from .delivery import known_delivery
from .message import is_lockable
from .states import stores_no_result

# Modules that are loaded where a library traces Celery's tasks, and the distribution of each.
_TRACERS = {
    "sentry_sdk.integrations.celery": "sentry-sdk",
    "newrelic.hooks.application_celery": "newrelic",
    "opentelemetry.instrumentation.celery": "opentelemetry-instrumentation-celery",
    "ddtrace.contrib.internal.celery.app": "ddtrace",
    "elasticapm.contrib.celery": "elastic-apm",
    "celery_aio_pool.tracer": "celery-aio-pool",
}
_LOCK_ATTRIBUTES = tuple(f"lock_{name}" for name in OPTION_NAMES)

_PACKAGE = __name__.partition(".")[0]

_looked_at: set[str] = set()


def tracers() -> list[str]:
    """The libraries in this process that trace tasks, each with its version."""
    found = [name for module, name in _TRACERS.items() if module in sys.modules]
    return [f"{name} {_version(name)}" for name in found]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # in a frozen program
        return "of an unknown version"


def tell(app: Any) -> None:
    """Say at a worker's start what runs beside the locks, and which tasks only look locked."""
    if found := tracers():
        logger.info("locked tasks run beside %s", ", ".join(found))
    for task in app.tasks.values():
        warn_of_missing_base(task)
    # Once more: when they were declared, this worker's log had not been opened.
    for declared in locked_tasks(app):
        for each in misnamed(app.tasks[declared.options.task]):
            logger.warning("%s", each.text)


def warn_of_missing_base(task: Any) -> None:
    """Warn, once for each task, of one that was declared with options of a lock and has none."""
    if task.name in _looked_at:
        return
    _looked_at.add(task.name)
    if written := lacks_base(task):
        logger.warning(
            "the task %s is declared with %s and takes NO LOCK, because its base is not "
            "LockedTask: write @app.task(base=LockedTask, %s=…)",
            *(task.name, ", ".join(written), written[0]),
        )


def lacks_base(task: Any) -> list[str]:
    """The options of a lock that a task was declared with, if it is no LockedTask."""
    if is_lockable(task):
        return []
    # What an annotation says for all tasks ("*") is not said of this one.
    for_all = {name for each in task.app.annotations for name in _of_all(each)}
    return [name for name in _LOCK_ATTRIBUTES if hasattr(task, name) and name not in for_all]


def _of_all(annotation: Any) -> Iterable[str]:
    of_all: Any = getattr(annotation, "annotate_any", None)  # a user's own object may lack it
    return (of_all and of_all()) or ()


def on_publish(name: str) -> None:
    """Look at a task that is about to be sent, if it was never looked at before."""
    if name not in _looked_at and (task := current_app._tasks.get(name)) is not None:
        warn_of_missing_base(task)


def see_that_it_began(task: Any) -> None:
    """Raise LockConfigError if a task whose `run` was not reached has a lock."""
    if task._relock_declares():
        raise _error_of(task, task.request_stack.top)


def keep_aside(task: Any) -> None:
    """Raise once more what tells that this delivery is set aside, if a `__call__` has handled
    it."""
    request = task.request_stack.top
    delivery = known_delivery(request)
    if delivery is None or delivery.aside is None:
        return
    logger.warning(
        "%s[%s]: %s handles the exception that tells that this call waits or is a copy (%s). "
        "It is raised once more. Let celery.exceptions.Ignore and Retry through there",
        *(task.name, request.id, type(task).__call__.__qualname__, delivery.aside),
    )
    raise delivery.aside from None


def shown(error: Exception) -> TracebackType | None:
    """The traceback of an error that leaves a task, without the frames of this library that it
    begins with: people and tracers look for the task's own.

    Celery's pool sends the whole stack once for each frame. With ours that was more than a pipe
    takes at once (64 KB), and a time limit that strikes a child in the midst of it costs a slot.
    """
    last = rest = error.__traceback__
    while rest is not None and _is_ours(rest.tb_frame):
        last, rest = rest, rest.tb_next
    if rest is None:  # our own, whose text says what to do: where it was raised; or a fault: all
        rest = last if isinstance(error, RelockError) else error.__traceback__
    return rest


def _is_ours(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in (_PACKAGE, "contextlib")


def on_unreached(task: Any, request: Any, state: str | None) -> None:
    """Fail a locked task that Celery has ended although its `run` was not reached.

    This is the last check: somebody who waits for the result may have the success already.
    """
    if state != SUCCESS or not task._relock_declares():
        return
    error = _error_of(task, request)
    logger.critical("%s", error)
    if stores_no_result(task, request):
        return
    # Celery keeps the result of a success against any later state.
    task.backend.forget(request.id)
    task.backend.mark_as_failure(request.id, error, request=request)


def _error_of(task: Any, request: Any) -> LockConfigError:
    is_direct = request is None or not request.id
    what = f"a direct call of {task.name}" if is_direct else f"{task.name}[{request.id}]"
    return LockConfigError(
        f"{what} ended without its lock: its body, or something in its place, "
        f"was not called by way of the task's run. In between stand: {', '.join(_between(task))}. "
        "Let them call run, in the task's own thread, or take them off this task"
    )


def _between(task: Any) -> Iterator[str]:
    """What stands around a task, for a message to people."""
    yield from tracers()
    for what in (type(task).__call__, vars(task).get("run"), vars(type(task)).get("run")):
        module = getattr(what, "__module__", None)
        if module and not module.startswith(("celery.", "celery_relock.")):
            yield f"{module}.{getattr(what, '__qualname__', what)}"
