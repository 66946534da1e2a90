"""A parked execution comes back: once, twice or not at all; before its turn, or behind itself."""

from __future__ import annotations

import pytest

from celery_relock.engine.protocol import (
    Conflict,
    Ended,
    Held,
    OtherAttempt,
    Parked,
    Queued,
    Release,
    Successor,
)

AB = ("a", "b")


@pytest.fixture
def sent(desk):
    """A desk where r2's message was resumed and r3 is parked behind it."""
    desk.fence("r1")
    desk.park("r2")
    desk.park("r3")
    desk.release("r1")
    assert desk.out() == ["r2"]
    return desk


def test_whoever_comes_back_when_it_is_its_turn_acquires(sent):
    assert isinstance(sent.acquire("r2", "back"), Held)
    assert sent.waiters() == ["r3"]
    assert sent.release("r2", "back", ended="execution")
    assert sent.out() == ["r3"]


def test_whoever_comes_back_hears_that_it_was_parked_and_the_next_copy_of_it_does_not(sent):
    first = sent.acquire("r2", "back")
    assert first.resumed
    assert not sent.acquire("r2", "back").resumed, "a command that is repeated"
    sent.release("r2", "back")
    sent.acquire("r3", "next")
    sent.release("r3", "next", ended="execution")
    again = sent.acquire("r2", "again")
    assert isinstance(again, Held)
    assert not again.resumed


def test_whoever_comes_back_too_early_stays_parked_and_keeps_its_ticket(sent):
    before = sent.client.zscore(sent.keys.of_lock("q", "a"), "r3")

    answer = sent.acquire("r3", "early")
    assert isinstance(answer, Conflict)
    assert answer.parked
    assert sent.leave("r3", "early") == Parked(1)

    assert sent.client.zscore(sent.keys.of_lock("q", "a"), "r3") == before
    assert isinstance(sent.acquire("stranger"), Conflict)
    assert not sent.acquire("stranger").parked


def test_whoever_came_too_early_and_died_there_is_resumed_again(sent):
    sent.acquire("r3", "early")
    sent.acquire("r2", "back")

    sent.release("r2", "back")

    assert sent.out() == ["r3"]


def test_whoever_parks_again_has_a_new_trip(sent):
    sent.lapse_place("r2", sent=7, back=1, first=1)
    sent.fence("quick", limit=2)
    sent.park("r2", "back")

    assert {"sent", "back", "first", "untold"}.isdisjoint(sent.place("r2"))


@pytest.mark.parametrize("late", ["park", "acquire"])
def test_a_late_copy_of_what_parked_an_execution_acquires_for_nobody(desk, late):
    desk.fence("r1")
    desk.park("r2")
    desk.release("r1", home="nobody's")

    answer = desk.leave("r2") if late == "park" else desk.acquire("r2")

    assert answer == Parked(0) if late == "park" else isinstance(answer, Conflict) and answer.parked
    assert desk.holders() == []
    desk.all_due()
    assert desk.out() + desk.resume() == ["r2"]
    assert isinstance(desk.acquire("r2", "back"), Held)


def test_a_late_copy_for_several_locks_acquires_for_nobody(desk):
    desk.fence("r1", names=("b",))
    desk.park("r2", names=AB)
    desk.release("r1", names=("b",))
    assert desk.out() == ["r2"]

    answer = desk.acquire("r2", names=AB)

    assert isinstance(answer, Conflict)
    assert answer.parked
    assert (desk.holders("a"), desk.holders("b")) == ([], [])
    assert isinstance(desk.acquire("r2", "back", names=AB), Held)


def test_a_late_copy_parks_again_if_its_message_was_evicted(desk):
    desk.fence("r1")
    desk.park("r2")
    desk.client.delete(desk.keys.of_lock("w", "a"), desk.keys.of_lock("q", "a"))

    assert desk.leave("r2") == Parked(0)
    assert desk.waiters() == ["r2"]


def test_an_attempt_that_is_remembered_after_it_has_parked_leaves_its_message(sent):
    assert not sent.release("r3", ended="parked")

    assert sent.waiters() == ["r2", "r3"]
    assert sent.acquire("r3") == Ended()
    assert sent.leave("r3") == Ended()
    sent.acquire("r2", "back")
    sent.release("r2", "back", ended="execution")
    assert sent.out() == ["r3"]
    assert isinstance(sent.acquire("r3", "back"), Held)


