"""A hold that is kept for the execution that comes next: nobody acquires the lock between them, and
nobody renews the hold."""

from __future__ import annotations

import pytest

from celery_relock.engine.protocol import (
    COOLDOWN,
    Conflict,
    Ended,
    Held,
    OtherAttempt,
    ParkRequest,
    Queued,
    Release,
    Successor,
)
from celery_relock.engine.protocol import Claim as ClaimOf

OWNER = {"owner": "workflow"}


def _keep(desk, execution_id="first", successor="next", keep=30.0, names=("a",), ended="execution"):
    return desk.backend.release(
        Release(names, execution_id, "n", ended, 60.0, successor=Successor(successor, keep))
    )


@pytest.fixture
def kept(desk):
    """The fence of the permit that is kept for the execution "next"."""
    fence = desk.fence("first", **OWNER)
    assert _keep(desk).had
    return fence


def test_the_successor_acquires_with_the_same_fence_and_a_stranger_does_not(desk, kept):
    assert isinstance(desk.acquire("stranger"), Conflict)
    assert desk.fence("next", **OWNER) == kept
    assert desk.holders() == ["next"]


def test_a_stranger_is_told_that_the_hold_is_kept(desk):
    desk.fence("first", **OWNER)
    assert not desk.acquire("stranger").kept
    _keep(desk)
    assert desk.acquire("stranger").kept
    desk.fence("next", **OWNER)
    assert not desk.acquire("stranger").kept


def test_the_successor_acquires_ahead_of_those_that_wait(desk):
    desk.listen("p")
    fence = desk.fence("first", **OWNER)
    desk.queue("stranger", inbox="p")
    _keep(desk)
    assert desk.holders() == ["next"]
    assert desk.fence("next", **OWNER) == fence
    assert desk.waiters() == ["stranger"]
    desk.release("next")
    assert desk.holders() == ["stranger"]


def test_a_cooldown_keeps_out_everybody_and_its_own_workflow(desk):
    desk.fence("first", **OWNER)
    _keep(desk, successor=f"{COOLDOWN}first")
    for run in ("next", "first"):
        answer = desk.acquire(run, by_owner=True, **OWNER)
        assert isinstance(answer, Conflict | Ended)
    assert desk.holders() == [f"{COOLDOWN}first"]


def test_a_kept_hold_ends_by_itself(desk):
    desk.fence("first", **OWNER)
    _keep(desk, keep=0.05)
    desk.wait_ms(60)
    assert desk.fence("stranger")


def test_the_lease_of_the_successor_is_its_own_and_not_that_of_the_countdown(desk, kept):
    desk.acquire("next", lease=5.0, **OWNER)
    [hold] = desk.backend.inspect("a").holds
    assert hold.remaining <= 5.0


def test_a_second_copy_of_the_successor_is_a_duplicate(desk, kept):
    desk.fence("next", **OWNER)
    assert isinstance(desk.acquire("next", "another", **OWNER), OtherAttempt)


def test_the_execution_that_left_its_hold_has_ended(desk, kept):
    assert isinstance(desk.acquire("first", "another", **OWNER), Ended)


def test_what_is_kept_is_not_renewed_and_not_released_by_the_execution_before(desk, kept):
    assert not desk.renew("first")
    assert not desk.release("first")
    assert desk.holders() == ["next"]


def test_a_repeated_command_changes_nothing_whether_the_successor_holds_or_not(desk, kept):
    assert not _keep(desk).had
    assert desk.holders() == ["next"]
    assert desk.fence("next", **OWNER) == kept
    assert not _keep(desk).had
    assert desk.renew("next")


def test_an_execution_that_has_lost_its_hold_leaves_nothing(desk):
    desk.fence("first", **OWNER)
    desk.lapse("first")
    assert not _keep(desk).had
    assert desk.fence("stranger")


def test_a_hold_that_was_re_entered_is_kept_in_its_permit(desk):
    fence = desk.fence("outer", **OWNER)
    assert desk.fence("first", ancestors=("outer",), **OWNER) == fence
    _keep(desk)
    desk.release("outer")
    assert isinstance(desk.acquire("stranger"), Conflict)
    assert desk.fence("next", **OWNER) == fence


def test_all_of_several_locks_are_kept(desk):
    held = desk.acquire("first", names=("a", "b"), **OWNER)
    _keep(desk, names=("a", "b"))
    assert isinstance(desk.acquire("stranger", names=("b",)), Conflict)
    assert desk.acquire("next", names=("a", "b"), **OWNER).fences == held.fences


def test_a_successor_in_two_locks_of_which_one_was_released_by_force_acquires_that_one_anew(desk):
    held = desk.acquire("first", names=("a", "b"), **OWNER)
    _keep(desk, names=("a", "b"))
    desk.backend.force_release("b")
    fences = desk.acquire("next", names=("a", "b"), **OWNER).fences
    assert fences[0] == held.fences[0]
    assert fences[1] > held.fences[1]


def test_nothing_is_acquired_when_the_successor_finds_one_lock_kept_and_another_held(desk):
    desk.acquire("first", names=("a", "b"), **OWNER)
    _keep(desk, names=("a", "b"))
    desk.backend.force_release("b")
    desk.fence("stranger", names=("b",))
    assert isinstance(desk.acquire("next", names=("a", "b"), **OWNER), Conflict)
    # Still kept, not taken: another attempt of the successor is no duplicate.
    assert isinstance(desk.acquire("next", "another", names=("a",), **OWNER), Held)


def test_a_successor_that_waits_already_acquires_when_the_hold_is_left_to_it(desk):
    fence = desk.fence("first", **OWNER)
    inbox = desk.listen("p")
    desk.queue("stranger")
    desk.queue("next", inbox="p", **OWNER)
    _keep(desk)
    assert inbox.heard() == [f"granted next n {fence}"]
    assert desk.holders() == ["next"]
    assert desk.waiters() == ["stranger"]


def test_a_successor_that_waits_and_was_not_reached_acquires_by_its_heartbeat(desk):
    fence = desk.fence("first", **OWNER)
    desk.queue("stranger")
    desk.queue("next", inbox="gone", **OWNER)
    _keep(desk)
    assert isinstance(desk.beat("stranger"), Queued)
    answer = desk.beat("next")
    assert isinstance(answer, Held)
    assert answer.fences == (fence,)


def test_the_message_of_a_successor_that_is_parked_is_resumed(desk):
    fence = desk.fence("first", **OWNER)
    claim = ClaimOf("next", "n", "workflow", ("a",), (1,), 30.0)
    desk.backend.park(claim, ParkRequest("its message", "broker", "task"))
    back = desk.backend.release(
        Release(("a",), "first", "n", "execution", 60.0, "broker", Successor("next", 30.0))
    )
    assert [message.text for message in back.messages] == ["its message"]
    assert desk.fence("next", "another", **OWNER) == fence
    assert desk.waiters() == []


def test_what_is_kept_for_a_successor_that_never_comes_is_freed_by_the_attempt_of_the_kept_hold(
    desk, kept
):
    desk.listen("p")
    desk.queue("stranger", inbox="p")
    assert desk.release("next", "-")
    assert desk.holders() == ["stranger"]


def test_the_limit_counts_a_kept_permit(desk):
    desk.fence("first", limit=2, **OWNER)
    _keep(desk)
    desk.fence("second", limit=2)
    assert isinstance(desk.acquire("third", limit=2), Conflict)
    assert isinstance(desk.acquire("next", limit=2, **OWNER), Held)
