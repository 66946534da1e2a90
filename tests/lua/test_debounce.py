"""Bursts of calls: one message is parked for all, and resumed when no more of them come."""

from __future__ import annotations

from itertools import count

import pytest

from celery_relock.engine.protocol import Burst, Debounce, Full, Parked, ParkRequest

NAME = "debounce\ta"


@pytest.fixture
def bursts(desk) -> Bursts:
    return Bursts(desk)


class Bursts:
    """Calls of one name, as a caller makes them."""

    def __init__(self, desk) -> None:
        self.desk = desk
        self._ids = count(1)

    def call(self, text="text", *, into=None, exactly=False, call_id="", most=60.0, **more):
        call_id = call_id or f"c{next(self._ids)}"
        pause, bounds = more.pop("pause", 5.0), {"most": 10_000, **more}
        call = Debounce(call_id, into, exactly, pause, most, f"task of {call_id}", "who")
        request = ParkRequest(text, "h", f"t-{call_id}", None, **bounds)
        return self.desk.backend.debounce(NAME, call, request)

    def burst(self, whole=False):
        return self.desk.backend.burst(NAME, whole)

    def merge(self, text="text", **more):
        return self.call(text, into=self.burst(), **more)

    def left(self):
        """Seconds to the end of the pause."""
        return [round(hold.remaining) for hold in self.desk.backend.inspect(NAME).holds]

    def pass_by(self):
        """The pause is over, and somebody looks: the messages that are resumed."""
        self.desk.lapse("pause", NAME)
        self.desk.all_due()
        return self.messages()

    def messages(self):
        return [
            each.text for each in self.desk.backend.resume("h", f"worker{next(self._ids)}").messages
        ]

    def sent(self, burst_id):
        """As the process does that has published the message of a burst."""
        return self.desk.withdraw(burst_id)


def test_a_call_waits_for_its_pause_and_is_resumed_after_it(bursts, desk):
    assert bursts.call("one") == Parked(0)
    desk.all_due()
    assert bursts.messages() == []
    assert bursts.left() == [5]
    assert bursts.pass_by() == ["one"]


def test_a_later_call_takes_the_place_of_the_message_and_makes_the_pause_longer(bursts):
    bursts.call("one", pause=2.0)
    burst = bursts.burst(whole=True)
    assert burst == Burst("c1", "c1", "task of c1", "one")
    assert bursts.call("two", into=burst) == Parked(0)
    assert bursts.left() == [5]
    assert bursts.burst() == Burst("c1", "c2", "task of c1")
    assert bursts.pass_by() == ["two"]


def test_a_burst_is_over_after_its_longest_time_though_calls_come(bursts):
    bursts.call(most=8.0)
    bursts.merge(most=8.0, pause=5.0)
    assert bursts.left() == [5]
    bursts.merge(most=8.0, pause=600.0)
    assert bursts.left() == [8]


def test_the_longest_time_of_a_burst_counts_from_its_first_call(bursts, desk):
    bursts.call()
    (first,) = desk.backend.inspect(NAME).holds
    bursts.merge()
    bursts.merge()
    # The token of the pause is the time of the call from which it counts.
    assert [hold.fence for hold in desk.backend.inspect(NAME).holds] == [first.fence]


def test_a_burst_has_its_longest_time_though_fencing_tokens_are_ahead_of_the_clock(bursts, desk):
    """As they are after the clock was set back."""
    desk.client.hset(desk.keys.meta(), "fence", int(desk.now_ms() + 3_600_000) * 1000)
    bursts.call(most=8.0)
    bursts.merge(most=8.0, pause=600.0)
    assert bursts.left() == [8]


def test_a_call_that_does_not_know_the_burst_is_told_of_it(bursts):
    bursts.call("one")
    assert bursts.call("two") == Burst("c1", "c1", "task of c1")
    assert bursts.call("two", into=Burst("other", "c", "t")) == Burst("c1", "c1", "task of c1")
    assert bursts.pass_by() == ["one"]


def test_to_the_exact_last_call_or_not_at_all(bursts):
    bursts.call("one")
    known = bursts.burst(whole=True)
    assert bursts.call("one two", into=known, exactly=True) == Parked(0)
    told = bursts.call("one three", into=known, exactly=True)
    assert told == Burst("c1", "c2", "task of c1", "one two")
    assert bursts.call("one two three", into=told, exactly=True) == Parked(0)
    assert bursts.pass_by() == ["one two three"]


def test_what_was_resumed_is_never_replaced(bursts):
    bursts.call("one")
    known = bursts.burst()
    assert bursts.pass_by() == ["one"]
    assert bursts.burst() is None
    assert bursts.call("two", into=known) is None
    assert bursts.call("two") == Parked(0)
    assert bursts.sent("c1")
    assert bursts.pass_by() == ["two"]


def test_a_message_that_nobody_says_was_published_is_resumed_again(bursts, desk):
    bursts.call("one")
    assert bursts.pass_by() == ["one"]
    desk.lapse_place("c1", NAME, back=1)
    desk.all_due()
    assert [each.text for each in desk.backend.resume("h", "another").messages] == ["one"]
    assert bursts.sent("c1")
    desk.all_due()
    assert bursts.messages() == []
    assert desk.waiters(NAME) == []


