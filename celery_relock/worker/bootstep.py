"""What a worker with locked tasks does beside its work: it releases the locks of dead processes,
resumes parked messages and consumes its resume queues.

Celery finds the steps by name (`LockedTask.on_bound`), so a process that only sends loads none of
this.
"""

from __future__ import annotations

import threading
from functools import wraps
from typing import Any

from celery import bootsteps
from celery.concurrency.prefork import TaskPool as PreforkPool
from celery.concurrency.solo import TaskPool as SoloPool
from celery.concurrency.thread import TaskPool as ThreadPool
from celery.signals import import_modules, worker_shutdown
from celery.utils.imports import symbol_by_name
from celery.worker.state import active_requests, reserved_requests

from ..declaration import (
    Declaration,
    engine_of,
    has_locks,
    locked_tasks,
    refuse_late_settings,
    where,
)
from ..engine import platform
from ..engine.crash import Reaper, journal
from ..engine.events import logger
from ..engine.interrupt import INSTEAD
from ..errors import LockConfigError
from ..naming.names import NameRule
from ..options import LockOptions
from ..settings import enabled, in_memory
from ..workflow import steps
from . import company, control, execution, parking
from . import events as worker_events
from .consumer import remember_consumer
from .delivery import known_delivery
from .message import HEADER, is_lockable, parse, that_tells_its_end
from .report import report
from .resuming import Resumer
from .spawned import hand_on

_PREPARED = "_relock_unlocked"


def begin(app: Any) -> None:
    """What a process of a worker begins with that executes tasks."""
    prepare(app)
    journal.on = True


def begin_spawned(app: Any) -> None:
    """As `begin`, in a spawned child, which has no tasks yet. Celery makes their tracers as soon as
    it has them all."""

    def finalized(**_: Any) -> None:
        begin(app)

    def is_made(**_: Any) -> None:
        if app.finalized:  # by something that Django has imported
            begin(app)
        app.on_after_finalize.connect(finalized, weak=False)

    import_modules.connect(is_made, sender=app, weak=False)


def prepare(app: Any) -> None:
    """Prepare the tasks of a worker.

    Celery executes a task's `run`, and only from inside of it a body can be refused. So each task
    that is no `LockedTask` gets a `run` of its own, as for Celery's autoretry: its message can be a
    step of a workflow, or have been sent for a lock (`unlocked`). Call this when the app is
    finalized and before the pool starts; a second call does nothing.
    """
    if not has_locks(app):
        return  # nothing of ours is in use here
    for task in app.tasks.values():
        if _PREPARED in vars(task):
            continue
        task.Request = that_tells_its_end(symbol_by_name(task.Request))
        if not is_lockable(task):
            _prepare(task)
        setattr(task, _PREPARED, True)


def _prepare(task: Any) -> None:
    body, replace = task.run, task.on_replace
    declared = Declaration(LockOptions(key=False), NameRule(task.name, (), off=True), task.app)

    @wraps(body)
    def run(*args: Any, **kwargs: Any) -> Any:
        known = known_delivery(task.request_stack.top)
        if known is not None and known.begun and known.aside is None:
            return body(*args, **kwargs)  # a call from inside of the body: a function's
        return execution.run(execution.Execution(task, declared, run, body, args, kwargs))

    @wraps(replace)
    def replaced(sig: Any) -> Any:
        steps.on_replace(task.request, sig)
        return replace(sig)

    task.run, task.on_replace = run, replaced


class Locks(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery ships no types
    """Runs in a worker's main process, if its app has locked tasks and a Redis for their locks.

    It does not depend on how Celery notices a death. A child that is killed causes no signal if its
    message is requeued, and a hard time limit calls the failure hooks while the child still lives.
    What counts is that the process is gone (`engine.crash`).
    """

    # Started when the pool has forked: its children have no copy of these threads. For those that
    # it forks later see `platform.ForkGate`.
    requires = ("celery.worker.components:Pool",)

    def __init__(self, w: Any, **_: Any) -> None:
        self._watchers: tuple[Reaper | Resumer, ...] = ()
        w.relock_resumer = None

    def include_if(self, w: Any) -> bool:
        company.tell(w.app)
        return has_locks(w.app)

    def create(self, w: Any) -> None:
        platform.refuse_eventlet()
        refuse_late_settings(w.app)
        if issubclass(w.pool_cls, ThreadPool):
            _refuse_to_interrupt(w.app)
        if issubclass(w.pool_cls, PreforkPool) and in_memory(w.app):
            raise _not_shared(
                "the prefork pool of this worker runs tasks in other processes",
                "Use the threads or the solo pool",
            )
        engine = engine_of(w.app)  # what is wrong with its settings would fail each of its tasks
        # Before the pool forks, so that its children have it.
        begin(w.app)
        hand_on(w.app, begin_spawned)
        parking.carry()
        runs_bodies = issubclass(w.pool_cls, SoloPool)
        w.relock_resumer = Resumer(
            engine,
            control.Revoked(engine.backend),
            _resumed_here,
            lambda: runs_bodies and bool(active_requests),
        )
        self._watchers = Reaper(engine.parking), w.relock_resumer

    def start(self, w: Any) -> None:
        remember_consumer()
        # Not in `stop`: the pool ends its tasks later.
        worker_shutdown.connect(self._end, sender=w, dispatch_uid=(id(self), "shutdown"))
        if in_memory(w.app) and threading.current_thread() is threading.main_thread():
            raise _not_shared(
                "this worker is a process of its own",
                "Start the worker in a thread of the tests (the fixture celery_worker)",
            )
        if enabled(w.app):
            logger.info("the locks of this worker are in %s", where(w.app))
        else:
            logger.warning("relock_enabled=False: the tasks of this worker run without their locks")
        for watcher in self._watchers:
            watcher.start()

    def terminate(self, w: Any) -> None:
        # Celery sends no `worker_shutdown` then. The test worker of celery.contrib ends like this,
        # in a process that goes on.
        threading.Thread(target=self._end_after, args=(w,), daemon=True).start()

    def info(self, w: Any) -> dict[str, Any]:
        """What `celery inspect stats` shows of the locks; the doctor compares the workers by it."""
        return {"relock": report(w.app)}

    def _end_after(self, w: Any) -> None:
        w.blueprint.join()
        self._end(w)

    def _end(self, sender: Any, **_: Any) -> None:
        worker_events.forget(sender)
        for watcher in self._watchers:
            watcher.stop()


def _refuse_to_interrupt(app: Any) -> None:
    """Refuse what could only fail, task by task."""
    names = [each.options.task for each in locked_tasks(app) if each.options.on_lost == "raise"]
    if names and enabled(app):
        raise LockConfigError(
            'lock_on_lost="raise" cannot interrupt a body in the threads pool of this worker '
            f"({', '.join(sorted(names))}): {INSTEAD}"
        )


def _not_shared(where: str, what: str) -> LockConfigError:
    return LockConfigError(
        f"relock_url='memory://' keeps the locks in the memory of one process, and {where}, where "
        f"they would exclude nobody else. {what}, or set relock_url to a Redis"
    )


def _resumed_here() -> list[str]:
    """The executions that were resumed and wait in this worker for a slot."""
    try:
        waiting = set(reserved_requests) - set(active_requests)
    except RuntimeError:
        return []  # the main thread has just received one; the next look is soon
    headers = (parse(request.request_dict.get(HEADER)) for request in waiting)
    return [header.execution_id for header in headers if header is not None and header.attempts]
