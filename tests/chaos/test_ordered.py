"""The short form of `scripts/ordered`, and its judge on histories made by hand."""

from __future__ import annotations

import pytest

from tests.chaos.ordered import judge
from tests.chaos.ordered.campaign import Campaign

JOURNAL = """\
sending a k 10
sent a k 20
sending b k 30
sent b k 40
sending c k 35
"""


@pytest.mark.slow
def test_calls_run_in_order_whoever_is_killed(redis_binary: str) -> None:
    campaign = Campaign(calls=160, keys=8, senders=2, workers=2, faults=4, gap=8.0)
    report = campaign.run()
    assert report.violations == []
    assert report.begun >= 140


def _judged(*begins: tuple[str, bool, int], killed: frozenset[int] = frozenset()) -> list[str]:
    made = [
        judge.Begin(what, call, "k", pid, told)
        for call, told, pid in begins
        for what in ("begun", "ended")
    ]
    calls = judge.calls_in([JOURNAL])
    found = judge.report(calls, made, set(), {*killed}, {"a", "b"}).violations
    return [violation.partition(":")[0] for violation in found]


def test_calls_in_the_order_of_sending_are_fine() -> None:
    assert _judged(("a", True, 1), ("b", True, 1), ("c", True, 1)) == []


def test_calls_that_were_sent_at_the_same_time_have_any_order() -> None:
    assert _judged(("a", True, 1), ("c", True, 1), ("b", True, 1)) == []


def test_a_call_that_was_overtaken_is_to_be_told_so() -> None:
    assert _judged(("b", True, 1), ("a", True, 1)) == ["order"]
    assert _judged(("b", True, 1), ("a", False, 1)) == []


def test_a_call_that_was_sent_is_to_run() -> None:
    assert _judged(("a", True, 1)) == ["lost"]


def test_a_call_runs_once_unless_its_process_was_killed() -> None:
    again = ("a", True, 1), ("a", True, 2), ("b", True, 2)
    assert _judged(*again) == ["doubled"]
    assert _judged(*again, killed=frozenset({1})) == []
