"""Whether what happened to parked executions keeps the promise. Pure: no Redis, no clock.

- lost: a run that was never completed. With early acknowledgement Celery runs a message at most
  once: there a run may end with the process that had it in its hands.
- overlap: nobody enters a lock between somebody's entry and the last thing that this one said.
- order: every entry has a higher fence than all before it.
- twice: no run is completed again once its result was stored.
- refused: the register has never seen a higher fence than that of who is in.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from tests.chaos.parked.steps import CHILD, MAIN, MESSAGE, PARKED, WORKER
from tests.support.journal import Event


@dataclass
class Report:
    """What a campaign found.

    Attributes:
        killed: processes of pools.
        again: runs that were completed again as their result had not been stored.
        lost: the tasks that a worker had received and nobody has completed, and the last that was
            seen of each.
        unreceived: tasks that the broker's transport lost before any worker had received them.
        unfinished: the tasks whose final state is not to be judged.
    """

    sent: int
    deliveries: int
    entries: int
    killed: int
    again: int
    lost: dict[str, str]
    unreceived: int
    unfinished: AbstractSet[str]
    faults: Counter[str]
    violations: list[str]
    seconds: float = 0.0


def report(
    sent: Sequence[str],
    events: Sequence[Event],
    received: AbstractSet[str],
    late: bool,
    children: int,
) -> Report:
    """Judge a journal.

    Args:
        received: the tasks that any worker has received.
        late: whether messages are acknowledged late.
        children: of each worker.
    """
    missing = lost(sent, events)
    again, twice = completed_again(events)
    # Acknowledged early, a run ends with the process that had it, with or without a result.
    excused: set[str] = set()
    if not late:
        arrived = {event["task"] for event in events if event.name == "arrived"}
        excused = in_dead_hands(events) | (received - arrived)
    found = {task: seen for task, seen in missing.items() if task in received}
    faults = [event for event in events if event.name == "fault"]
    victims = Counter(event["victim"] for event in faults)
    return Report(
        sent=len(sent),
        deliveries=sum(event.name == "over" for event in events),
        entries=sum(event.name == "enter" for event in events),
        killed=victims[CHILD] + children * (victims[MAIN] + victims[WORKER]),
        again=again,
        lost=found,
        unreceived=len(missing) - len(found),
        unfinished={*missing, *excused},
        faults=Counter(map(_name_of, faults)),
        violations=[
            *overlaps(events),
            *twice,
            *(f"lost: {task}: {seen}" for task, seen in found.items() if task not in excused),
            *(f"refused: {event.data}" for event in events if event.name == "refused"),
        ],
    )


def overlaps(events: Sequence[Event]) -> list[str]:
    """Breaches of exclusion and of the order of fences, by the journal's order."""
    found = []
    by_lock: dict[str, list[tuple[int, Event]]] = defaultdict(list)
    for number, event in enumerate(events):
        if event.name in ("enter", "leave"):
            by_lock[event["lock"]].append((number, event))
    for lock, told in by_lock.items():
        # A run that was killed says nothing more: then its entry is only the moment of it.
        last = {event["fence"]: number for number, event in told}
        inside = 0
        highest = 0
        for number, event in told:
            if event.name != "enter":
                continue
            if number < inside:
                found.append(f"overlap: {event['task']} came into {lock} while another was in")
            if event["fence"] <= highest:
                found.append(f"order: {event['task']} came into {lock} with a fence from before")
            inside = max(inside, last[event["fence"]])
            highest = max(highest, event["fence"])
    return found


def completed_again(events: Iterable[Event]) -> tuple[int, list[str]]:
    """How many runs were completed again as their result had not been stored, which is Celery's
    at-least-once; and those that were though it had been."""
    completed: set[str] = set()
    stored: set[str] = set()
    again, wrong = 0, []
    for event in events:
        if event.name == "over" and event["state"] == "SUCCESS":
            stored.add(event["task"])
        elif event.name == "leave":
            task = event["task"]
            again += task in completed
            if task in stored:
                wrong.append(f"twice: {task} was completed again after its result was stored")
            completed.add(task)
    return again, wrong


def lost(sent: Sequence[str], events: Sequence[Event]) -> dict[str, str]:
    """The tasks that were never completed, and the last that was seen of each."""
    completed = {event["task"] for event in events if event.name == "leave"}
    last = {event["task"]: f"{event.name} {event.data}" for event in events if "task" in event.data}
    return {task: last.get(task, "never seen") for task in sent if task not in completed}


def in_dead_hands(events: Iterable[Event]) -> set[str]:
    """The tasks that were in a process when that was killed, the last time that they were seen,
    and did not leave it parked."""
    hands: dict[str, Event] = {}
    dead: list[Event] = []
    for event in events:
        if event.name == "arrived":
            hands[event["task"]] = event
        elif event.name == "over" and event["state"] == "IGNORED":
            hands.pop(event["task"], None)
        elif event.name == "fault":
            dead.append(event)
            if event["step"] == PARKED:
                hands = {task: last for task, last in hands.items() if last.pid != event.pid}
    children = {event.pid for event in dead}
    mains = {event["main"] for event in dead if event["victim"] != CHILD}
    return {
        task for task, event in hands.items() if event.pid in children or event["main"] in mains
    }


def _name_of(fault: Event) -> str:
    victim, step = fault["victim"], fault["step"]
    if victim == MESSAGE:
        return "a sent message lost"
    return f"kill -9 of a {victim}" + (f", {step}" if victim == CHILD else "")
