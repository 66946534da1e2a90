"""Whether what happened while all kinds of calls wanted the same locks keeps the promises. Pure: no
Redis, no clock.

- overlap: while somebody is inside, nobody comes in who is of another workflow, or has another
  fencing token, unless both share the lock, or the lock has permits enough.
- order of tokens: whoever comes in alone has a token that is not lower than all before.
- cooldown: a lock that cools down is not acquired meanwhile.
- order of calls: a body that begins after that of a later call was told so.
- twice: no call is completed again once its result was stored. (A step of a canvas can be: its
  message is sent again if the step before is run again. So can a call whose process was killed, or
  told to exit, when it had sent a retry: its message comes again, and sends another.)
- lost, state: what a worker has received comes to an end, in one of the states that it may end in.
  (A message that no worker has received was lost by the broker, also the one of a retry.)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import pairwise

from celery.states import READY_STATES

from tests.support.journal import Event

#: What the locks of the campaign's tasks have: seconds, and permits.
COOLDOWN, LIMIT = 0.2, 2


@dataclass
class Report:
    """What a campaign found.

    Attributes:
        sent: tasks, by the kind of their call.
        bodies: that entered a lock.
        beside: entries while somebody else was inside, as the lock is shared or has more permits.
        unreceived: tasks that have not ended, as no worker has received their last message; each
            with its kind and what was told of it.
    """

    sent: Counter[str]
    bodies: int
    beside: int
    unreceived: list[str]
    violations: list[str]
    faults: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


def report(events: Sequence[Event], states: Mapping[str, str]) -> Report:
    """Judge a journal.

    Args:
        states: of the results of the tasks that were sent.
    """
    beside, wrong = overlaps(events)
    sent = {event["task"]: event for event in events if event.name == "sent"}
    alone = {task for task, event in sent.items() if event["alone"]}
    open_ = {task for task in sent if not ended(task, states, events)}
    on_their_way = open_ & _on_their_way(sent, events)
    lost = [f"lost: {task} ({sent[task]['kind']})" for task in sorted(open_ - on_their_way)]
    states_wrong = [
        f"state: {task} ({sent[task]['kind']}) is {states[task]}"
        for task in sorted(sent.keys() - open_)
        if states[task] not in (*sent[task]["ends"], "RETRY")
    ]
    return Report(
        sent=Counter(event["kind"] for event in sent.values()),
        bodies=sum(event.name == "enter" for event in events),
        beside=beside,
        unreceived=[
            f"{task} ({sent[task]['kind']}): {_told_of(task, events)}"
            for task in sorted(on_their_way)
        ],
        violations=[
            *wrong,
            *too_soon(events),
            *out_of_order(events),
            *completed_again(events, alone),
            *lost,
            *states_wrong,
        ],
    )


def _told_of(task: str, events: Iterable[Event]) -> str:
    of = (event for event in events if event.data.get("task") == task)
    return ", ".join(f"{event.name} {event.data.get('state', '')}".strip() for event in of)


def _on_their_way(sent: Iterable[str], events: Sequence[Event]) -> set[str]:
    """The tasks of which no worker has a message: each that was received has sent another one."""
    received = Counter(event["task"] for event in events if event.name == "received")
    retried = Counter(
        event["task"] for event in events if event.name == "over" and event["state"] == "RETRY"
    )
    return {task for task in sent if received[task] <= retried[task]}


def completed_again(events: Sequence[Event], alone: AbstractSet[str]) -> list[str]:
    """Bodies of these tasks that ended after the result of their task had been stored."""
    found = []
    stored: set[str] = set()
    alone = alone - _with_two_retries(events)
    for event in events:
        if event.name == "over" and event["state"] == "SUCCESS":
            stored.add(event["task"])
        elif event.name == "leave" and event["task"] in stored & alone:
            found.append(f"twice: {event.data} came after its result was stored")
    return found


def _with_two_retries(events: Iterable[Event]) -> set[str]:
    """The tasks that may retry and had a process that was killed between a body and its end."""
    open_: Counter[tuple[str, int]] = Counter()
    retry = set()
    for event in events:
        if event.name == "sent" and event["retries"]:
            retry.add(event["task"])
        elif event.name == "leave":
            open_[event["task"], event.pid] += 1
        elif event.name == "over" and event["state"] != "PENDING":  # as it is told of an exit
            open_[event["task"], event.pid] = 0
    return {task for (task, _), bodies in open_.items() if bodies} & retry


def ended(task: str, states: Mapping[str, str], events: Iterable[Event]) -> bool:
    """Whether a task has come to its end. Celery may store that a task is retried after the retry
    has ended."""
    if states[task] in READY_STATES:
        return True
    return any(
        event.name == "over" and event["task"] == task and event["state"] in ("SUCCESS", "FAILURE")
        for event in events
    )


def overlaps(events: Sequence[Event]) -> tuple[int, list[str]]:
    """How often two were rightly inside, and breaches of exclusion and of the order of tokens, by
    the journal's order."""
    found: list[str] = []
    beside = 0
    # Who was killed says nothing more: then its entry is only the moment of it.
    last = {event["entry"]: number for number, event in enumerate(events) if "entry" in event.data}
    inside: dict[str, list[Event]] = defaultdict(list)
    highest: dict[str, int] = defaultdict(int)
    for number, event in enumerate(events):
        if event.name != "enter":
            continue
        lock, fence, mode = event["lock"], event["fence"], event["mode"]
        inside[lock] = [each for each in inside[lock] if last[each["entry"]] > number]
        others = [each for each in inside[lock] if not _re_enters(event, each)]
        at_most = LIMIT if mode == "limited" else len(others) + 1
        together = all({mode, each["mode"]} in ({"shared"}, {"limited"}) for each in others)
        if not together or len({fence, *(each["fence"] for each in others)}) > at_most:
            found.append(f"overlap: {event.data} while these were in: {others}")
        beside += bool(others)
        if mode not in ("shared", "limited"):
            if fence < highest[lock]:
                found.append(f"token: {event.data} came in after {highest[lock]}")
            highest[lock] = max(highest[lock], fence)
        inside[lock].append(event)
    return beside, found


def _re_enters(event: Event, other: Event) -> bool:
    return (event["fence"], event["owner"]) == (other["fence"], other["owner"])


def too_soon(events: Iterable[Event]) -> list[str]:
    """Entries while the lock should have cooled down."""
    by_lock: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.name in ("enter", "leave") and event["mode"] == "cooled":
            by_lock[event["lock"]].append(event)
    return [
        f"cooldown: {after.data} came {after.at - before.at:.3f} s after {before.data}"
        for each in by_lock.values()
        for before, after in pairwise(each)
        # A body that was killed, or whose process was before the release, is run again.
        if (before.name, after.name) == ("leave", "enter")
        if before["task"] != after["task"]
        if after.at - before.at < COOLDOWN - 0.001  # the journal counts milliseconds
    ]


def out_of_order(events: Iterable[Event]) -> list[str]:
    """Bodies of ordered calls that began after that of a later call, and were not told so."""
    found = []
    latest: dict[str, int] = defaultdict(lambda: -1)
    for event in events:
        if event.name == "begun":
            if event["number"] < latest[event["lock"]] and event["in_order"]:
                found.append(f"order: {event.data} came after {latest[event['lock']]}")
            latest[event["lock"]] = max(latest[event["lock"]], event["number"])
    return found
