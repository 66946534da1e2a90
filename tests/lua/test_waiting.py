"""Waiting for one lock, in a process."""

from __future__ import annotations

import pytest

from celery_relock.engine.protocol import (
    Claim,
    Deadlocked,
    Ended,
    Held,
    OtherAttempt,
    Queued,
    Release,
    Successor,
)
from celery_relock.errors import LockConfigError
from tests.support.ears import Ears
from tests.support.simple import in_a_row, wait

PLAIN = ["r2", "r3", "r4"]


def test_who_waits_knows_its_rank(desk):
    assert in_a_row(desk, *PLAIN) == [0, 1, 2]


def test_who_has_the_lock_or_waits_already_gets_no_second_place(desk):
    in_a_row(desk, "r2")

    assert isinstance(desk.acquire("r1", wait=6.0), Held)
    assert isinstance(desk.acquire("r1", "n2", wait=6.0), OtherAttempt)
    assert isinstance(desk.acquire("r2", "n2", wait=6.0), OtherAttempt)
    assert desk.waiters() == ["r2"]


def test_who_is_over_waits_for_nothing(desk):
    desk.release("r2", ended="execution")
    desk.fence("r1")

    assert desk.acquire("r2", wait=6.0) == Ended()
    assert desk.waiters() == []


def test_a_lapsed_holder_is_found_by_who_would_wait(desk):
    desk.fence("r1")
    desk.lapse("r1")

    assert isinstance(desk.acquire("r2", wait=6.0), Held)


def test_a_holder_from_before_the_clock_was_set_back_holds_up_nobody_for_longer_than_its_lease(
    desk,
):
    desk.fence("r1", lease=30.0)
    later = round(desk.now_ms()) + 3_600_000
    record = desk.client.hget(desk.keys.lock("a"), "r1").decode().split(" ", 1)[1]
    desk.client.hset(desk.keys.lock("a"), "r1", f"{later} {record}")

    answer = desk.acquire("r2", wait=6.0)

    assert isinstance(answer, Queued)
    assert answer.recheck < 40


def test_a_ticket_is_the_time(desk):
    before = desk.now_ms() * 1000
    in_a_row(desk, "r2")

    assert before <= desk.client.zscore(desk.keys.of_lock("q", "a"), "r2") <= desk.now_ms() * 1000


def test_tickets_increase_though_the_clock_does_not(desk):
    in_a_row(desk, "r4")
    desk.client.zadd(desk.keys.of_lock("q", "a"), {"r4": 9e15 + 1})
    wait(desk, "r3")
    wait(desk, "r2")

    assert desk.waiters() == ["r4", "r3", "r2"], "not by their names"


def test_what_is_somebody_elses_beside_a_hold_is_an_error(desk):
    desk.fence("r1")
    desk.client.hdel(desk.keys.lock("a"), "@r1")
    desk.client.hset(desk.keys.lock("a"), "what", "ever")

    with pytest.raises(LockConfigError):
        wait(desk, "r2")
    assert desk.waiters() == []


def test_a_line_outlives_its_longest_place(desk):
    in_a_row(desk, "r2")
    desk.queue("r3", wait=200.0)
    wait(desk, "r4")

    for key in (desk.keys.of_lock("q", "a"), desk.keys.of_lock("w", "a")):
        assert desk.client.pttl(key) > 200_000


def test_a_ring_of_waiters_is_seen_by_who_may_be_stuck(desk):
    desk.fence("r1")
    desk.fence("r2", names=("b",))
    wait(desk, "r1-in", names=("b",), stuck=("r1",))
    claim = Claim("r2-in", "n", "r2-in", ("a",), (1,), 30.0, stuck=("r2",))

    assert isinstance(desk.backend.acquire(claim, 6.0, "p-1"), Deadlocked)


def test_what_is_kept_for_one_who_waits_goes_to_it_before_another_waits_behind(desk):
    desk.fence("r1")
    wait(desk, "r2", channel="away")
    desk.backend.release(
        Release(("a",), "r1", "n", "execution", 60.0, successor=Successor("r2", 30.0))
    )
    assert desk.waiters() == ["r2"], "nobody hears there"
    ears = Ears(desk, ["away"])
    wait(desk, "r3")

    assert desk.waiters() == ["r3"]
    ears.close()
