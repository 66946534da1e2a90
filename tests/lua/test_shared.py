"""Claims that share a lock: beside each other, beside nobody else, first come first served."""

from __future__ import annotations

import pytest

from celery_relock.engine.protocol import (
    SHARED,
    Conflict,
    Deadlocked,
    Downgraded,
    Held,
    Parked,
    Queued,
    Release,
    Renewal,
    Successor,
)
from tests.support.simple import granted

MANY = 40
#: More than a search for a deadlock looks at.
CROWD = 120
#: Of a claim that shares its locks.
SHARES = {"limit": SHARED}


def waits(desk, run, **more):
    """It waits in a process that hears of its grant."""
    desk.queue(run, inbox="p", **more)


def downgrade(desk, run, attempt_id="n", names=("a",)):
    return desk.backend.downgrade(names, run, attempt_id)


def modes(desk, name="a"):
    return {hold.execution_id: hold.shared for hold in desk.backend.inspect(name, most=1000).holds}


def test_all_who_share_a_lock_hold_one_permit_and_nobody_else_acquires(desk):
    fence = desk.fence("s1", **SHARES)

    assert desk.acquire("s2", **SHARES) == Held((fence,), (False,)), "to share is not to re-enter"
    assert isinstance(desk.acquire("x"), Conflict)
    desk.release("s1")
    assert isinstance(desk.acquire("x"), Conflict)
    desk.release("s2")
    assert desk.fence("x") > fence
    assert isinstance(desk.acquire("s1", **SHARES), Conflict)


def test_nobody_shares_with_a_semaphore_nor_it_with_them(desk):
    desk.fence("five", limit=5)
    assert isinstance(desk.acquire("s1", **SHARES), Conflict)
    desk.release("five")
    desk.fence("s1", **SHARES)
    assert isinstance(desk.acquire("five", limit=5), Conflict)


def test_a_semaphore_does_not_overtake_a_message_on_its_way_that_is_to_share(desk):
    desk.fence("x1")
    desk.park("s1", **SHARES)
    waits(desk, "five", limit=5)
    desk.release("x1")
    assert desk.out() == ["s1"]

    assert isinstance(desk.beat("five"), Queued)
    assert isinstance(desk.acquire("another", limit=5), Conflict)
    assert isinstance(desk.acquire("s1", "n2", **SHARES), Held)


def test_who_comes_to_share_waits_behind_one_that_waits_to_be_alone(desk):
    desk.fence("s1", **SHARES)
    waits(desk, "x")

    for limit, outranked in ((SHARED, True), (1, False)):
        answer = desk.acquire("s2", limit=limit)
        assert isinstance(answer, Conflict)
        assert (answer.shared, answer.outranked) == (True, outranked)
    assert desk.queue("s2", **SHARES) == 1
    assert isinstance(desk.beat("s2"), Queued)


def test_the_first_in_the_queue_acquire_together_as_far_as_they_share(desk):
    inbox = desk.listen("p")
    desk.fence("x1")
    for run in ("s1", "s2"):
        waits(desk, run, **SHARES)
    waits(desk, "x2")
    waits(desk, "s3", **SHARES)

    desk.release("x1")
    assert granted(inbox.heard()) == ["s1", "s2"]
    desk.release("s1")
    assert inbox.heard() == []
    desk.release("s2")
    assert granted(inbox.heard()) == ["x2"]
    desk.release("x2")
    assert granted(inbox.heard()) == ["s3"]


def test_parked_ones_are_resumed_together_and_only_who_wants_to_be_alone_waits_for_them(desk):
    desk.fence("x1")
    for run in ("s1", "s2"):
        desk.park(run, **SHARES)
    desk.park("x2")

    desk.release("x1")
    assert desk.out() == ["s1", "s2"]
    assert isinstance(desk.acquire("x3"), Conflict)
    fence = desk.fence("s2", "back", **SHARES)
    assert desk.fence("s1", "back", **SHARES) == fence
    desk.release("s1", "back")
    assert desk.out() == []
    desk.release("s2", "back")
    assert desk.out() == ["x2"]


def test_a_message_on_its_way_that_is_to_share_keeps_out_nobody_else_that_is(desk):
    desk.fence("x1")
    desk.park("s1", **SHARES)
    desk.release("x1")
    assert desk.out() == ["s1"]

    assert isinstance(desk.acquire("s2", **SHARES), Held)
    desk.release("s2")
    assert isinstance(desk.acquire("x2"), Conflict), "it is on its way"


def test_a_message_on_its_way_that_is_to_be_alone_keeps_out_who_is_to_share(desk):
    desk.fence("x1")
    desk.park("x2")
    desk.release("x1")
    assert desk.out() == ["x2"]

    assert isinstance(desk.acquire("s1", **SHARES), Conflict)
    assert isinstance(desk.acquire("x2", "back"), Held)


