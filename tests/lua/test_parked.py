"""Parked executions: their messages wait in line, and are resumed when their turn comes."""

from __future__ import annotations

import pytest

from celery_relock.engine.protocol import Conflict, Full, Held, Message, Parked

TEXT = 'a "message" \\ with\tall of it: ü ✓ 🐘 \u2028 {}'


def test_a_parked_execution_is_first_in_line_and_its_message_comes_back_as_it_was(desk):
    desk.fence("r1")

    assert desk.leave("r2", text=TEXT) == Parked(0)
    desk.release("r1")

    assert desk.messages() == [Message("r2", "a", TEXT)]


def test_parked_executions_are_resumed_in_the_order_in_which_they_came(desk):
    desk.fence("r0")
    assert [desk.park(f"r{i}") for i in range(1, 6)] == [0, 1, 2, 3, 4]

    for i in range(5):
        desk.release(f"r{i}")
        assert desk.out() == [f"r{i + 1}"]
        desk.fence(f"r{i + 1}", "copy")
        desk.release(f"r{i + 1}", "copy")


def test_waiting_and_parked_ones_stand_in_one_queue(desk):
    desk.listen("p")
    desk.fence("r0")
    desk.park("r1")
    desk.queue("r2", inbox="p")
    desk.park("r3")
    desk.queue("r4", inbox="p")
    served = []

    desk.release("r0")
    for run in ("r1", "r2", "r3", "r4"):
        served += desk.out() or desk.holders()
        desk.acquire(run)
        desk.release(run)

    assert served == ["r1", "r2", "r3", "r4"]


def test_the_dead_between_parked_executions_hold_up_nobody(desk):
    desk.fence("r1")
    desk.queue("dead1")
    desk.park("r2")
    desk.queue("dead2")
    desk.park("r3")
    desk.lapse_place("dead1")
    desk.lapse_place("dead2")

    desk.release("r1")
    assert (desk.out(), desk.waiters()) == (["r2"], ["r2", "r3"])
    desk.fence("r2", "back")
    desk.release("r2", "back")
    assert (desk.out(), desk.waiters()) == (["r3"], ["r3"])


def test_an_unreachable_waiter_ahead_keeps_its_place_and_holds_up_nobody_who_is_parked(desk):
    desk.fence("r1")
    desk.queue("r2", inbox="gone")
    desk.park("r3")

    desk.release("r1")

    assert (desk.out(), desk.waiters()) == (["r3"], ["r2", "r3"])


def test_a_parked_place_needs_no_life(desk):
    desk.fence("r1")
    desk.park("r2")
    desk.lapse_place("r2")

    desk.release("r1")

    assert desk.out() == ["r2"]


def test_the_message_stays_until_its_execution_has_the_lock(desk):
    desk.fence("r1")
    desk.park("r2")
    desk.release("r1")
    assert desk.client.hgetall(f"{desk.keys.prefix(0)}m:a") == {b"r2": b"text of r2"}

    desk.fence("r2", "back")

    assert desk.client.keys(f"{desk.keys.prefix(0)}m:*") == []
    assert desk.waiters() == []


def test_whoever_is_on_its_way_counts_as_a_permit(desk):
    desk.fence("r1", limit=2)
    desk.fence("r2", limit=2)
    desk.park("r3", limit=2)
    desk.release("r1")
    assert desk.out() == ["r3"]

    assert isinstance(desk.acquire("new", limit=2), Conflict)
    desk.release("r2")
    assert isinstance(desk.acquire("new", limit=2), Held), "one is promised, the other is free"
    assert isinstance(desk.acquire("newer", limit=2), Conflict)
    assert isinstance(desk.acquire("r3", "back", limit=2), Held)


def test_as_many_are_resumed_as_there_is_room_for(desk):
    desk.fence("r0", limit=3)
    for i in range(1, 3):
        desk.fence(f"r{i}", limit=3)
    for i in range(3, 9):
        desk.park(f"r{i}", limit=3)

    for i in range(3):
        desk.release(f"r{i}")

    assert desk.out() == ["r3", "r4", "r5"]
    assert desk.resume() == []


def test_who_comes_first_of_those_on_their_way_acquires(desk):
    desk.fence("r1", limit=2)
    desk.fence("r2", limit=2)
    desk.park("r3", limit=2)
    desk.park("r4", limit=2)
    desk.release("r1")
    desk.release("r2")

    assert isinstance(desk.acquire("r4", "back", limit=2), Held)
    assert isinstance(desk.acquire("r3", "back", limit=2), Held)


def test_who_is_on_its_way_holds_up_a_waiting_one_behind_it(desk):
    desk.listen("p")
    desk.fence("r1")
    desk.park("r2")
    desk.queue("r3", inbox="p")
    desk.release("r1")

    desk.beat("r3")
    assert desk.holders() == []
    desk.fence("r2", "back")
    desk.release("r2", "back")
    assert desk.holders() == ["r3"]


