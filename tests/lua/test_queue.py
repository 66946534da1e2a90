"""The queue: first come first served, the dead and the unreachable hold nobody up."""

from __future__ import annotations

import pytest

from celery_relock.engine.protocol import Conflict, Held, Queued


def words(messages):
    return [message.split(" ")[:2] for message in messages]


def test_waiters_acquire_in_the_order_in_which_they_came(desk):
    inbox = desk.listen("p")
    desk.fence("r0")
    for i in range(1, 6):
        assert desk.queue(f"r{i}", inbox="p") == i - 1

    for i in range(5):
        desk.release(f"r{i}")
        assert words(inbox.heard()) == [["granted", f"r{i + 1}"]]
        assert desk.holders() == [f"r{i + 1}"]


def test_the_order_holds_when_the_clock_is_set_back(desk):
    desk.fence("r0")
    desk.queue("r1")
    ahead = int(desk.now_ms() * 1000) + 3_600_000_000
    desk.client.zadd(desk.keys.of_lock("q", "a"), {"r1": ahead})

    assert [desk.queue("r2"), desk.queue("r3")] == [1, 2]
    scores = [
        score
        for _, score in desk.client.zrange(desk.keys.of_lock("q", "a"), 0, -1, withscores=True)
    ]
    assert scores == [ahead, ahead + 1, ahead + 2]


def test_a_grant_says_which_execution_attempt_and_fence(desk):
    inbox = desk.listen("p")
    desk.fence("r1")
    desk.queue("r2", "its-attempt", inbox="p")

    desk.release("r1")

    hold = desk.backend.inspect("a").holds[0]
    assert inbox.heard() == [f"granted r2 its-attempt {hold.fence}"]
    assert (hold.execution_id, hold.attempt_id, hold.owner) == ("r2", "its-attempt", "r2")


def test_a_grant_has_a_new_fence(desk):
    desk.listen("p")
    before = desk.fence("r1")
    desk.queue("r2", inbox="p")

    desk.release("r1")

    assert desk.backend.inspect("a").holds[0].fence > before


def test_a_grant_has_its_whole_lease_however_little_is_left_of_the_place(desk):
    desk.listen("p")
    desk.fence("r1")
    desk.queue("r2", inbox="p", wait=3.0, lease=30)
    desk.wait_ms(50)
    desk.release("r1")

    assert desk.backend.inspect("a").holds[0].remaining > 29.9
    assert desk.waiters() == []
    assert desk.client.exists(desk.keys.of_lock("w", "a"), desk.keys.of_lock("q", "a")) == 0


def test_as_many_acquire_as_there_is_room_for(desk):
    inbox = desk.listen("p")
    desk.fence("r1", limit=1)
    for run, limit in (("r2", 1), ("r3", 2), ("r4", 2)):
        desk.queue(run, limit=limit, inbox="p")

    desk.release("r1")
    assert desk.holders() == ["r2", "r3"]
    assert words(inbox.heard()) == [["granted", "r2"], ["granted", "r3"]]
    assert desk.waiters() == ["r4"]


def test_a_newcomer_does_not_overtake_a_waiter_that_is_held_up(desk):
    desk.listen("p")
    desk.fence("r1", limit=2)
    desk.queue("strict", limit=1, inbox="p")

    answer = desk.acquire("r3", limit=2)
    assert isinstance(answer, Conflict)
    assert answer.waiting == 1
    assert desk.queue("r3", limit=2) == 1


def test_a_newcomer_that_finds_a_lapsed_hold_grants_the_lock_to_the_waiter_first(desk):
    inbox = desk.listen("p")
    desk.fence("r1")
    desk.queue("r2", inbox="p")
    desk.lapse("r1")

    assert isinstance(desk.acquire("r3"), Conflict)
    assert desk.holders() == ["r2"]
    assert words(inbox.heard()) == [["granted", "r2"]]


@pytest.mark.parametrize("joiner", ["reachable", "asks again", "beats"])
def test_queued_executions_of_an_owner_acquire_with_it(desk, joiner):
    inbox = desk.listen("p")
    desk.fence("stranger")
    desk.queue("first", owner="o", by_owner=True, inbox="p")
    desk.queue("between", inbox="p")
    desk.queue("second", owner="o", by_owner=True, inbox="p" if joiner == "reachable" else "gone")
    desk.queue("not-asked", owner="o", inbox="p")
    desk.queue("other-owner", owner="x", by_owner=True, inbox="p")

    desk.release("stranger")
    told = words(inbox.heard())
    if joiner == "asks again":
        answer = desk.acquire("second", owner="o", by_owner=True, wait=6.0)
        assert answer.reentered == (True,)
    elif joiner == "beats":
        assert isinstance(desk.beat("second"), Held)

    assert desk.holders() == ["first", "second"]
    assert (
        told == [["granted", "first"], ["granted", "second"]][: 2 if joiner == "reachable" else 1]
    )
    assert len({hold.fence for hold in desk.backend.inspect("a").holds}) == 1
    assert desk.waiters() == ["between", "not-asked", "other-owner"]


def test_a_waiter_finds_at_its_heartbeat_that_its_owner_holds_though_nobody_told_it(desk):
    desk.listen("p")
    desk.fence("stranger")
    desk.queue("first", owner="o", inbox="p")
    desk.queue("between", inbox="p")
    desk.queue("second", owner="o", by_owner=True, inbox="p")
    desk.release("stranger")
    assert desk.holders() == ["first"]

    assert isinstance(desk.beat("second"), Held)
    assert isinstance(desk.beat("between"), Queued)
