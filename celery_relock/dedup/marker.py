"""The marker of a call that is queued or runs: what keeps a second one from being sent.

It is a hold, of a lock that is named after the task and its lock names. While the message is on its
way nobody renews it, so it says how long that may take (`QUEUED` and the like, here and nowhere
else). The run that arrives takes it over: from then on it is renewed like any lock, freed by a
reaper when the process dies, and left to a retry or to the message that is parked.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple

from celery.utils.time import maybe_iso8601

from ..engine import ids
from ..engine.engine import Engine
from ..engine.lease import Lease
from ..engine.protocol import KEPT, Answer, Claim, Conflict, Renewal

# How long it may take to send a message, in seconds: a caller who is killed meanwhile, or can
# neither send it nor take the marker off again, leaves it for no longer.
SENDING = 60.0
# How long a message may be in a broker's queue after it is due, in seconds, before its call no
# longer counts: this is what a message that is lost costs.
QUEUED = 86_400.0
# The same for a message that is parked: it cannot be lost in a queue.
PARKED = 30 * 86_400.0
# For how long it is known that a run's marker is gone, in seconds: a copy must not take it again.
REMEMBER = 3600.0

START, DONE = "until_start", "until_done"
#: For a marker that stays for some seconds whatever happens.
TIME = "time"
#: For a call that has none: one that asked for that, and one that Celery made.
OFF, OWN = "off", "own"


class Marker(NamedTuple):
    """Which marker a call has: its lock's name ("" for none), and until when."""

    name: str
    until: str


class Found(NamedTuple):
    """The call that has a marker: its ids, and for how many seconds it counts at least."""

    task_id: str
    execution_id: str
    remaining: float


class Quiet(Lease):
    """A lease of a marker: what happens to it is nobody's news."""

    __slots__ = ()

    def tell(self, kind: str, reason: str = "", since: float = 0.0) -> None:
        pass


def until(mode: str | float) -> str:
    """When a marker goes, by the option's value."""
    return mode if isinstance(mode, str) else TIME


def name_for(task_name: str, names: Sequence[str]) -> str:
    """The marker's lock. No lock name has a tab, so it is nobody else's, nor another task's."""
    return "\t".join(("dedup", task_name, *names))


def readable(name: str) -> str:
    """The lock names that a marker is for."""
    return ", ".join(name.split("\t")[2:])


def hold_id(execution_id: str) -> str:
    """The id of a run's hold of its marker."""
    return ids.digest(f"{execution_id}/dedup".encode())


def claim_for(
    name: str, execution_id: str, task_id: str, lease: float, attempt_id: str = KEPT
) -> Claim:
    """What is asked for it; `nonce` is that of an attempt to execute the run, if there is one."""
    own, label = hold_id(execution_id), f"{task_id} {execution_id}"
    return Claim(own, attempt_id, own, (name,), (1,), lease, label)


def put(engine: Engine, name: str, execution_id: str, task_id: str, keep: float) -> Found | None:
    """Mark a call that is about to be sent, for so many seconds. Returns whose marker is there.

    Raises:
        LockUnavailable, LockConfigError: from the store.
    """
    return found(engine.backend.acquire(claim_for(name, execution_id, task_id, keep)))


def extend(engine: Engine, name: str, execution_id: str, keep: float) -> None:
    """Let a marker last for so many seconds more. Where its run has taken it over already, or is
    over, or was replaced, this changes nothing. Raises LockUnavailable."""
    engine.backend.renew([Renewal(name, hold_id(execution_id), KEPT, keep)])


def found(answer: Answer) -> Found | None:
    """Whose marker is in the way, None where the answer does not say."""
    if not isinstance(answer, Conflict):
        return None
    task_id, _, execution_id = answer.label.rpartition(" ")
    return Found(task_id, execution_id, answer.remaining) if task_id else None


def begin(engine: Engine, name: str, execution_id: str, task_id: str) -> None:
    """Let it be known of a marker that goes on by the clock that its call has begun."""
    for hold in engine.inspect(name).holds:
        if hold.execution_id == hold_id(execution_id):
            engine.backend.acquire(
                claim_for(name, execution_id, task_id, hold.remaining, ids.new_attempt_id())
            )


def drop(engine: Engine, name: str, execution_id: str, *, ended: float = 0.0) -> bool:
    """Take a marker off a call that has not begun; False if it had none, or has begun.

    Args:
        ended: for so many seconds the run gets none any more.
    """
    own = hold_id(execution_id)
    return engine.backend.release([name], own, KEPT, "run" if ended else "", ended).had


def take_away(engine: Engine, marker: Marker, there: Found) -> bool:
    """Take a marker for good from a call that has not begun. False if it has, or has none."""
    own, name = hold_id(there.execution_id), marker.name
    while True:
        hold = next((each for each in engine.inspect(name).holds if each.execution_id == own), None)
        if hold is None or (marker.until != START and hold.attempt_id != KEPT):
            return False
        # In one step with the end of its hold, so that it cannot be told to have ended without: one
        # that waits in a worker slot asks when it is to begin, and one that arrives must not take
        # the marker again before the call that comes instead has got it.
        remember = max(hold.remaining, REMEMBER)
        if engine.backend.release([name], own, hold.attempt_id, "run", remember).had:
            return True


def keep_for(task: Any, options: dict[str, Any]) -> float:
    """Seconds for which a call counts that is sent with these options and then seen by nobody."""
    due = seconds_to(options.get("countdown") or options.get("eta"), task.app)
    end = seconds_to(options.get("expires") or task.expires, task.app)
    # A worker that gets it later only throws it away.
    return min(due + QUEUED, end + 60.0) if end else due + QUEUED


def seconds_to(when: Any, app: Any) -> float:
    """From now to a moment in any form that Celery takes; 0 if it is none, or is over."""
    if isinstance(when, int | float):
        return max(0.0, float(when))
    try:
        moment = maybe_iso8601(when)
    except (TypeError, ValueError):
        return 0.0  # Celery says so better
    if not isinstance(moment, datetime):
        return 0.0
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=app.timezone)
    return max(0.0, (moment - datetime.now(timezone.utc)).total_seconds())


def look(engine: Engine, name: str) -> Found | None:
    """Whose marker is there, if anybody's. Raises LockUnavailable."""
    for hold in engine.inspect(name).holds:
        task_id, _, execution_id = hold.label.rpartition(" ")
        if task_id:
            return Found(task_id, execution_id, hold.remaining)
    return None