def test_one_that_is_late_to_be_alone_is_passed_while_the_lock_is_free_and_not_while_it_is_shared(
    desk,
):
    inbox = desk.listen("p")
    desk.fence("x1")
    desk.park("x2")
    waits(desk, "s1", **SHARES)
    desk.release("x1")
    desk.lapse_place("x2", first=desk.place("x2")["first"] - 5000)
    assert isinstance(desk.beat("s1"), Held)

    waits(desk, "s2", **SHARES)
    assert isinstance(desk.beat("s2"), Queued)
    desk.release("s1")
    assert granted(inbox.heard()) == ["s2"]


def test_nobody_is_its_own_kin(desk):
    for _ in range(2):
        told = desk.acquire("s1", ancestors=("s1",), **SHARES)
        assert told.reentered == (False,)


@pytest.mark.parametrize("how", [{"by_owner": True}, {"ancestors": ("outer",)}])
def test_who_is_to_be_alone_does_not_join_its_own_shared_permit(desk, how):
    desk.fence("outer", owner="o", **SHARES)

    assert isinstance(desk.acquire("inner", owner="o", **how), Conflict)
    told = desk.acquire("inner", owner="o", wait=6.0, stuck=("outer",), **how)
    assert told == Deadlocked(("a",))
    assert desk.acquire("child", owner="o", **how, **SHARES).reentered == (True,)
    assert desk.acquire("child", owner="o", **how, **SHARES).reentered == (True,), "repeated"


def test_who_is_to_be_alone_beside_a_crowd_is_told_that_its_own_hold_is_in_the_way(desk):
    desk.fence("zz", **SHARES)  # by name, the last
    for number in range(CROWD):
        desk.fence(f"s{number}", **SHARES)

    assert desk.acquire("inner", wait=6.0, stuck=("zz",)) == Deadlocked(("a",))


@pytest.mark.parametrize("how", [{"by_owner": True}, {"ancestors": ("outer",)}])
def test_to_share_what_one_holds_alone_already_is_to_join_it(desk, how):
    fence = desk.fence("outer", owner="o")

    assert desk.acquire("inner", owner="o", **how, **SHARES) == Held((fence,), (True,))
    assert modes(desk) == {"outer": False, "inner": False}
    desk.release("outer")
    assert isinstance(desk.acquire("s1", **SHARES), Conflict), "still exclusive, whoever is in it"


def test_of_several_locks_some_are_shared(desk):
    both = {"names": ("a", "b"), "limits": (SHARED, 1)}
    first = desk.acquire("r1", **both)
    assert isinstance(desk.acquire("r2", **both), Conflict)
    desk.fence("s1", **SHARES)
    desk.release("r1", names=("a", "b"))

    fences = desk.acquire("r2", **both).fences
    assert fences[0] == first.fences[0], "that of those who share"
    assert fences[1] > first.fences[1]
    assert modes(desk, "b") == {"r2": False}


def test_a_renewal_and_a_kept_hold_stay_shared(desk):
    fence = desk.fence("s1", **SHARES)
    assert desk.backend.renew([Renewal("a", "s1", "n", 60.0)]) == [True]
    desk.backend.release(Release(("a",), "s1", "n", successor=Successor("s2", 30.0)))

    assert modes(desk) == {"s2": True}
    assert desk.fence("s3", **SHARES) == fence
    assert isinstance(desk.acquire("x"), Conflict)


def leaves_to(desk, run, successor):
    desk.backend.release(Release(("a",), run, "n", successor=Successor(successor, 30.0)))


@pytest.mark.parametrize("comes", [SHARED, 1])
def test_who_comes_to_be_alone_and_only_that_is_alone_with_what_was_kept_for_it(desk, comes):
    fence = desk.fence("s1", **SHARES)
    waits(desk, "x")
    leaves_to(desk, "s1", "retry")

    assert desk.fence("retry", limit=comes) == fence
    assert modes(desk) == {"retry": comes == SHARED}


def test_who_comes_to_be_alone_does_not_wait_for_its_own_hold_while_others_share(desk):
    for run in ("s1", "s2"):
        fence = desk.fence(run, **SHARES)
    leaves_to(desk, "s1", "retry")

    desk.park("retry")
    assert modes(desk) == {"s2": True}
    desk.release("s2")
    assert desk.out() == ["retry"]
    assert desk.fence("retry", "n2") > fence


@pytest.mark.parametrize("others", [(), ("s2",)])
def test_who_waits_to_be_alone_when_a_shared_hold_is_kept_for_it_does_not_wait_for_that(
    desk, others
):
    inbox = desk.listen("p")
    for run in ("s1", *others):
        desk.fence(run, **SHARES)
    for run in ("x", "retry"):
        waits(desk, run)
    leaves_to(desk, "s1", "retry")

    for run in others:
        assert modes(desk) == {run: True}
        desk.release(run)
        assert granted(inbox.heard()) == ["x"]
        desk.release("x")
    assert granted(inbox.heard()) == ["retry"]
    assert modes(desk) == {"retry": False}


def test_a_lapsed_shared_hold_ends_alone(desk):
    for run in ("s1", "s2"):
        desk.fence(run, **SHARES)
    desk.lapse("s1")
    assert isinstance(desk.acquire("x"), Conflict)
    desk.lapse("s2")
    assert isinstance(desk.acquire("x"), Held)


