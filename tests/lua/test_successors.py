"""A hold that is left to several executions at once: the messages that go on from a step."""

from __future__ import annotations

import pytest

from celery_relock.engine.protocol import Conflict, Release, Successor

OWNER = {"owner": "workflow"}


@pytest.fixture
def fence(desk):
    return desk.fence("step", **OWNER)


def _leave(desk, *successors, keep=30.0):
    return desk.backend.release(
        Release(
            ("a",), "step", "n", "execution", 60.0, successor=Successor(" ".join(successors), keep)
        )
    )


def test_all_successors_share_the_permit_until_the_last_has_released(desk, fence):
    _leave(desk, "one", "two")
    assert desk.fence("one", **OWNER) == desk.fence("two", **OWNER) == fence
    desk.backend.release(Release(("a",), "one", "n", ended="execution", remember=60.0))
    assert isinstance(desk.acquire("stranger"), Conflict)
    desk.backend.release(Release(("a",), "two", "n", ended="execution", remember=60.0))
    assert desk.fence("stranger") > fence


def test_a_successor_that_holds_already_keeps_the_hold_that_it_has(desk, fence):
    joined = desk.fence("quick", ancestors=("step",), **OWNER)
    _leave(desk, "quick", "slow")
    assert joined == fence
    # A kept hold in its place would be released by nobody.
    desk.backend.release(Release(("a",), "quick", "n", ended="execution", remember=60.0))
    assert desk.holders() == ["slow"]


@pytest.mark.parametrize("ended", ["execution", "killed"])
def test_a_successor_that_has_ended_or_was_killed_gets_nothing(desk, fence, ended):
    desk.fence("quick", ancestors=("step",), **OWNER)
    desk.backend.release(Release(("a",), "quick", "n", ended=ended, remember=60.0))
    _leave(desk, "quick")
    assert desk.fence("stranger") > fence


@pytest.mark.parametrize("before", [(), ("killed",)])
def test_a_successor_that_is_sent_again_gets_the_hold_though_its_first_attempt_has_ended(
    desk, fence, before
):
    """Redis was away from the end of a step until the next one had begun: what is made up for then
    can come in any order."""
    for number, ended in enumerate((*before, "attempt")):
        desk.backend.release(Release(("a",), "next", f"n{number}", ended=ended, remember=60.0))
    _leave(desk, "next")
    assert desk.fence("next", **OWNER) == fence


def test_successors_that_never_come_hold_the_lock_for_the_gap_alone(desk, fence):
    _leave(desk, "one", "two", keep=0.2)
    assert isinstance(desk.acquire("stranger"), Conflict)
    desk.wait_ms(250)
    assert desk.fence("stranger") > fence


def test_a_step_that_had_lost_its_hold_leaves_nothing(desk, fence):
    desk.backend.force_release("a")
    assert not _leave(desk, "one").had
    assert desk.fence("stranger") > fence
