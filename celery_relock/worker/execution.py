"""One execution of a task, from the call of its `run` to the release: the order of things.

    run         the workflow that it is a step of
    Execution   which message the call is for, and what it says instead of its task
    run_named   which locks it needs; whether its call is a duplicate
    run_locked  what a caller holds is re-entered, the rest is acquired
    _acquire    acquire, body, release
    run_body    the state STARTED, `self.lock`, and the task's own code
    note_end    whether it is over; what waits for one that has not come to ask for its locks
    _over       what is left for when Celery has published what comes next
    _unreached  what was left to a message whose `run` was not reached
    _retried    the same, before Celery says that a retry was sent
    _failed     a group behind an execution that has failed

`message` is Celery's request (its `Context`) if a message is behind the call. Its header is read
once. It says, or else the task's declaration, which features the execution uses. A feature that it
does not use is not entered: `workflow` only for a step or a re-entry, `dedup` only with
`lock_dedup`, `order` only with `lock_order`, `retry` only with `lock_keep_on_retry`, `cooldown`
only with `lock_cooldown`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from celery.signals import task_failure, task_postrun, task_retry
from celery.states import SUCCESS

from ..declaration import Declaration, engine_of, unbegun
from ..dedup import worker as dedup
from ..engine import ids, reentrancy
from ..engine.hold import Body, Hold, MakeHold, Share
from ..engine.interrupt import Interruption
from ..engine.lease import Lease, State
from ..engine.protocol import EndedAs
from ..errors import LockConfigError, LockUnavailable, RelockError
from ..naming.names import Misfit, bind
from ..order import worker as order
from ..workflow import steps
from . import company, cooldown, leftovers, retry, unlocked
from . import events as worker_events
from .conflict import Attempt, begins_unlocked, lease_of, obtain, release
from .delivery import DELIVERY, Delivery, delivery_of, finish, known_delivery, to_finish
from .ending import end_unlocked, is_acknowledged, is_over, puts_back, remember_for
from .message import (
    ENTER,
    Header,
    ancestors_here,
    begin_call,
    header_of,
    inside,
    is_lockable,
    keep_header,
    owner_of,
    prefix_of,
    running_request,
)
from .parking import carried
from .states import (
    LATER,
    Aside,
    Dropped,
    Late,
    SentAgain,
    end_dropped,
    fail_groups,
    show_started,
    tells_no_state,
)

# What a body can return of which no line has run yet.
_UNBEGUN = CoroutineType, GeneratorType, AsyncGeneratorType


def current(task: Any) -> Hold | None:
    """The hold of the innermost call of this task on the call stack."""
    for execution in reversed(inside.get()):
        if execution.task is task and execution.make_hold is not None:
            hold: Hold = execution.make_hold()
            return hold
    return None


def run(execution: Execution) -> Any:
    """Call a task's body under its locks."""
    task = execution.task
    delivery = getattr(task.request_stack.top, DELIVERY, None)
    if delivery is not None and delivery.aside:
        company.keep_aside(task)  # its `__call__` has handled that, and calls once more
    try:
        outer = inside.get()
        if outer and outer[-1].covers(execution):
            return execution.body(*execution.args, **execution.kwargs)
        header = execution.begin()
        begins_workflow = execution.declared.options.hold == "workflow"
        if header is not None and (header.workflow_locks or begins_workflow):
            result = steps.around(task, execution.message, execution.run_named)
        else:
            result = execution.run_named()
    # No call here, not even of what is built in: a signal's exception there would make a failure of
    # what waits.
    except (Aside, SentAgain) as aside:
        if execution.delivery is not None:
            execution.delivery.aside = aside
        aside.__traceback__ = None
        raise aside from None
    except Exception as error:
        if task.acks_late or execution.unasked:
            execution.note_end(error)
        error.with_traceback(company.shown(error))  # no assignment: an exception may refuse that
        raise error
    if task.acks_late or execution.unasked:
        execution.note_end(None)
    return result


