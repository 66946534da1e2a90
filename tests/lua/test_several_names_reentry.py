"""Several locks in one claim, some of which the execution may join: what it joins and waits for."""

from __future__ import annotations

from celery_relock.engine.protocol import Conflict, Held, OtherAttempt, Queued, Renewal

AB = ("a", "b")


def both(desk, run):
    return desk.backend.heartbeat([Renewal(name, run, "n", 30.0, 6.0) for name in AB])


def test_without_waiting_nothing_is_joined_when_another_is_held(desk):
    desk.fence("outer", names=("a",), owner="o")
    desk.fence("stranger", names=("b",))

    answer = desk.acquire("inner", names=AB, owner="o", ancestors=("outer",))

    assert isinstance(answer, Conflict)
    assert answer.name == "b"
    assert desk.holders("a") == ["outer"]


def test_a_joined_lock_is_kept_while_the_other_is_waited_for(desk):
    desk.listen("p")
    outer = desk.fence("outer", names=("a",), owner="o")
    desk.fence("stranger", names=("b",))

    desk.queue("inner", names=AB, owner="o", ancestors=("outer",), inbox="p")
    assert desk.holders("a") == ["inner", "outer"]
    assert desk.waiters("a") == []
    assert [type(line) for line in both(desk, "inner")] == [Held, Queued]

    desk.release("stranger", names=("b",))
    first, second = both(desk, "inner")
    assert first.fences == (outer,)
    assert second.fences[0] > outer
    answer = desk.acquire("inner", names=AB, owner="o", ancestors=("outer",), wait=6.0)
    assert answer == Held((*first.fences, *second.fences), (True, False))


def test_who_releases_while_it_waits_releases_what_it_had_joined(desk):
    desk.fence("outer", names=("a",), owner="o")
    desk.fence("stranger", names=("b",))
    desk.queue("inner", names=AB, owner="o", ancestors=("outer",))

    reply = desk.raw("release", desk.keys.claim(AB, "inner"), ["inner n 0", ""])

    assert reply == ["RELEASED", "2"]
    assert (desk.holders("a"), desk.waiters("b")) == (["outer"], [])


def test_a_claim_that_may_join_meanwhile_has_one_place_for_the_rest(desk):
    desk.listen("p")
    desk.fence("outer", names=("a",), owner="o", limit=2)
    desk.fence("stranger", names=("b",))
    desk.queue("inner", names=AB, owner="o", limits=(2, 1))
    # The second time it says where it comes from.
    again = desk.acquire(
        "inner", names=AB, owner="o", limits=(2, 1), ancestors=("outer",), wait=6.0
    )

    assert isinstance(again, Queued)
    assert (desk.waiters("a"), desk.waiters("b")) == ([], ["inner"])
    desk.release("stranger", names=("b",))
    assert isinstance(desk.beat("inner", name="b"), Held)
    assert len({hold.fence for hold in desk.backend.inspect("a").holds}) == 1


def test_a_claim_that_may_join_meanwhile_is_not_held_up_by_its_own_place(desk):
    desk.fence("outer", names=("a",), owner="o")
    desk.queue("inner", names=AB, owner="o")

    answer = desk.acquire("inner", names=AB, owner="o", ancestors=("outer",), wait=6.0)

    assert answer.reentered == (True, False)
    assert desk.waiters("a") == desk.waiters("b") == []


def test_another_attempt_that_wants_more_than_the_dead_one_takes_one_new_ticket(desk):
    desk.listen("p")
    outer = desk.fence("outer", names=("b",), owner="o")
    desk.fence("stranger", names=("a",))
    desk.queue("inner", "n1", names=AB, owner="o", ancestors=("outer",))
    desk.queue("rival", names=AB, inbox="p")
    desk.lapse_place("inner")
    desk.lapse("inner", "b")
    desk.release("outer", names=("b",))

    # Now for both: with its old ticket in a and a new one in b, each would wait for the other.
    desk.queue("inner", "n2", names=AB, owner="o", inbox="p")
    desk.release("stranger", names=("a",))

    assert desk.holders("a") == desk.holders("b") == ["rival"]
    desk.release("rival", names=AB)
    assert desk.holders("a") == desk.holders("b") == ["inner"]
    assert desk.backend.inspect("b").holds[0].fence > outer


def test_an_attempt_that_is_turned_away_leaves_no_place(desk):
    desk.fence("outer", names=("b",), owner="o")
    desk.fence("stranger", names=("a",))
    desk.queue("inner", "n1", names=AB, owner="o", ancestors=("outer",))
    desk.lapse_place("inner")

    assert isinstance(desk.acquire("inner", "n2", names=AB, owner="o", wait=6.0), OtherAttempt)
    assert desk.beat("inner", "n2") is None


def test_a_waiter_that_joins_one_lock_by_its_owner_acquires_the_other(desk):
    desk.listen("p")
    desk.fence("stranger", names=AB)
    desk.queue("single", names=("a",), owner="o", by_owner=True, inbox="p")
    desk.queue("both", names=AB, owner="o", by_owner=True, inbox="p")

    desk.release("stranger", names=AB)

    assert desk.holders("a") == ["both", "single"]
    assert desk.holders("b") == ["both"]
    assert len({hold.fence for hold in desk.backend.inspect("a").holds}) == 1
