"""How an execution ends that does not run its body, and the states and results that Celery has of
locked tasks: STARTED when the body begins, BLOCKED while a message is parked, RETRY before it is
sent again, the result of a dropped one."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from celery.app.task import Context
from celery.exceptions import Ignore, Retry
from celery.states import READY_STATES, RETRY, REVOKED, STARTED

from ..engine import events
from ..engine.events import logger
from ..engine.interrupt import is_thrown_in
from ..engine.protocol import LINE, Conflict
from ..errors import LockConflict, RelockError
from . import events as worker_events
from .delivery import DELIVERY
from .events import BLOCKED
from .message import header_of

_KIND = "relock"
# For how many seconds to wait for a result backend that has failed in this thread.
_ASKING = 5.0

T = TypeVar("T")


class Aside(Ignore):  # type: ignore[misc]  # Celery ships no types
    """This delivery does not run the body: its message is parked, or is a copy of another."""


def _say_why(record: logging.LogRecord) -> bool:
    """In Celery's line of the log for what it ignores: why, and not "ignored"."""
    error, told = sys.exc_info()[1], record.args
    if isinstance(error, Aside) and isinstance(told, dict) and "description" in told:
        told["description"] = str(error)
    return True


logging.getLogger("celery.app.trace").addFilter(_say_why)


class Waits(Aside):
    """This delivery does not run the body: its message comes again, as the same execution."""


class Late(Aside):
    """Nothing of this message is to run, now or later: it is a late copy of an execution that has
    ended, the copy of another worker, or was replaced by a later call."""


class SentAgain(Retry):  # type: ignore[misc]
    """This delivery does not run the body: its message was sent again, as the same execution. To
    Celery that is a retry, so this is no `Aside`."""


class Dropped(Exception):
    """The body does not run, and `result` is what it has instead."""

    def __init__(self, conflict: RelockError) -> None:
        super().__init__(conflict.reason)
        self.result = {
            _KIND: "dropped",
            "lock": conflict.name,
            "owner": conflict.owner,
            "reason": conflict.reason,
        }


def is_dropped(result: object) -> bool:
    """Whether a task's result says that its body did not run: the lock was held
    (`lock_on_conflict="drop"`), or the call was a duplicate.

        if is_dropped(result := rebuild.delay().get()):
            print(result["reason"])
    """
    return isinstance(result, Mapping) and result.get(_KIND) == "dropped"


def ignores_result(task: Any, message: Any) -> bool:
    """Whether an execution stores no result, by its message or else by its task."""
    told = vars(message).get("ignore_result")
    return bool(task.ignore_result if told is None else told)


def show_revoked(task: Any, task_id: str, reason: str, message: Any = None) -> None:
    """Store REVOKED for a call that will not run, unless it has ended. `message`: of the call,
    where it is at hand: the backend `rpc://` answers to who sent it."""
    # Without a request `rpc://` would tell it to who waits for the task that runs here.
    message = message or Context(id=task_id)
    if stores_no_result(task):
        return

    def store() -> bool:
        if task.AsyncResult(task_id).state in READY_STATES:
            return False
        task.backend.mark_as_revoked(task_id, reason, request=message)
        return True

    with events.only_logged("Cannot store the state REVOKED of %s", task_id):
        if asked_anywhere(store):
            worker_events.show(task, task_id, REVOKED)


def asked_anywhere(ask: Callable[[], T]) -> T:
    """What the result backend answers: if Django refuses here, in a thread of its own. Django's
    connections belong to a thread, and refuse where an event loop runs and where the transaction
    has failed.
    """
    try:
        return ask()
    except Exception as error:
        if is_thrown_in(error) or not type(error).__module__.startswith("django."):
            raise
        answers: list[T] = []
        args = ask, answers
        thread = threading.Thread(target=_ask_again, args=args, name="relock-state", daemon=True)
        thread.start()
        thread.join(_ASKING)  # a backend that is away can be silent
        if not answers:
            raise
        return answers[0]


def _ask_again(ask: Callable[[], T], answers: list[T]) -> None:
    with suppress(Exception):  # what the first try has said is told
        answers.append(ask())
    with suppress(Exception):  # without settings it has none
        sys.modules["django.db"].connections.close_all()


def stores_no_result(task: Any, message: Any = None) -> bool:
    """Whether the result backend cannot say what became of the execution of a message, or of any
    of the task's."""
    from celery.backends.base import DisabledBackend  # who only sends may load no backend

    ignored = task.ignore_result if message is None else ignores_result(task, message)
    return bool(ignored) or isinstance(task.backend, DisabledBackend)


def tells_no_state(task: Any, message: Any) -> bool:
    """Whether nobody but its sender can ask what became of an execution: as `stores_no_result`, or
    its result is a message (`rpc://`)."""
    rpc = sys.modules.get("celery.backends.rpc")
    is_rpc = rpc is not None and isinstance(task.backend, rpc.RPCBackend)
    return is_rpc or stores_no_result(task, message)


def stored(task: Any, task_id: str) -> Mapping[str, Any] | None:
    """What the result backend has of a task, its state as `status`; None if it cannot be read."""
    try:
        found: Mapping[str, Any] = asked_anywhere(lambda: task.backend.get_task_meta(task_id))
        return found
    except Exception as error:
        if is_thrown_in(error):
            raise
        logger.warning("Cannot read the state of %s", task_id, exc_info=True)
        return None


