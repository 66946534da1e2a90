"""The message that a locked task runs for: which one it is, what we write into it, and who is its
owner.

    which message    the requests on Celery's stacks
    the header       what we write into every message that is published, and read from each
    ancestors        the executions whose holds a message may re-enter
    the owner        who may re-enter
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeAlias

from celery._state import _task_stack

from ..engine import ids, reentrancy
from ..errors import LockConfigError
from ..options import LockOptions

#: The header of ours.
HEADER = "relock"
VERSION = 2
# So many ancestors are passed on, the nearest first: a task that sends itself for ever must not
# make its message longer each time.
_MOST_ANCESTORS = 32
# Where a request has its header, once that was read; and that the body of its task has begun.
_PARSED, _BEGUN = "relock_header", "relock_begun"

# -- Which message -------------------------------------------------------------------------------

# The tasks whose bodies this call stack is inside of.
_bodies: ContextVar[tuple[str, ...]] = ContextVar("relock_bodies", default=())


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


# -- The header ----------------------------------------------------------------------------------
#
# It tells a second copy of a message (same execution) from a message that was sent again (another
# one), which the task id cannot: a retry, or a person who sends an old id once more, uses the same.
# It is written when any task is published by a process that has the library loaded: no extra trip.
#
# An execution whose lock is held is sent again as the *same* execution: nothing of it was executed
# yet, so a copy of its first message that turns up later is recognised as a copy of what was sent
# instead.


@dataclass(frozen=True, slots=True)
class Header:
    """The header's content.

    Attributes:
        execution_id: anew at each publish.
        own: False if the id was made from the task id, as the message came without a header. Such
            an id cannot tell a copy from a task that somebody sends again on purpose.
        attempts: how often its message was sent again because its lock was not to be had.
        since: the sender's clock (s since the epoch) when that first happened; 0 before.
        ancestors: execution ids of the holds that its ancestors have.
        kept: lock names and fences of what the attempt before a retry left to it (see `retry`).
        workflow_locks: those that it belongs to (see `workflow.steps.WorkflowLock`).
        dedup: the name of the call's marker and when it goes (see `marker`).
        receiver: the worker whose copy of a broadcast message it is.
        first: the id made from the task id, if it was given one of its own since.
        v: version of this content; one that is not known is ignored.
    """

    execution_id: str
    own: bool = True
    attempts: int = 0
    since: float = 0.0
    ancestors: tuple[str, ...] = ()
    kept: tuple[tuple[str, int], ...] = ()
    workflow_locks: tuple[Mapping[str, Any], ...] = ()
    dedup: tuple[str, str] | None = None
    first: str = ""
    receiver: str = ""
    v: int = VERSION

    @property
    def call(self) -> str:
        """The execution id that the first message of this execution had."""
        return self.first or self.execution_id

    def made_own(self) -> Header:
        """The header for a message that may be sent on twice: from now on its copies are known."""
        if self.own:
            return self
        return replace(self, execution_id=ids.new_id(), own=True, first=self.execution_id)

    def again(self) -> Header:
        """The header for the same execution's next message."""
        return replace(self, attempts=self.attempts + 1, since=self.since or time.time())


def header_of(message: Any) -> Header:
    """The header that a message came with, or one made from its id if it has none of use."""
    known: Header | None = getattr(message, _PARSED, None)
    if known is None:
        known = _parsed(message)
        setattr(message, _PARSED, known)
    return known


def is_broadcast(app: Any, message: Any) -> bool:
    """Whether every worker received a copy of the message (`kombu.common.Broadcast`)."""
    name = (message.delivery_info or {}).get("exchange")
    if not name:
        return False
    exchanges = [queue.exchange for queue in app.amqp.queues.values()]
    return any(each and each.name == name and each.type == "fanout" for each in exchanges)


def is_of_another_receiver(message: Any) -> bool:
    """Of a broadcast message each worker's copy is an execution of its own: its header says so from
    here on. True for a copy that another worker had parked, should it come here all the same."""
    header = header_of(message)
    if header.receiver:
        return bool(header.receiver != message.hostname)
    own = ids.short(f"{header.execution_id}@{message.hostname}")
    setattr(message, _PARSED, replace(header, execution_id=own, receiver=message.hostname))
    return False


def _parsed(message: Any) -> Header:
    raw = _raw(message)
    found = parse(raw) if isinstance(raw, Mapping) else None
    return found or Header(ids.short(f"{message.id}:{message.retries}"), own=False)


def _raw(message: Any) -> Any:
    return getattr(message, HEADER, None) or (message.headers or {}).get(HEADER)


