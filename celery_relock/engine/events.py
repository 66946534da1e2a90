"""What happens to locks, told to subscribers (the log by default), and the sentences
about who holds what, for errors, logs and the command line."""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from . import ids
from .interrupt import is_thrown_in
from .protocol import COOLDOWN, LINE, Answer, Conflict, Full, OtherAttempt, Passed

if TYPE_CHECKING:
    from .lease import Lease

logger = logging.getLogger("celery_relock")


class Work(NamedTuple):
    """The task that a lock is for.

    Attributes:
        task: the task object, None where it is not known (a process that is dead).
        name: of the task.
        id: of the message that is executed, "" without a message.
        node: the worker's node name, "" if unknown.
    """

    task: Any
    name: str
    id: str
    node: str = ""


NO_TASK = Work(None, "", "")


class LockEvent(NamedTuple):
    """Something that happened to an execution's lock.

    Attributes:
        kind: what happened; the signals of `celery_relock.signals` say what each one means.
        names: the lock names.
        execution_id: its short id.
        owner: of the permit. Listeners are told the whole id of a workflow.
        fence: the fencing token of the permit, 0 if there is none.
        reason: a sentence for people, "" where the kind says it all.
        since: seconds since the last good renewal, for "lost".
        work: the task that the lock is for, None outside of tasks.
        waited: seconds from when the execution first had to wait, parked ones too; 0 if it did not.
        held: seconds for which this execution held the lock.
        reentered: whether the execution joined permits that were there already.
        policy: what becomes of an execution that met a conflict, "" where nobody says.
        of_workflow: whether it is a workflow lock, for `enter` or a step.
    """

    kind: str
    names: tuple[str, ...]
    execution_id: str
    owner: str
    fence: int = 0
    reason: str = ""
    since: float = 0.0
    work: Work | None = None
    waited: float = 0.0
    held: float = 0.0
    reentered: bool = False
    policy: str = ""
    of_workflow: bool = False


# For an operator: what happens to every lock is for debugging, what keeps an execution waiting is
# worth a line, and a warning is what should not happen.
_LEVELS = {
    **dict.fromkeys(("acquired", "reentered", "released"), logging.DEBUG),
    **dict.fromkeys(("waiting", "parked", "resumed", "dropped"), logging.DEBUG),
    **dict.fromkeys(("unavailable", "unrenewed"), logging.DEBUG),
    "conflict": logging.INFO,
    "unprotected": logging.ERROR,
}


# Each listener, with the kinds that it wants.
_subscriptions: list[tuple[Callable[[LockEvent], None], Container[str]]] = []


def subscribe(listener: Callable[[LockEvent], None], kinds: Container[str]) -> None:
    """Call `listener` at every event of these kinds, maybe from another thread. A set of kinds may
    change later."""
    _subscriptions.append((listener, kinds))


@contextmanager
def only_logged(text: str, *args: object) -> Iterator[None]:
    """What fails in the block is logged, with its traceback. What arrives from outside passes."""
    try:
        yield
    except Exception as error:
        if is_thrown_in(error):
            raise
        logger.warning(text, *args, exc_info=True)


def wanted(kind: str) -> bool:
    """Whether anybody would hear of an event of this kind. Most locks nobody watches."""
    if logger.isEnabledFor(_LEVELS.get(kind, logging.WARNING)):
        return True
    for _, kinds in _subscriptions:  # noqa: SIM110 - asked twice a lock: a generator takes as long again
        if kind in kinds:
            return True
    return False


def tell(event: LockEvent) -> None:
    """Log the event and call the listeners. No lock fails because somebody watches: what a listener
    raises is logged."""
    level = _LEVELS.get(event.kind, logging.WARNING)
    event = event._replace(owner=ids.full(event.owner))
    if logger.isEnabledFor(level):
        logger.log(level, "%s", sentence(event), extra=_facts(event))
    for listener, kinds in tuple(_subscriptions):
        try:
            if event.kind in kinds:
                listener(event)
        except Exception as error:
            if is_thrown_in(error):
                raise
            logger.exception("a listener for lock events failed: %r", listener)