def test_a_message_that_does_not_arrive_is_resumed_again_ever_more_seldom(desk):
    desk.fence("r1")
    desk.park("r2")
    desk.release("r1")
    assert desk.out() == ["r2"]
    trips = [desk.place("r2")["back"] - desk.now_ms()]

    for _ in range(9):
        assert desk.resume() == []
        desk.lapse_place("r2", back=1)
        desk.all_due()
        assert desk.resume() == ["r2"]
        trips.append(desk.place("r2")["back"] - desk.now_ms())

    expected = [5, 10, 20, 40, 80, 160, 320, 600, 600, 600]
    for trip, seconds in zip(trips, expected, strict=True):
        assert seconds * 1000 - 2000 < trip <= seconds * 1000


def test_a_newcomer_finds_that_a_message_got_lost_and_calls_for_it(desk):
    ear = desk.listen("parked")
    desk.fence("r1")
    desk.park("r2")
    desk.release("r1")
    desk.lapse_place("r2", back=1)

    assert isinstance(desk.acquire("r3"), Conflict)

    assert ear.heard() == ["parked r2 h"]
    assert desk.resume() == ["r2"]


def test_whoever_parks_finds_whose_turn_has_come_and_a_process_that_can_publish_resumes_it(desk):
    desk.fence("r1")
    desk.park("r2")
    desk.lapse("r1")

    ears = desk.listen("parked")
    assert desk.leave("r3") == Parked(1)
    assert ears.heard() == ["parked r2 h"]
    assert desk.leave("r3") == Parked(1), "the first answer was lost, perhaps"
    assert ears.heard() == []
    assert desk.resume() == ["r2"]
    assert desk.resume() == [], "resumed, and no longer owed"


def test_who_is_long_overdue_keeps_its_ticket_and_holds_up_nobody(desk):
    desk.fence("r1")
    desk.park("r2")
    desk.park("r3")
    desk.release("r1")
    assert desk.out() == ["r2"]

    desk.lapse_place("r2", first=1)

    desk.all_due()
    assert desk.resume() == ["r3"], "the lock is free for the next"
    assert desk.waiters() == ["r2", "r3"]
    desk.lapse_place("r2", back=1)
    desk.all_due()
    assert desk.resume() == ["r2"], "and it is resumed all the same"


def test_the_repeated_release_resumes_the_same_message(desk):
    desk.fence("r1")
    desk.park("r2")
    desk.park("r3")
    desk.release("r1", ended="execution")
    assert desk.out() == ["r2"]

    assert not desk.release("r1", ended="execution")
    assert desk.out() == ["r2"], "the first answer was lost, perhaps"
    desk.release("other")
    assert desk.out() == []


def test_parking_twice_is_parking_once(desk):
    desk.fence("r1")
    desk.park("r2")
    desk.park("r3")
    ticket = desk.client.zscore(desk.keys.of_lock("q", "a"), "r2")

    assert desk.leave("r2") == Parked(0)

    assert desk.client.zscore(desk.keys.of_lock("q", "a"), "r2") == ticket
    assert desk.waiters() == ["r2", "r3"]


def test_whoever_finds_the_lock_free_when_it_would_park_has_it(desk):
    assert isinstance(desk.leave("r1"), Held)
    assert desk.waiters() == []
    assert isinstance(desk.leave("r1"), Held), "the same command again"


@pytest.mark.parametrize("by", ["lapse", "force"])
def test_without_a_release_a_look_finds_that_the_lock_is_free(desk, by):
    desk.fence("r1")
    desk.park("r2")
    assert desk.resume() == []
    if by == "lapse":
        desk.lapse("r1")
        desk.all_due()
    else:
        desk.backend.force_release("a")

    assert desk.resume() == ["r2"]


def test_a_look_is_due_at_the_lapse_that_could_free_the_lock_and_every_ten_seconds(desk):
    desk.fence("r1", lease=3)
    desk.park("r2")
    desk.resume()
    assert 0 < desk.recheck <= 3.01

    desk.renew("r1", lease=300)
    desk.all_due()
    desk.resume()
    assert 3.1 < desk.recheck <= 10


def test_no_more_are_parked_than_allowed_and_whoever_is_parked_counts_once(desk):
    desk.fence("r1")
    desk.park("r2", most=2)
    desk.park("r3", most=2)

    assert desk.leave("r4", most=2) == Full("a", 2)
    assert desk.waiters() == ["r2", "r3"]
    assert desk.park("r3", most=2) == 1


def test_whoever_finds_no_room_has_no_place_left(desk):
    desk.fence("r1")
    desk.park("r2", most=1)
    desk.queue("r3")
    desk.lapse_place("r3")

    assert desk.leave("r3", "another-attempt", most=1) == Full("a", 1)
    assert desk.waiters() == ["r2"]


