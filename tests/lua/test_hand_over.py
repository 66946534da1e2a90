"""Who gets the lock that one execution gives up while others wait for it."""

from __future__ import annotations

import pytest

from tests.support.simple import granted, in_a_row, wait

PLAIN = ["r2", "r3", "r4"]


def test_the_grant_goes_to_the_inbox_and_so_does_a_forced_release(desk):
    process = desk.listen("p-1")
    in_a_row(desk, "r2", label="who r2")
    desk.release("r1")

    assert granted(process.heard()) == ["r2"]
    assert desk.client.hget(desk.keys.lock("a"), "@r2") == b"p-1 who r2"
    desk.backend.force_release("a")
    assert process.heard() == ["lost r2 n"]


@pytest.mark.parametrize("more", [{}, {"by_owner": True}], ids=["plain", "by owner"])
def test_the_grant_has_its_attempt_its_token_and_its_whole_lease(desk, more):
    inbox = desk.listen("p-1")
    old = desk.fence("r1", "first")
    wait(desk, "r2", owner="o", **more)
    before = desk.now_ms()
    desk.release("r1", "first")

    expiry, fence, *rest = desk.client.hget(desk.keys.lock("a"), "r2").decode().split(" ")
    assert inbox.heard() == [f"granted r2 n {fence}"]
    assert int(fence) > old
    assert before + 29_999 <= int(expiry) <= desk.now_ms() + 30_000
    assert rest == ["n", "o", "p"], "no longer than 2^15 ms"
    assert 80_000 < desk.client.pttl(desk.keys.lock("a")) <= 90_000
    assert desk.client.exists(desk.keys.of_lock("q", "a"), desk.keys.of_lock("w", "a")) == 0


def test_the_first_in_line_gets_it_and_nobody_else(desk):
    inbox = desk.listen("p-1")
    in_a_row(desk, *PLAIN)
    desk.release("r1")

    assert granted(inbox.heard()) == ["r2"]
    assert desk.holders() == ["r2"]
    assert desk.waiters() == ["r3", "r4"]


def test_an_execution_that_has_ended_hands_over_as_well_and_is_over(desk):
    desk.listen("p-1")
    in_a_row(desk, "r2")
    desk.release("r1", ended="execution", remember=60.0)

    assert desk.holders() == ["r2"]
    assert desk.client.get(desk.keys.tombstone("r1")) == b"*"
    assert 50_000 < desk.client.pttl(desk.keys.tombstone("r1")) <= 60_000


def test_an_attempt_that_has_ended_hands_over_as_well_and_is_over(desk):
    desk.listen("p-1")
    in_a_row(desk, "r2")
    desk.release("r1", ended="attempt")

    assert desk.holders() == ["r2"]
    assert desk.client.get(desk.keys.tombstone("r1")) == b" n "


def test_only_the_attempt_that_holds_hands_over(desk):
    desk.listen("p-1")
    in_a_row(desk, "r2")

    assert not desk.release("r1", "other")
    assert desk.holders() == ["r1"]


def test_where_nobody_listens_at_the_head_the_next_one_gets_it(desk):
    inbox = desk.listen("p-1")
    in_a_row(desk)
    wait(desk, "r2", "gone")
    wait(desk, "r3")
    wait(desk, "r4")
    desk.release("r1")

    assert granted(inbox.heard()) == ["r3"]
    assert desk.holders() == ["r3"]
    assert desk.waiters() == ["r2", "r4"]


def test_where_the_head_is_dead_the_next_one_gets_it(desk):
    inbox = desk.listen("p-1")
    in_a_row(desk, *PLAIN)
    desk.lapse_place("r2")
    desk.release("r1")

    assert granted(inbox.heard()) == ["r3"]
    assert desk.waiters() == ["r4"]


def test_the_dead_at_the_head_go_with_the_next_who_waits(desk):
    in_a_row(desk, "r2", "r3")
    desk.lapse_place("r2")

    assert wait(desk, "r4") == 1
    assert desk.waiters() == ["r3", "r4"]


def test_the_dead_behind_the_head_go_with_the_release_that_comes_to_them(desk):
    inbox = desk.listen("p-1")
    in_a_row(desk, "r2", "r3")
    desk.lapse_place("r3")
    assert wait(desk, "r4") == 2

    desk.release("r1")
    desk.release("r2")

    assert granted(inbox.heard()) == ["r2", "r4"]
    assert desk.waiters() == []


def test_where_the_head_is_dead_and_the_second_admits_another_both_get_it(desk):
    inbox = desk.listen("p-1")
    in_a_row(desk, "r2")
    wait(desk, "r3", limits=(2,))
    wait(desk, "r4", limits=(2,))
    desk.lapse_place("r2")
    desk.release("r1")

    assert granted(inbox.heard()) == ["r3", "r4"]


def test_behind_the_head_the_others_acquire_by_their_own_limit(desk):
    inbox = desk.listen("p-1")
    in_a_row(desk, "r2")
    wait(desk, "r3", limits=(2,))
    desk.release("r1")

    assert granted(inbox.heard()) == ["r2", "r3"]


def test_where_another_holds_too_nobody_acquires_before_that_has_ended(desk):
    desk.listen("p-1")
    in_a_row(desk, "r2")
    desk.fence("inner", owner="r1", ancestors=("r1",))

    desk.release("r1")
    assert desk.holders() == ["inner"]
    desk.release("inner")
    assert desk.holders() == ["r2"]


@pytest.mark.parametrize("lost", ["r2", "r3", "r4"])
def test_a_place_without_a_record_is_cleared_away(desk, lost):
    desk.listen("p-1")
    in_a_row(desk, *PLAIN)
    desk.client.hdel(desk.keys.of_lock("w", "a"), lost)
    first, second = [run for run in PLAIN if run != lost]

    desk.release("r1")
    assert desk.holders() == [first]
    desk.release(first)
    assert desk.holders() == [second]
    desk.release(second)
    assert desk.waiters() == []


def test_the_lock_lives_as_long_as_the_grant(desk):
    desk.listen("p-1")
    desk.fence("r1", lease=10.0)
    desk.queue("r2", lease=200.0, inbox="p-1")
    desk.release("r1")

    assert desk.holders() == ["r2"]
    assert 250_000 < desk.client.pttl(desk.keys.lock("a")) <= 260_000


def test_a_place_from_before_the_clock_was_set_back_lets_a_grant_live_no_longer_than_asked(desk):
    desk.listen("p-1")
    in_a_row(desk, "r2")
    key, text = (
        desk.keys.of_lock("w", "a"),
        desk.client.hget(desk.keys.of_lock("w", "a"), "r2").decode(),
    )
    expiry = desk.place("r2")["expiry"]
    desk.client.hset(key, "r2", text.replace(str(expiry), str(expiry + 3_600_000)))
    desk.release("r1")

    assert desk.backend.inspect("a").holds[0].execution_id == "r2"
    ends = float(desk.client.hget(desk.keys.lock("a"), "r2").split()[0])
    assert ends < desk.now_ms() + 31_000


def test_an_execution_that_releases_leaves_its_place_as_well(desk):
    desk.listen("p-1")
    in_a_row(desk, "r2")
    held = desk.client.hgetall(desk.keys.lock("a"))
    wait(desk, "own")
    # Its lease ended unseen when it queued, and a renewal that was late is not to be ruled out.
    as_if = {key.replace(b"r1", b"own"): value for key, value in held.items()}
    desk.client.delete(desk.keys.lock("a"))
    desk.client.hset(desk.keys.lock("a"), mapping=as_if)

    desk.release("own")

    assert desk.holders() == ["r2"]
    assert desk.waiters() == []