def test_a_late_copy_acquires_nothing_when_its_message_has_come_and_was_put_back(sent):
    sent.release("r2", ended="parked")
    sent.fence("r2", "back")
    sent.release("r2", "back")

    assert sent.leave("r2") == Ended()
    assert sent.holders() == []


def test_a_message_that_arrives_twice_runs_once(sent):
    sent.fence("r2", "one")

    assert isinstance(sent.acquire("r2", "two"), OtherAttempt)
    sent.release("r2", "one", ended="execution")
    assert isinstance(sent.acquire("r2", "two"), Ended)
    assert isinstance(sent.leave("r2", "two"), Ended)
    assert sent.waiters() == ["r3"]


def test_a_second_arrival_before_its_turn_takes_the_place_over(sent):
    assert isinstance(sent.acquire("r3", "one"), Conflict)
    assert isinstance(sent.acquire("r3", "two"), Conflict)
    assert sent.waiters() == ["r2", "r3"]


def test_a_copy_of_the_execution_that_holds_is_parked_ahead_of_all(sent):
    sent.fence("r2", "one")
    sent.queue("r4")

    assert sent.leave("r2", "two") == Parked(0)

    assert sent.waiters() == ["r2", "r3", "r4"]
    assert sent.holders() == ["r2"]
    sent.all_due()
    assert sent.resume() == []


def test_the_clean_end_of_an_execution_ends_the_copy_behind_it(sent):
    sent.fence("r2", "one")
    sent.park("r2", "two")

    sent.release("r2", "one", ended="execution")

    assert sent.out() == ["r3"]
    assert sent.waiters() == ["r3"]


def test_the_end_of_an_execution_resumes_the_copy_behind_it_if_the_message_is_not_acknowledged(
    sent,
):
    sent.fence("r2", "one")
    sent.park("r2", "two")

    sent.release("r2", "one", ended="unacknowledged")

    assert sent.out() == ["r2"]
    assert sent.acquire("r2", "three") == Ended()
    assert sent.waiters() == ["r3"]


@pytest.mark.parametrize("end", ["lapse", "force", "attempt"])
def test_the_death_of_an_execution_resumes_the_copy_behind_it(sent, end):
    sent.fence("r2", "one")
    sent.park("r2", "two")

    if end == "attempt":
        sent.release("r2", "one", ended="attempt")
    elif end == "force":
        sent.backend.force_release("a")
    else:
        sent.lapse("r2")
        sent.all_due()

    assert sent.out() + sent.resume() == ["r2"]
    assert isinstance(sent.acquire("r2", "three"), Held)


def test_a_copy_does_not_hold_up_who_may_acquire_beside_its_execution(desk):
    desk.fence("r1", limit=2)
    desk.park("r1", "copy", limit=2)

    assert isinstance(desk.acquire("r2", limit=2), Held)
    assert desk.park("r3", limit=2) == 1
    desk.release("r2")
    assert desk.out() == ["r3"]


def test_a_copy_does_not_hold_up_who_waits_for_several_locks(desk):
    desk.fence("r1", names=("b",), limit=2)
    desk.park("r1", "copy", names=("b",), limit=2)
    desk.fence("r2")
    desk.park("both", names=AB, limits=(1, 2))

    desk.release("r2")

    assert desk.out() == ["both"]


def test_there_is_always_room_for_a_copy(desk):
    desk.fence("r1")
    desk.park("r2", most=1)

    assert desk.park("r1", "copy", most=1) == 0


@pytest.mark.parametrize("by_owner", [False, True])
def test_the_execution_that_holds_asks_once_more_and_its_copy_stays(desk, by_owner):
    how = {"limit": 2, "by_owner": by_owner}
    fence = desk.fence("r1", **how)
    desk.park("r1", "copy", **how)

    assert desk.fence("r1", **how) == fence
    assert desk.waiters() == ["r1"]
    assert desk.place("r1")["attempt"] == "copy"


def test_the_execution_that_lost_one_of_its_locks_asks_again_and_its_copy_stays(desk):
    desk.fence("r1", names=AB, limit=2)
    desk.park("r1", "copy", names=AB, limit=2)
    desk.lapse("r1", "a")
    desk.all_due()
    assert desk.resume() == []

    assert isinstance(desk.acquire("r1", names=AB, limit=2), Held)

    assert {hold.attempt_id for name in AB for hold in desk.backend.inspect(name).holds} == {"n"}
    assert (desk.waiters("a"), desk.waiters("b")) == (["r1"], ["r1"])


