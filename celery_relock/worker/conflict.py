"""The locks of one execution: acquired as its task's options say, and released whatever comes.

From top to bottom:

    lease_of     what is asked for
    obtain       acquire, or wait, block, retry, drop, raise; what to do without Redis
    _end         it ends without them, for whatever reason
    _decide      what the answer and the task's policy make of it: one function for each
    _claim_anew  a late copy of an execution that has ended: whether it runs all the same
    pause_for    how long to wait, and until the next try
    release      at the end
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from celery.exceptions import SoftTimeLimitExceeded
from celery.states import FAILURE, READY_STATES, STARTED

from ..engine import ids, reentrancy
from ..engine.engine import Engine
from ..engine.events import (
    describe_conflict,
    describe_deadlock,
    describe_full,
    describe_own_share,
    label_of,
    logger,
)
from ..engine.lease import Lease, State
from ..engine.protocol import (
    LINE,
    MAY_COME,
    Claim,
    Conflict,
    Deadlocked,
    Ended,
    EndedAs,
    Full,
    Held,
    OtherAttempt,
    Outcome,
    Parked,
    ParkRequest,
    Successor,
    lock_names,
)
from ..errors import (
    LockConfigError,
    LockConflict,
    LockDeadlock,
    LockLost,
    LockUnavailable,
    RelockError,
)
from ..naming.callables import called
from ..options import POLICIES, WAITS, LockOptions
from . import cooldown
from .consumer import consumes_here
from .delivery import delivery_of
from .ending import end_unlocked, is_acknowledged, is_over, remember_unlocked, withdraw_later
from .events import show
from .message import (
    Header,
    header_of,
    inside,
    keep_header,
    moment,
    running_request,
    seconds_to,
    work_for,
)
from .parking import park_request, send_again
from .states import (
    Aside,
    Dropped,
    Late,
    SentAgain,
    Waits,
    show_blocked,
    show_retry,
    stored,
    tells_no_state,
)

# Seconds until a message is sent again for the first time, and the longest pause it grows to.
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0
# How long a live worker may take from the release of a lock until it has stored the result, in
# seconds.
_STORING = 2.0


class Attempt(NamedTuple):
    """An attempt to acquire the locks of a call.

    Attributes:
        message: the request of the message that is run; None for an inline or eager call, which
            can neither be parked nor sent again.
        kept_fences: the fencing tokens of what was left to it. If a retry comes early, the attempt
            before still holds one: it is waited for, whatever the options say.
    """

    task: Any
    engine: Engine
    lease: Lease
    options: LockOptions
    message: Any | None
    kept_fences: Collection[int] = ()


def lease_of(
    make: Callable[[Claim], Lease], task: Any, request: Any, header: Header | None, **claim: Any
) -> Lease:
    """A lease for what an execution asks for, in an attempt of its own.

    Args:
        make: `Engine.lease`.
        request: as for `work_for`.
        header: of its message; None without one.
        **claim: what it asks for, as for `Claim`.
    """
    work, own = work_for(task, request), ids.new_id() if header is None else header.execution_id
    told = {"execution_id": own, "label": label_of(task.name, work.id), **claim}
    lease = make(Claim(attempt_id=ids.new_attempt_id(), **told))
    lease.work = work
    lease.put_off_since = 0.0 if header is None else header.since
    return lease


def obtain(attempt: Attempt) -> Held | None:
    """Acquire the locks as the task's options say.

    Returns:
        What was acquired; None if it is to go on without these locks: if its body is next,
        `begins_unlocked` is to be called.

    Raises:
        LockConflict: somebody else holds a lock, and the policy is to raise, or the time to wait is
            over.
        Dropped: somebody else holds a lock, and the policy is to drop the call.
        SentAgain: the message was sent again, to be executed later.
        Waits: the message is parked, or is a copy of one that lives elsewhere.
        Late: it is a copy of one that has ended.
        LockUnavailable, LockConfigError: from the backend.

    With another error than those by which it is set aside (`Aside`, `SentAgain`) it has ended.
    """
    task, engine, lease, _, message, _ = attempt
    if lease.put_off_since and message is not None and _has_failed(task, message):
        withdraw_later(engine, lease.claim.execution_id)
        raise Late("has ended already: it failed while its place could not be removed")
    try:
        if attempt.kept_fences and max(lease.claim.limits) > 1:
            _wait_for_the_attempt_before(attempt)
        while True:
            try:
                answer = engine.acquire(lease)
                held = (
                    answer
                    if isinstance(answer, Held) and not answer.resumed
                    else _look_at(attempt, answer)
                )
                if held is not None:
                    return held
                continue
            except LockUnavailable as error:
                pause = without_redis(attempt, error)
                if pause is None:
                    return None
            # Neither Redis nor the broker can be reached: the execution stays in its slot, or it
            # would be lost.
            time.sleep(pause)
    except (Aside, SentAgain):
        raise
    except Exception as error:
        try:
            _end(attempt, error)
        except SoftTimeLimitExceeded:
            _end(attempt, error)  # the rule in `delivery`
            raise
        raise


def _tell_redelivered(message: Any, answer: Outcome) -> None:
    """Let a message say whether its execution may have begun before, which a body asks that does
    what cannot be undone.

    The broker tells that of what a full worker has requeued, too. While Redis keeps a message, no
    body has begun since it was parked; what was known before that is in the header. A message that
    was never parked may meet a copy of itself that is, after its body has died.
    """
    header = header_of(message)
    has_begun = header.redelivered or isinstance(answer, OtherAttempt | Ended)
    is_kept = isinstance(answer, Held) and answer.resumed
    is_kept = is_kept or (isinstance(answer, Conflict) and answer.parked)
    if has_begun or (is_kept and header.parked_at):
        message.delivery_info = {**(message.delivery_info or {}), "redelivered": has_begun}


def _wait_for_the_attempt_before(attempt: Attempt) -> None:
    """A retry that comes early waits until the attempt before it has left its hold to it.

    If a lock has one permit, that of the attempt before is in the way, and the answer names it
    (`_decide`). Of several permits the retry would take another one, or hear of another holder.

    Raises:
        Waits: the message was sent again, to be executed later.
    """
    before = header_of(attempt.message).before
    while before and _is_held_by(before, attempt):
        pause = pause_for(attempt.message, attempt.options)
        if pause is None:
            return
        if send_again(attempt.task, attempt.message, pause):
            raise Waits("waits until the attempt before it has left its lock to it")
        time.sleep(pause)


def _is_held_by(executions: Sequence[str], attempt: Attempt) -> bool:
    try:
        names = attempt.lease.claim.names
        return any(attempt.engine.inspect(name, executions).holds for name in names)
    except RelockError:
        return False  # it is asked for its lock next, and says so, too


def without_redis(attempt: Attempt, error: LockUnavailable) -> float | None:
    """Redis cannot be reached: do what the task's policy says. Returns None if the body is to run
    without its locks; else for how many seconds to wait, as the message could not be sent again."""
    policy, message, pause = attempt.options.on_unavailable, attempt.message, None
    if policy == "retry" and message is not None:
        pause = pause_for(message, attempt.options)
    ends = pause is None and policy != "run"
    attempt.lease.tell("unavailable", error.reason, policy="raise" if ends else policy)
    if pause is not None:
        _try_later(attempt, pause, error)
        return pause
    if policy == "run":
        how = f"it RUNS WITHOUT ITS LOCK (lock_on_unavailable='run'): {error}"
        attempt.lease.tell("unprotected", how)
        return None
    if policy == "raise":
        what_to_do = 'To run the task later instead, set lock_on_unavailable="retry"'
        raise LockUnavailable(f"{error.reason}. {what_to_do}", error.name) from error
    raise error


def _has_failed(task: Any, message: Any) -> bool:
    """Whether a message that was parked has failed since, as Redis could not be asked: its place
    could not be removed either, and somebody has published it again before that was made up for.

    Its state says so, which was BLOCKED when it was parked. A failure from before is that of
    another execution, which was sent again with its id.
    """
    header = header_of(message)
    if not header.parked_at or tells_no_state(task, message):
        return False
    found = stored(task, message.id)
    if found is None or found["status"] != FAILURE:
        return False
    if (failed_at := moment(found.get("date_done"))) is not None and failed_at < header.since:
        return False
    error = found["result"]
    is_told = isinstance(error, LockUnavailable | LockConfigError | SoftTimeLimitExceeded)
    return is_told and is_acknowledged(task, error)


def begins_unlocked(attempt: Attempt) -> None:
    """The body begins without these locks: what is parked for them does not run later."""
    if attempt.message is not None:
        claim, remember = attempt.lease.claim, remember_unlocked(attempt, None)
        # It may come again before this is done, and be parked then.
        of = claim.attempt_id if remember == MAY_COME else ""
        withdraw_later(attempt.engine, claim.execution_id, remember, of)


def _end(attempt: Attempt, error: Exception) -> None:
    """The execution ends with an error, without these locks."""
    message, lease, over = attempt.message, attempt.lease, False
    if message is None:
        return
    # The end of a copy is not that of the execution, which lives.
    if not isinstance(lease.unheld, OtherAttempt):
        over = isinstance(error, Dropped) or is_over(attempt, error)
    is_silent = lease.state is State.ASKED  # then it is not known whether it is parked
    was_parked = isinstance(lease.unheld, Conflict) and lease.unheld.parked
    # Also for another lock than it asks for now (a deploy).
    is_parked = is_silent or was_parked or bool(header_of(message).parked_at)
    is_parked = is_parked and lease.state is not State.HELD
    end_unlocked(attempt, over, is_parked=is_parked, here=not is_silent)


def _look_at(attempt: Attempt, answer: Outcome) -> Held | None:
    """The lock is held, or the message was parked for it until now. Returns as `_decide` does."""
    if attempt.message is not None:
        _tell_redelivered(attempt.message, answer)
    return answer if isinstance(answer, Held) else _decide(attempt, answer)


def _decide(attempt: Attempt, answer: Conflict | OtherAttempt | Ended | Deadlocked) -> Held | None:
    """The lock is held: do what the answer and the task's policy say. Returns what was acquired
    after all; None if the lock is to be asked for once more."""
    message, options = attempt.message, attempt.options
    if isinstance(answer, Ended):
        _claim_anew(attempt, answer)
        return None
    if isinstance(answer, Deadlocked):
        raise deadlock(attempt, answer)
    error = _conflict_error(attempt, answer)
    copy = answer if isinstance(answer, OtherAttempt) and message is not None else None
    policy = "duplicate" if copy is not None else _policy(options, answer, error)
    if policy not in WAITS and isinstance(answer, Conflict) and answer.fence in attempt.kept_fences:
        policy = "wait"
    left = None if message is None else seconds_left(message, options)
    # Without a message it cannot wait elsewhere.
    stays = policy == "block" or (policy in WAITS and message is None)
    if policy in WAITS:
        _warn_of_an_ancestor(attempt, answer)
    if stays:
        return _stay(attempt, _patience_in_slot(options, left))
    is_over = policy in WAITS and left is not None and left <= 0
    policy = "raise" if is_over else policy
    attempt.lease.tell("conflict", error.reason, policy=policy)
    if copy is not None:
        return _wait_behind(attempt, copy, error)
    if policy == "wait":
        return _park(attempt, answer, error, left)
    if policy == "retry":
        return _send_again(attempt, answer, error)
    if policy == "drop":
        attempt.lease.tell("dropped", error.reason)
        raise Dropped(error)
    raise error


def _patience_in_slot(options: LockOptions, left: float | None) -> float:
    """For how many seconds it can wait there: what is left of `lock_max_wait`, or the default."""
    if _is_called_by_the_worker():
        return 0.0
    return options.patience if left is None else max(left, 0.0)


def _warn_of_an_ancestor(attempt: Attempt, answer: Conflict | OtherAttempt) -> None:
    """Warn once if an ancestor of this task holds the lock that it waits for.

    If the ancestor waits for this task, both wait for ever, which the server cannot see. It sees
    that this call stack shares the lock itself.
    """
    if attempt.message is None or not isinstance(answer, Conflict) or _own_share(answer):
        return
    header = header_of(attempt.message)
    # Who was replaced by this task (`self.replace`) waits for nobody, and releases at once.
    ancestors = header.ancestors[bool(attempt.message.replaced_task_nesting) :]
    if header.attempts or not ancestors:
        return
    try:
        holds = attempt.engine.inspect(answer.name, ancestors).holds
    except RelockError:
        return
    if holds:
        # A line refuses what would let a holder's own calls overtake.
        or_declare = "" if attempt.options.order else ", or declare lock_reentrant='descendants'"
        logger.warning(
            "%s[%s] waits for the lock %r, which its own ancestor %s holds. That is how children "
            "exclude each other. If the ancestor waits for this task, both wait until a time "
            "limit: then call the task directly%s",
            *(
                attempt.task.name,
                attempt.message.id,
                answer.name.removeprefix(LINE),
                holds[0].label,
                or_declare,
            ),
        )


def _policy(options: LockOptions, answer: Conflict | OtherAttempt, error: LockConflict) -> str:
    """The policy of the task, or the one that its callable chooses for this conflict."""
    policy = options.on_conflict
    if not callable(policy):
        return str(policy)
    if isinstance(answer, Conflict) and answer.parked:
        return "wait"  # as was chosen when it was parked
    where = f"task {options.task}: the callable in lock_on_conflict"
    chosen = called(where, policy, error)
    if chosen not in POLICIES:
        raise LockConfigError(
            f"{where} must return one of {', '.join(map(repr, POLICIES))}; it returned "
            f"{chosen!r:.100}"
        )
    return str(chosen)


def _wait_behind(attempt: Attempt, answer: OtherAttempt, error: LockConflict) -> Held | None:
    """Let a copy wait behind the execution that lives.

    Never an error, which would overwrite the state of that execution. The copy comes back: it is
    discarded if the execution has ended, and takes over if it has died.
    """
    policy, message, found = attempt.options.on_conflict, attempt.message, None
    request = _park_request(attempt, None) if policy == "wait" or callable(policy) else None
    if request is not None:
        found = attempt.engine.park(attempt.lease, request)
    if isinstance(found, Held):
        return found
    if isinstance(found, Ended):
        return None
    pause = min(max(answer.remaining, FIRST_PAUSE), LONGEST_PAUSE)
    if isinstance(found, Parked) or send_again(attempt.task, message, pause):
        raise Waits(f"waits: {error.reason}")
    return _stay(attempt, None)


def _park(
    attempt: Attempt, answer: Conflict | OtherAttempt, error: LockConflict, left: float | None
) -> Held | None:
    message: Any = attempt.message
    request = _park_request(attempt, left)
    if request is None:
        return _send_again(attempt, answer, error)
    if not (isinstance(answer, Conflict) and answer.parked):
        # Before it is parked: afterwards it may have been resumed, and its result been stored.
        show_blocked(attempt.task, message, error, answer)
    found = attempt.engine.park(attempt.lease, request)
    if not isinstance(found, Parked):
        show(attempt.task, message.id, STARTED)  # it goes on in its slot
    if isinstance(found, Held):
        return found
    if isinstance(found, Full):
        refused = LockConflict(f"{describe_full(found)}; {error.reason}", *error.args[1:])
        attempt.lease.tell("conflict", refused.reason, policy="raise")
        raise refused
    if isinstance(found, Deadlocked):
        raise deadlock(attempt, found)
    if isinstance(found, Parked):
        raise Waits(f"parked: {error.reason}")
    return None


def _park_request(attempt: Attempt, left: float | None) -> ParkRequest | None:
    """How to park the message. None: it cannot be parked."""
    task, _, lease, options, message, _ = attempt
    bounds = {"patience": seconds_to_resume(left, message), "most": options.max_parked}
    came = header_of(message)
    header = came.made_own()
    again = header.again(message)._replace(parked_at=lease.claim.names[0])
    request = park_request(task, message, again, **bounds)
    if request is None:
        return None
    if not came.own or lease.claim.execution_id == header.first:
        # Two messages without a header may be copies, or two calls: each counts as an execution.
        lease.claim = lease.claim._replace(execution_id=header.execution_id)
        keep_header(message, header)
    return request


def _send_again(attempt: Attempt, answer: Conflict | OtherAttempt, error: LockConflict) -> Held:
    message = attempt.message
    if isinstance(answer, Conflict) and _own_share(answer):
        # It would be in its own way each time.
        raise deadlock(attempt, Deadlocked((answer.name,)))
    pause = pause_for(message, attempt.options)
    if pause is None:
        raise error
    _try_later(attempt, pause, error)
    return _stay(attempt, seconds_left(message, attempt.options))


def _try_later(attempt: Attempt, pause: float, error: RelockError) -> None:
    """Send the message again, to come after a pause. Returns if that failed, else raises
    `SentAgain`."""
    requests = show_retry(attempt.task, attempt.message, error)
    # Before it is sent: a time limit that strikes from then on would let it fail, and run later.
    sent = SentAgain(f"{error}; again in {pause:.1f} s", exc=error, when=pause)
    if send_again(attempt.task, attempt.message, pause):
        for each in requests:
            each.ignore_result = True
        lease, header = attempt.lease, header_of(attempt.message)
        if lease.state is State.ASKED and (header.kept or header.workflow_locks):
            # What was kept for it may be this attempt's by now: it is kept for the next one.
            keep = pause + attempt.options.gap_ttl
            lease.successor = Successor(lease.claim.execution_id, keep)
        raise sent from None


def _stay(attempt: Attempt, wait: float | None) -> Held:
    """Wait in the worker's slot, also for a message that could not be sent again.

    The message may be acknowledged already, so to end here would lose it. If it was sent in spite
    of the error, it is a copy of this execution.
    """
    lease = attempt.lease
    while isinstance(answer := attempt.engine.acquire(lease, wait), Ended):
        _claim_anew(attempt, answer)
    if isinstance(answer, Held):
        return answer
    if isinstance(answer, Deadlocked):
        raise deadlock(attempt, answer)
    error = _conflict_error(attempt, answer)
    lease.tell("conflict", error.reason, policy="block" if lease.waits_since else "raise")
    raise error


def _conflict_error(attempt: Attempt, answer: Conflict | OtherAttempt) -> LockConflict:
    options, text = attempt.options, describe_conflict(attempt.lease.claim.names[0], answer)
    busy = answer if isinstance(answer, Conflict) else None
    mine = _own_share(answer)
    text += f"; {describe_own_share(mine)}" if mine else ""
    bound = "" if options.max_wait is None else f", lock_max_wait={options.max_wait:g} s"
    if attempt.message is None and attempt.lease.waits_since and options.max_wait is None:
        bound = f", and a direct call waits for {options.patience:g} s without a lock_max_wait"
    policy = getattr(options.on_conflict, "__qualname__", options.on_conflict)
    said = f"lock_on_conflict={policy!r}"
    if attempt.lease.claim.names[0].startswith(LINE):
        # For its turn an execution waits, whatever it does while somebody holds its lock.
        said = f"lock_order={options.order!r}"
    if _is_called_by_the_worker():
        said += ", but an error callback that a worker calls in its main process waits for nobody. "
        said += "With one argument, the failed task's id, it is sent as a task, which waits"
    return LockConflict(
        f"{text}; {said}{bound}",
        name=busy.name.removeprefix(LINE) if busy else None,
        owner=ids.full(busy.owner) if busy else None,
        remaining=answer.remaining,
    )


def _own_share(answer: Conflict | OtherAttempt) -> Lease | None:
    """The lease by which this call stack itself is in the way: it shares the lock."""
    if isinstance(answer, Conflict) and answer.shared:
        return reentrancy.sharing(answer.name)
    return None


def _is_called_by_the_worker() -> bool:
    """Whether this is an error callback that the worker calls there."""
    return running_request() is None and consumes_here()


def _claim_anew(attempt: Attempt, ended: Ended) -> None:
    """This is a late copy of a message whose execution has ended. If it has to run all the same, it
    claims the locks as an execution of its own.

    Raises:
        Late: nothing of it is to run.
    """
    lease, message, task = attempt.lease, attempt.message, attempt.task
    # The same id for all late copies, so that they are copies of one another, too.
    again = again_of(lease.claim.execution_id)
    if message is None or ended.retried or not _has_to_run(task, message):
        if task.acks_late:
            # One that had to run may be parked by that id, for its turn (`lock_order`) or for the
            # lock: the result has come meanwhile. Nobody else would end its place.
            with suppress(RelockError):
                attempt.engine.parking.withdraw(again)
        raise Late("is a late copy of an execution that has ended")
    if attempt.options.cooldown is not None:
        cooldown.end_before(message, attempt.engine, lease.claim.names)
    lease.claim = lease.claim._replace(execution_id=again)
    lease.again(ids.new_attempt_id())


def again_of(execution_id: str) -> str:
    """The id by which late copies of an execution run that has ended."""
    return ids.short(f"{execution_id}+again")


def deadlock(attempt: Attempt, answer: Deadlocked) -> LockDeadlock:
    """The error for a wait that would never end."""
    claim = attempt.lease.claim
    text = describe_deadlock(answer.path, reentrancy.sharing(answer.path[-1]))
    attempt.lease.tell("conflict", text, policy="raise")
    return LockDeadlock(
        f"{attempt.task.name}: {text}",
        name=claim.names[0].removeprefix(LINE),
        owner=ids.full(claim.owner),
    )


def _has_to_run(task: Any, message: Any) -> bool:
    """Whether the message still has to be executed, though the body has ended once for it.

    The lock is released before Celery stores the result and publishes the next step. With
    `acks_late`, a worker that dies in between leaves a message that is delivered again on purpose:
    it is discarded only if the result is there. After an execution that ended without one
    (`Ignore`) a copy runs again, as it does without a lock; so does one that stores no result but
    has a next step, or is a member of a chord.
    """
    if not task.acks_late:
        return False
    delivery = delivery_of(message)
    if delivery.ended_for_good is not None and delivery.ended_for_good():
        return False
    if tells_no_state(task, message):
        return bool(message.chain or message.callbacks or message.errbacks or message.chord)
    # Once for a message: one that waits for its turn and then for the lock is asked about twice.
    delivery.stored_by = delivery.stored_by or time.monotonic() + _STORING
    while True:
        found = stored(task, message.id)
        if found is None:
            return True
        if found["status"] in READY_STATES:
            # Not of the execution that has ended, or its message was rejected all the same.
            return found["status"] == FAILURE and not is_acknowledged(task, found["result"])
        if time.monotonic() >= delivery.stored_by:
            return True
        time.sleep(0.1)


def pause_for(message: Any, options: LockOptions) -> float | None:
    """Seconds until the message is to be sent again, None when `lock_max_wait` is over."""
    pause, left = pause_before(header_of(message).attempts + 1), seconds_left(message, options)
    if left is None:
        return pause
    return min(pause, left) if left > 0 else None


def seconds_left(message: Any, options: LockOptions) -> float | None:
    """Seconds that are left of `lock_max_wait`; None without one."""
    if options.max_wait is None:
        return None
    return (header_of(message).since or time.time()) + options.max_wait - time.time()


def seconds_to_resume(left: float | None, message: Any) -> float | None:
    """Seconds until a parked message must be resumed in any case.

    Then its wait is over, or it has expired, which a worker finds when it receives the message.
    """
    expires = seconds_to(message.expires)
    if expires is None:
        return left
    return expires + 0.01 if left is None else min(left, expires + 0.01)


def pause_before(attempt: int) -> float:
    """Seconds to wait before the given attempt (from 1).

    They double, and half of them is random, so that executions that met one holder do not all come
    back at once.
    """
    longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(attempt, 16))
    return ids.chance.uniform(longest / 2, longest)


def release(engine: Engine, lease: Lease, ended: EndedAs = "") -> None:
    """Release a lease. A failure is logged, as the task's own outcome stands."""
    # Also of an acquire that was not answered: a frozen server may still execute it.
    held = lease.state in (State.HELD, State.LOST)
    asked = lease.state not in (State.NEW, State.RELEASED)
    try:
        engine.release(lease, ended=ended)
    except (SoftTimeLimitExceeded, LockLost):
        # The rule in `delivery`. The body had its outcome before; one that has called it is to hear
        # of the exception.
        with suppress(Exception):
            engine.release(lease, ended=ended)
        if inside.get():
            raise
    except RelockError as error:
        # What was refused has not acquired.
        again = asked and (held or lease.successor or isinstance(error, LockUnavailable))
        logger.log(
            logging.WARNING if held else logging.DEBUG,
            "Cannot release the lock %s, %sits lease ends it within %.0f s: %s",
            _named(lease),
            "trying again; " if again else "",
            lease.claim.lease,
            error,
        )
        if again:
            engine.later.add(partial(_release_again, engine, lease, ended, held))
    except BaseException:
        # The same, of whatever else is thrown in.
        with suppress(Exception):
            engine.release(lease, ended=ended)
        raise


def _release_again(engine: Engine, lease: Lease, ended: EndedAs, held: bool) -> None:
    engine.release(lease, ended=ended)
    if held:
        is_left = lease.successor is not None and not lease.cools
        what = "left to what comes next" if is_left else "released"
        logger.info("The lock %s is %s now", _named(lease), what)


def _named(lease: Lease) -> str:
    return ", ".join(repr(name) for each in lease.claim.names for name in lock_names(each))
