"""What a campaign has found: whether the bodies began in the order in which the calls were sent."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A call as its sender's journal has it: sent between two moments, in ns; without end if the
    sender was killed meanwhile."""

    id: str
    key: str
    since: int
    until: float


class Begin(NamedTuple):
    """A body as it began, or ended."""

    what: str
    id: str
    key: str
    pid: int
    in_order: bool | None


@dataclass
class Report:
    """What was found.

    Attributes:
        again: bodies begun once more, as a process was killed.
        early: begun out of order, and told so.
        unsent: calls whose sender was killed meanwhile.
        unreceived: no worker has ever received them: Celery's Redis transport loses a message if
            the worker dies right after it has popped it.
    """

    calls: int = 0
    begun: int = 0
    again: int = 0
    early: int = 0
    unsent: int = 0
    unreceived: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


def calls_in(journals: Iterable[str]) -> dict[str, Call]:
    found: dict[str, Call] = {}
    for line in (line for text in journals for line in text.splitlines()):
        what, call, key, at = line.split()
        if what == "sending":
            found[call] = Call(call, key, int(at), math.inf)
        else:
            found[call] = found[call]._replace(until=int(at))
    return found


def begins_in(lines: Iterable[Mapping[str, Any]]) -> list[Begin]:
    return [Begin(**line) for line in lines]


def report(
    calls: Mapping[str, Call],
    begins: list[Begin],
    taken: set[str],
    killed: set[int],
    received: set[str],
) -> Report:
    """Judge a campaign.

    Args:
        begins: in the order in which they happened.
        taken: the calls whose messages were taken away.
        killed: the pool processes that were killed.
        received: the calls that a worker has received.
    """
    found = Report(calls=len(calls))
    found.begun = sum(each.what == "begun" for each in begins)
    found.unsent = sum(call.until == math.inf for call in calls.values())
    found.violations += _doubled(found, begins, killed)
    found.violations += _out_of_order(found, calls, begins)
    ended = {each.id for each in begins if each.what == "ended"}
    sent = {call.id for call in calls.values() if call.until < math.inf}
    missing = sent - ended - taken
    found.unreceived = len(missing - received)
    lost = sorted(missing & received)
    found.violations += [f"lost: {call} was received and has not run" for call in lost]
    return found


def _doubled(found: Report, begins: list[Begin], killed: set[int]) -> list[str]:
    """A body begins once more only if the process of its execution before was killed."""
    wrong: list[str] = []
    before: dict[str, int] = {}
    for each in begins:
        if each.what != "begun":
            continue
        if each.id in before:
            found.again += 1
            if before[each.id] not in killed:
                wrong.append(f"doubled: {each.id} of {each.key}, which process {each.pid} ran")
        before[each.id] = each.pid
    return wrong


def _out_of_order(found: Report, calls: Mapping[str, Call], begins: list[Begin]) -> list[str]:
    """A call that was wholly sent before another one that has begun already is told so."""
    wrong: list[str] = []
    last: dict[str, int] = defaultdict(int)
    for each in begins:
        call = calls[each.id]
        if each.what == "begun":
            if call.until < last[each.key] and each.in_order:
                wrong.append(f"order: {each.id} of {each.key} began too late and was not told")
            found.early += not each.in_order
            last[each.key] = max(last[each.key], call.since)
    return wrong