# -- STARTED: of `task_track_started` ------------------------------------------------------------
#
# Stored when the body begins, with its lock. Celery stores it as soon as a message comes. So a copy
# of an execution would overwrite the state of the execution itself, which may live, have failed or
# be revoked, and nobody would correct it.


class _Later:
    """The value of `track_started` instead of True: Celery takes it for False."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "<when the task has its lock>"


LATER = _Later()


def defer_started(cls: Any) -> None:
    """Leave it to `show_started` when the tasks of a class become STARTED, if they do at all."""
    if cls.track_started:
        cls.track_started = LATER


def show_started(task: Any, message: Any) -> None:
    """The body that a message is for begins: store STARTED if that is asked for, or in the place of
    BLOCKED, and tell monitors."""
    header = header_of(message)
    if header.attempts:
        worker_events.show(task, message.id, STARTED)
    if task.track_started is LATER or header.parked_at or getattr(message, DELIVERY).was_blocked:
        _store(task, message, STARTED, {"pid": os.getpid(), "hostname": message.hostname})


# -- BLOCKED: a message is parked ----------------------------------------------------------------


def show_blocked(task: Any, message: Any, conflict: LockConflict, answer: Any) -> None:
    """Store the state BLOCKED and tell monitors which lock the message waits for.

    Both say who holds the lock since when, and how many wait ahead.
    """
    busy = answer if isinstance(answer, Conflict) else None
    in_order = busy is not None and busy.name.startswith(LINE)
    meta = {
        "lock": conflict.name,
        "holder": busy.label if busy else "",
        "owner": conflict.owner,
        # In an order the token is of when the call was sent.
        "since": busy.fence / 1e6 if busy and busy.fence and not in_order else None,
        "position": busy.waiting if busy else 0,
        "blocked_at": time.time(),
    }
    getattr(message, DELIVERY).was_blocked = True
    worker_events.show(task, message.id, BLOCKED, **meta)
    _store(task, message, BLOCKED, meta)


def _store(task: Any, message: Any, state: str, meta: dict[str, Any]) -> None:
    if ignores_result(task, message):
        return
    with events.only_logged("Cannot store the state %s of %s", state, message.id):
        if _is_aborted(task, message.id):
            return  # by this state its body finds out
        task.backend.store_result(message.id, meta, state, request=message)


def _is_aborted(task: Any, task_id: str) -> bool:
    module = sys.modules.get("celery.contrib.abortable")
    is_one = module is not None and isinstance(task, module.AbortableTask)
    return is_one and bool(task.is_aborted(task_id=task_id))


# -- RETRY: a message is sent again --------------------------------------------------------------


def show_retry(task: Any, message: Any, error: RelockError) -> list[Any]:
    """Store the state RETRY of a message that is about to be sent again because of an error.

    Celery stores it afterwards. By then the message can have come, its body have failed, and nobody
    would correct the state.

    Returns:
        The requests whose `ignore_result` is to be set when it is sent: then Celery, from 5.6 on,
        leaves its own out.
    """
    getattr(message, DELIVERY).was_blocked = True  # should it stay: its body becomes STARTED
    if not ignores_result(task, message):
        with events.only_logged("Cannot store the state %s of %s", RETRY, message.id):
            task.backend.mark_as_retry(message.id, error, request=message)
    # Where nothing protects the stack, the tracer has another copy.
    return [message, *(each for each in task.request_stack.stack if each.id == message.id)]


# -- Dropped -------------------------------------------------------------------------------------


def end_dropped(task: Any, message: Any | None, dropped: Dropped) -> Any:
    """End a dropped execution, and return its result.

    Its links are not called and its chain ends. Each step that was to come gets the same result, so
    that nobody waits for it.
    """
    if message is None:
        return dropped.result
    steps = message.chain or ()
    for each in task.request_stack.stack:
        if each.id == message.id:  # where nothing protects the stack, the tracer has another copy
            each.chain = each.callbacks = None
    for step in steps:
        for each in results_of(step):
            task.backend.mark_as_done(
                each.id, dropped.result, request=each, store_result=not each.ignore_result
            )
    return dropped.result


def fail_groups(task: Any, message: Any, error: Exception | None) -> None:
    """Celery fails each step behind a failed one, but does not look into a group, whose members
    somebody may wait for."""
    for step in message.chain or ():
        if step.get("subtask_type") == "group":
            for each in results_of(step):
                how = {"store_result": not each.ignore_result, "call_errbacks": False}
                task.backend.mark_as_failure(each.id, error, request=each, **how)


def results_of(step: Mapping[str, Any]) -> list[Context]:
    """The requests whose results somebody may wait for.

    They are those of a chord's body, of a group's members, of a chain's last step.
    """
    kind, inner = step.get("subtask_type"), step.get("kwargs") or {}
    if kind == "chord":
        return results_of(inner["body"])
    if kind == "group":
        return [found for each in inner["tasks"] for found in results_of(each)]
    if kind == "chain":
        return results_of(inner["tasks"][-1])
    options = step.get("options") or {}
    context = Context(step, **options)
    context.id, context.group = options.get("task_id"), options.get("group_id")
    return [context] if context.id else []
