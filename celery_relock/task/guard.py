"""The way of a call through its lock: take, run the body, give back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any, NamedTuple

from celery._state import _task_stack
from celery.exceptions import Reject, SoftTimeLimitExceeded

from ..core import callstack, ids
from ..core.answers import Claim, Held
from ..core.engine import Engine
from ..core.hold import Hold, Share
from ..core.interrupt import Interruption
from ..core.lease import Lease, State
from ..core.messages import who_am_i
from ..core.options import LockOptions
from ..errors import LockLost
from . import conflicts, headers
from .binding import bind
from .declaration import Declaration, declaration
from .owner import owner

logger = logging.getLogger("celery_relock")


class _Entered(NamedTuple):
    """A call that is inside: its task, the id that it runs for ("" for a direct call), its hold."""

    task: Any
    message_id: str
    hold: Hold


_inside: ContextVar[tuple[_Entered, ...]] = ContextVar("relock_inside", default=())


def current(task: Any) -> Hold | None:
    """The hold of the innermost call of this task on the call stack."""
    for entered in reversed(_inside.get()):
        if entered.task is task:
            hold: Hold = entered.hold
            return hold
    return None


def run(task: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the task under the locks that it declared."""
    declared = declaration(type(task))
    if declared.rule.off:
        return call(task, *args, **kwargs)
    arguments = bind(task, args, kwargs)
    if arguments is None:
        # The call does not fit the body, whose own TypeError says so best. Not by `call`: one that
        # adds arguments of its own would run the body without the lock that they name.
        return task.run(*args, **kwargs)
    request = _request_of(task)

    def body(hold: Hold) -> Any:
        with _shown(_Entered(task, "" if request is None else request.id, hold)):
            return call(task, *args, **kwargs)

    names = declared.rule.names(arguments)
    outer = {name: lease for name in names if (lease := _covered(declared, name))}
    shares = [Share(name, lease, _fence(lease, name), True) for name, lease in outer.items()]
    missing = tuple(name for name in names if name not in outer)
    if not missing:
        return body(Hold(next(iter(outer.values())).claim.owner, shares))
    claim = _claim(task, declared, request, missing, arguments)
    return _run_locked(task, declared, request, claim, shares, body)


def _run_locked(
    task: Any,
    declared: Declaration,
    request: Any | None,
    claim: Claim,
    shares: list[Share],
    body: Callable[[Hold], Any],
) -> Any:
    engine, options = declared.engine, declared.options
    message = None if request is None or request.is_eager else request
    lease = engine.lease(claim)
    over = False
    try:
        held = conflicts.obtain(task, engine, lease, options, message)
        if held is None:
            return body(Hold(claim.owner, ()))
        callstack.push(lease)
        hold = Hold(claim.owner, [*shares, *_shares(lease, held)])
        try:
            with _interrupted(options, lease, hold):
                result = body(hold)
        except Exception as error:
            over = not (isinstance(error, Reject) and error.requeue)
            raise
        over = True
        return result
    finally:
        # An id made from the task id must not be remembered: whoever sends that id again on purpose
        # would be taken for a late copy.
        ended = over and message is not None and headers.read(message).own
        try:
            callstack.pop(lease)
            _give_back(engine, lease, ended=ended)
        finally:
            # A signal's exception may have come before the line above had begun.
            if lease.state in (State.HELD, State.LOST):
                _give_back(engine, lease, ended=ended)


def _give_back(engine: Engine, lease: Lease, *, ended: bool) -> None:
    """Release, whatever comes: the task's own outcome stands."""
    held = lease.state in (State.HELD, State.LOST)
    try:
        engine.release(lease, ended=ended)
    except BaseException as error:
        if _is_thrown_in(error):
            # The lock goes first: a process that is told to end has nobody left to do it.
            with suppress(Exception):
                engine.release(lease, ended=ended)
            if isinstance(error, SoftTimeLimitExceeded):
                return  # the body had its outcome before the limit
            raise
        logger.log(
            logging.WARNING if held else logging.DEBUG,
            "the lock %s could not be given back, its lease ends it within %.0f s: %s",
            ", ".join(map(repr, lease.claim.names)),
            lease.claim.lease,
            error,
        )


def _is_thrown_in(error: BaseException) -> bool:
    """Whether an exception is none of the give-back's own: a time limit, the loss of a lock around
    this one, the end of the process or of the greenlet."""
    return isinstance(error, SoftTimeLimitExceeded | LockLost) or not isinstance(error, Exception)


def _request_of(task: Any) -> Any | None:
    """The request that this very call runs for, as a message or by `apply()`; None if it is direct.

    A task that calls itself finds its own request, or a copy of it, and has entered with it before.
    """
    request = task.request_stack.top
    if request is None or not request.id or _task_stack.top is not task:
        return None
    for entered in _inside.get():
        if entered.task is task and entered.message_id == request.id:
            return None
    return request


def _covered(declared: Declaration, name: str) -> Lease | None:
    lease = callstack.holding(declared.engine.store, name)
    if lease is not None and lease.lost:
        raise LockLost(
            f"the lock {name!r} was lost by a caller of this task, so it cannot be entered again",
            name=name,
            owner=lease.claim.owner,
        )
    return lease


def _fence(lease: Lease, name: str) -> int:
    return lease.fences[lease.claim.names.index(name)]


def _shares(lease: Lease, answer: Held) -> Iterator[Share]:
    for name, fence, reentered in zip(
        lease.claim.names, answer.fences, answer.reentered, strict=True
    ):
        yield Share(name, lease, fence, reentered)


def _claim(
    task: Any,
    declared: Declaration,
    request: Any | None,
    names: tuple[str, ...],
    arguments: Mapping[str, object],
) -> Claim:
    options = declared.options
    limit = options.limit_for(arguments)
    sent = request is not None and not request.is_eager
    return Claim(
        run=headers.read(request).run if sent else ids.new_id(),
        nonce=ids.nonce(),
        owner=owner(options.owner, request, task.name),
        names=names,
        limits=(limit,) * len(names),
        lease=options.ttl,
        who=who_am_i(task.name, request.id if request is not None else ""),
    )


def _interrupted(options: LockOptions, lease: Lease, hold: Hold) -> AbstractContextManager[None]:
    return Interruption(lease, hold.lost_error) if options.on_lost == "raise" else nullcontext()


@contextmanager
def _shown(entered: _Entered) -> Iterator[None]:
    token = _inside.set((*_inside.get(), entered))
    try:
        yield
    finally:
        _inside.reset(token)