def test_a_burst_that_cannot_be_published_is_tried_soon_and_holds_up_newer_ones(bursts, desk):
    bursts.call("old")
    assert bursts.pass_by() == ["old"]
    desk.lapse_place("c1", NAME, first=1, sent=9)
    bursts.call("new")
    assert bursts.pass_by() == []
    desk.lapse_place("c1", NAME, first=1, sent=9, back=1)
    desk.all_due()
    assert bursts.messages() == ["old"]
    assert desk.place("c1", NAME)["back"] - desk.now_ms() <= 10_000
    assert bursts.sent("c1")
    assert bursts.messages() == ["new"]


def test_a_burst_that_cannot_be_published_waits_for_no_pause_of_a_newer_one(bursts, desk):
    bursts.call("old")
    assert bursts.pass_by() == ["old"]
    bursts.call("new")
    desk.lapse_place("c1", NAME, first=1, sent=1, back=1)
    desk.all_due()
    assert bursts.messages() == ["old"]
    assert bursts.sent("c1")
    assert bursts.messages() == [], "its calls may go on"
    assert bursts.pass_by() == ["new"]


def test_a_burst_that_cannot_be_published_is_tried_before_no_older_one(bursts, desk):
    bursts.call("old")
    assert bursts.pass_by() == ["old"]
    bursts.call("new", call_id="new")
    desk.lapse("pause", NAME)
    desk.lapse_place("new", NAME, sent=1, first=1, back=1)
    desk.all_due()
    assert bursts.messages() == []
    assert bursts.sent("c1")
    assert bursts.messages() == ["new"]


def test_a_burst_that_is_over_and_that_nobody_could_publish_takes_calls_and_is_not_put_off(
    bursts, desk
):
    bursts.call("one")
    desk.lapse("pause", NAME)
    desk.all_due()
    assert desk.backend.resume("another home", "worker").messages == ()
    bursts.merge("two")
    assert bursts.left() == []
    assert bursts.messages() == ["two"]


def test_a_call_that_is_sent_twice_acts_once(bursts, desk):
    for _ in range(2):
        assert bursts.call("one", call_id="c1") == Parked(0)
    known = bursts.burst()
    for _ in range(2):
        assert bursts.call("two", call_id="c2", into=known) == Parked(0)
    assert bursts.burst().call_id == "c2"
    assert bursts.pass_by() == ["two"]
    assert bursts.sent("c1")
    assert bursts.call("two", call_id="c2", into=known) == Parked(0)
    assert bursts.call("one", call_id="c1") == Parked(0)
    assert desk.waiters(NAME) == []


def test_a_call_that_comes_twice_after_its_burst_was_handed_out_is_counted_once(
    bursts, bare, namespace
):
    bursts.call("one", call_id="c1")
    bursts.pass_by()
    # What it was remembered by has lapsed, or was evicted.
    assert bare.client.delete(f"{namespace}:{{0}}:d:c1")
    assert bursts.call("one", call_id="c1") == Parked(0)
    assert bare.client.hget(f"{namespace}:{{0}}:meta", "parked") == b"1"


def test_a_call_that_was_refused_begins_no_burst_when_its_copy_comes(bursts):
    """Its caller has gone on: with another call, or to another burst."""
    bursts.call("one")
    assert bursts.call("two", call_id="refused") == Burst("c1", "c1", "task of c1")
    assert bursts.pass_by() == ["one"]
    assert bursts.sent("c1")
    assert bursts.call("two", call_id="refused") is None
    assert bursts.burst() is None
    assert bursts.call("three") == Parked(0)
    assert bursts.pass_by() == ["three"]


def test_a_call_that_found_no_room_begins_no_burst_when_its_copy_comes(bursts):
    too_long = {"text": "one", "call_id": "refused", "most_bytes": 1}
    assert isinstance(bursts.call(**too_long), Full)
    assert bursts.call(**{**too_long, "most_bytes": 100}) is None
    assert bursts.burst() is None


def test_a_bound_of_what_may_be_parked_holds_for_bursts_and_not_for_calls_of_one(bursts):
    bursts.call("one", most_in_all=1)
    assert bursts.merge("two", most_in_all=1) == Parked(0)
    bursts.pass_by()
    assert bursts.call("three", most_in_all=1) == Full("", 1, 3)


def test_a_task_that_is_revoked_is_resumed_at_once_and_the_next_call_begins_a_burst(bursts, desk):
    bursts.call("one")
    found = desk.backend.resume("h", "worker", ["t-c1"])
    assert [each.text for each in found.messages] == ["one"]
    assert bursts.call("two") == Parked(0)
    bursts.sent("c1")
    assert bursts.left() == [5]
    assert bursts.pass_by() == ["two"]


def test_a_burst_that_is_cancelled_leaves_no_pause(bursts):
    bursts.call("one")
    assert bursts.sent("c1")
    assert bursts.left() == []


def test_who_publishes_hears_of_a_burst_that_begins(bursts, desk):
    ear = desk.listen("parked")
    bursts.call("one")
    bursts.merge("two")
    assert ear.heard() == ["parked c1 h"]


def test_a_burst_leaves_nothing_behind(bursts, bare, namespace):
    before = set(bare.client.keys(f"{namespace}:*"))
    bursts.call("one")
    bursts.merge("two")
    bursts.pass_by()
    bursts.sent("c1")
    left = set(bare.client.keys(f"{namespace}:*")) - before
    assert {key.split(b":")[2] for key in left} == {b"d"}
    assert all(0 < bare.client.pttl(key) <= 60_000 for key in left)
