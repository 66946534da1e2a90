"""Several locks in one claim: all or none, one place in line, no two claims wait for each other."""

from __future__ import annotations

import itertools

import pytest

from celery_relock.engine.protocol import SHARED, Conflict, Held, Release, Renewal, Successor
from tests.support.simple import granted

AB = ("a", "b")


def both(desk, run):
    return desk.backend.heartbeat([Renewal(name, run, "n", 30.0, 6.0) for name in AB])


def test_all_are_held_with_one_fence(desk):
    answer = desk.acquire("r1", names=AB)

    assert isinstance(answer, Held)
    assert len(set(answer.fences)) == 1
    assert answer.reentered == (False, False)
    assert desk.holders("a") == desk.holders("b") == ["r1"]
    assert desk.acquire("r1", names=AB) == answer


@pytest.mark.parametrize("taken", AB)
def test_if_one_is_held_by_another_none_is_acquired(desk, taken):
    desk.fence("r1", names=(taken,))

    answer = desk.acquire("r2", names=AB)

    assert isinstance(answer, Conflict)
    assert answer.name == taken
    assert desk.holders("b" if taken == "a" else "a") == []


def test_who_is_parked_and_acquires_other_locks_is_not_parked_any_more(desk):
    desk.fence("r1")
    desk.park("r2")

    assert isinstance(desk.acquire("r2", names=("b", "c")), Held)
    assert desk.waiters("a") == []


def test_whoever_waits_for_several_has_the_same_ticket_in_each_queue(desk):
    desk.fence("r1", names=AB)
    desk.queue("r2", names=AB)

    tickets = {desk.client.zscore(desk.keys.of_lock("q", name), "r2") for name in AB}
    assert len(tickets) == 1


def test_the_ticket_is_above_the_last_of_every_queue(desk):
    desk.fence("r1", names=AB)
    desk.queue("r2", names=("b",))
    ahead = desk.now_ms() * 1000 + 3.6e9
    desk.client.zadd(desk.keys.of_lock("q", "b"), {"r2": int(ahead)})

    desk.queue("r3", names=AB)

    assert desk.client.zscore(desk.keys.of_lock("q", "a"), "r3") == int(ahead) + 1
    assert desk.waiters("b") == ["r2", "r3"]


def test_a_waiter_gets_all_when_the_last_is_free(desk):
    inbox = desk.listen("p")
    desk.fence("r1", names=("a",))
    desk.fence("r2", names=("b",))
    desk.queue("both", names=AB, inbox="p")

    desk.release("r1", names=("a",))
    assert (desk.holders("a"), inbox.heard()) == ([], [])
    desk.release("r2", names=("b",))

    assert desk.holders("a") == desk.holders("b") == ["both"]
    [message] = inbox.heard()
    [hold] = desk.backend.inspect(AB[0]).holds
    assert message == f"granted both n {hold.fence}"
    assert desk.waiters("a") == desk.waiters("b") == []


def test_nobody_overtakes_a_waiter_that_waits_for_another_lock(desk):
    desk.fence("r1", names=("b",))
    desk.queue("both", names=AB)

    assert isinstance(desk.acquire("r2", names=("a",)), Conflict)
    assert desk.queue("r2", names=("a",)) == 1


def test_a_waiter_for_several_does_not_overtake_in_its_other_queue(desk):
    desk.listen("p")
    desk.fence("r1", names=("a",))
    desk.fence("r2", names=("b",))
    desk.queue("single", names=("b",), inbox="p")
    desk.queue("both", names=AB, inbox="p")

    desk.release("r1", names=("a",))
    desk.release("r2", names=("b",))

    assert desk.holders("b") == ["single"]
    assert desk.holders("a") == []
    desk.release("single", names=("b",))
    assert desk.holders("a") == desk.holders("b") == ["both"]


@pytest.mark.parametrize("order", list(itertools.permutations(["ab", "ba", "a", "b"])))
def test_claims_in_any_order_never_wait_for_each_other(desk, order):
    desk.listen("p")
    desk.fence("start", names=AB)
    for run in order:
        desk.queue(run, names=tuple(run), inbox="p")
    desk.release("start", names=AB)

    served = []
    while held := set(desk.holders("a")) | set(desk.holders("b")):
        served += sorted(held)
        for run in held:
            desk.release(run, names=tuple(run))

    assert sorted(served) == sorted(order)
    for earlier, later in itertools.combinations(order, 2):
        if set(earlier) & set(later):
            assert served.index(earlier) < served.index(later)


def test_who_leaves_leaves_every_queue_and_others_acquire(desk):
    desk.listen("p")
    desk.fence("r1", names=("a",))
    desk.queue("both", names=AB)
    desk.queue("r2", names=("b",), inbox="p")

    assert desk.release("both", names=AB)

    assert desk.waiters("a") == desk.waiters("b") == []
    assert desk.holders("b") == ["r2"]


def test_a_waiter_that_meets_all_locks_free_at_its_own_call_gets_all_in_one_answer(desk):
    desk.listen("p")
    desk.fence("r1", names=AB)
    # In the queue of b it stands behind somebody who has died; b is looked after last.
    desk.queue("dead", names=("b",), inbox="p")
    desk.queue("both", names=AB, inbox="p")
    desk.lapse_place("dead", "b")
    for name in AB:
        desk.lapse("r1", name)

    assert [type(line) for line in both(desk, "both")] == [Held, Held]

    for name in AB:
        assert desk.holders(name) == ["both"]
        assert desk.waiters(name) == []


