"""The short form of `scripts/combined`, and its judge on histories made by hand."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from tests.chaos.combined import judge
from tests.chaos.combined.campaign import Campaign
from tests.chaos.combined.workload import (
    ENDS_OTHERWISE,
    STAYS_OPEN,
    Canvas,
    Declared,
    Item,
    Step,
    Workload,
    order_of,
)
from tests.support.journal import Event
from tests.support.worker import ROOT


@pytest.mark.slow
def test_a_round_of_random_calls_ends_as_without_locks(redis_binary: str) -> None:
    with closing(Campaign(items=6).rounds(1)) as rounds:
        _, report = next(rounds)
    assert report.violations == []
    assert report.bodies > 10


def test_a_seed_makes_the_same_round_in_every_process() -> None:
    made = "from tests.chaos.combined.workload import Round; print(sum(map(len, %s)))"
    steps = "[f'{step.id} {step.task} {step.options}' for step in Round(7).workload().steps()]"
    found = {
        subprocess.check_output([sys.executable, "-c", made % steps], cwd=ROOT, env=env)
        for env in ({"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2"})
    }
    assert len(found) == 1


#: A call of a task that calls another one, a call, and a chain of two.
WORKLOAD = Workload(
    tasks=[Declared(0, ("x",), lock={"lock_key": "x:{key}"})],
    items=[
        Item(0, Step("0.1", 0, "a", [("call", Step("0.2", 0, "a"), False)]), 0, set()),
        Item(1, Step("1.1", 0, "a"), 0, set()),
        Item(2, Canvas("chain", [Step("2.1", 0, "a"), Step("2.2", 0, "a")]), 0, set()),
    ],
    conf={},
    arguments=[],
)


def _sent(item: int, prefix: str, by: str = "") -> Event:
    tasks = [f"{prefix}{by or item}"]
    told = {"item": item, "prefix": prefix, "by": by, "number": item + 1, "tasks": tasks}
    return Event("sent", 1, 0.0, told)


def _told(name: str, step: str, *, prefix: str = "t", retries: int = 0, **data: Any) -> Event:
    task = f"{prefix}{step.partition('.')[0]}"
    told = {"task": task, "step": step, "prefix": prefix, "retries": retries, **data}
    return Event(name, 1, 0.0, told)


def _body(
    step: str, fence: int, *between: Event, mode: str = "exclusive", permits: int = 1, **told: Any
) -> list[Event]:
    entry = f"{step} {fence} {told}"
    told = {"locks": [["x:a", permits, mode]], "fences": {"x:a": fence}, "in_order": None, **told}
    enter = _told("enter", step, entry=entry, **told)
    return [enter, *between, _told("leave", step, entry=entry, done=True)]


def _twin(step: str) -> list[Event]:
    entry = f"twin {step}"
    enter = _told("enter", step, prefix="p", entry=entry, locks=[])
    return [enter, _told("leave", step, prefix="p", entry=entry, done=True)]


SENT = [_sent(item, prefix) for item in range(3) for prefix in "pt"]
TWINS = [event for step in ("0.1", "0.2", "1.1", "2.1", "2.2") for event in _twin(step)]


def _first(fence: int, **told: Any) -> list[Event]:
    """What the first item runs."""
    return _body("0.1", fence, *_body("0.2", fence), **told)


A, B, C, D = _first(1), _body("1.1", 2), _body("2.1", 3), _body("2.2", 4)
ASKED, PARKED = _told("asked", "0.1"), _told("over", "0.1", state="IGNORED")


def _rules(
    *events: Event, workload: Workload = WORKLOAD, calm: bool = True, **states: str
) -> list[str]:
    every = {f"{prefix}{item}": "SUCCESS" for item in range(3) for prefix in "pt"} | states
    found = judge.report([*SENT, *TWINS, *events], workload, every, calm).violations
    return [violation.partition(":")[0] for violation in found]


def _loose(*why: str) -> Workload:
    return replace(WORKLOAD, items=[replace(each, loose={*why}) for each in WORKLOAD.items])


LATER = _told("asked", "1.1")
OVERTAKEN = _body("1.1", 1, in_order=True)

GOOD: dict[str, list[Event]] = {
    "one after the other": [*A, *B],
    "beside one that was told that it has lost its lock": [
        *[*A[:-1], Event("lost", 1, 0.0, {"entry": A[0]["entry"]}), *B, A[-1]],
    ],
    "in turns": [ASKED, PARKED, LATER, *A, *B],
    "before one that had not been parked yet": [ASKED, LATER, PARKED, *OVERTAKEN, *_first(2)],
    "told that it was overtaken": [*OVERTAKEN, *_first(2, in_order=False)],
}

BAD: dict[str, tuple[str, list[Event]]] = {
    "two inside": ("overlap", [*A[:-1], *B, A[-1]]),
    "the permit of another item": ("overlap", [*A[:-1], *_body("1.1", 1), A[-1]]),
    "a token from before": ("token", [*_first(2), *_body("1.1", 1)]),
    "another lock": ("names", [*A, *_body("1.1", 1, fences={"y:a": 1})]),
    "overtaken while it was parked": (
        "turn",
        [ASKED, PARKED, LATER, *OVERTAKEN, *_first(2)],
    ),
    "overtaken in its line": ("order", [*OVERTAKEN, *_first(2, in_order=True)]),
    "run once more": ("often", [*A, *_body("1.1", 2), *_body("1.1", 2, more=1)]),
    "not run": ("often", A),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_round_that_keeps_the_promises_passes(name: str) -> None:
    assert _rules(*GOOD[name], *C, *D) == []


@pytest.mark.parametrize("name", BAD)
def test_a_round_that_breaks_a_promise_is_found_out(name: str) -> None:
    rule, events = BAD[name]
    assert _rules(*events, *C, *D) == [rule]


def test_a_step_that_begins_before_the_one_before_it_has_ended_is_found_out() -> None:
    assert _rules(*A, *B, *_body("2.2", 3), *_body("2.1", 4)) == ["canvas"]


def test_those_who_share_a_lock_are_inside_together() -> None:
    def two(*modes: str, permits: int = 1, second: int = 3) -> list[str]:
        outer, inner = (
            _body(step, fence, mode=mode, permits=permits)
            for step, fence, mode in zip(("2.1", "1.1"), (3, second), modes, strict=True)
        )
        return _rules(*A, outer[0], *inner, outer[1], *D)

    assert two("shared", "shared") == []
    assert two("shared", "exclusive") == ["overlap"]
    assert two("exclusive", "exclusive", permits=2, second=4) == []
    assert two("exclusive", "exclusive", permits=2) == ["overlap"]


def test_a_result_ends_as_that_of_its_twin_or_if_it_is_loose_at_all() -> None:
    every = [*A, *B, *C, *D]
    assert _rules(*every, t0="FAILURE", p0="FAILURE") == []
    assert _rules(*every, t0="FAILURE") == ["state"]
    assert _rules(*every, t0="FAILURE", workload=_loose(ENDS_OTHERWISE)) == []
    for state in ("BLOCKED", "PENDING", "RETRY", "STARTED"):
        assert _rules(*every, t0=state) == ["open"]
        assert _rules(*every, t0=state, workload=_loose(ENDS_OTHERWISE)) == ["open"]
        assert _rules(*every, t0=state, workload=_loose(ENDS_OTHERWISE, STAYS_OPEN)) == []
    assert _rules(*every, t0="PENDING", p0="PENDING") == []  # as Celery has it
    # Celery may store that a task is retried after the retry has ended.
    late = _told("over", "0.1", state="SUCCESS", retries=1), _told("over", "0.1", state="RETRY")
    assert _rules(*every, *late, t0="RETRY") == []


def test_what_was_parked_or_retried_comes_to_an_end_also_in_the_middle_of_a_canvas() -> None:
    of = {"task": "inner", "step": "2.1", "prefix": "t", "retries": 0}
    for state in ("IGNORED", "RETRY"):
        left = [*A, *B, *C, *D, Event("over", 1, 0.0, {**of, "state": state})]
        assert _rules(*left, inner="BLOCKED") == ["lost"]
        assert _rules(*left, inner="REVOKED") == []
        assert _rules(*left, inner="BLOCKED", workload=_loose(STAYS_OPEN)) == []
        assert _rules(*left, Event("over", 1, 0.0, {**of, "state": "SUCCESS"}), inner="RETRY") == []


def test_what_a_body_has_sent_ends_as_what_the_body_of_its_twin_has_sent() -> None:
    every = [*A, *B, *C, *D, _sent(2, "t", by="2.1"), _sent(2, "p", by="2.1")]
    ends = {"p2.1": "SUCCESS"}
    assert _rules(*every, **ends, **{"t2.1": "SUCCESS"}) == []
    assert _rules(*every, **ends, **{"t2.1": "FAILURE"}) == ["state"]
    assert _rules(*every, **ends, **{"t2.1": "PENDING"}) == ["open"]


def test_a_duplicate_has_the_end_of_the_call_that_it_repeats() -> None:
    told = {**_sent(2, "t", by="2.1").data, "tasks": ["t0"]}
    every = [*A, *B, *C, *D, Event("sent", 1, 0.0, told), _sent(2, "p", by="2.1")]
    workload = _loose(ENDS_OTHERWISE)
    ends = {"t0": "PENDING", "p2.1": "SUCCESS"}
    assert _rules(*every, **ends, workload=workload) == ["open"], "the first one"
    workload.items[0].loose.add(STAYS_OPEN)  # as if it stored no result
    assert _rules(*every, **ends, workload=workload) == []


def test_where_a_worker_was_ended_bodies_are_not_counted() -> None:
    assert _rules(*A, *C, *D, calm=False) == []
    assert _rules(*A[:-1], *B, A[-1], *C, *D, calm=False) == ["overlap"]


def test_what_stands_before_what_in_a_canvas() -> None:
    one, two, three, four, five = (Step(str(number), 0, "a") for number in range(1, 6))
    one.acts = [("replace", Canvas("chain", [two, three]))]
    inner = Canvas("locked", [Canvas("group", [four, five])])
    assert {*order_of(Canvas("chain", [one, inner]))} == {("3", "4"), ("3", "5"), ("2", "3")}
    chord = Canvas("chord", [four, five], three)
    assert {*order_of(Canvas("chain", [chord, two]))} == {("4", "3"), ("5", "3"), ("3", "2")}