def test_more_holders_than_are_read_at_once_share_as_few_do(desk):
    inbox = desk.listen("p")
    for number in range(MANY):
        assert desk.acquire(f"s{number}", **SHARES).reentered == (False,)
    assert len(set(modes(desk))) == MANY
    kin = {"owner": "s1", "by_owner": True, **SHARES}
    assert desk.acquire("kin", **kin).reentered == (True,)
    waits(desk, "x")
    assert isinstance(desk.acquire("late", **SHARES), Conflict)

    for number in range(MANY):
        desk.release(f"s{number}")
    assert inbox.heard() == []
    desk.release("kin")
    assert granted(inbox.heard()) == ["x"]


def test_a_lock_that_became_large_while_it_was_shared_is_not_taken_for_another_one(desk):
    """The index is built from what is there, and tells who shares."""
    for number in range(MANY):
        desk.fence(f"s{number}", **SHARES)
    assert isinstance(desk.acquire("semaphore", limit=1000), Conflict)
    for number in range(MANY):
        desk.release(f"s{number}")
    for number in range(MANY):
        desk.fence(f"h{number}", limit=1000)
    assert isinstance(desk.acquire("s1", **SHARES), Conflict)


def test_downgraded_it_keeps_its_token_and_those_who_are_to_share_acquire_first(desk):
    inbox = desk.listen("p")
    fence = desk.fence("x1")
    waits(desk, "s1", **SHARES)
    desk.park("s2", **SHARES)
    waits(desk, "x2")
    waits(desk, "s3", **SHARES)

    assert downgrade(desk, "x1") == Downgraded()
    assert inbox.heard() == [f"granted s1 n {fence}"]
    assert modes(desk) == {"x1": True, "s1": True}
    assert downgrade(desk, "x1") == Downgraded(), "sent twice"
    assert desk.resume() == ["s2"]
    assert isinstance(desk.acquire("x1"), Held), "a late copy of its claim"
    assert modes(desk) == {"x1": True, "s1": True}


def test_what_others_have_re_entered_is_not_downgraded(desk):
    desk.fence("outer", names=("a", "b"), owner="o")
    desk.fence("inner", names=("b",), owner="o", by_owner=True)

    assert downgrade(desk, "outer", names=("a", "b")) == Downgraded(joined="b")
    assert modes(desk) == {"outer": False}
    desk.release("inner", names=("b",))
    assert downgrade(desk, "outer", names=("a", "b")) == Downgraded()


def test_what_is_not_held_is_not_downgraded(desk):
    desk.fence("x1")
    desk.lapse("x1")
    assert downgrade(desk, "x1") == Downgraded(False)
    desk.fence("x2")
    assert downgrade(desk, "x2", "n2") == Downgraded(False)
    assert modes(desk) == {"x2": False}


@pytest.mark.parametrize(("parked", "comes"), [(SHARED, 1), (1, SHARED)])
def test_what_a_task_declares_now_counts_and_not_what_it_did_when_it_was_parked(
    desk, parked, comes
):
    desk.fence("x1")
    desk.park("r1", limit=parked)
    desk.release("x1")

    assert isinstance(desk.acquire("r1", "n2", limit=comes), Held)
    assert modes(desk) == {"r1": comes == SHARED}


def test_who_shares_is_told_of_a_deadlock_by_one_that_waits_between_them(desk):
    """r1 shares x and cannot end before its inner call has y, which r2 holds; r2's inner call is to
    share x too, behind one that waits to be alone, and so for r1."""
    desk.fence("r1", names=("x",), **SHARES)
    desk.fence("r2", names=("y",))
    desk.queue("in1", names=("y",), stuck=("r1",), label="the first one")
    asks = {"names": ("x",), "stuck": ("r2",), **SHARES}
    assert isinstance(desk.acquire("in2", wait=6.0, **asks), Held)
    desk.release("in2", names=("x",))

    desk.queue("alone", names=("x",))
    assert desk.acquire("in2", wait=6.0, **asks) == Deadlocked(("x", "the first one", "y"))


def test_nobody_is_told_of_a_deadlock_who_only_waits_for_a_message_on_its_way(desk):
    """s1, which r2 waits for, is to share x beside r1, and is about to come."""
    desk.fence("x1", names=("x",))
    desk.park("s0", names=("x",), **SHARES)
    desk.park("s1", names=("x",), stuck=("r2",), **SHARES)
    desk.fence("r2", names=("y",))
    desk.release("x1", names=("x",))
    desk.fence("r1", names=("x",), **SHARES)

    assert isinstance(desk.leave("in1", names=("y",), stuck=("r1",)), Parked)


def test_a_copy_of_one_that_was_downgraded_waits_for_itself_and_makes_no_deadlock(desk):
    desk.fence("x1")
    desk.park("x1", "n2")
    downgrade(desk, "x1")
    desk.fence("s1", **SHARES)
    desk.fence("r2", names=("b",))

    both = {"names": ("a", "b"), "limits": (SHARED, 1)}
    assert isinstance(desk.acquire("inner", wait=6.0, stuck=("s1",), **both), Queued)
