"""One execution of a locked task, from the call of its `run` to the release: the order of things.

    run       which message the call is for; the workflow that it is a step of
    begin     which locks it needs; whether its call is a duplicate
    locked    acquire, body, release
    body      the state STARTED, `self.lock`, and the task's own code
    _after    what is left for when Celery has published what comes next

A task that is no step of a workflow passes nothing of `workflow`, and one without `lock_dedup`
nothing of `dedup`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

from celery.signals import task_postrun

from ..declaration import declaration
from ..dedup import worker as dedup
from ..engine import ids, reentrancy
from ..engine.events import label_of
from ..engine.hold import Hold, Share
from ..engine.interrupt import Interruption
from ..engine.lease import Lease, State
from ..engine.protocol import Claim, Held
from ..errors import LockLost
from ..naming.arguments import bind
from ..workflow import steps
from . import company, events, retry
from .conflict import Attempt, obtain, release
from .message import (
    ancestors_for,
    body_of,
    header_of,
    is_broadcast,
    is_of_another_receiver,
    owner,
    request_of,
    running_request,
)
from .states import Dropped, Late, end_dropped, is_acknowledged, show_started


def current(task: Any) -> Hold | None:
    """The hold of the innermost call of this task on the call stack."""
    for execution in reversed(_inside.get()):
        if execution.task is task and execution.hold is not None:
            hold: Hold = execution.hold
            return hold
    return None


def run(
    task: Any,
    by: Callable[..., Any],
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a task's body under its locks.

    Args:
        by: the locked `run` that was called. A body that calls the one of its base class
            (`super().run()`) comes by another one, and is inside already.
        call: the body.
    """
    inside = _inside.get()
    if inside and inside[-1].task is task and inside[-1].by is not by:
        return call(*args, **kwargs)
    execution = Execution(task, by, call, args, kwargs)
    message = execution.message
    if message is not None:
        if is_broadcast(task.app, message) and is_of_another_receiver(message):
            raise Late("is the copy of another worker")
        if steps.concerns(message, execution.declared):
            return steps.around(task, message, execution.begin)
    return execution.begin()


