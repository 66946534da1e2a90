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
    """A body as it has begun or ended; or as it asks for its retry, `retrying`, and has sent it,
    `retried`: if the retry has a place of its own, `at` is when it is due at the earliest, and at
    the latest, in ns."""

    what: str
    id: str
    key: str
    pid: int
    in_order: bool | None
    retries: int = 0
    at: int = 0


@dataclass
class Report:
    """What was found.

    Attributes:
        retried: calls whose retry has begun.
        again: bodies begun once more, as a process was killed.
        early: begun out of order, and told so.
        unsent: calls whose sender was killed meanwhile.
        unreceived: no worker has ever received them: Celery's Redis transport loses a message if
            the worker dies right after it has popped it.
    """

    calls: int = 0
    begun: int = 0
    retried: int = 0
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
    received: set[tuple[str, int]],
) -> Report:
    """Judge a campaign.

    Args:
        begins: in the order in which they happened.
        taken: the calls of which a message was taken away.
        killed: the pool processes that were killed.
        received: the calls that a worker has received, with the number of their retries.
    """
    found = Report(calls=len(calls))
    begun = [each for each in begins if each.what == "begun"]
    found.begun = len(begun)
    found.retried = len({each.id for each in begun if each.retries})
    found.unsent = sum(call.until == math.inf for call in calls.values())
    found.violations += _doubled(found, begun, killed)
    found.violations += _out_of_order(found, calls, begins)
    ended = {each.id for each in begins if each.what == "ended"}
    retried = {each.id for each in begins if each.what == "retried"}
    sent = {call.id for call in calls.values() if call.until < math.inf}
    missing = {(call, int(call in retried)) for call in sent - ended - taken}
    found.unreceived = len(missing - received)
    lost = sorted(missing & received)
    found.violations += [
        f"lost: {call} was received with {retries} retries and has not run"
        for call, retries in lost
    ]
    return found


def _doubled(found: Report, begun: list[Begin], killed: set[int]) -> list[str]:
    """A body begins once more only if the process of its execution before was killed, or if the
    body that asks for it has begun once more."""
    wrong: list[str] = []
    before: dict[tuple[str, int], int] = {}
    repeated: set[tuple[str, int]] = set()
    for each in begun:
        of = each.id, each.retries
        if of in before:
            found.again += 1
            repeated.add(of)
            is_asked_for = (each.id, each.retries - 1) in repeated
            if before[of] not in killed and not is_asked_for:
                wrong.append(f"doubled: {of} of {each.key}, which process {each.pid} ran")
        before[of] = each.pid
    return wrong


def _out_of_order(found: Report, calls: Mapping[str, Call], begins: list[Begin]) -> list[str]:
    """A call that was wholly sent before another one that has begun already is told so. A retry was
    sent when its call was, unless it has a place of its own."""
    wrong: list[str] = []
    last: dict[str, int] = defaultdict(int)
    retries: dict[str, Call] = {}
    for each in begins:
        if each.at and each.what == "retrying":
            # The body that asks may have begun once more; nobody can tell which retry begins.
            before = retries.get(each.id, Call(each.id, each.key, each.at, math.inf))
            retries[each.id] = before._replace(until=math.inf)
        elif each.at:
            retries[each.id] = retries[each.id]._replace(until=each.at)
        if each.what != "begun":
            continue
        call = retries.get(each.id, calls[each.id]) if each.retries else calls[each.id]
        if call.until < last[each.key] and each.in_order:
            wrong.append(f"order: {each.id} of {each.key} began too late and was not told")
        found.early += not each.in_order
        last[each.key] = max(last[each.key], call.since)
    return wrong
