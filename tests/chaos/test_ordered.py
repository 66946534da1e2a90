"""The short form of `scripts/ordered`, and its judge on histories made by hand."""

from __future__ import annotations

from queue import Empty

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


class _Dead(Campaign):
    """Somebody has died with a message that he did not acknowledge, before there is a worker."""

    def _revive(self) -> None:
        if not self._count and self._hold():
            self._count = 1
        super()._revive()

    def _hold(self) -> bool:
        with self._app.connection_for_read() as connection:
            queue = connection.SimpleQueue(self._app.conf.task_default_queue)
            try:
                message = queue.get(block=False)
            except Empty:
                return False
            message.channel.do_restore = False  # else kombu puts it back when the channel closes
        return True


@pytest.mark.slow
def test_what_the_dead_have_not_acknowledged_comes_back_in_time(redis_binary: str) -> None:
    report = _Dead(calls=20, keys=4, senders=1, workers=0, faults=0).run()
    assert (report.violations, report.unreceived) == ([], 0)
    assert report.begun >= 20


def _judged(*begins: tuple[str, bool, int], killed: frozenset[int] = frozenset()) -> list[str]:
    made = [
        judge.Begin(what, call, "k", pid, told)
        for call, told, pid in begins
        for what in ("begun", "ended")
    ]
    calls = judge.calls_in([JOURNAL])
    return _violations(calls, made, killed)


def _violations(
    calls: dict[str, judge.Call], made: list[judge.Begin], killed: frozenset[int] = frozenset()
) -> list[str]:
    received = {("a", 0), ("a", 1), ("b", 0), ("b", 1)}
    found = judge.report(calls, made, set(), {*killed}, received).violations
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


def _retried(told: bool, *, own_place: bool, after: str = "b") -> list[judge.Begin]:
    """Call a is retried; the other begins before its retry, which is `told` of its order."""
    sent = (50, 60) if own_place else (0, 0)
    return [
        judge.Begin("begun", "a", "k", 1, True),
        judge.Begin("retrying", "a", "k", 1, True, at=sent[0]),
        judge.Begin("retried", "a", "k", 1, True, at=sent[1]),
        judge.Begin("begun", after, "k", 1, True),
        judge.Begin("ended", after, "k", 1, True),
        judge.Begin("begun", "a", "k", 1, told, 1),
        judge.Begin("ended", "a", "k", 1, told, 1),
    ]


def test_a_retry_that_keeps_its_place_is_to_be_told_of_who_overtook_it() -> None:
    calls = judge.calls_in([JOURNAL])
    assert _violations(calls, _retried(True, own_place=False)) == ["order"]
    assert _violations(calls, _retried(False, own_place=False)) == []


def test_a_retry_with_a_place_of_its_own_is_overtaken_by_whom_was_sent_after_it_alone() -> None:
    calls = judge.calls_in([JOURNAL])
    assert _violations(calls, _retried(True, own_place=True)) == []
    later = judge.calls_in([JOURNAL + "sending d k 70\nsent d k 80\n"])
    b_as_well = [judge.Begin(what, "b", "k", 1, True) for what in ("begun", "ended")]
    begins = _retried(True, own_place=True, after="d")
    assert _violations(later, [*b_as_well, *begins]) == ["order"] * 2


def test_a_retry_runs_once_unless_its_process_or_that_of_the_call_was_killed() -> None:
    calls = judge.calls_in([JOURNAL])
    begins = _retried(True, own_place=True)
    again = begins[-2]._replace(pid=2)
    assert _violations(calls, [*begins, again]) == ["doubled"]
    assert _violations(calls, [*begins, again], frozenset({1})) == []
    repeated = [begins[0], begins[0]._replace(pid=2), *begins[1:], again]
    assert _violations(calls, repeated) == ["doubled"]
    killed = [begins[0]._replace(pid=3), *begins, again]
    assert _violations(calls, killed, frozenset({3})) == []


def test_a_retry_that_was_received_is_to_run() -> None:
    calls = judge.calls_in([JOURNAL])
    assert _violations(calls, _retried(True, own_place=True)[:-2]) == ["lost"]
