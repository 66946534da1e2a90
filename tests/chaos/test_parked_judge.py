"""The judge of parked executions, on journals that were made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.parked import judge
from tests.chaos.parked.steps import CHILD, MID_RUN, PARKED, WORKER
from tests.support.journal import Event


def arrived(task: str, pid: int = 11, main: int = 1) -> Event:
    return Event("arrived", pid, 0.0, {"task": task, "main": main})


def enter(task: str, fence: int, pid: int = 11, lock: str = "a") -> Event:
    return Event("enter", pid, 0.0, {"task": task, "lock": lock, "fence": fence})


def leave(task: str, fence: int, pid: int = 11, lock: str = "a") -> Event:
    return Event("leave", pid, 0.0, {"task": task, "lock": lock, "fence": fence})


def over(task: str, state: str = "SUCCESS", pid: int = 11) -> Event:
    return Event("over", pid, 0.0, {"task": task, "state": state})


def fault(victim: str, step: str = MID_RUN, pid: int = 11, main: int = 1) -> Event:
    return Event("fault", pid, 0.0, {"victim": victim, "step": step, "main": main})


def run(task: str, fence: int, **where: Any) -> list[Event]:
    return [arrived(task), enter(task, fence, **where), leave(task, fence, **where), over(task)]


def found(*events: Event, sent: str = "xy", late: bool = True) -> list[str]:
    told = judge.report([*sent], events, {*sent}, late, children=3).violations
    return [violation.partition(":")[0] for violation in told]


X, Y = run("x", 1), run("y", 2)

GOOD: dict[str, list[Event]] = {
    "one after the other": [*X, *Y],
    "at the same time in two locks": [X[1], *run("y", 2, lock="b"), *X[2:]],
    "killed inside, run again, the next one meanwhile": [X[1], fault(CHILD), *Y, *run("x", 3)],
    "run again, as it died before its result was stored": [
        *X[:3],
        fault(CHILD),
        *run("x", 2),
        *run("y", 3),
    ],
    "parked first": [arrived("x"), over("x", "IGNORED"), *X, *Y],
}

BAD: dict[str, tuple[str, list[Event]]] = {
    "two inside": ("overlap", [X[1], Y[1], X[2], X[3], *Y[2:]]),
    "one inside all the time of another": ("overlap", [X[1], *Y, *X[2:]]),
    "a fence from before": ("order", [*Y, *X]),
    "never completed": ("lost", [*X]),
    "killed and not run again": ("lost", [*X, Y[1], fault(CHILD)]),
    "completed again with its result stored": ("twice", [*X, *Y, *run("x", 3)]),
    "refused by the register": ("refused", [*X, *Y, Event("refused", 11, 0.0, {"task": "x"})]),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_history_of_a_correct_lock_passes(name: str) -> None:
    assert found(*GOOD[name]) == []


@pytest.mark.parametrize("name", BAD)
def test_a_history_of_a_broken_lock_is_found_out(name: str) -> None:
    rule, events = BAD[name]
    assert found(*events) == [rule]


@pytest.mark.parametrize("victim", [CHILD, WORKER])
def test_acknowledged_early_an_execution_may_end_with_its_process_but_not_once_it_is_parked(
    victim: str,
) -> None:
    elsewhere = [arrived("x", pid=21, main=2), *X[1:]]
    assert found(*elsewhere, arrived("y"), fault(victim), late=False) == []
    assert found(*elsewhere, arrived("y"), fault(victim), late=True) == ["lost"]
    parked = [arrived("y"), over("y", "IGNORED"), fault(victim, PARKED)]
    assert found(*elsewhere, *parked, late=False) == ["lost"]
    before_it_knows = [arrived("y"), fault(victim, PARKED)]
    assert found(*elsewhere, *before_it_knows, late=False) == ["lost"]


def test_what_no_worker_has_received_is_counted_apart() -> None:
    told = judge.report(["x", "y"], X, {"x"}, True, children=3)
    assert (told.unreceived, told.lost, told.violations) == (1, {}, [])
