"""The server's clock is set back: what is written lies an hour ahead, and no one waits for that."""

from __future__ import annotations

import json

import pytest

from celery_relock.engine.protocol import (
    LINE,
    Conflict,
    Held,
    OtherAttempt,
    PlaceRequest,
    Queued,
    Release,
    Successor,
)
from tests.support import wait_for

HOUR = 3_600_000


@pytest.fixture
def set_back(desk):
    """All that is written about lock "a" is an hour later than it was."""

    def later(name="a"):
        client, keys = desk.client, desk.keys
        for run, record in client.hgetall(keys.lock(name)).items():
            if not run.startswith(b"@"):
                expiry, rest = record.split(b" ", 1)
                client.hset(keys.lock(name), run, b"%d %b" % (int(expiry) + HOUR, rest))
        for run, record in client.hgetall(keys.of_lock("w", name)).items():
            facts = json.loads(record)
            times = ("expiry", "back", "first", "turn")
            moved = {key: facts[key] + HOUR for key in times if key in facts}
            if "line" in facts:
                due = facts["line"]["due"]
                moved["line"] = {**facts["line"], "due": due and due + HOUR}
            client.hset(keys.of_lock("w", name), run, json.dumps(facts | moved))
        for member in client.zrange(keys.due(), 0, -1):
            client.zincrby(keys.due(), HOUR, member)
        if client.hexists(keys.meta(), "clock"):
            client.hincrby(keys.meta(), "clock", HOUR)

    return later


def test_a_lease_ends_after_twice_its_length_at_the_most(desk, set_back):
    desk.fence("dead", lease=0.3)
    set_back()

    answer = desk.acquire("other")
    assert isinstance(answer, Conflict)
    assert answer.remaining <= 0.6
    desk.wait_ms(600)

    assert isinstance(desk.acquire("other"), Held)


@pytest.mark.parametrize("way", ["renewed", "granted", "taken with another one"])
def test_so_does_one_that_was_written_in_another_way(desk, set_back, way):
    if way == "renewed":
        desk.fence("dead", lease=30.0)
        desk.renew("dead", lease=0.3)
    elif way == "granted":
        desk.listen("p")
        desk.fence("before")
        desk.queue("dead", wait=0.3, lease=0.3, inbox="p")
        desk.release("before")
    else:
        assert isinstance(desk.acquire("dead", names=("a", "b"), lease=0.3), Held)
    set_back()

    assert isinstance(answer := desk.acquire("other"), Conflict)
    assert 0.0 < answer.remaining <= 0.6


def test_who_looks_is_told_so(desk, set_back):
    desk.fence("dead", lease=30.0)
    set_back()

    (hold,) = desk.backend.inspect("a").holds
    assert 30.0 <= hold.remaining <= 60.0


def test_a_live_holder_has_its_whole_lease(desk, set_back):
    desk.fence("alive", lease=30.0)
    set_back()
    assert isinstance(desk.acquire("other"), Conflict)

    assert desk.renew("alive", lease=30.0)


def test_a_lease_of_many_hours_is_left_alone(desk, set_back):
    desk.fence("alive", lease=100_000.0)
    set_back()

    assert desk.backend.inspect("a").holds[0].remaining > 100_000
    assert isinstance(desk.acquire("other"), Conflict)


@pytest.mark.parametrize("renewals", [False, True])
def test_a_place_lives_for_as_long_as_it_was_given(desk, set_back, renewals):
    desk.fence("holder")
    desk.queue("waiter", "dead", wait=30.0 if renewals else 0.3, inbox="nobody")
    if renewals:
        desk.beat("waiter", "dead", wait=0.3)
    set_back()

    answer = desk.acquire("waiter", "copy", wait=0.3)
    assert isinstance(answer, OtherAttempt)
    assert answer.remaining <= 0.3
    desk.wait_ms(310)
    assert isinstance(desk.acquire("waiter", "copy", wait=0.6), Queued)
    set_back()
    assert 0.3 < desk.acquire("waiter", "third", wait=6.0).remaining <= 0.6


def test_a_waiter_that_cannot_hear_waits_no_hour_longer(desk, set_back):
    desk.fence("holder")
    desk.queue("deaf", inbox="gone")
    desk.release("holder")
    desk.lapse_place("deaf", unheard=round(desk.now_ms()) + 3_600_000)
    set_back()
    desk.fence("another")
    desk.release("another")

    assert desk.place("deaf")["unheard"] <= desk.now_ms()


def test_a_message_that_does_not_come_is_sent_again(desk, set_back):
    desk.fence("holder")
    desk.park("one")
    desk.release("holder")
    set_back()
    desk.all_due()

    assert desk.resume() == ["one"]
    assert desk.place("one")["first"] <= desk.now_ms()


def test_a_message_on_its_way_holds_up_nobody_for_an_hour(desk, set_back):
    desk.fence("holder")
    desk.park("one")
    desk.park("two")
    desk.release("holder")
    set_back()
    desk.lapse_place("one", back=desk.now_ms() + 5000)
    desk.all_due()

    assert desk.resume() == ["two"]


@pytest.mark.parametrize("is_retry", [False, True])
def test_a_call_that_does_not_come_holds_up_its_line_for_no_longer(desk, set_back, is_retry):
    line = f"{LINE}a"
    for run in ("late", "here"):
        desk.backend.place(PlaceRequest(line, run, f"t-{run}", run, 0.3, 0.0, 0.0, 1000.0))
    if is_retry:
        desk.fence("late", names=(line,))
        desk.backend.release(Release((line,), "late", "n", successor=Successor("retry", 0.3)))
    desk.park("here", names=(line,))
    desk.resume()
    set_back(line)

    wait_for(lambda: desk.resume() == ["here"])


def test_what_is_due_is_due_as_soon_as_before(desk, set_back):
    desk.fence("holder", lease=0.2)
    desk.park("one")
    desk.resume()
    set_back()
    desk.resume()

    assert desk.recheck <= 0.3
    wait_for(lambda: desk.resume() == ["one"])


def test_the_clock_is_forgotten_when_nothing_is_parked(desk, set_back):
    desk.fence("holder", lease=600.0)
    desk.park("before")
    desk.resume()
    desk.withdraw("before")
    desk.resume()
    set_back()
    desk.park("since", patience=600.0)

    assert desk.resume() == []
    assert desk.client.zscore(desk.keys.due(), "r since") > desk.now_ms() + 500_000
