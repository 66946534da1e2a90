"""Whether what happened in a round keeps the promises. Pure: no Redis, no clock.

- names: a body has the locks that its task should have, and no others.
- overlap: never more permits of a lock at the same time than it has, told by their tokens; and who
  has the same token is of the same item, or both share the lock.
- token: whoever comes in has a token that is not lower than all before.
- turn: who was parked before another one asked has a token that is not higher.
- order: a body that begins after that of a call that was sent later was told so.
- canvas: no step begins before those have ended that stand before it.
- often: a body runs as often as its twin without locks, which runs beside it.
- state, open: a result ends as that of its twin, or at least ends.
- lost: what was parked or retried comes to an end, also in the middle of a canvas.

Some of it is not judged where the round's own kills, revokes, … may cause it: `Item.loose` says so.
A holder that was told that it has lost its lock may overlap.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import NamedTuple

from celery.states import READY_STATES

from tests.chaos.combined.workload import (
    END_STAYS_OPEN,
    ENDS_OTHERWISE,
    STAYS_OPEN,
    Canvas,
    Item,
    Node,
    Step,
    Workload,
    inner,
    order_of,
    steps_of,
    waits,
)
from tests.support.journal import Event


@dataclass
class Report:
    """What a round found.

    Attributes:
        bodies: with a lock.
        results: of calls with a lock.
        waited: bodies whose message had been parked.
    """

    bodies: int = 0
    results: int = 0
    waited: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


def report(
    events: Sequence[Event], workload: Workload, states: Mapping[str, str], calm: bool
) -> Report:
    """Judge a round.

    Args:
        states: of all results, by their ids: of what was sent, and of what a worker has begun.
        calm: whether no worker was ended meanwhile.
    """
    bodies = [each for each in events if each.name == "enter" and "task" in each.data]
    locked = [each for each in bodies if each["prefix"] == "t"]
    sent = [each for each in events if each.name == "sent" and each["prefix"] == "t"]
    found = [*overlaps(events), *out_of_order(events, workload), *_ends(events, workload, states)]
    found += _lost(events, workload, states)
    if calm:
        found += [*overtaken(events, workload), *out_of_canvas(events, workload)]
        found += repeated(bodies, workload)
    return Report(
        bodies=len(locked),
        results=sum(len(each["tasks"]) for each in sent),
        waited=len(_parked(events).keys() & {*map(_attempt, locked)}),
        violations=found,
    )


class _Hold(NamedTuple):
    """What a body has of a lock: from an event to another one, by their numbers."""

    event: Event
    since: int
    until: int
    permits: int
    fence: int
    shared: bool

    @property
    def item(self) -> str:
        return str(self.event["step"]).partition(".")[0]


def overlaps(events: Sequence[Event]) -> Iterator[str]:
    # Who was killed says nothing more: then its entry is only the moment of it.
    last = {each["entry"]: number for number, each in enumerate(events) if "entry" in each.data}
    lost = {each["entry"] for each in events if each.name == "lost"}
    downgraded = {each["entry"] for each in events if each.name == "downgraded"}
    inside: dict[str, list[_Hold]] = defaultdict(list)
    highest: dict[str, int] = defaultdict(int)
    for number, event in enumerate(events):
        if event.name != "enter" or "fences" not in event.data:
            continue
        expected = {name for name, *_ in event["locks"]}
        if event["locks"] and expected != event["fences"].keys():
            yield f"names: {event.data} has other locks"
            continue
        for name, permits, mode in event["locks"]:
            shared = mode == "shared" or event["entry"] in downgraded
            end = number if event["entry"] in lost else last[event["entry"]]
            hold = _Hold(event, number, end, permits, event["fences"][name], shared)
            inside[name] = [each for each in inside[name] if each.until > number]
            yield from _breaches(name, hold, inside[name], highest[name])
            highest[name] = max(highest[name], hold.fence)
            inside[name].append(hold)


def _breaches(name: str, hold: _Hold, others: list[_Hold], highest: int) -> Iterator[str]:
    told = f"{name} of {hold.event.data}"
    beside = [each.event.data for each in others]
    if len({hold.fence, *(each.fence for each in others)}) > hold.permits:
        yield f"overlap: {told} beside {beside}"
    for each in others:
        if (
            each.fence == hold.fence
            and each.item != hold.item
            and not (each.shared and hold.shared)
        ):
            yield f"overlap: {told} has the permit of {each.event.data}"
    if hold.permits == 1 and hold.fence < highest:
        yield f"token: {told} after {highest}"


def _parked(events: Sequence[Event]) -> dict[_Attempt, int]:
    """When each attempt of a task that was parked had been for the first time."""
    found: dict[_Attempt, int] = {}
    for number, event in enumerate(events):
        if event.name == "over" and event["state"] == "IGNORED":
            found.setdefault(_attempt(event), number)
    return found


def overtaken(events: Sequence[Event], workload: Workload) -> Iterator[str]:
    """Who asked later and has a lower token. Not told of those who have their lock from elsewhere,
    or wait for several or for a place in a line. Of those who may hold it side by side any can be
    the first whose turn has come."""
    parked, asked = _parked(events), dict[_Attempt, int]()
    direct = {step.id for item in workload.items for step in _waiting_alone(item.node, workload)}
    entered: dict[str, dict[int, Event]] = defaultdict(dict)
    for number, event in enumerate(events):
        if event.name not in ("asked", "enter") or "task" not in event.data:
            continue
        if event.name == "asked":
            asked.setdefault(_attempt(event), number)
        elif event["step"] in direct and _attempt(event) in asked and len(event["locks"]) == 1:
            ((name, permits, _),) = event["locks"]
            if permits == 1:
                entered[name].setdefault(event["fences"].get(name), event)
    for name, by_token in entered.items():
        for (token, event), (before, other) in permutations(by_token.items(), 2):
            waited = parked.get(_attempt(event), len(events)) < asked[_attempt(other)]
            both_share = {event["locks"][0][2], other["locks"][0][2]} == {"shared"}
            if waited and before < token and not both_share:
                yield f"turn: {name} of {other.data} before that of {event.data}"


_Attempt = tuple[str, str, int]


def _attempt(event: Event) -> _Attempt:
    return event["task"], event["step"], event["retries"]  # what replaces a step has its task id


def _waiting_alone(node: Node, workload: Workload) -> Iterator[Step]:
    """The steps that ask for one lock, which no workflow or retry holds, have no line, and do not
    wait in slots: if those take all slots they may be the first."""
    if _holds(node, workload):
        return
    applied = (act[1].id for step in steps_of(node) for act in step.acts if act[0] == "apply")
    inline = {*applied}
    for step in steps_of(node):
        conf = {name.replace("relock_", "lock_"): value for name, value in workload.conf.items()}
        options = {**conf, **workload.tasks[step.task].lock, **step.options}
        others = options.get("lock_keep_on_retry") or options.get("lock_order")
        parks = options.get("lock_on_conflict", "wait") in ("wait", waits)
        if parks and not others and step.id not in inline:
            yield step


def _holds(node: Node, workload: Workload) -> bool:
    """Whether a workflow in it has a lock."""
    if isinstance(node, Canvas) and node.kind == "locked":
        return True
    if isinstance(node, Step):
        declared = workload.tasks[node.task]
        nodes: list[Node] = [*inner(node), *node.links]
        if declared.holds_on:
            return True
    else:
        nodes = [*node.parts, *([node.body] if node.body else [])]
    return any(_holds(each, workload) for each in nodes)


def out_of_order(events: Sequence[Event], workload: Workload) -> Iterator[str]:
    """Bodies that the sender's own calls began too late without being told so."""
    numbers = _numbered(events, workload)
    latest: dict[str, int] = defaultdict(int)
    for event in events:
        if event.name == "enter" and event.data.get("in_order") is not None:
            number = numbers.get((event["task"], event["step"]), 0)
            for name, *_ in event["locks"]:
                if number and number < latest[name] and event["in_order"] and not event["retries"]:
                    yield f"order: {event.data} after call {latest[name]}"
                latest[name] = max(latest[name], number)


