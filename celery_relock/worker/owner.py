"""Whose lock it is: the workflow that the running call belongs to.

Celery's own answers do not do here (seen on 5.7): a direct call `other(...)` has no id and no root,
`apply()` under a direct call gets a root of its own, and a task that calls itself looks like the
worker's run. The first request with an id, from the bottom of the task stack, is the message that
the worker, or the outermost `apply()`, really runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

from celery._state import _task_stack

from ..engine import ids, reentrancy
from ..errors import LockConfigError

_BEGUN = "relock_begun"

_bodies: ContextVar[tuple[str, ...]] = ContextVar("relock_bodies", default=())

OwnerOption: TypeAlias = str | Callable[[Any], object]


def running_request() -> Any | None:
    """The request of the message that this call stack runs for; None outside of any task."""
    for task in _task_stack.stack:
        for request in task.request_stack.stack:
            if request.id:
                return request
    return None


def request_of(task: Any) -> Any | None:
    """The request that the body of a task begins for, as a message or by `apply()`; None if it is
    called directly. Asked once for each call: the next one that asks is called from inside.

    Whatever stands between the tracer and the body may have pushed copies of the request, or put
    something else on Celery's stack of tasks, so nothing else is looked at.
    """
    stack = task.request_stack.stack
    request = next((each for each in reversed(stack) if each.id), None)
    if request is None or getattr(request, _BEGUN, False):
        return None
    for each in stack:
        if each.id == request.id:
            setattr(each, _BEGUN, True)
    return request


def has_begun(request: Any) -> bool:
    """Whether the body of this request's task was reached by way of its lock."""
    return bool(getattr(request, _BEGUN, False))


@contextmanager
def body_of(request: Any | None) -> Iterator[None]:
    """Around the body of a locked task; the request is None for a direct call."""
    if request is None:
        yield
        return
    token = _bodies.set((*_bodies.get(), request.id))
    try:
        yield
    finally:
        _bodies.reset(token)


def body_runs(task_id: str) -> bool:
    """Whether the body of this locked task runs on this call stack: what Celery sends for it before
    and after, such as the next step of a chain, is not sent by the body."""
    return task_id in _bodies.get()


def workflow() -> str | None:
    """The short id of the workflow that this call stack belongs to; None outside of any task.

    Protocol 1 messages carry no root id: there the workflow is the task itself.
    """
    request = running_request()
    return None if request is None else ids.short(request.root_id or request.id)


def owner(option: OwnerOption, request: Any | None, where: str = "") -> str:
    """The owner under a task's `lock_owner`.

    Args:
        option: the option's value.
        request: of the message that the locked task itself runs for, None for a direct call.
        where: the task's name, for messages.

    Raises:
        LockConfigError: the callable in the option failed, or gave no owner.
    """
    if request is None:
        request = running_request()
    if request is not None:
        if option == "task":
            return ids.short(request.id)
        if callable(option):
            return ids.short(_asked(option, request, where))
        return workflow() or ids.new_id()
    # A direct call outside of any task belongs to whoever holds a lock around it, or to itself.
    outer = reentrancy.innermost()
    return ids.new_id() if outer is None else outer.claim.owner


def _asked(option: Callable[[Any], object], request: Any, where: str) -> str:
    try:
        found = option(request)
    except Exception as error:
        raise LockConfigError(
            f"task {where}: the callable in lock_owner failed for request {request.id}: {error!r}"
        ) from error
    if not isinstance(found, str) or not found:
        raise LockConfigError(
            f"task {where}: the callable in lock_owner must return a text, the same for all who "
            f"may re-enter; it returned {found!r:.100} for request {request.id}"
        )
    return found