def test_a_message_that_is_gone_holds_up_nobody(desk):
    desk.fence("r1")
    desk.park("r2")
    desk.park("r3")
    desk.client.hdel(f"{desk.keys.prefix(0)}m:a", "r2")

    desk.release("r1")

    assert (desk.out(), desk.waiters()) == (["r3"], ["r3"])


def test_a_reply_has_a_hundred_messages_at_the_most_and_the_rest_is_owed(desk):
    desk.fence("r")
    desk.park("r000")
    for i in range(1, 230):
        desk.park(f"r{i:03}", limit=300)

    desk.release("r")

    assert desk.out() == [f"r{i:03}" for i in range(100)]
    assert desk.resume() == [f"r{i:03}" for i in range(100, 200)]
    assert desk.recheck == 0
    assert desk.resume() == [f"r{i:03}" for i in range(200, 230)]
    assert desk.recheck > 0


def test_parked_executions_of_an_owner_that_acquires_are_resumed_with_it(desk):
    desk.fence("stranger")
    desk.park("first", owner="o", by_owner=True)
    desk.park("between")
    desk.park("second", owner="o", by_owner=True)
    desk.release("stranger")
    assert desk.out() == ["first"]

    assert isinstance(desk.acquire("first", "back", owner="o", by_owner=True), Held)
    assert desk.resume() == ["second"], "owed: the arrival could not send it"
    answer = desk.acquire("second", "back", owner="o", by_owner=True)
    assert answer.reentered == (True,)
    assert desk.waiters() == ["between"]


def test_whoever_may_not_re_enter_by_owner_waits_for_its_owner_too(desk):
    desk.fence("r1", owner="o")
    desk.park("r2", owner="o")
    desk.all_due()

    assert desk.resume() == []


def test_who_is_on_its_way_holds_up_who_wants_several_locks_in_each_of_them(desk):
    desk.fence("r1", names=("a",))
    desk.fence("r2", names=("b",))
    desk.park("single", names=("b",))
    desk.park("both", names=("a", "b"))
    desk.release("r2", names=("b",))
    assert desk.out() == ["single"]

    desk.release("r1", names=("a",))
    assert desk.out() == []
    desk.fence("single", "back", names=("b",))
    desk.release("single", "back", names=("b",))
    assert desk.out() == ["both"]


def test_whoever_comes_back_to_its_owners_permit_takes_no_other(desk):
    desk.fence("s1", limit=2)
    desk.fence("s2", limit=2)
    desk.park("first", owner="o", by_owner=True, limit=2)
    desk.park("second", owner="o", by_owner=True, limit=2)
    desk.release("s1")
    desk.acquire("first", "back", owner="o", by_owner=True, limit=2)
    assert desk.resume() == ["second"]

    desk.release("s2")

    assert isinstance(desk.acquire("new", limit=2), Held)


def test_who_waits_in_a_process_acquires_when_what_was_resumed_does_not_come(desk):
    # It may have the only worker slot, which the message needs.
    desk.listen("p")
    desk.fence("r1")
    for run in ("r2", "r3"):
        desk.park(run)
    desk.queue("r4", inbox="p")
    desk.park("r5")
    desk.release("r1")
    assert desk.out() == ["r2"]
    desk.beat("r4")
    assert desk.holders() == []

    place = desk.place("r2")
    desk.lapse_place("r2", first=place["first"] - 5000)
    assert isinstance(desk.acquire("r6"), Conflict), "a newcomer does not overtake"
    desk.beat("r4")
    assert desk.holders() == ["r4"]
    assert desk.waiters() == ["r2", "r3", "r5"]
    desk.release("r4")
    assert desk.out() == [], "it is still on its way"
    desk.fence("r2", "back")


def test_who_waits_in_a_process_for_several_locks_passes_what_is_late_at_each_of_them(desk):
    both = {"names": ("a", "b")}
    desk.listen("p")
    desk.fence("r1", **both)
    desk.park("r2", **both)
    desk.queue("r3", inbox="p", **both)
    desk.release("r1", **both)
    assert desk.out() == ["r2"]
    desk.beat("r3")
    assert desk.holders() == []

    desk.lapse_place("r2", first=desk.place("r2")["first"] - 5000)
    desk.beat("r3")

    assert (desk.holders("a"), desk.holders("b")) == (["r3"], ["r3"])


def test_a_newcomer_does_not_overtake_a_parked_execution_that_others_may_pass(desk):
    for run in ("b1", "b2"):
        desk.fence(run, names=("b",), limit=2)
    for run in ("r0", "r1"):
        desk.fence(run, limit=2)
    desk.park("r2", limit=2)
    desk.park("r3", names=("a", "b"), limit=2)
    for run in ("r0", "r1"):
        desk.release(run)
    desk.lapse_place("r2", first=desk.place("r2")["first"] - 5000)

    assert isinstance(desk.acquire("r4", limit=2), Conflict)