def _numbered(events: Sequence[Event], workload: Workload) -> dict[tuple[str, str], int]:
    """The calls that the sender has sent one after the other, by task and step; not those that are
    due later, nor several in one."""
    items = {item.number: item for item in workload.items}
    found = {}
    for event in events:
        if event.name == "sent" and event["prefix"] == "t" and not event["by"]:
            item = items[event["item"]]
            if not isinstance(item.node, Step) or item.times > 1 or item.by_name:
                continue
            is_due = "countdown" not in {**item.node.options, **item.options}
            if is_due and event["tasks"]:  # else it was a duplicate
                found[event["tasks"][0], item.node.id] = event["number"]
    return found


def out_of_canvas(events: Sequence[Event], workload: Workload) -> Iterator[str]:
    ended: dict[tuple[str, str], int] = {}
    began: dict[tuple[str, str], int] = {}
    for number, event in enumerate(events):
        if event.name == "enter" and "task" in event.data:
            began.setdefault((event["prefix"], event["step"]), number)
        elif event.name == "leave" and event["done"]:
            ended.setdefault((event["prefix"], event["step"]), number)
    for item in workload.items:
        for before, after in order_of(item.node) if item.times == 1 else ():
            first = ended.get(("t", before))
            if first is not None and began.get(("t", after), first) < first:
                yield f"canvas: {after} began before {before} had ended"


