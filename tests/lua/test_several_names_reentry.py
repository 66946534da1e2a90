"""Several locks in one claim, some of which the execution may join: it joins none before it can
have all of them."""

from __future__ import annotations

import pytest

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


def test_a_lock_is_joined_when_the_other_that_is_waited_for_is_free(desk):
    desk.listen("p")
    outer = desk.fence("outer", names=("a",), owner="o")
    desk.fence("stranger", names=("b",))

    desk.queue("inner", names=AB, owner="o", ancestors=("outer",), inbox="p")
    assert desk.holders("a") == ["outer"]
    assert desk.waiters("a") == desk.waiters("b") == ["inner"]
    assert [type(line) for line in both(desk, "inner")] == [Queued, Queued]

    desk.release("stranger", names=("b",))
    first, second = both(desk, "inner")
    assert first.fences == (outer,)
    assert second.fences[0] > outer
    answer = desk.acquire("inner", names=AB, owner="o", ancestors=("outer",), wait=6.0)
    assert answer == Held((*first.fences, *second.fences), (True, False))


def test_who_releases_while_it_waits_leaves_what_it_may_join_as_it_is(desk):
    desk.fence("outer", names=("a",), owner="o")
    desk.fence("stranger", names=("b",))
    desk.queue("inner", names=AB, owner="o", ancestors=("outer",))

    reply = desk.raw("release", desk.keys.claim(AB, "inner"), ["inner n 0", ""])

    assert reply == ["RELEASED"]
    assert (desk.holders("a"), desk.waiters("a"), desk.waiters("b")) == (["outer"], [], [])


@pytest.fixture(params=["queue", "park"])
def ahead(request, desk):
    """It waits for both locks, as outer has b."""
    desk.listen("p")
    desk.fence("outer", names=("b",), owner="o")
    getattr(desk, request.param)("ahead", names=AB)
    return desk


def test_who_may_join_what_those_ahead_wait_for_passes_them(ahead):
    """Outer can have sent it, and wait for its result."""
    answer = ahead.acquire("inner", names=AB, owner="o", ancestors=("outer",))

    assert answer.reentered == (False, True)
    assert ahead.waiters("a") == ahead.waiters("b") == ["ahead"]


@pytest.mark.parametrize("how", ["queue", "park"])
def test_who_may_join_what_those_ahead_wait_for_passes_them_in_the_queue(desk, how):
    desk.fence("outer", names=("b",), owner="o")
    desk.fence("stranger", names=("a",))
    desk.park("ahead", names=AB)
    more = {"inbox": "p"} if how == "queue" else {}

    assert getattr(desk, how)("inner", names=AB, owner="o", ancestors=("outer",), **more) == 0

    assert desk.waiters("a") == desk.waiters("b") == ["inner", "ahead"]
    assert desk.holders("b") == ["outer"]


def test_who_waits_for_another_permit_is_not_passed(desk):
    for run in ("outer", "stranger"):
        desk.fence(run, names=("b",), owner="o" if run == "outer" else run, limit=2)
    desk.park("ahead", names=AB, limits=(1, 2))

    answer = desk.acquire("inner", names=AB, limits=(1, 2), owner="o", ancestors=("outer",))

    assert isinstance(answer, Conflict)


@pytest.mark.parametrize("how", ["queue", "park"])
def test_who_could_have_joined_a_lock_keeps_its_turn_when_that_is_over(desk, how):
    desk.listen("p")
    desk.fence("outer", names=("a",), owner="o")
    desk.fence("stranger", names=("b",))
    more = {"inbox": "p"} if how == "queue" else {}
    getattr(desk, how)("inner", names=AB, owner="o", ancestors=("outer",), **more)
    desk.park("behind", names=("b",))

    desk.release("outer", names=("a",))
    assert isinstance(desk.acquire("newcomer", names=("a",)), Conflict)
    desk.release("stranger", names=("b",))

    if how == "park":
        assert desk.out() == ["inner"]
        assert isinstance(desk.acquire("inner", "back", names=AB, owner="o"), Held)
    assert desk.holders("a") == desk.holders("b") == ["inner"]


def test_a_claim_that_may_join_meanwhile_does_so_when_its_turn_comes(desk):
    desk.listen("p")
    desk.fence("outer", names=("a",), owner="o", limit=2)
    desk.fence("stranger", names=("b",))
    desk.queue("inner", names=AB, owner="o", limits=(2, 1))
    # The second time it says where it comes from.
    again = desk.acquire(
        "inner", names=AB, owner="o", limits=(2, 1), ancestors=("outer",), wait=6.0
    )

    assert isinstance(again, Queued)
    assert desk.waiters("a") == desk.waiters("b") == ["inner"]
    desk.release("stranger", names=("b",))
    assert isinstance(desk.beat("inner", name="b"), Held)
    assert len({hold.fence for hold in desk.backend.inspect("a").holds}) == 1


def test_a_claim_that_may_join_meanwhile_is_not_held_up_by_its_own_place(desk):
    desk.fence("outer", names=("a",), owner="o")
    desk.queue("inner", names=AB, owner="o")

    answer = desk.acquire("inner", names=AB, owner="o", ancestors=("outer",), wait=6.0)

    assert answer.reentered == (True, False)
    assert desk.waiters("a") == desk.waiters("b") == []


def test_another_attempt_that_may_join_nothing_any_more_has_the_place_of_the_dead_one(desk):
    desk.listen("p")
    outer = desk.fence("outer", names=("b",), owner="o")
    desk.fence("stranger", names=("a",))
    desk.queue("inner", "n1", names=AB, owner="o", ancestors=("outer",))
    desk.queue("rival", names=AB, inbox="p")
    desk.lapse_place("inner")

    desk.queue("inner", "n2", names=AB, owner="o", inbox="p")
    desk.release("outer", names=("b",))
    desk.release("stranger", names=("a",))

    assert desk.holders("a") == desk.holders("b") == ["inner"]
    assert desk.backend.inspect("b").holds[0].fence > outer
    desk.release("inner", "n2", names=AB)
    assert desk.holders("a") == desk.holders("b") == ["rival"]


def test_an_attempt_that_is_turned_away_leaves_no_place(desk):
    desk.fence("inner", "n1", names=("b",))
    desk.fence("stranger", names=("a",))

    assert isinstance(desk.acquire("inner", "n2", names=AB, wait=6.0), OtherAttempt)
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
