"""The short form of `scripts/mixed`, and its judge on histories made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.mixed import judge
from tests.chaos.mixed.campaign import Campaign
from tests.support.journal import Event


@pytest.mark.slow
def test_calls_of_every_kind_share_their_locks_whatever_is_killed(rabbitmq: object) -> None:
    report = Campaign(calls=135).run()
    assert report.violations == []
    # Celery does not count a member of a chord whose process is killed when its result is stored.
    assert [each for each in report.unreceived if "(locked chord)" not in each] == []
    assert report.bodies > 150
    assert len(report.faults) >= 4, f"too few kinds of fault were tried: {report.faults}"


def _told(name: str, at: float = 0.0, **data: Any) -> Event:
    return Event(name, 1, at, {"task": "a", "lock": "l", "mode": "exclusive", **data})


def _body(entry: str, fence: int, *between: Event, at: float = 0.0, **data: Any) -> list[Event]:
    """Somebody comes in, what is told meanwhile, and that he leaves."""
    of = {"task": entry, "owner": entry, **data, "entry": entry, "fence": fence}
    return [_told("enter", at, **of), *between, _told("leave", at, **of)]


def _breaches(events: list[Event]) -> list[str]:
    found = judge.overlaps(events)[1] + judge.too_soon(events) + judge.out_of_order(events)
    return [violation.partition(":")[0] for violation in found]


def test_one_after_the_other_is_fine_and_one_beside_the_other_is_not() -> None:
    assert _breaches([*_body("a", 1), *_body("b", 2)]) == []
    assert _breaches(_body("a", 1, *_body("b", 2))) == ["overlap"]
    assert _breaches(_body("a", 1, *_body("b", 2, mode="shared"))) == ["overlap"]
    assert _breaches(_body("a", 1, *_body("b", 2, lock="another"))) == []


def test_who_is_of_the_same_workflow_and_has_the_same_token_has_re_entered() -> None:
    assert _breaches(_body("a", 1, *_body("b", 1, owner="a"))) == []
    assert _breaches(_body("a", 1, *_body("b", 1))) == ["overlap"]
    assert _breaches(_body("a", 1, *_body("b", 2, owner="a"))) == ["overlap"]


def test_who_was_killed_is_not_inside_any_more() -> None:
    assert _breaches([_body("a", 1)[0], *_body("b", 2)]) == []


def test_a_token_never_goes_back() -> None:
    assert _breaches([*_body("a", 2), *_body("b", 1)]) == ["token"]


def test_those_who_share_a_lock_are_inside_together() -> None:
    inner = _body("b", 2, mode="shared")
    assert _breaches(_body("a", 1, *inner, mode="shared")) == []
    assert judge.overlaps(_body("a", 1, *inner, mode="shared"))[0] == 1


def test_there_are_never_more_inside_than_permits() -> None:
    two = _body("b", 2, mode="limited")
    assert _breaches(_body("a", 1, *two, mode="limited")) == []
    three = _body("b", 2, *_body("c", 3, mode="limited"), mode="limited")
    assert _breaches(_body("a", 1, *three, mode="limited")) == ["overlap"]


def test_a_lock_that_cools_down_is_not_acquired_meanwhile() -> None:
    first = _body("a", 1, mode="cooled")
    assert _breaches([*first, *_body("b", 2, at=0.2, mode="cooled")]) == []
    assert _breaches([*first, *_body("b", 2, at=0.15, mode="cooled")]) == ["cooldown"]
    # Killed before it could release, and run again.
    assert _breaches([*first, *_body("again", 2, at=0.1, mode="cooled", task="a")]) == []


def test_a_body_that_begins_after_a_later_one_is_told_so() -> None:
    later = _told("begun", number=2, in_order=True)
    assert _breaches([later, _told("begun", number=1, in_order=True)]) == ["order"]
    assert _breaches([later, _told("begun", number=1, in_order=False)]) == []
    assert _breaches([later, later]) == []  # it was killed and runs again


def _verdict(*events: Event, state: str, alone: bool = True, retries: bool = False) -> list[str]:
    sent = _told("sent", kind="single", ends=["SUCCESS"], alone=alone, retries=retries)
    found = judge.report([sent, *events], {"a": state}).violations
    return [violation.partition(":")[0] for violation in found]


def test_what_was_received_is_to_come_to_an_end_that_it_may_have() -> None:
    received, over = _told("received"), _told("over", state="SUCCESS")
    assert _verdict(received, over, state="SUCCESS") == []
    assert _verdict(received, state="PENDING") == ["lost"]
    assert _verdict(state="PENDING") == []  # by the broker, on its way
    assert _verdict(received, over, state="FAILURE") == ["state"]
    # Celery stores that it is retried after the retry has ended.
    assert _verdict(received, over, state="RETRY") == []
    assert _verdict(received, state="RETRY") == ["lost"]
    assert _verdict(received, state="BLOCKED") == ["lost"]
    again = _told("over", state="RETRY")
    assert _verdict(received, again, state="RETRY") == []  # on its way again
    assert _verdict(received, again, received, state="RETRY") == ["lost"]


def test_nothing_is_completed_once_more_but_a_step_of_a_canvas() -> None:
    events = _body("a", 1), [_told("over", state="SUCCESS")], _body("again", 2, task="a")
    every = [event for each in events for event in each]
    assert _verdict(*every, state="SUCCESS") == ["twice"]
    assert _verdict(*every, state="SUCCESS", alone=False) == []


def test_a_process_that_is_killed_when_it_has_sent_a_retry_lets_a_call_be_completed_twice() -> None:
    killed, over = _body("a", 1), _told("over", state="SUCCESS")
    events = [*_body("again", 2, task="a"), over, *_body("retry", 3, task="a"), over]
    by = Event("leave", 2, 0.0, killed[1].data)  # of another process
    told_to_exit = Event("over", 2, 0.0, _told("over", state="PENDING").data)
    for before in ([killed[0], by], [killed[0], by, told_to_exit]):
        assert _verdict(*before, *events, state="SUCCESS", retries=True) == []
        assert _verdict(*before, *events, state="SUCCESS") == ["twice"]
    assert _verdict(*events, state="SUCCESS", retries=True) == ["twice"]