def repeated(bodies: Sequence[Event], workload: Workload) -> Iterator[str]:
    """Bodies that ran more often than those of their twins, or not at all."""
    counted = Counter((each["prefix"], each["step"], each["retries"]) for each in bodies)
    for item in workload.items:
        steps = {step.id for step in steps_of(item.node)}
        for step, retries in sorted({each[1:] for each in counted if each[1] in steps}):
            twin, own = counted["p", step, retries], counted["t", step, retries]
            if own > max(twin, item.times) and ENDS_OTHERWISE not in item.loose:
                yield f"often: step {step}, retry {retries}: {own} times, its twin {twin} times"
            if twin > own and not item.loose:
                yield f"often: step {step}, retry {retries}: {own} times, its twin {twin} times"


def _ends(events: Sequence[Event], workload: Workload, states: Mapping[str, str]) -> Iterator[str]:
    # Of each item, and of what each of its bodies has sent.
    results: dict[tuple[int, str, str], list[list[str]]] = defaultdict(list)
    first: dict[str, tuple[int, str, str]] = {}
    for event in events:
        if event.name == "sent":
            who = event["item"], event["by"], event["prefix"]
            # A duplicate has the result of the call before it, or none if that stores none.
            if all(first.setdefault(task, who) == who for task in event["tasks"]):
                results[who].append(event["tasks"])
    over = _over(events)

    def ends(tasks: list[str]) -> list[str]:
        # Celery may store that a task is retried after the retry has ended.
        retried = {task for task in tasks if states[task] == "RETRY" and task in over}
        return sorted(over[task]["state"] if task in retried else states[task] for task in tasks)

    by_number = {item.number: item for item in workload.items}
    for number, by in {(number, by): None for number, by, _ in results}:
        twins, own = ([ends(each) for each in results[number, by, prefix]] for prefix in "pt")
        yield from _compared(by_number[number], by, twins, own)


def _over(events: Sequence[Event]) -> dict[str, Event]:
    """How the last attempt of each task ended."""
    ends = [each for each in events if each.name == "over"]
    return {each["task"]: each for each in sorted(ends, key=lambda each: int(each["retries"]))}


def _lost(events: Sequence[Event], workload: Workload, states: Mapping[str, str]) -> Iterator[str]:
    over = _over(events)
    for item in workload.items:
        steps = {step.id for step in steps_of(item.node)} if STAYS_OPEN not in item.loose else ()
        for task, event in over.items():
            is_open = event["state"] in ("IGNORED", "RETRY") and states[task] not in READY_STATES
            if event["step"] in steps and event["prefix"] == "t" and is_open:
                yield f"lost: {event.data} is {states[task]}"


def _compared(item: Item, by: str, twins: list[list[str]], own: list[list[str]]) -> Iterator[str]:
    what = f"what {by} has sent" if by else f"item {item.number}"
    closed = all(state in READY_STATES for each in twins for state in each)
    still_open = [each for each in own if any(state not in READY_STATES for state in each)]
    if closed and still_open and not item.loose & {STAYS_OPEN, END_STAYS_OPEN}:
        yield f"open: {what} is {own}, its twin {twins}"
    elif not item.loose and sorted(twins) != sorted(own):
        yield f"state: {what} is {own}, its twin {twins}"