def test_a_repeated_claim_that_acquires_has_no_place_left(desk):
    desk.fence("r1", names=AB)
    desk.queue("dead", names=("b",))
    desk.queue("both", names=AB)
    desk.lapse_place("dead", "b")
    for name in AB:
        desk.lapse("r1", name)

    answer = desk.acquire("both", names=AB, wait=6.0)

    assert isinstance(answer, Held)
    assert desk.waiters("a") == desk.waiters("b") == []
    assert desk.release("both", names=AB)
    assert desk.holders("a") == desk.holders("b") == []


def test_whoever_asks_passes_the_unreachable_in_every_queue(desk):
    desk.fence("r1", names=AB)
    desk.queue("gone-a", names=("a",), inbox="gone")
    desk.queue("gone-b", names=("b",), inbox="gone")
    desk.queue("both", names=AB)
    desk.release("r1", names=AB)

    assert isinstance(desk.acquire("both", names=AB, wait=6.0), Held)
    assert (desk.waiters("a"), desk.waiters("b")) == (["gone-a"], ["gone-b"])


def test_each_lock_has_its_own_limit(desk):
    desk.fence("r1", names=AB, limits=(2, 1))

    assert isinstance(desk.acquire("r2", names=("a",), limit=2), Held)
    answer = desk.acquire("r3", names=AB, limits=(3, 1))
    assert isinstance(answer, Conflict)
    assert answer.name == "b"
    desk.queue("r4", names=AB, limits=(3, 1))
    desk.release("r1", names=AB)
    assert isinstance(both(desk, "r4")[0], Held)


def behind_one_for_several(desk, **how):
    """One waits for both locks, to share b; behind it at b, two are to share b, too."""
    inbox = desk.listen("p")
    desk.fence("r1", names=("a",))
    desk.fence("r2", names=("b",))
    desk.queue("both", names=AB, limits=(1, SHARED), **{"inbox": "p", **how})
    desk.queue("waits", names=("b",), limit=SHARED, inbox="p")
    desk.park("parked", names=("b",), limit=SHARED)
    desk.release("r2", names=("b",))
    assert (inbox.heard(), desk.out()) == ([], [])
    return inbox


def test_who_waits_behind_a_waiter_for_several_locks_follows_it_at_each_of_them(desk):
    inbox = behind_one_for_several(desk)
    desk.release("r1", names=("a",))
    assert granted(inbox.heard()) == ["both", "waits"]
    assert desk.out() == ["parked"]


def test_a_dead_waiter_for_several_locks_holds_up_nobody_at_any_of_them(desk):
    inbox = behind_one_for_several(desk, inbox="gone")
    desk.lapse_place("both", "a")
    desk.lapse_place("both", "b")
    desk.release("r1", names=("a",))
    assert granted(inbox.heard()) == ["waits"]
    assert desk.out() == ["parked"]


@pytest.mark.parametrize("when", ["at its turn", "at its deadline"])
def test_a_copy_for_several_locks_that_is_given_up_holds_up_nobody_at_any_of_them(desk, when):
    inbox = desk.listen("p")
    desk.fence("r1", names=("a",))
    desk.park("both", names=AB, is_copy=True, patience=30.0)
    desk.lapse_place("both", "a", back=1, first=1, sent=5)
    desk.queue("waits", names=("b",), inbox="p")
    if when == "at its turn":
        desk.release("r1", names=("a",))
    else:
        desk.all_due()
        desk.resume()
    assert granted(inbox.heard()) == ["waits"]


def test_who_waits_behind_a_successor_for_several_locks_follows_it_at_each_of_them(desk):
    inbox = desk.listen("p")
    desk.fence("r1", names=("a",))
    desk.fence("r2", names=("b",))
    desk.queue("first", names=("a",), inbox="p")
    desk.queue("both", names=AB, limits=(1, SHARED), inbox="p")
    desk.queue("waits", names=("b",), limit=SHARED, inbox="p")
    desk.release("r2", names=("b",))
    desk.backend.release(Release(("a",), "r1", "n", successor=Successor("both", 30.0)))
    assert granted(inbox.heard()) == ["both", "waits"]


def test_a_place_that_was_evicted_at_one_lock_comes_back_with_the_ticket_of_the_others(desk):
    desk.fence("holder", names=("a",))
    desk.park("first", names=("a", "c"))
    desk.client.delete(desk.keys.of_lock("w", "c"))
    desk.fence("passer-by", names=("c",))  # clears away what is left there
    desk.release("passer-by", names=("c",))
    desk.park("second", names=("a", "c"))
    desk.park("first", "n2", names=("a", "c"))

    assert desk.waiters("a") == desk.waiters("c") == ["first", "second"]
    desk.release("holder", names=("a",))
    assert desk.out() == ["first"]


@pytest.mark.parametrize(("lost", "kept"), ["ac", "ca"])
def test_an_evicted_place_keeps_its_ticket_behind_others_at_whichever_lock(desk, lost, kept):
    desk.fence("holder", names=("a", "c"))
    desk.park("ahead", names=(kept,))
    desk.park("first", names=("a", "c"))
    desk.client.delete(desk.keys.of_lock("w", lost))
    desk.acquire("passer-by", names=(lost,))  # clears away what is left there
    desk.park("second", names=(lost,))
    desk.park("third", names=(kept,))
    desk.park("first", "n2", names=("a", "c"))

    assert desk.waiters(lost) == ["first", "second"]
    assert desk.waiters(kept) == ["ahead", "first", "third"]