def parse(raw: Mapping[str, Any]) -> Header | None:
    """The header in a message; None if it is not one of this version."""
    execution_id, attempts, since = (
        raw.get("execution_id"),
        raw.get("attempts", 0),
        raw.get("since", 0.0),
    )
    if (
        raw.get("v") != VERSION
        or not isinstance(execution_id, str)
        or not isinstance(attempts, int)
    ):
        return None
    if not isinstance(since, int | float):
        return None
    own, ancestors = raw.get("own") is not False, parse_ancestors(raw.get("ancestors"))
    kept, told = _kept(raw.get("kept")), raw.get("workflow_locks")
    listed = isinstance(told, list | tuple) and all(isinstance(each, Mapping) for each in told)
    told, dedup = tuple(told or ()) if listed else (), _pair(raw.get("dedup"))
    first = raw.get("first")
    first = ids.short(first) if isinstance(first, str) and first else ""
    waited = attempts, float(since)
    receiver = raw.get("receiver")
    receiver = receiver if isinstance(receiver, str) else ""
    return Header(
        ids.short(execution_id), own, *waited, ancestors, kept, told, dedup, first, receiver
    )


def _pair(raw: Any) -> tuple[str, str] | None:
    fits = isinstance(raw, list | tuple) and [type(part) for part in raw] == [str, str]
    return (raw[0], raw[1]) if fits else None


def _kept(raw: Any) -> tuple[tuple[str, int], ...]:
    pairs = raw if isinstance(raw, list | tuple) else ()
    every = [tuple(each) for each in pairs if isinstance(each, list | tuple)]
    fits = all([type(part) for part in each] == [str, int] for each in every)
    return tuple(every) if fits else ()


def write_header(headers: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Give a message that is about to be published our header, which is returned.

    Args:
        headers: of the message.
        fields: where its id is; protocol 1 has that in the body.
    """
    # A predecessor's header came along with its custom headers: it is replaced, never kept.
    predecessor = headers.get(HEADER)
    header: dict[str, Any] = {"v": VERSION, "execution_id": ids.new_id()}
    if ancestors := _ancestors(fields, predecessor):
        header["ancestors"] = list(ancestors)
    locks = predecessor.get("workflow_locks") if isinstance(predecessor, Mapping) else None
    if locks and not running_request():
        # Sent by a worker's main process, in the place of an execution that died.
        header["workflow_locks"] = locks
    headers[HEADER] = header
    return header


def is_retry(fields: Mapping[str, Any], request: Any) -> bool:
    """Whether a message is the running one's own next try, and not what the task is replaced by."""
    nesting = fields.get("replaced_task_nesting") or 0
    same: bool = fields.get("id") == request.id
    return same and nesting == (request.replaced_task_nesting or 0)


# -- Ancestors -----------------------------------------------------------------------------------


def ancestors_for(options: LockOptions) -> tuple[str, ...]:
    """The holds that a task with these options may re-enter, though it does not run inside them."""
    return ancestors_here() if options.reentrant == "descendants" else ()


def ancestors_here() -> tuple[str, ...]:
    """The ancestors of the message that this call stack runs for; empty outside of tasks."""
    request = running_request()
    return () if request is None else _ancestors_in(_raw(request))


def _ancestors(fields: Mapping[str, Any], predecessor: Any) -> tuple[str, ...]:
    """The ancestors for a message that is published here."""
    request = running_request()
    # A retry has that of the message before it, also where the worker's main process sends it.
    raw = predecessor if predecessor or request is None else _raw(request)
    inherited = _ancestors_in(raw)
    if request is not None and is_retry(fields, request):
        # Not by its own holds: it would be in while the body before it is still on its way out.
        return inherited
    return extended(inherited)


def _ancestors_in(raw: Any) -> tuple[str, ...]:
    known = isinstance(raw, Mapping) and raw.get("v") == VERSION
    return parse_ancestors(raw.get("ancestors")) if known else ()


def parse_ancestors(value: Any) -> tuple[str, ...]:
    """The ancestors in a header; none if it has none."""
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        return ()
    return tuple(ids.short(each) for each in value[:_MOST_ANCESTORS] if each)


def extended(inherited: Iterable[str]) -> tuple[str, ...]:
    """The ancestors of what this call stack publishes: all that it holds, then its own."""
    held = reentrancy.runs()
    return (
        tuple(islice(dict.fromkeys((*held, *inherited)), _MOST_ANCESTORS))
        if held
        else tuple(inherited)
    )


# -- The owner -----------------------------------------------------------------------------------
#
# Celery's own answers do not do here (seen on 5.7): a direct call `other(...)` has no id and no
# root, `apply()` under a direct call gets a root of its own, and a task that calls itself looks
# like the worker's. The first request with an id, from the bottom of the task stack, is the message
# that the worker, or the outermost `apply()`, really runs.

OwnerOption: TypeAlias = str | Callable[[Any], object]


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
