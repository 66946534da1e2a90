"""`lock_cooldown`: after a success a lock is left to nobody for a while.

It begins when the body returns, in the command that would release the lock: so it costs none, and
nobody gets the lock in between. But then Celery can make a failure or a retry of the success, and a
process can be killed before it has told of it. So the id that the lock is left to is made from that
of the execution: who finds out that it has not succeeded ends the cooldown by that.

    after        the body returns
    _end         Celery says that it is no success, or a retry is sent
    end_before   of a late copy that has to run
    clear_away   the process is gone
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..engine.engine import Engine
from ..engine.events import logger
from ..engine.hold import Body, MakeHold
from ..engine.protocol import COOLDOWN, KEPT, Release, Successor
from ..errors import RelockError
from .delivery import delivery_of
from .ending import end_unexecuted, keep_only, locks_of
from .message import header_of

if TYPE_CHECKING:
    from .conflict import Attempt


def after(run_body: Body, attempt: Attempt, seconds: float) -> Body:
    """A body after which its locks cool down."""

    def run(make_hold: MakeHold) -> Any:
        result = run_body(make_hold)
        _begin(attempt, seconds)
        return result

    return run


def _begin(attempt: Attempt, seconds: float) -> None:
    """Leave the locks that were acquired, and not re-entered, to nobody for so long, unless a retry
    was sent."""
    engine, lease, message = attempt.engine, attempt.lease, attempt.message
    delivery = None if message is None else delivery_of(message)
    if delivery is not None and delivery.retry is not None:
        return
    acquired = tuple(not each for each in lease.reentered)
    if not any(acquired):
        return
    if not all(acquired):
        keep_only(engine, lease, acquired)
    if delivery is None:
        cooldown_id = COOLDOWN + lease.claim.execution_id
    else:
        cooldown_id = COOLDOWN + header_of(message).execution_id
        delivery.end_cooldown = partial(_end, engine, lease.claim.names, cooldown_id)
    lease.successor = Successor(cooldown_id, seconds)


def _end(engine: Engine, names: Sequence[str], cooldown_id: str) -> None:
    """The execution has not succeeded, or a retry of it is to run."""
    try:
        end_unexecuted(engine, names, cooldown_id)
    except RelockError as error:
        logger.warning("A cooldown does not end before its time: %s", error)


def end_before(message: Any, engine: Engine, names: Sequence[str]) -> None:
    """A late copy has to run: its execution has not told of its success. Raises as `acquire`."""
    engine.parking.release(Release(names, COOLDOWN + header_of(message).execution_id, KEPT))


def clear_away(
    engine: Engine, request: Any, remember: float | None, task: Any, began: bool
) -> None:
    """The process of an execution is gone, and has not told of its success."""
    if began:
        names = locks_of(task, request, lambda its: its.cooldown)[1]
        end_unexecuted(engine, names, COOLDOWN + header_of(request).execution_id, remember)
