"""How an execution ends, as far as Celery and the broker go, and what is let go then that waits for
it.

    is_acknowledged    whether its message is gone for good
    is_requeued        whether it is put back instead
    is_autoretried     whether a retry of its error takes its place
    is_retried         whether any retry does
    is_over            as is_acknowledged, where a retry may still be sent; then its end comes later
    ended_as           what its copies are told
    remember_for       for how long its end is remembered
    remember_unlocked  the same where it ends, or begins its body, without its locks
    end_unlocked       it ends without its locks
    end_unexecuted     what is kept for one that has ended, or will not come, is released
    keep_only          of its locks it leaves some to what comes, and releases the others
    withdraw_later     the message of one that was parked
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from celery.exceptions import Ignore, Reject, Retry, TimeLimitExceeded, WorkerLostError

from ..declaration import declaration
from ..engine.crash import FORGET, Entry, kept_for
from ..engine.engine import Engine
from ..engine.events import logger
from ..engine.lease import Lease
from ..engine.protocol import KEPT, MAY_COME, REMEMBER_ATTEMPT, Claim, EndedAs, Release
from ..errors import RelockError
from ..naming.names import Misfit
from ..options import LockOptions
from .delivery import Delivery, afterwards, known_delivery
from .message import header_of
from .states import tells_no_state

if TYPE_CHECKING:
    from .conflict import Attempt


def is_acknowledged(task: Any, error: BaseException | None) -> bool:
    """Whether the message of an execution that ends with this error is acknowledged for good.

    The broker may bring back one that is rejected, by a dead-letter queue or a redrive, and then it
    is to run again. The answer is that of `celery.worker.request.Request.on_failure`.
    """
    if not task.acks_late or error is None or isinstance(error, Ignore | Retry):
        return True
    if not isinstance(error, Exception):
        return False  # of a process that is about to end, or by what its pool does not see
    if _acknowledges(task, error) and not puts_back(task, error):
        return True
    delivery = known_delivery(task.request)
    has_sent_one = delivery is not None and delivery.retry is not None
    return has_sent_one and is_autoretried(task, error)


def remember_for(task: Any, error: BaseException | None) -> float | None:
    """For how many seconds to remember an execution that ends with this error, as `end_unexecuted`
    takes it: not at all if its message is rejected, as it may be brought back."""
    return None if is_acknowledged(task, error) else MAY_COME


def _acknowledges(task: Any, error: BaseException) -> bool:
    which = "acks_on_timeout" if isinstance(error, TimeLimitExceeded) else "acks_on_failure"
    flag = getattr(task, which, task.acks_on_failure_or_timeout)  # Celery >= 5.7 has both
    return bool(flag) and not isinstance(error, Reject)


def is_requeued(task: Any, error: BaseException | None) -> bool:
    """Whether Celery puts the message of an execution back that ends with this error. It cannot if
    that is acknowledged already."""
    return error is not None and puts_back(task, error) and not is_autoretried(task, error)


def puts_back(task: Any, error: BaseException) -> bool:
    """Whether Celery puts a message back for an error that has reached it. One of a process that
    was lost, or has passed its time limit, reaches it by no autoretry."""
    if not task.acks_late:
        return False
    if isinstance(error, WorkerLostError):
        return task.reject_on_worker_lost and not getattr(task, "retry_on_worker_lost", False)
    if isinstance(error, TimeLimitExceeded):  # Celery < 5.7 tells nobody of one that it puts back
        return hasattr(task, "acks_on_timeout") and not _acknowledges(task, error)
    return isinstance(error, Reject) and error.requeue


def is_retried(task: Any, delivery: Delivery, error: BaseException | None) -> bool:
    """Whether a body ends because it has sent its retry, or with an error of which autoretry makes
    one.

    That is let go only after `task_retry`: before, it could succeed first, and Celery would write
    its RETRY over that, so that `get()` never returns.
    """
    has_sent_it = isinstance(error, Retry) and delivery.retry is not None
    return has_sent_it or is_autoretried(task, error)


def is_autoretried(task: Any, error: BaseException | None) -> bool:
    """Whether Celery's autoretry makes a retry of an error that the running body ends with.

    It lies around the `run` of a task: it sends the retry when the error has left our code.
    """
    never = (Ignore, Retry, *_of_autoretry(task, "dont_autoretry_for", ()))
    fits = isinstance(error, tuple(_of_autoretry(task, "autoretry_for", ())))
    return fits and not isinstance(error, never) and _has_retries_left(task)


def _of_autoretry(task: Any, option: str, default: Any) -> Any:
    """What Celery's autoretry has for an option: `register_task(task, autoretry_for=…)` tells it to
    nothing but the function that it puts around `run`."""
    around = vars(task).get("run")
    told = inspect.getclosurevars(around).nonlocals if inspect.isfunction(around) else {}
    return told.get(option, getattr(task, option, default))


def _has_retries_left(task: Any) -> bool:
    """As `celery.app.autoretry` and `Task.retry` count them."""
    most = _of_autoretry(task, "retry_kwargs", {}).get("max_retries")
    most = getattr(task, "override_max_retries", most)
    most = task.max_retries if most is None else most
    return most is None or bool(task.request.retries < most)


def is_over(attempt: Attempt, error: Exception) -> bool:
    """Whether the message of an execution that ends with an error is acknowledged for good.

    Not yet, if Celery is about to send a retry of the error: a process that is killed before that
    leaves a message that is to run again. So then it is called off afterwards, if its message is
    acknowledged by that time.
    """
    task, message = attempt.task, attempt.message
    if task.acks_late and message is not None and is_autoretried(task, error):
        afterwards(lambda: end_unlocked(attempt, True) if is_acknowledged(task, error) else None)
        return False
    return is_acknowledged(task, error)


def remember_unlocked(attempt: Attempt, error: Exception | None) -> float | None:
    """As `remember_for`, of an execution that has not got its locks: it ends with this error, or
    with None goes on without them and has yet to run its body.

    A body whose message is acknowledged late may die, and then that is to run again.
    """
    is_last = not attempt.task.acks_late if error is None else is_over(attempt, error)
    return None if is_last else MAY_COME


def ended_as(message: Any | None, task: Any = None) -> EndedAs:
    """As what the end of a message's execution is remembered; "" for not at all: that of an id that
    was made from the task id, as a task that is sent again on purpose with that id would be taken
    for a late copy.

    Args:
        task: given where Celery may have yet to store its result. A copy asks for that, if it can.
    """
    if message is None or not header_of(message).own:
        return ""
    delivery = known_delivery(message)
    if delivery is not None and delivery.retry is not None:
        return "retried"
    asks = task is not None and task.acks_late and not tells_no_state(task, message)
    return "unacknowledged" if asks else "execution"


def end_unlocked(
    attempt: Attempt, over: bool, *, is_parked: bool = False, here: bool = True
) -> None:
    """An execution ends without its locks, or before Celery has sent its retry: no message of it
    runs later that is parked, on its way, or delivered once more.

    Args:
        over: whether its message is acknowledged for good; else that may come again, and run then.
        is_parked: whether its message may be parked.
        here: False if Redis can be silent: then this is done in another thread.
    """
    engine, claim = attempt.engine, attempt.lease.claim
    ended, remember = ended_as(attempt.message) if over else "", None if over else MAY_COME
    if not (ended or is_parked):
        return
    # It may come again before this is done, and be parked then.
    of = "" if over or here else claim.attempt_id
    leave = partial(_leave, engine, claim, ended, (remember, of) if is_parked else None)
    kept = _kept_parked(engine, claim.execution_id, remember, of)
    if not here:
        engine.later.add(leave, kept)
        return
    try:
        engine.later.try_now(leave, kept)
    except RelockError as failure:
        logger.warning("%s may run though it has ended: %s", claim.label, failure)


def _leave(
    engine: Engine, claim: Claim, ended: EndedAs, withdraw: tuple[float | None, str] | None
) -> None:
    # By this it leaves its place at these locks, too.
    if ended:
        of = claim.names, claim.execution_id, KEPT
        engine.parking.release(Release(*of, ended, engine.remember))
    if withdraw is not None:
        engine.parking.withdraw(claim.execution_id, *withdraw)


def locks_of(
    task: Any, request: Any, having: Callable[[LockOptions], object] = lambda _: True
) -> tuple[Any, tuple[str, ...]]:
    """The options and the lock names of a call that is not executed here. No names of a task that
    is not known, has no lock or not the option that `having` reads, or cannot be called so."""
    if task is None:
        return None, ()
    header = header_of(request)
    declared = declaration(type(task)).of_call(header.options, header.prefix, is_sent=True)
    options = declared.options
    try:
        if having(options) is not None:
            return options, declared.names_of_call(task, request.args, request.kwargs)
    except Misfit:
        pass  # such a call never asked for any
    return options, ()


def end_unexecuted(
    engine: Engine,
    names: Sequence[str],
    execution_id: str,
    remember: float | None = None,
    *,
    is_left: bool = False,
) -> None:
    """Release what is kept for an execution that will not come: now, or as soon as Redis can be
    asked.

    Args:
        remember: for how many seconds copies of it are told that it has ended; by default the
            engine's. With `MAY_COME` none are, and it may come all the same.
        is_left: what is kept for it is a hold, which who has sent it leaves to it, perhaps later.

    Raises:
        LockConfigError: from the backend.
    """
    if not names:
        return
    kept, of = kept_for(engine.backend, execution_id, *names), (engine, names, execution_id)
    engine.later.try_now(partial(_end_unexecuted, *of, remember, is_left), kept)


def _end_unexecuted(
    engine: Engine,
    names: Sequence[str],
    execution_id: str,
    remember: float | None,
    is_left: bool,
) -> None:
    remember = engine.remember if remember is None else remember
    # As an execution that has ended: the hold may not have been left to it yet.
    ended: EndedAs = "execution" if remember else ""
    if is_left and not remember:
        # Nor is one left to what was killed, and that can come again.
        ended, remember = "killed", REMEMBER_ATTEMPT
    engine.parking.release(Release(names, execution_id, KEPT, ended, remember))


def keep_only(engine: Engine, lease: Lease, kept: tuple[bool, ...]) -> None:
    """Release the locks of a lease but for those that are left to what comes."""
    claim = lease.claim
    rest = [name for name, is_kept in zip(claim.names, kept, strict=True) if not is_kept]
    # Before they are released: a renewal on its way that does not find them tells no loss.
    lease.narrow(kept)
    with suppress(RelockError):  # their lease ends them
        engine.parking.release(Release(rest, claim.execution_id, claim.attempt_id))


def withdraw_later(
    engine: Engine, execution_id: str, remember: float | None = None, attempt_id: str = ""
) -> None:
    """Take a message out of its queues for good; not here, as Redis can be silent. `remember` as
    for `Parking.withdraw`. `attempt_id`: of whom, if the message may come again, see `Backend`."""
    withdraw = partial(engine.parking.withdraw, execution_id, remember, attempt_id)
    engine.later.add(withdraw, _kept_parked(engine, execution_id, remember, attempt_id))


def _kept_parked(
    engine: Engine, execution_id: str, remember: float | None, attempt_id: str
) -> Entry:
    kept = kept_for(engine.backend, execution_id)
    if remember == MAY_COME:
        kept = kept._replace(keep=FORGET, attempt_id=attempt_id or KEPT)
    return kept
