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


def first_come_first_served(events: Sequence[Event], slack: float = 0.5) -> bool:
    """Whether nobody went in before one who had asked more than `slack` seconds earlier. Somebody
    who says that he asks may need a moment to do it."""
    waiting: dict[str, Event] = {}
    for event in events:
        if event.what == "asks":
            waiting[event.who] = event
        elif event.what == "in" and not event.again:
            mine = waiting.pop(event.who)
            others = (other for other in waiting.values() if other.lock == mine.lock)
            if any(other.at < mine.at - slack for other in others):
                return False
    return True


def _inside(events: Sequence[Event]) -> Iterator[dict[str, dict[str, int]]]:
    """After each event: lock -> who holds it -> the fencing token."""
    now: dict[str, dict[str, int]] = {}
    for event in events:
        if event.what == "in":
            now.setdefault(event.lock, {})[event.who] = event.fence
        elif event.what != "asks":
            now.get(event.lock, {}).pop(event.who, None)
        yield now