def test_a_copy_does_not_acquire_with_its_owner_while_its_execution_holds(desk):
    how = {"owner": "o", "by_owner": True}
    desk.fence("stranger")
    desk.park("first", **how)
    desk.park("second", **how)
    desk.release("stranger")
    desk.fence("first", "back", **how)
    assert desk.resume() == ["second"]
    desk.park("first", "copy", **how)

    desk.fence("second", "back", **how)

    assert desk.resume() == []


@pytest.mark.parametrize("by_owner", [False, True])
def test_the_copy_of_a_successor_that_was_quicker_stays_when_a_hold_is_left_to_it(desk, by_owner):
    how = {"owner": "o", "by_owner": by_owner, "ancestors": ("first",)}
    desk.fence("first", **how)
    desk.fence("retry", **how)
    desk.park("retry", "copy", **how)

    left = desk.backend.release(
        Release(("a",), "first", "n", homes="h", successor=Successor("retry", 30.0))
    )

    assert not left.messages
    assert desk.resume() == []


def test_a_copy_of_an_inner_execution_joins_again_what_the_outer_one_holds(desk):
    desk.fence("outer", owner="o")
    desk.fence("inner", owner="o", ancestors=("outer",))
    desk.park("stranger")
    desk.park("inner", "copy", owner="o", ancestors=("outer",))

    desk.lapse("inner")
    desk.all_due()

    assert desk.resume() == ["inner"], "it need not wait for the outer one"
    answer = desk.acquire("inner", "back", owner="o", ancestors=("outer",))
    assert answer.reentered == (True,)


def test_a_copy_of_an_execution_that_waits_in_a_process_is_not_parked(desk):
    desk.fence("r1")
    desk.queue("r2", "one")

    assert isinstance(desk.leave("r2", "two"), OtherAttempt)
    assert isinstance(desk.beat("r2", "one"), Queued), "its place is as it was"


def test_a_copy_has_one_ticket_for_all_its_locks(desk):
    """Or it would wait for another execution that wants both, and that one for it."""
    desk.fence("outer", owner="o")
    desk.fence("stranger", names=("b",))
    desk.queue("inner", "one", names=AB, owner="o", ancestors=("outer",))
    desk.park("both", names=AB)
    desk.lapse_place("inner", "b")

    desk.park("inner", "two", names=AB, owner="o", ancestors=("outer",))

    assert desk.waiters("a") == desk.waiters("b") == ["inner", "both"]
    scores = {desk.client.zscore(desk.keys.of_lock("q", name), "inner") for name in AB}
    assert len(scores) == 1


def test_a_copy_of_an_execution_that_holds_one_lock_and_waits_for_another_is_not_parked(desk):
    desk.fence("outer", owner="o")
    desk.fence("stranger", names=("b",))
    desk.queue("inner", "one", names=AB, owner="o", ancestors=("outer",))

    answer = desk.leave("inner", "two", names=AB, owner="o", ancestors=("outer",))

    assert isinstance(answer, OtherAttempt)
    assert isinstance(desk.beat("inner", "one", "b"), Queued)


def test_an_execution_that_is_parked_holds_none_of_its_locks(desk):
    """It could not renew them, and would take itself for a duplicate when it comes back."""
    desk.fence("outer", owner="o")
    desk.fence("stranger", names=("b",))

    desk.park("inner", names=AB, owner="o", ancestors=("outer",))

    assert desk.holders("a") == ["outer"]
    desk.release("stranger", names=("b",))
    assert desk.out() == ["inner"]
    answer = desk.acquire("inner", "back", names=AB, owner="o", ancestors=("outer",))
    assert answer.reentered == (True, False)


def test_a_parked_execution_that_waits_in_a_process_now_keeps_its_ticket_and_loses_its_message(
    sent,
):
    before = sent.client.zscore(sent.keys.of_lock("q", "a"), "r3")

    assert sent.queue("r3", "early") == 1

    assert sent.client.zscore(sent.keys.of_lock("q", "a"), "r3") == before
    assert sent.client.hkeys(f"{sent.keys.prefix(0)}m:a") == [b"r2"]
    sent.lapse_place("r3")
    sent.fence("r2", "back")
    assert sent.park("r3", "parked-again") == 0


def test_a_dead_waiter_that_is_delivered_again_parks_in_its_place(desk):
    desk.fence("r1")
    desk.queue("r2")
    desk.queue("r3")
    desk.lapse_place("r2")

    assert desk.leave("r2", "again") == Parked(0)
    assert desk.waiters() == ["r2", "r3"]


