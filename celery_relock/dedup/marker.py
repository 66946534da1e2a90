"""The dedup marker: a lease in Redis that belongs to a call which is queued or runs.

It is the hold of a lock that is named after the task and its lock names. While the message is in a
queue nobody renews it, so it says how long that may take (`QUEUED` and the others). The execution
that the message becomes takes it over: from then on it is renewed like any lock, freed by a reaper
when the process dies, and left to a retry or to the parked message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..engine import ids
from ..engine.engine import Engine
from ..engine.lease import Lease, QuietLease
from ..engine.protocol import (
    KEPT,
    MARKER,
    Answer,
    Claim,
    Conflict,
    HoldInfo,
    Release,
    Renewal,
)
from ..worker.message import QUEUED, keep_for

# How long it may take to send a message, in seconds: a caller that is killed meanwhile, or can
# neither send it nor remove the marker, leaves the marker for no longer.
SENDING = 60.0
# How long a message may be parked, in seconds: it cannot be lost in a queue, as others can
# (`QUEUED`).
PARKED = 30 * 86_400.0

Acquire = Callable[[Claim], Answer | None]

START, DONE = "until_start", "until_done"
#: For a marker that stays for some seconds whatever happens.
TIME = "time"
#: What the header says of a message that has no marker as Celery sent it by itself, and the marker
#: that its execution, or that of a retry, gets: no later call replaces it.
OWN = "own"


class Marker(NamedTuple):
    """Which marker a call has: its lock's name ("" for none), and until when."""

    name: str
    until: str

    @classmethod
    def of(cls, task_name: str, names: Sequence[str], mode: str | float | None) -> Marker:
        """The marker of a call with these lock names; `mode` is the value of `lock_dedup`."""
        return cls(name_for(task_name, names), mode if isinstance(mode, str) else TIME)


class Found(NamedTuple):
    """The call that has a marker.

    Attributes:
        task_id, execution_id: of its first message.
        remaining: for how many seconds it counts at least.
        since: when it got the marker, in seconds since the epoch by the server's clock.
        until: when the marker goes, as its holder has said; see `Marker`.
        begun: whether it is known that an execution, or a retry, has taken the marker over.
        repeated: the command that found it was sent more than once, so a copy may still come, and
            mark the call that asked.
    """

    task_id: str
    execution_id: str
    remaining: float
    since: float
    until: str
    begun: bool = False
    repeated: bool = False


def name_for(task_name: str, names: Sequence[str]) -> str:
    """The marker's lock. No lock name has a tab, so it is nobody else's, nor another task's."""
    return MARKER + "\t".join((task_name, *names))


def hold_id(execution_id: str) -> str:
    """The execution id under which an execution holds its marker: it has another lock as well."""
    return ids.digest(f"{execution_id}/dedup".encode())


def put(
    acquire: Acquire, marker: Marker, execution_id: str, task_id: str, keep: float
) -> Found | None:
    """Mark a call that is about to be sent, for so many seconds, with what acquires in the backend.
    Returns whose marker is there. Raises LockUnavailable, LockConfigError."""
    return found(acquire(_claim(marker, execution_id, task_id, keep)))


def extend(engine: Engine, name: str, execution_id: str, keep: float) -> None:
    """Let a marker last for so many seconds more. Where its execution has taken it over already, or
    is over, or was replaced, this changes nothing. Raises LockUnavailable."""
    engine.backend.renew([Renewal(name, hold_id(execution_id), KEPT, keep, longer=True)])


def look(engine: Engine, name: str) -> Found | None:
    """Whose marker is there, if anybody's. Raises LockUnavailable."""
    for hold in engine.inspect(name).holds:
        there = found(hold)
        if there is not None:
            is_first = hold.execution_id == hold_id(there.execution_id)
            return there._replace(begun=hold.attempt_id != KEPT or not is_first)
    return None


def found(told: HoldInfo | Answer | None) -> Found | None:
    """Whose hold this is, or which is in the way; None where that is not said."""
    if not isinstance(told, HoldInfo | Conflict):
        return None
    call, _, until = told.label.partition("\t")
    task_id, _, execution_id = call.rpartition(" ")
    if not task_id:
        return None
    repeated, since = isinstance(told, Conflict) and told.repeated, told.fence / 1e6
    return Found(task_id, execution_id, told.remaining, since, until, repeated=repeated)


def drop(engine: Engine, name: str, execution_id: str, *, ended: bool = False) -> bool:
    """Free the marker of a call that has not begun. False if it had none, or has begun. `ended`: it
    gets none any more, for as long as its end is remembered."""
    mine = Release([name], hold_id(execution_id), KEPT)
    if ended:
        mine = mine._replace(ended="execution", remember=engine.remember)
    return engine.backend.release(mine).had


def drop_begun(engine: Engine, name: str, there: Found) -> None:
    """Free the marker of a call whose execution has taken it over."""
    for hold in engine.inspect(name).holds:
        own = found(hold)
        if own is not None and own.execution_id == there.execution_id:
            engine.backend.release(Release([name], hold.execution_id, hold.attempt_id))


def take_away(engine: Engine, marker: Marker, there: Found) -> bool:
    """Take the marker for good from a call that has not begun, and remember that it was replaced.
    False if it has begun, or has none, or somebody waits for its very result."""
    while True:
        hold = hold_of(engine, marker.name, there.execution_id)
        own = found(hold)
        if hold is None or own is None or own.until == OWN:
            return False
        # Until its body begins. Of any other it cannot be told whether the body runs.
        if own.until != START and hold.attempt_id != KEPT:
            return False
        # In one step with the end of its hold: an execution that waits in a worker slot asks when
        # it is to begin, and one that arrives must not take the marker again before the call that
        # comes instead has got it.
        of = [marker.name], hold.execution_id, hold.attempt_id
        taken = Release(*of, "replaced", max(hold.remaining, engine.remember))
        had = engine.backend.release(taken).had
        # Sent twice, the command cannot tell: its first copy may have been lost, and the execution
        # have come before the second.
        if had and hold_of(engine, marker.name, there.execution_id) is None:
            return True


def counts_for(task: Any, options: Mapping[str, Any]) -> float:
    """Seconds for which a call counts that is sent with these options and then seen by nobody. One
    that says `expires=None` does not expire, whatever its task says, as in Celery."""
    due = options.get("countdown") or options.get("eta")
    return keep_for(QUEUED, due, options.get("expires", task.expires))


def lease_of(
    engine: Engine, marker: Marker, execution_id: str, task_id: str, seconds: float
) -> Lease:
    """The lease by which an execution has its call's marker."""
    claim = _claim(marker, execution_id, task_id, seconds, ids.new_attempt_id())
    return QuietLease(claim, engine.backend)


def _claim(
    marker: Marker, execution_id: str, task_id: str, lease: float, attempt_id: str = KEPT
) -> Claim:
    own, label = hold_id(execution_id), f"{task_id} {execution_id}\t{marker.until}"
    return Claim(own, attempt_id, own, (marker.name,), (1,), lease, label)


def hold_of(engine: Engine, name: str, execution_id: str) -> HoldInfo | None:
    """The hold of a marker that this execution has, or its message. Raises LockUnavailable."""
    own = hold_id(execution_id)
    return next(iter(engine.inspect(name, (own,)).holds), None)
