"""`lock_keep_on_retry`: the hold of an execution passes to its retry, through the countdown.

A retry is a message of its own, so another execution. Its id is known once it is published, and
when the body has ended the hold is left to that id, in the same permit. Nobody renews it meanwhile:
the process that published the retry may be gone by the time it runs, and if the retry never comes
the lease ends the lock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..declaration import declaration
from ..engine import events
from ..engine.engine import Engine
from ..engine.lease import Lease
from ..engine.protocol import MAY_COME, Held, Successor
from ..errors import RelockError
from ..naming.names import Misfit
from .conflict import Attempt, obtain, release
from .delivery import Delivery, Retried, afterwards, delivery_of
from .ending import (
    end_unexecuted,
    ended_as,
    is_acknowledged,
    is_retried,
    keep_only,
    remember_unlocked,
)
from .message import header_of, keep_for, prefix_here, running_request
from .states import Aside, SentAgain


@dataclass(slots=True, eq=False)
class LeftToRetry:
    """What a running body leaves to its retry.

    Attributes:
        attempt: by which the body has its locks.
        open: whether the body has ended, and Celery has yet to make the retry of its error, or to
            store the state RETRY.
    """

    attempt: Attempt
    open: bool = False

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Around a body: if it has sent its retry, the lease is left to that, however it ends."""
        delivery, raised = delivery_of(self.attempt.message), None
        delivery.left_to_retry = self
        try:
            yield
        except Exception as error:
            raised = error
            raise
        finally:
            if delivery.retry is not None:
                self.leave(delivery.retry)
            if is_retried(self.attempt.task, delivery, raised):
                afterwards(partial(self.end, raised))
                self.open = True

    def leave(self, sent: Retried) -> None:
        """Leave the lease to the retry, if that needs any of it; release what it does not need."""
        lease, gap = self.attempt.lease, self.attempt.options.gap_ttl
        needed = {name for name, _ in sent.header.get("kept", ())}
        kept = tuple(name in needed for name in lease.claim.names)
        if not any(kept):
            return
        if not all(kept):
            keep_only(self.attempt.engine, lease, kept)
        keep = keep_for(gap, sent.fields.get("eta"), sent.fields.get("expires"))
        lease.successor = Successor(sent.execution_id, keep)

    def end(self, error: Exception | None) -> None:
        """The message is over: the retry of its error was sent, or there is none."""
        task, engine, lease, _, message, _ = self.attempt
        delivery = delivery_of(message)
        if delivery.retry is not None:
            self.leave(delivery.retry)
        release(engine, lease, ended_as(message) if is_acknowledged(task, error) else "")


def obtain_kept(attempt: Attempt) -> Held | None:
    """Acquire as `obtain` does. A retry that ends without its locks, or has others, leaves nothing
    that was kept for it."""
    kept, engine, message = header_of(attempt.message).kept, attempt.engine, attempt.message

    # Not here: Redis can be silent.
    def clear_later(remember: float | None, but: Collection[str] = ()) -> None:
        engine.later.add(partial(clear_away, engine, message, remember, but=but))

    try:
        held = obtain(attempt._replace(kept_fences=[fence for _, fence in kept]))
    except Exception as error:
        if not isinstance(error, Aside | SentAgain):
            clear_later(remember_unlocked(attempt, error))
        raise
    names = attempt.lease.claim.names
    if held is None:  # lock_on_unavailable="run"
        clear_later(remember_unlocked(attempt, None))
        return None
    if any(name not in names for name, _ in kept):  # a deploy has changed its names
        clear_later(MAY_COME, but=names)
    _look_for_a_gap(attempt.lease, dict(kept))
    return held


def _look_for_a_gap(lease: Lease, kept: Mapping[str, int]) -> None:
    """Find out whether a retry has the holds that were kept for it. If not, its lease is broken,
    and the signal `lock_lost` tells so.

    Args:
        kept: the fence of each lock name.
    """
    claim = lease.claim
    fences = dict(zip(claim.names, lease.fences, strict=True))
    broken = {name: fence for name, fence in kept.items() if fences.get(name, fence) != fence}
    lease.unbroken = not broken
    if broken and events.wanted("lost"):
        # It also ends if the retry is to be alone and others share the lock (`downgrade`).
        reason = (
            "the hold that was kept for this retry had ended before the retry came, or others "
            "shared the lock then"
        )
        event = events.LockEvent(
            "lost",
            tuple(broken),
            claim.execution_id,
            claim.owner,
            fence=max(broken.values()),
            reason=reason,
            work=lease.work,
        )
        events.tell(event)


def on_publish(body: Any, header: dict[str, Any], retried: Delivery | None) -> None:
    """A retry's header tells what is kept for it."""
    if retried is None:
        return
    if retried.left_to_retry is None:
        # One of an execution that did not get what was kept for it is to hear of the gap.
        if awaited := header_of(running_request()).kept:
            header["kept"] = [list(each) for each in awaited]
        return
    attempt: Attempt = retried.left_to_retry.attempt
    lease, needed = attempt.lease, _names_of(attempt.task, *body[:2])
    kept = zip(lease.claim.names, lease.fences, strict=True)
    header["kept"] = [[name, fence] for name, fence in kept if name in needed]
    header["before"] = [lease.claim.execution_id]


def _names_of(task: Any, args: Any, kwargs: Any) -> tuple[str, ...]:
    """The locks that a retry needs, by its own arguments."""
    try:
        declared = declaration(type(task)).of_call({}, prefix_here())
        return declared.names_of_call(task, args, kwargs)
    except (RelockError, Misfit):
        return ()  # it says so itself when it runs


def clear_away(
    engine: Engine,
    request: Any,
    remember: float | None,
    but: Collection[str] = (),
    **_: Any,
) -> None:
    """The retry is not executed: release what is kept for it, but for these names. A body that has
    begun has it no more, and releases by itself."""
    header = header_of(request)
    names = [name for name, _ in header.kept if name not in but]
    end_unexecuted(engine, names, header.execution_id, remember, is_left=True)
