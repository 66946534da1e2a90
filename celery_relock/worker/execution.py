"""The way of a call through its lock: take, run the body, give back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

from ..declaration import Declaration, declaration
from ..dedup import worker as arrival
from ..engine import ids, reentrancy
from ..engine.hold import Hold, Share
from ..engine.interrupt import Interruption
from ..engine.lease import Lease, State
from ..engine.messages import label_of
from ..engine.protocol import Claim, Held
from ..errors import LockLost
from ..naming.arguments import bind
from ..options import LockOptions
from ..workflow import steps
from . import conflict as conflicts
from . import events as telling
from . import headers, starting
from . import owner as owner_of
from . import retry as retries
from .attempt import Attempt
from .owner import owner, running_request
from .release import give_back
from .states import Dropped, end_dropped, is_acknowledged


class _Entered(NamedTuple):
    """A call that is inside: its task, which `run` it came by, its hold."""

    task: Any
    run: Callable[..., Any]
    hold: Hold | None


_inside: ContextVar[tuple[_Entered, ...]] = ContextVar("relock_inside", default=())


def current(task: Any) -> Hold | None:
    """The hold of the innermost call of this task on the call stack."""
    for entered in reversed(_inside.get()):
        if entered.task is task and entered.hold is not None:
            hold: Hold = entered.hold
            return hold
    return None


def run(
    task: Any,
    by: Callable[..., Any],
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call the task's body under the locks that it declared and those of its workflow.

    Args:
        by: the locked `run` that was called. A body that calls the one of its base class
            (`super().run()`) comes by another one, and is inside already.
    """
    inside = _inside.get()
    if inside and inside[-1].task is task and inside[-1].run is not by:
        return call(*args, **kwargs)
    request = owner_of.request_of(task)
    if not _is_step(task, request):
        return _run(task, by, request, call, args, kwargs)
    return steps.around(task, request, partial(_run, task, by, request, call, args, kwargs))


def _is_step(task: Any, request: Any | None) -> bool:
    """Whether a message belongs to a workflow lock, or may begin one."""
    if request is None or request.is_eager:
        return False
    declared = declaration(type(task))
    if declared.enters_workflows or declared.options.hold == "workflow":
        return True
    return bool(headers.read(request).workflow_locks)


def _run(
    task: Any,
    by: Callable[..., Any],
    request: Any | None,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    declared = declaration(type(task))
    message = None if request is None or request.is_eager else request
    if declared.rule.off:
        starting.tell(task, message)
        with _shown(_Entered(task, by, None)):
            return call(*args, **kwargs)
    arguments = bind(task, args, kwargs)
    if arguments is None:
        # The call does not fit the body, whose own TypeError says so best.
        return call(*args, **kwargs)

    def body(hold: Hold) -> Any:
        starting.tell(task, message)
        with _shown(_Entered(task, by, hold)):
            return call(*args, **kwargs)

    names = declared.rule.names(arguments)

    def within(inner: Callable[[Hold], Any]) -> Any:
        return _run_within(task, declared, request, names, arguments, inner)

    return arrival.around(task, declared, message, names, within, body)


def _run_within(
    task: Any,
    declared: Declaration,
    request: Any | None,
    names: tuple[str, ...],
    arguments: Mapping[str, object],
    body: Callable[[Hold], Any],
) -> Any:
    outer = {name: lease for name in names if (lease := _covered(declared, name))}
    shares = [Share(name, lease, _fence(lease, name), True) for name, lease in outer.items()]
    missing = tuple(name for name in names if name not in outer)
    if not missing:
        unbroken = all(map(steps.is_unbroken, outer.values()))
        return body(Hold(next(iter(outer.values())).claim.owner, shares, unbroken))
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
    lease.work = telling.work_for(task, request)
    over = False
    try:
        held = conflicts.obtain(Attempt(task, engine, lease, options, message))
        if held is None:
            return body(Hold(claim.owner, ()))
        reentrancy.push(lease)
        if message is not None and options.hold == "workflow":
            steps.keep_for_chain(message, engine, lease, options)
        unbroken = retries.unbroken(message, options, lease)
        hold = Hold(claim.owner, [*shares, *_shares(lease, held)], unbroken)
        try:
            kept = retries.keeping(task, message, engine, options, lease)
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
        # An id made from the task id must not be remembered: whoever sends that id again on purpose
        # would be taken for a late copy.
        ended = over and message is not None and headers.read(message).own
        if retries.is_open(lease):
            reentrancy.pop(lease)
        elif options.hold != "workflow" or not steps.owns(lease):
            try:
                reentrancy.pop(lease)
                give_back(engine, lease, ended=ended)
            finally:
                # A signal's exception may have come before the line above had begun.
                if lease.state in (State.HELD, State.LOST):
                    give_back(engine, lease, ended=ended)


def _covered(declared: Declaration, name: str) -> Lease | None:
    lease = reentrancy.holding(declared.engine.backend, name)
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
    message = request or running_request()  # a direct call is found by whose it is
    return Claim(
        execution_id=headers.read(request).execution_id if sent else ids.new_id(),
        attempt_id=ids.new_attempt_id(),
        owner=owner(options.owner, request, task.name),
        names=names,
        limits=(limit,) * len(names),
        lease=options.ttl,
        label=label_of(task.name, "" if message is None else message.id),
        by_owner=options.reentrant == "workflow",
        ancestors=headers.ancestors_for(options),
        stuck=reentrancy.stuck(),
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