def test_a_heartbeat_that_comes_late_acquires_nothing_for_a_parked_execution(desk):
    desk.fence("r1")
    desk.queue("r2")
    desk.park("r2")
    desk.lapse("r1")

    assert desk.beat("r2") is None
    assert desk.holders() == []


def test_an_execution_that_comes_back_for_other_locks_leaves_its_old_place(sent):
    sent.fence("x", names=("b",))

    assert sent.leave("r3", "changed", names=("b",)) == Parked(0)

    assert (sent.waiters("a"), sent.waiters("b")) == (["r2"], ["r3"])
    assert sent.client.hkeys(f"{sent.keys.prefix(0)}m:a") == [b"r2"]


@pytest.mark.parametrize("busy", [False, True])
def test_an_execution_that_comes_back_for_some_other_locks_acquires_none_of_the_old_ones(
    desk, busy
):
    old, new = ("a", "b"), ("b", "c")
    desk.fence("r0", names=old)
    desk.park("r1", names=old)
    for name in old:
        desk.park(f"behind-{name}", names=(name,))
    desk.release("r0", names=old)
    assert desk.out() == ["r1"]
    if busy:
        desk.fence("x", names=("c",))

    assert isinstance(desk.acquire("r1", "changed", names=new), Conflict)
    desk.park("r1", "changed", names=new)

    assert [desk.holders(name) for name in "abc"] == [[], [], ["x"] if busy else []]
    assert [desk.waiters(name) for name in "abc"] == [["behind-a"], ["behind-b", "r1"], ["r1"]]
    assert sorted(desk.resume()) == ["behind-a", "behind-b"]


def test_an_execution_that_comes_back_for_other_locks_does_not_acquire_the_old_one(desk):
    """Where another has left, the turn comes to its old place while it asks."""
    desk.fence("x", names=("b", "c"))
    desk.queue("dead", names=("a", "c"))
    desk.park("r1", names=("c",))
    desk.release("x", names=("b", "c"))
    desk.fence("x", names=("b",))
    desk.lapse_place("dead")

    desk.park("r1", "changed", names=("a", "b"))

    assert [desk.holders(name) for name in "abc"] == [[], ["x"], []]
    assert [desk.waiters(name) for name in "abc"] == [["r1"], ["r1"], []]


def test_an_execution_that_comes_back_for_more_locks_acquires_all_or_none(desk):
    desk.fence("r0", names=("b",))
    desk.park("r1", names=("b",))
    desk.release("r0", names=("b",))
    desk.fence("x", names=("c",))

    desk.park("r1", "changed", names=("b", "c"))

    assert [desk.holders(name) for name in "bc"] == [[], ["x"]]
    assert [desk.waiters(name) for name in "bc"] == [["r1"], ["r1"]]


def test_an_execution_whose_ancestor_has_ended_meanwhile_acquires_all_or_none(desk):
    inbox = desk.listen("p")
    child = {"owner": "o", "ancestors": ("parent",)}
    desk.fence("parent", names=("a",), owner="o")
    desk.fence("x", names=("b",))
    desk.park("r1", names=AB, **child)
    desk.queue("y", names=("a",), inbox="p")
    desk.release("parent", names=("a",))
    assert inbox.heard() == [], "r1 is ahead of y"

    desk.park("r1", "back", names=AB, **child)

    assert [desk.holders(name) for name in AB] == [[], ["x"]]
    desk.release("x", names=("b",))
    assert desk.out() == ["r1"]
    assert isinstance(desk.acquire("r1", "again", names=AB, **child), Held)


@pytest.mark.parametrize("wait", [0.0, 6.0])
def test_an_execution_that_comes_back_for_some_other_locks_acquires_these_alone(desk, wait):
    desk.fence("r0", names=AB)
    desk.park("r1", names=AB)
    desk.release("r0", names=AB)

    assert isinstance(desk.acquire("r1", "changed", names=("b", "c"), wait=wait), Held)

    assert [desk.holders(name) for name in "abc"] == [[], ["r1"], ["r1"]]
    assert [desk.waiters(name) for name in "abc"] == [[], [], []]


@pytest.mark.parametrize("others", [0, 1, 40])
def test_an_execution_that_acquires_another_lock_leaves_its_place_at_once(desk, others):
    """Whether nobody, one other or so many hold the other lock that it has an index."""
    desk.fence("r0", names=("a",))
    for name in ("r1", "behind"):
        desk.park(name, names=("a",))
    for number in range(others):
        desk.acquire(f"other-{number}", names=("b",), limits=(99,))

    assert isinstance(desk.acquire("r1", "changed", names=("b",), limits=(99,)), Held)

    assert desk.waiters("a") == ["behind"]
    desk.release("r0", names=("a",))
    assert desk.out() == ["behind"]