class Execution:
    """One call of a task's body.

    Attributes:
        declared: by the task, and for this call instead; of one that is no `LockedTask`, that it
            has no lock.
        by: the `run` that was called. A body that calls the one of its base class
            (`super().run()`) comes by another one.
        body: the task's own code.
        request: Celery's, None for a direct call; `message` is the same if a message is behind it,
            which an eager or direct call has not, and so can be neither parked nor sent again.
            `header` is the message's.
        names, limits, owner: what this call asks for; limits by name.
        unasked: which leftovers nobody has taken charge of yet. If it ends now, they are in the way
            of others, and are cleared away.
        ended: the attempt whose end is remembered, if no retry had been sent by then; None before.
        make_hold: makes what `self.lock` shows; None before there is a hold.
    """

    def __init__(
        self,
        task: Any,
        declared: Declaration,
        by: Callable[..., Any],
        body: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.task = task
        self.declared = declared
        self.by = by
        self.body = body
        self.args = args
        self.kwargs = kwargs
        self.request: Any = None
        self.message: Any = None
        self.delivery: Delivery | None = None
        self.header: Header | None = None
        self.names: tuple[str, ...] = ()
        self.limits: Mapping[str, int] = {}
        self.owner = ""
        self.unasked = leftovers.ALL
        self.ended: Attempt | None = None
        self.make_hold: MakeHold | None = None

    def begin(self) -> Header | None:
        """Find its message, read the header of that, and return it.

        Raises:
            Late: the message is another worker's copy of a broadcast.
        """
        self.request, self.delivery = request, _ = begin_call(self.task)
        if request is None or request.is_eager:
            return None
        self.message = message = request
        self.header = header = header_of(message)
        if header.redelivered:
            # Of an earlier message: the broker knows this one alone.
            message.delivery_info = {**(message.delivery_info or {}), "redelivered": True}
        exchange = (message.delivery_info or {}).get("exchange")
        was = carried(message) if exchange else None
        if was is None or not was.receiver:
            return header
        if not header.receiver:
            # Each copy is an execution for itself. By the first id its call has a dedup marker.
            own = ids.short(f"{header.execution_id}@{was.receiver}")
            self.header = header = header._replace(
                execution_id=own, receiver=was.receiver, first=header.first_execution_id
            )
            keep_header(message, header)
        if header.receiver != was.receiver:
            # Another worker had parked it.
            raise Late("is the copy of another worker")
        return header

    def covers(self, call: Execution) -> bool:
        """Whether its body calls that of a base class, for which it has the locks. Arguments that
        do not fit the task, but that body alone, name no locks."""
        if call.task is not self.task or call.by is self.by:
            return False
        try:
            names = self.declared.names(bind(call.task, call.args, call.kwargs))
        except Misfit:
            return True
        return {*names} <= {*self.names}

    def run_named(self) -> Any:
        """Find the locks that the call needs, and run it unless it is a duplicate."""
        self.unasked = leftovers.BEFORE_MARKER
        header = self.header
        if header is not None and header.refused:
            raise LockConfigError(header.refused)
        if self.declared.rule.off:
            self.unasked = ()
            if self.message is None or self.task.name == ENTER:
                return self.run_body(None)
            with unlocked.alone(self.task, self.message):
                return self.run_body(None)
        try:
            arguments = bind(self.task, self.args, self.kwargs)
        except Misfit as misfit:
            raise TypeError(*misfit.args) from None  # a client reads it without this library
        self.declared = declared = _declared(self.declared, self.request, header)
        self.limits = limits = declared.limits(arguments)
        self.names = tuple(limits)
        self.owner = owner_of(declared.options.owner, self.request, self.task.name)
        # From the inside out: the locks, the line, the marker.
        locked: Callable[[Body], Any] = self.run_locked
        if header is not None and (header.order or declared.options.order):
            locked = partial(order.around, self)
        if header is not None and (header.marker or declared.options.dedup is not None):
            return dedup.around(self, locked)
        return locked(self.run_body)

    def asks_for_marker(self) -> None:
        """From now on it ends by itself what it has of its marker."""
        self.unasked = leftovers.BEFORE_LINE

    def asks_for_line(self) -> None:
        """From now on it ends by itself what it has of its line."""
        self.unasked = leftovers.BEFORE_LOCKS

    def run_locked(self, run_body: Body) -> Any:
        """Run the body under its locks: re-enter those that a caller holds, acquire the others."""
        if reentrancy.innermost() is None:
            return self._acquire(run_body, self.names, [])
        declared = self.declared
        limits = [*self.limits.values()]
        outer = reentrancy.covering(engine_of(declared.app).backend, self.names, limits)
        shares = [Share(name, lease, lease.fence_of(name), True) for name, lease in outer.items()]
        run_body = reentrancy.Relying(outer.values())(run_body)
        for share in shares if declared.options.on_lost == "raise" else ():
            outer_hold = partial(Hold, share.lease.claim.owner, [share])
            run_body = _interrupted(run_body, share.lease, outer_hold)
        unbroken = reentrancy.unbroken()
        missing = tuple(name for name in self.names if name not in outer)
        if missing:
            return self._acquire(run_body, missing, shares, reentrancy.stuck(), unbroken)
        self.unasked = ()
        worker_events.tell_reentered(self.task, self.request, outer)
        return run_body(partial(Hold, shares[0].lease.claim.owner, shares, unbroken=unbroken))

    def _acquire(
        self,
        run_body: Body,
        names: tuple[str, ...],
        shares: list[Share],
        stuck: tuple[str, ...] = (),
        unbroken: bool = True,
    ) -> Any:
        """Acquire locks, run the body, and release them, or leave them to what comes next.

        Args:
            names: of the locks.
            shares: of the locks that a caller holds.
            stuck: the other executions that cannot release before this one has ended.
            unbroken: whether what lies around the call was held all the time.
        """
        task, message, options = self.task, self.message, self.declared.options
        engine = engine_of(self.declared.app)
        header, descends = self.header, options.reentrant == "descendants"
        lease = lease_of(
            engine.lease,
            task,
            self.request,
            header,
            owner=self.owner,
            names=names,
            limits=tuple(map(self.limits.__getitem__, names)),
            lease=options.ttl,
            by_owner=options.reentrant == "workflow",
            ancestors=ancestors_here() if descends else (),
            stuck=stuck if header is None else (*stuck, *header.stuck),
            parked_at="" if header is None else header.parked_at,
        )
        attempt = Attempt(task, engine, lease, options, message)
        self.unasked = ()
        # What a workflow holds goes on to the retry as to any other message of the workflow.
        is_kept = options.keep_on_retry and options.hold != "workflow" and message is not None
        to_retry = retry.LeftToRetry(attempt) if is_kept else None
        # When the body has ended, a copy asks for the result, if it can.
        asks = task.acks_late and message is not None and not tells_no_state(task, message)
        well: EndedAs = "unacknowledged" if asks else "execution"
        over = False  # whether the message is acknowledged for good
        try:
            kept = self.header is not None and self.header.kept
            held = (retry.obtain_kept if kept else obtain)(attempt)
            if held is None:  # lock_on_unavailable="run"
                begins_unlocked(attempt)
                make_hold: MakeHold = partial(Hold, lease.claim.owner, shares, unbroken=unbroken)
            else:
                reentrancy.push(lease)
                if message is not None and options.hold == "workflow":
                    steps.keep_for_chain(attempt)
                for name, fence, reentered in zip(names, held.fences, held.reentered, strict=True):
                    shares.append(Share(name, lease, fence, reentered))
                is_whole = names == self.names
                make_hold = partial(
                    Hold,
                    lease.claim.owner,
                    shares,
                    unbroken=unbroken and lease.unbroken,
                    engine=engine if is_whole else None,
                )
                run_body = self._watched(run_body, attempt, make_hold, to_retry)
            try:
                result = run_body(make_hold)
            except Exception as error:
                # What is sent again before its body begins (`dedup`) is to find no end of itself.
                over = not isinstance(error, SentAgain) and is_over(attempt, error)
                raise
            over = True
            return result
        except Dropped as dropped:
            return end_dropped(task, message, dropped)
        finally:
            # Parked, or sent again: nothing is to be done, and no call begins here at which a
            # signal's exception could make a failure of it.
            if lease.state is not State.NEW:
                # As `ended_as` says it, but without a call.
                is_told = over and self.header is not None and self.header.own
                has_retried = self.delivery is not None and self.delivery.retry is not None
                ended: EndedAs = "" if not is_told else "retried" if has_retried else well
                self.ended = attempt if ended == well else None
                is_left = False
                try:
                    if to_retry is not None and to_retry.open:
                        is_left = True  # released when Celery has sent the retry
                        reentrancy.pop(lease)
                    elif options.hold == "workflow" and steps.owns(message, lease):
                        is_left = True  # released at the end of the workflow
                    else:
                        reentrancy.pop(lease)
                        release(engine, lease, ended)
                finally:
                    # The rule in `delivery`.
                    if not is_left and lease.state in (State.HELD, State.LOST):
                        reentrancy.pop(lease)
                        release(engine, lease, ended)

    def note_end(self, error: Exception | None) -> None:
        """It is over, as far as `run` knows: what is left of it where it has not asked is cleared
        away."""
        if self.message is None:
            return
        if self.task.acks_late:
            delivery = delivery_of(self.message)
            delivery.over, delivery.ended = is_acknowledged(self.task, error), self.ended
        if self.unasked and header_of(self.message).has_any_leftovers:
            of, remember = (self.message, self.task), remember_for(self.task, error)
            app = self.task.app
            clear = partial(leftovers.clear_away, app, *of, self.unasked, remember)
            # Not here where Redis cannot be reached.
            engine_of(app).later.add(clear) if isinstance(error, LockUnavailable) else clear()

    def _watched(
        self,
        run_body: Body,
        attempt: Attempt,
        make_hold: MakeHold,
        to_retry: retry.LeftToRetry | None,
    ) -> Body:
        """A body that a lost lock ends, whose retry gets the hold, and after which the lock cools
        down: what the options ask for."""
        options = attempt.options
        if options.on_lost == "raise":
            run_body = _interrupted(run_body, attempt.lease, make_hold)
        if to_retry is not None:
            run_body = to_retry.keeping()(run_body)
        if options.cooldown is not None:
            run_body = cooldown.after(run_body, attempt, options.cooldown)
        return run_body

    def run_body(self, make_hold: MakeHold | None) -> Any:
        """Run the task's own code, which finds what `make_hold` makes as `self.lock`."""
        delivery, task = self.delivery, self.task
        # `enter` waits for its lock in its body.
        if task.name != ENTER and self.header is not None and delivery is not None:
            has_waited = self.header.attempts or delivery.was_blocked
            if has_waited or task.track_started is LATER:
                show_started(task, self.message)
        self.make_hold = make_hold
        token = inside.set((*inside.get(), self))
        try:
            result = self.body(*self.args, **self.kwargs)
        finally:
            inside.reset(token)
            self.make_hold = None
        if isinstance(result, _UNBEGUN) and make_hold is not None:
            close = getattr(result, "close", None)  # else Python warns that nobody awaited it
            if close is not None:
                close()
            raise unbegun(task.name)
        return result


def _interrupted(run_body: Body, lease: Lease, make_hold: MakeHold) -> Body:
    if not any(lease.fences):
        return run_body  # relock_enabled=False: it cannot be lost
    return Interruption(lease, lambda: make_hold().lost_error())(run_body)


def _declared(declared: Declaration, request: Any, header: Header | None) -> Declaration:
    """What the task declares, and what this call says instead."""
    if header is None and request is not None:
        header = header_of(request)  # of an eager call
    if header is not None and (header.options or header.prefix is not None):
        return declared.of_call(header.options, header.prefix, is_sent=True)
    if request is None and (prefix := prefix_of(declared.prefix)):
        return declared.of_call({}, prefix)
    return declared


def _over(
    task_id: str = "", task: Any = None, retval: Any = None, state: str | None = None, **_: Any
) -> None:
    """Celery has published what comes after the task, and stored its result. What it has ended with
    need not be what its body has ended with."""
    request = task.request_stack.top
    if request is None or request.id != task_id or request.is_eager:
        return
    if to_finish.stack:
        finish()
    error = sys.exc_info()[1]  # the signal is sent meanwhile
    if error is None and state != SUCCESS and isinstance(retval, Exception):
        error = retval
    delivery = getattr(request, DELIVERY, None)
    if delivery is not None and delivery.begun:
        # When its process exits the result may be stored already: a copy goes by that, as after a
        # kill.
        is_exit = error is not None and not isinstance(error, Exception)
        if is_exit and not tells_no_state(task, request):
            return
        if delivery.end_cooldown is not None and (error is not None or state != SUCCESS):
            delivery.end_cooldown()  # first: what comes again may cool down then
        if delivery.over and not is_acknowledged(task, error):
            leftovers.comes_again(task.app, request, task)
        return
    _unreached(task, request, error, state)


def _unreached(task: Any, request: Any, error: BaseException | None, state: str | None) -> None:
    """The message is over and `run` was not reached (an error in `before_start`): nothing has taken
    over what was left to it."""
    # Not by `is_requeued`: autoretry lies around `run`. Of a process that exits the main process
    # hears, with Celery >= 5.7.
    is_exit = error is not None and not isinstance(error, Exception)
    is_told = is_exit and hasattr(task, "acks_on_timeout")
    is_put_back = error is not None and puts_back(task, error)
    if leftovers.is_ours(task, request) and not (is_told or is_put_back):
        leftovers.clear_away(task.app, request, task, remember=remember_for(task, error))
    if is_lockable(task):
        company.on_unreached(task, request, state)


def _retried(request: Any = None, **_: Any) -> None:
    """Celery has stored that a retry was sent: only now is that let go, see `is_retried`."""
    running = running_request()
    if running is None or running.id != request.id:
        return
    if to_finish.stack:
        finish()
    delivery = known_delivery(running)
    if delivery is not None and delivery.retry is not None and delivery.ended is not None:
        # By a class's own `__call__`, say, when the body had ended.
        end_unlocked(delivery.ended, over=True)


def _failed(
    sender: Any = None, task_id: str = "", exception: Exception | None = None, **_: Any
) -> None:
    """Celery has stored a failure: if it is a lock's, nobody behind it waits for ever. Not sooner:
    if a class's own `__call__` has handled the error, the group runs."""
    request = sender.request_stack.top
    if request is None or request.id != task_id or request.is_eager:
        return
    if isinstance(exception, RelockError) or sender.name == ENTER:
        fail_groups(sender, request, exception)


task_failure.connect(_failed, weak=False, dispatch_uid="celery_relock.groups")
task_retry.connect(_retried, weak=False, dispatch_uid="celery_relock")
task_postrun.connect(_over, weak=False, dispatch_uid="celery_relock")
