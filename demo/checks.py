"""What must be true of the events of a step, however slow the machine is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from demo.timeline import Event


def never_two(events: Sequence[Event]) -> bool:
    """Whether at every moment all who held one lock held the same permit."""
    return all(len(set(who.values())) < 2 for now in _inside(events) for who in now.values())


def side_by_side(events: Sequence[Event]) -> bool:
    """Whether there was a moment with somebody in under each of two locks."""
    return any(sum(map(bool, now.values())) > 1 for now in _inside(events))


def fences_increase(events: Sequence[Event]) -> bool:
    """Whether the fencing tokens of each lock rise, in the order in which they were given."""
    last: dict[str, int] = {}
    for event in events:
        if event.what == "in" and not event.again:
            if event.fence <= last.get(event.lock, 0):
                return False
            last[event.lock] = event.fence
    return True


def first_come_first_served(events: Sequence[Event]) -> bool:
    """Whether nobody went in before one who was in the queue when he asked, and whether anybody
    was in the queue at all. Who asks is in the queue a moment later: then the library says so."""
    waiting: dict[str, Event] = {}
    ahead: dict[str, set[str]] = {}
    queued = False
    for event in events:
        if event.what == "asks":
            ahead[event.who] = {who for who, other in waiting.items() if other.lock == event.lock}
        elif event.what == "waits":
            waiting[event.who], queued = event, True
        elif event.what == "in" and not event.again:
            waiting.pop(event.who, None)
            if ahead.pop(event.who) & set(waiting):
                return False
    return queued


def _inside(events: Sequence[Event]) -> Iterator[dict[str, dict[str, int]]]:
    """After each event: lock -> who holds it -> the fencing token."""
    now: dict[str, dict[str, int]] = {}
    for event in events:
        if event.what == "in":
            now.setdefault(event.lock, {})[event.who] = event.fence
        elif event.what not in ("asks", "waits"):
            now.get(event.lock, {}).pop(event.who, None)
        yield now
