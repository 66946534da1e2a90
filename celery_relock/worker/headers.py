"""What the library writes into a message: the run id, anew at each publish.

The header tells a second copy of a message (same run) from a message that was sent again (another
run), which the task id cannot: a retry, or a person who sends an old id once more, uses the same.
It is written when any task is published by a process that has the library loaded: no extra trip.

A run whose lock is held is sent again as the *same* run: nothing of it was executed yet, so a copy
of its first message that turns up later is recognised as a copy of what was sent instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from ..engine import ids, reentrancy
from ..options import LockOptions
from .owner import running_request

NAME = "relock"
VERSION = 2
# Where a request has its header, once that was read.
_PARSED = "relock_header"
# So many ancestors are passed on, the nearest first: a task that sends itself for ever must not
# make its message longer each time.
_MOST_ANCESTORS = 32


@dataclass(frozen=True, slots=True)
class RunHeader:
    """The header's content.

    Attributes:
        run: the run id.
        own: False if the id was made from the task id, as the message came without a header. Such
            an id cannot tell a copy from a task that somebody sends again on purpose.
        attempts: how often this run's message was sent again because its lock was not to be had.
        since: the sender's clock (s since the epoch) when that first happened; 0 before.
        ancestors: execution ids of the holds that the run's ancestors have (see `ancestors`).
        kept: lock names and fences of what the run before this one left to it (see `retries`).
        workflow_locks: those that the run belongs to (see `workflow.steps.WorkflowLock`).
        dedup: the name of the call's marker and when it goes (see `marker`).
        receiver: the worker whose copy of a broadcast message it is.
        first: the id made from the task id, if the run was given one of its own since.
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
        """The run id that the first message of this run had."""
        return self.first or self.execution_id

    def made_own(self) -> RunHeader:
        """The header for a message that may be sent on twice: from now on its copies are known."""
        if self.own:
            return self
        return replace(self, execution_id=ids.new_id(), own=True, first=self.execution_id)

    def again(self) -> RunHeader:
        """The header for the same run's next message."""
        return replace(self, attempts=self.attempts + 1, since=self.since or time.time())


def read(message: Any) -> RunHeader:
    """The header that a message came with, or one made from its id if it has none of use."""
    known: RunHeader | None = getattr(message, _PARSED, None)
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
    header = read(message)
    if header.receiver:
        return bool(header.receiver != message.hostname)
    own = ids.short(f"{header.execution_id}@{message.hostname}")
    setattr(message, _PARSED, replace(header, execution_id=own, receiver=message.hostname))
    return False


def _parsed(message: Any) -> RunHeader:
    raw = _raw(message)
    found = parse(raw) if isinstance(raw, Mapping) else None
    return found or RunHeader(ids.short(f"{message.id}:{message.retries}"), own=False)


def ancestors_for(options: LockOptions) -> tuple[str, ...]:
    """The holds that a task with these options may re-enter, though it does not run inside them."""
    return ancestors_here() if options.reentrant == "descendants" else ()


def ancestors_here() -> tuple[str, ...]:
    """The ancestors of the message that this call stack runs for; empty outside of tasks."""
    request = running_request()
    return () if request is None else _ancestors_in(_raw(request))


def _raw(message: Any) -> Any:
    return getattr(message, NAME, None) or (message.headers or {}).get(NAME)


def _ancestors_in(raw: Any) -> tuple[str, ...]:
    known = isinstance(raw, Mapping) and raw.get("v") == VERSION
    return parse_ancestors(raw.get("ancestors")) if known else ()


def parse(raw: Mapping[str, Any]) -> RunHeader | None:
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
    return RunHeader(
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


def write(headers: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Give a message that is about to be published our header, which is returned.

    Args:
        headers: of the message.
        fields: where its id is; protocol 1 has that in the body.
    """
    # A predecessor's header came along with its custom headers: it is replaced, never kept.
    predecessor = headers.get(NAME)
    header: dict[str, Any] = {"v": VERSION, "execution_id": ids.new_id()}
    if ancestors := _ancestors(fields, predecessor):
        header["ancestors"] = list(ancestors)
    locks = predecessor.get("workflow_locks") if isinstance(predecessor, Mapping) else None
    if locks and not running_request():
        # Sent by a worker's main process, in the place of an execution that died.
        header["workflow_locks"] = locks
    headers[NAME] = header
    return header


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


def is_retry(fields: Mapping[str, Any], request: Any) -> bool:
    """Whether a message is the running one's own next try, and not what the task is replaced by."""
    nesting = fields.get("replaced_task_nesting") or 0
    same: bool = fields.get("id") == request.id
    return same and nesting == (request.replaced_task_nesting or 0)


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
