"""The way of a call through its lock: take, run the body, give back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from celery._state import _task_stack
from celery.exceptions import Reject, SoftTimeLimitExceeded

from ..core import callstack, ids
from ..core.answers import Claim, Held
from ..core.engine import Engine
from ..core.hold import Hold, Share
from ..core.interrupt import Interruption
from ..core.lease import Lease
from ..core.messages import who_am_i
from ..core.options import LockOptions
from ..errors import LockLost, LockUnavailable, RelockError
from . import conflicts, headers
from .binding import bind
from .declaration import Declaration, declaration
from .owner import owner

logger = logging.getLogger("celery_relock")

_holds: ContextVar[tuple[tuple[Any, Hold], ...]] = ContextVar("relock_holds", default=())


def current(task: Any) -> Hold | None:
    """The hold of the innermost call of this task on the call stack."""
    for each, hold in reversed(_holds.get()):
        if each is task:
            return hold
    return None


def run(task: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the task under the locks that it declared."""
    declared = declaration(type(task))
    if declared.rule.off:
        return call(task, *args, **kwargs)
    request = _message_of(task)
    arguments = bind(task, args, kwargs)
    if arguments is None:
        # The call does not fit the body, whose own TypeError says so best. Not by `call`: one that
        # adds arguments of its own would run the body without the lock that they name.
        return task.run(*args, **kwargs)
    names = declared.rule.names(arguments)
    outer = {name: lease for name in names if (lease := _covered(declared, name))}
    missing = tuple(name for name in names if name not in outer)
    shares = [Share(name, lease, _fence(lease, name), True) for name, lease in outer.items()]
    if not missing:
        with _shown(task, Hold(next(iter(outer.values())).claim.owner, shares)):
            return call(task, *args, **kwargs)
    claim = _claim(task, declared, request, missing, arguments)
    return _run_with(task, call, args, kwargs, declared, request, claim, shares)


def _run_with(
    task: Any,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    declared: Declaration,
    request: Any | None,
    claim: Claim,
    shares: list[Share],
) -> Any:
    engine = declared.engine
    lease = engine.lease(claim)
    ended = False
    try:
        try:
            answer = conflicts.obtain(task, engine, lease, declared.options, request)
        except LockUnavailable as error:
            conflicts.unavailable(task, declared.options, request, error)
            with _shown(task, Hold(claim.owner, ())):
                return call(task, *args, **kwargs)
        callstack.push(lease)
        hold = Hold(claim.owner, [*shares, *_shares(lease, answer)])
        try:
            with _shown(task, hold), _interrupted(declared.options, lease, hold):
                result = call(task, *args, **kwargs)
        except Exception as error:
            ended = not (isinstance(error, Reject) and error.requeue)
            raise
        ended = True
        return result
    finally:
        callstack.pop(lease)
        # Without a run id of its own a message cannot be told from one that is sent on purpose
        # with the same task id: then no late copy is refused.
        own_id = request is not None and headers.read(request) is not None
        give_back(engine, lease, ended=ended and own_id and not request.is_eager)


def give_back(engine: Engine, lease: Lease, *, ended: bool) -> None:
    """Release, whatever comes: the task's own outcome stands."""
    try:
        engine.release(lease, ended=ended)
    except SoftTimeLimitExceeded:
        # The limit fell into the give-back, after the body had its outcome.
        give_back(engine, lease, ended=ended)
    except RelockError as error:
        logger.warning(
            "the lock %s could not be given back, its lease ends it within %.0f s: %s",
            ", ".join(map(repr, lease.claim.names)),
            lease.claim.lease,
            error,
        )
    except BaseException:
        give_back(engine, lease, ended=ended)
        raise


def _message_of(task: Any) -> Any | None:
    """The request of the message that this very call runs, None if the call is a direct one.

    A task that calls itself gets a copy of its request, with the mark that is left here.
    """
    request = task.request_stack.top
    if request is None or not request.id or _task_stack.top is not task:
        return None
    if getattr(request, "relock_entered", False):
        return None
    request.relock_entered = True
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
    header = None if request is None else headers.read(request)
    if header is not None:
        run_id = header.run
    elif request is not None and not request.is_eager:
        run_id = ids.short(f"{request.id}:{request.retries}")
    else:
        run_id = ids.new_id()
    limit = options.limit_for(arguments)
    return Claim(
        run=run_id,
        nonce=ids.nonce(),
        owner=owner(options.owner, request),
        names=names,
        limits=(limit,) * len(names),
        lease=options.ttl,
        who=who_am_i(task.name, (request.id if request is not None else "") or ""),
    )


def _interrupted(options: LockOptions, lease: Lease, hold: Hold) -> AbstractContextManager[None]:
    return Interruption(lease, hold.lost_error) if options.on_lost == "raise" else nullcontext()


@contextmanager
def _shown(task: Any, hold: Hold) -> Iterator[None]:
    token = _holds.set((*_holds.get(), (task, hold)))
    try:
        yield
    finally:
        _holds.reset(token)