def tell_passed(call: Passed) -> None:
    """A call was passed over in its line."""
    task, task_id, *_ = told_by(call.label)
    reason = (
        f"passed over after {duration(call.waited)}: its message has not come, and calls that were "
        "sent after it wait (lock_order_gap)"
    )
    names, work = (call.line.removeprefix(LINE),), Work(None, task, task_id)
    event = LockEvent("passed", names, call.execution_id, owner="", reason=reason, work=work)
    tell(event._replace(waited=call.waited))


def sentence(event: LockEvent) -> str:
    """The event for people."""
    text = f"lock {', '.join(map(repr, event.names))} {event.kind}"
    text += f": owner {event.owner}" if event.owner else ""
    if event.work is not None and event.work.name:
        text += f", task {event.work.name}[{event.work.id}]"
    if event.fence:
        text += f", fence {event.fence}"
    if event.since:
        at = time.strftime("%H:%M:%S", time.localtime(time.time() - event.since))
        text += f", last renewal at {at} ({event.since:.1f} s ago)"
    if event.reason:
        text += f"; {event.reason}"
    return text


def _facts(event: LockEvent) -> dict[str, object]:
    facts = event._asdict()
    work, execution = facts.pop("work") or NO_TASK, facts.pop("execution_id")
    kind, names = facts.pop("kind"), facts.pop("names")
    return extra(kind, names, work.name, work.id, execution=execution, **facts)


def extra(
    kind: str, names: Iterable[str], task_name: str, task_id: str, **facts: object
) -> dict[str, object]:
    """The fields of a log record: plain values, so that any formatter can write them."""
    told = {"event": kind, "names": list(names), **facts}
    # A task's by the names under which Celery's own formatter for tasks has them.
    of_task = {"task_name": task_name, "task_id": task_id} if task_name else {}
    return {**{f"lock_{name}": fact for name, fact in told.items()}, **of_task}


# Why a claim that shares a lock has to wait while others share it.
OUTRANKED = ", and an exclusive execution waits ahead"
# Of a longer task name, in characters, the middle is left out.
_LONGEST_NAME = 100
_LABEL = re.compile(r"(?P<task>.*?)(?:\[(?P<id>.*)\])? (?P<host>\S*):(?P<pid>\d+)", re.DOTALL)


def label_of(work: str, task_id: str = "") -> str:
    """`work[id] host:pid`: who holds a lock, for people. The id is whole, whatever its length, so
    that it can be pasted into a command."""
    if len(work) > _LONGEST_NAME:
        half = _LONGEST_NAME // 2
        work = f"{work[:half]}…{work[-half:]}"
    return f"{work}{f'[{task_id}]' if task_id else ''} {_here(os.getpid())}"


def told_by(label: str) -> tuple[str, str, str, int]:
    """Task, task id, host and process id, as `label_of` wrote them."""
    found = _LABEL.fullmatch(label)
    if found is None:
        return label, "", "", 0
    return found["task"], found["id"] or "", found["host"], int(found["pid"])