class Execution:
    """One call of a locked task's body.

    Attributes:
        request: Celery's, None for a direct call; `message` is the same if a message is behind it,
            which an eager or direct call has not, and so can be neither parked nor sent again.
        names, arguments: of this call.
        hold: what `self.lock` shows, once there is one.
    """

    __slots__ = (
        "args", "arguments", "by", "call", "declared", "hold", "kwargs", "message", "names",
        "request", "task",
    )  # fmt: skip

    def __init__(
        self,
        task: Any,
        by: Callable[..., Any],
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.task = task
        self.by = by
        self.call = call
        self.args = args
        self.kwargs = kwargs
        self.declared = declaration(type(task))
        self.request = request = request_of(task)
        self.message = None if request is None or request.is_eager else request
        self.names: tuple[str, ...] = ()
        self.arguments: Mapping[str, object] = {}
        self.hold: Hold | None = None

    def begin(self) -> Any:
        """Find the locks that the call needs, and run it unless it is a duplicate."""
        rule = self.declared.rule
        if rule.off:
            return self.body(None)
        arguments = bind(self.task, self.args, self.kwargs)
        if arguments is None:
            # The call does not fit the body, whose own TypeError says so best.
            return self.call(*self.args, **self.kwargs)
        self.arguments, self.names = arguments, rule.names(arguments)
        if self.message is not None and dedup.concerns(self.message, self.declared):
            return dedup.around(
                self.task, self.declared, self.message, self.names, self.locked, self.body
            )
        return self.locked(self.body)

    def locked(self, body: Callable[[Hold], Any]) -> Any:
        """Acquire what the call stack does not hold, run the body, and release."""
        outer = self._covered()
        shares = [Share(name, lease, _fence(lease, name), True) for name, lease in outer.items()]
        missing = tuple(name for name in self.names if name not in outer)
        if not missing:
            unbroken = all(map(steps.is_unbroken, outer.values()))
            events.tell_reentered(self.task, self.request, outer)
            return body(Hold(next(iter(outer.values())).claim.owner, shares, unbroken))
        task, message, options = self.task, self.message, self.declared.options
        engine = self.declared.engine
        lease = engine.lease(self._claim(missing))
        lease.work = events.work_for(task, self.request)
        if message is not None:
            lease.parked_since = header_of(message).since
        over = False
        try:
            held = obtain(Attempt(task, engine, lease, options, message))
            if held is None:
                return body(Hold(lease.claim.owner, ()))  # lock_on_unavailable="run"
            reentrancy.push(lease)
            if message is not None and options.hold == "workflow":
                steps.keep_for_chain(message, engine, lease, options)
            unbroken = retry.unbroken(message, options, lease)
            hold = Hold(lease.claim.owner, [*shares, *_shares(lease, held)], unbroken)
            kept = retry.keeping(task, message, engine, options, lease)
            try:
                with kept, _interrupted(options, lease, hold):
                    result = body(hold)
            except Exception as error:
                over = is_acknowledged(task, error)
                raise
            over = True
            return result
        except Dropped as dropped:
            return end_dropped(task, message, dropped)
        finally:
            if retry.is_open(lease):
                reentrancy.pop(lease)
            elif options.hold != "workflow" or not steps.owns(lease):
                self._release(lease, over)

    def _release(self, lease: Lease, over: bool) -> None:
        # An id made from the task id must not be remembered: whoever sends that id again on purpose
        # would be taken for a late copy.
        ended = over and self.message is not None and header_of(self.message).own
        try:
            reentrancy.pop(lease)
            release(self.declared.engine, lease, ended=ended)
        finally:
            # A signal's exception may have come before the line above had begun.
            if lease.state in (State.HELD, State.LOST):
                release(self.declared.engine, lease, ended=ended)

    def body(self, hold: Hold | None) -> Any:
        """The task's own code."""
        show_started(self.task, self.message)
        self.hold = hold
        token = _inside.set((*_inside.get(), self))
        try:
            with body_of(self.request):
                return self.call(*self.args, **self.kwargs)
        finally:
            _inside.reset(token)
            self.hold = None

    def _covered(self) -> dict[str, Lease]:
        """The names that the call stack holds already, and by which lease."""
        found = {}
        for name in self.names:
            lease = reentrancy.holding(self.declared.engine.backend, name)
            if lease is None:
                continue
            if lease.lost:
                raise LockLost(
                    f"the lock {name!r} was lost by a caller of this task, so it cannot be "
                    "re-entered",
                    name=name,
                    owner=lease.claim.owner,
                )
            found[name] = lease
        return found

    def _claim(self, names: tuple[str, ...]) -> Claim:
        options, message = self.declared.options, self.message
        limit = options.limit_for(self.arguments)
        known = self.request or running_request()  # a direct call is found by whose it is
        return Claim(
            execution_id=ids.new_id() if message is None else header_of(message).execution_id,
            attempt_id=ids.new_attempt_id(),
            owner=owner(options.owner, self.request, self.task.name),
            names=names,
            limits=(limit,) * len(names),
            lease=options.ttl,
            label=label_of(self.task.name, "" if known is None else known.id),
            by_owner=options.reentrant == "workflow",
            ancestors=ancestors_for(options),
            stuck=reentrancy.stuck(),
        )


# The calls that this call stack is inside of, the innermost last.
_inside: ContextVar[tuple[Execution, ...]] = ContextVar("relock_inside", default=())


def _fence(lease: Lease, name: str) -> int:
    return lease.fences[lease.claim.names.index(name)]


def _shares(lease: Lease, answer: Held) -> Iterator[Share]:
    for name, fence, reentered in zip(
        lease.claim.names, answer.fences, answer.reentered, strict=True
    ):
        yield Share(name, lease, fence, reentered)


def _interrupted(options: Any, lease: Lease, hold: Hold) -> AbstractContextManager[None]:
    """For `lock_on_lost="raise"`: the loss interrupts the body."""
    return Interruption(lease, hold.lost_error) if options.on_lost == "raise" else nullcontext()


def _after(task_id: str = "", task: Any = None, state: str | None = None, **_: Any) -> None:
    """Celery has published what comes after the task, and stored its result."""
    retry.on_postrun(task_id)
    dedup.on_ended(task_id)
    steps.on_postrun(task_id)
    company.on_postrun(task_id, task, state)


task_postrun.connect(_after, weak=False, dispatch_uid="celery_relock")