def test_an_attempt_for_some_other_locks_acquires_none_of_those_that_a_dead_one_waited_for(desk):
    desk.fence("r0", names=AB)
    desk.queue("r1", names=AB)
    desk.release("r0", names=AB)
    desk.lapse_place("r1")

    assert isinstance(desk.acquire("r1", "changed", names=("b", "c"), wait=6.0), Held)

    assert [desk.holders(name) for name in "abc"] == [[], ["r1"], ["r1"]]


def test_an_execution_that_comes_back_for_other_locks_lets_in_those_behind_its_old_place(sent):
    sent.fence("x", names=("b",))

    sent.park("r2", "changed", names=("b",))
    assert sent.resume() == ["r3"]


def test_an_execution_that_has_ended_leaves_its_message_nowhere(sent):
    """The key of its lock was changed while it was parked: it ended before it asked for the new
    one."""
    sent.release("r2", "changed", names=("free",), ended="execution")
    sent.lapse_place("r2", back=1)
    sent.all_due()
    assert sent.resume() == ["r2"]

    assert isinstance(sent.acquire("r2", "late", names=("free",)), Ended)

    assert sent.waiters("a") == ["r3"]
    assert sent.resume() == ["r3"], "whose turn it is now"


def test_who_parked_a_message_and_heard_no_answer_takes_it_back(desk):
    desk.fence("r1")
    desk.park("r2")

    assert desk.release("r2", ended="attempt")

    assert desk.waiters() == []
    assert isinstance(desk.leave("r2"), Ended), "the command again, late"


def test_the_message_of_who_was_killed_before_the_answer_stays(desk):
    desk.fence("r1")
    desk.park("r2")

    assert not desk.release("r2", ended="killed")

    assert desk.waiters() == ["r2"]
    assert isinstance(desk.leave("r2"), Ended), "the command again, late"


def test_the_hold_and_the_place_of_who_was_killed_go(desk):
    desk.fence("r1")
    desk.queue("r2")

    assert desk.release("r2", ended="killed")
    assert desk.release("r1", ended="killed")

    assert desk.waiters() == []
    assert desk.fence("r3")


def test_who_was_killed_after_it_had_parked_takes_nothing_back(desk):
    desk.fence("r1")
    desk.park("r2")

    desk.release("r2", ended="killed")
    assert desk.waiters() == ["r2"]
    desk.release("r1")

    assert desk.out() == ["r2"]
    assert isinstance(desk.acquire("r2"), Ended), "the command of the one that was killed, late"
    assert isinstance(desk.acquire("r2", "back"), Held)


def test_who_came_by_a_message_does_not_take_it_back(sent):
    sent.acquire("r3", "early")

    assert not sent.release("r3", "early", ended="attempt")

    assert sent.waiters() == ["r2", "r3"]


@pytest.mark.parametrize("blocked", AB)
def test_whoever_is_parked_for_several_locks_is_resumed_when_it_may_have_all(desk, blocked):
    free = "b" if blocked == "a" else "a"
    desk.fence("r1", names=AB)
    desk.park("both", names=AB, text="once")
    desk.park("single", names=(free,))
    assert (
        desk.client.hvals(f"{desk.keys.prefix(0)}m:b")
        == [b"", b"text of single"][: 1 + (free == "b")]
    )

    desk.release("r1", names=(free,))
    assert desk.out() == [], "nobody overtakes"
    desk.release("r1", names=(blocked,))

    assert [message[::2] for message in desk.messages()] == [("both", "once")]
    assert isinstance(desk.acquire("both", "back", names=AB), Held)
    desk.release("both", "back", names=AB)
    assert desk.out() == ["single"]


def test_for_several_locks_that_come_free_at_once_the_message_goes_out_once(desk):
    desk.fence("r1", names=AB)
    desk.park("both", names=AB)

    desk.release("r1", names=AB)

    assert desk.out() == ["both"]
    assert isinstance(desk.acquire("x", names=("b",)), Conflict), "promised in each"


def test_a_message_with_many_locks_that_arrives_writes_its_place_once_at_each(desk):
    names = tuple(f"n{number:02}" for number in range(20))
    desk.fence("r1", names=names)
    desk.park("r2", names=names)
    desk.client.config_resetstat()

    assert isinstance(desk.acquire("r2", "early", names=names), Conflict)

    assert desk.client.info("commandstats")["cmdstat_hset"]["calls"] == len(names)