def describe_conflict(name: str, answer: Answer) -> str:
    """`the lock … is held by … for …`, from what the backend answered."""
    if isinstance(answer, OtherAttempt):
        what = f"holds or awaits the lock {name!r}"
        if name.startswith(LINE):
            what = f"has its turn or awaits it in the order of {name.removeprefix(LINE)!r}"
        left = f"for {answer.remaining:.0f} s more if it has died"
        return f"another copy of this execution {what} ({answer.label}), {left}"
    if not isinstance(answer, Conflict):
        return f"the lock {name!r} is held by another execution"
    if answer.name.startswith(LINE):
        return (
            f"calls that were sent before are to run first for {answer.name.removeprefix(LINE)!r} "
            f"(lock_order), {answer.waiting} wait or are on their way"
            + (f"; now it is the turn of {answer.label}" if answer.label else "")
        )
    who = answer.label or "an unnamed holder"
    if answer.owner.startswith(COOLDOWN):
        text = f"cools down for {answer.remaining:.1f} s more (lock_cooldown), after {who}"
    elif answer.fence:
        who += f" (workflow {ids.full(answer.owner)})"
        held = duration(time.time() - answer.fence / 1e6)
        if answer.kept:
            text = (
                f"is kept for the next step, or the retry, of {who}, which no process runs now, "
                f"for {duration(answer.remaining)} more"
            )
        else:
            # Who began to share the lock may have gone long ago.
            how = ("shared", "without a break for") if answer.shared else ("held", "for")
            left = f"its lease has {answer.remaining:.0f} s left"
            text = f"is {how[0]} by {who} {how[1]} {held}, {left}"
        text += OUTRANKED if answer.outranked else ""
    elif answer.waiting:
        ahead = "1 waiter is" if answer.waiting == 1 else f"{answer.waiting} waiters are"
        return f"the lock {answer.name!r} is free, but {ahead} ahead"
    else:
        text = "was acquired, but its lease ended before the answer came"
    waiting = f", {answer.waiting} waiting for it" if answer.waiting else ""
    return f"the lock {answer.name!r} {text}{waiting}"


def describe_full(answer: Full) -> str:
    """Why a message cannot be parked."""
    if answer.name:
        return (
            f"the lock {answer.name.removeprefix(LINE)!r} has {answer.parked} parked already, "
            "which is lock_max_parked"
        )
    return (
        f"{answer.parked} messages of {answer.size} bytes are parked for all locks together, and "
        "relock_max_parked_messages and relock_max_parked_bytes allow no more: see celery -A APP "
        "relock stats"
    )


def describe_deadlock(path: Sequence[str], sharing: Lease | None) -> str:
    """`waiting for … would never end: …`, from the path of a `Deadlocked`. `sharing`: the lease of
    this call stack that shares the lock already."""
    what, kept_by = _waited_for(path[0])
    parts = [f"{what} {kept_by}" if path[0].startswith(LINE) else f"the lock {what} {kept_by}"]
    for waiter, name in zip(path[1::2], path[2::2], strict=True):
        what, kept_by = _waited_for(name)
        who = waiter or "an unnamed execution"
        parts.append(f"{who}, which waits for {what}, which {kept_by}")
    who, how = "this very call stack", ""
    if sharing:
        who, advice = _sharer(sharing)
        how = f", which shares it: {advice}"
    elif len(path) == 1:
        who += ", or by who has started this thread"
        how = ". Use the same Lock object in one thread, or give both the same owner"
    return f"waiting would never end: {' '.join(parts)} {who}{how}"


def _waited_for(name: str) -> tuple[str, str]:
    """A lock, or a turn in a line, and how somebody keeps others from it."""
    if name.startswith(LINE):
        return f"its turn for {name.removeprefix(LINE)!r} (lock_order)", "comes after"
    return repr(name), "is held by"


def describe_own_share(sharing: Lease) -> str:
    """`… is among its holders: …`, of a conflict with this call stack's own lease."""
    who, advice = _sharer(sharing)
    return f"{who} is among its holders: {advice}"


def _sharer(lease: Lease) -> tuple[str, str]:
    """Who shares the lock by this lease of the call stack, and what to do instead."""
    if lease.of_workflow:
        return "the workflow of this task", "let the workflow hold it exclusively"
    return "this very call stack", "acquire it exclusively first, and downgrade it"


def duration(seconds: float) -> str:
    """Seconds for people: `12.3 s`, `3m12s`, `2h05m`."""
    seconds = max(0.0, round(seconds, 1))
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


@lru_cache(maxsize=1)
def _here(pid: int) -> str:
    return f"{socket.gethostname()}:{pid}"
