"""release: the attempt that acquired a lock releases it once, nobody else, and the next gets it."""

from __future__ import annotations

import pytest

from celery_relock.engine.protocol import Conflict, Ended, Held


def released(desk, run, attempt_id="n", ended="", remember=60_000, names=("a",)):
    """The raw reply."""
    words = f"{run} {attempt_id} {remember} {ended}"
    return desk.raw("release", desk.keys.claim(names, run), [words, ""])


def test_a_hold_is_released_once_and_then_gone(desk):
    desk.fence("r1")

    assert released(desk, "r1") == ["RELEASED"]
    assert released(desk, "r1") == ["GONE"]
    assert isinstance(desk.acquire("r2"), Held)


@pytest.mark.parametrize("ended", ["", "execution", "attempt"])
def test_another_attempt_releases_nothing(desk, ended):
    desk.fence("r1", "mine")

    assert released(desk, "r1", "other", ended) == ["GONE"]
    assert desk.holders() == ["r1"]


def test_an_attempt_id_that_is_only_a_part_of_the_right_one_releases_nothing(desk):
    desk.fence("r1", "mine")

    assert released(desk, "r1", "min") == ["GONE"]
    assert released(desk, "r1", "mine-too") == ["GONE"]
    assert desk.holders() == ["r1"]


def test_another_attempt_removes_nobody_from_the_queue(desk):
    desk.fence("r1")
    desk.queue("r2", "mine")

    assert released(desk, "r2", "other") == ["GONE"]
    assert desk.waiters() == ["r2"]


def test_who_leaves_its_place_moves_the_next_one_up(desk):
    desk.fence("r1")
    desk.queue("r2")
    desk.queue("r3")

    assert released(desk, "r2") == ["RELEASED"]
    assert released(desk, "r2") == ["GONE"]
    assert desk.waiters() == ["r3"]
    assert desk.queue("r3") == 0


def test_when_the_head_leaves_those_whom_it_held_up_acquire(desk):
    inbox = desk.listen("p")
    desk.fence("r1", limit=2)
    # Its own limit holds it up, and with it everybody behind.
    desk.queue("strict", limit=1)
    desk.queue("r3", limit=2, inbox="p")

    desk.release("strict")

    assert desk.holders() == ["r1", "r3"]
    assert len(inbox.heard()) == 1


def test_the_end_of_an_inner_hold_leaves_the_outer_one(desk):
    fence = desk.fence("outer", owner="o")
    desk.fence("inner", owner="o", ancestors=("outer",))

    assert desk.release("inner")
    assert isinstance(desk.acquire("stranger"), Conflict)
    assert desk.fence("again", owner="o", ancestors=("outer",)) == fence


def test_the_end_of_the_outer_hold_leaves_the_permit_to_the_inner_one(desk):
    fence = desk.fence("outer", owner="o")
    desk.fence("inner", owner="o", ancestors=("outer",))

    assert desk.release("outer")
    assert isinstance(desk.acquire("stranger"), Conflict)
    assert desk.backend.inspect("a").holds[0].fence == fence


def test_a_queued_execution_acquires_only_with_the_end_of_the_last_hold_of_the_permit(desk):
    desk.listen("p")
    desk.fence("outer", owner="o")
    desk.fence("inner", owner="o", ancestors=("outer",))
    desk.queue("next", inbox="p")

    desk.release("outer")
    assert desk.holders() == ["inner"]
    desk.release("inner")
    assert desk.holders() == ["next"]


def test_a_hold_that_has_lapsed_is_gone(desk):
    desk.fence("r1", lease=0.04)
    desk.wait_ms(41)
    desk.acquire("r2")

    assert released(desk, "r1") == ["GONE"]
    assert desk.holders() == ["r2"]


@pytest.mark.parametrize(("ended", "names"), [("attempt", ("a",)), ("execution", ("a", "b"))])
def test_a_hold_that_lapsed_unseen_is_gone_too_when_the_way_is_the_long_one(desk, ended, names):
    desk.fence("r1", lease=0.04, names=names)
    desk.wait_ms(41)

    assert released(desk, "r1", ended=ended, names=names) == ["GONE"]
    assert desk.acquire("r1", names=names) == Ended()


def test_the_end_of_an_execution_is_remembered_for_as_long_as_asked(desk):
    desk.fence("r1")
    desk.release("r1", ended="execution", remember=5.0)
    assert desk.acquire("r1") == Ended()
    assert 0 < desk.client.pttl(desk.keys.tombstone("r1")) <= 5000
    desk.forget("r1")

    assert isinstance(desk.acquire("r1"), Held)


@pytest.mark.parametrize("names", [("a",), ("a", "b")])
@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("ended", ["execution", "retried", "attempt"])
def test_an_end_is_remembered_whichever_way_the_lock_is_released(desk, ended, queued, names):
    desk.fence("r1", names=names)
    if queued:
        desk.queue("r2", names=names)

    assert released(desk, "r1", ended=ended, names=names) == ["RELEASED"]
    assert not any(desk.holders(name) for name in names)
    assert desk.acquire("r1", names=names) == Ended(retried=ended == "retried")


@pytest.mark.parametrize("ended", ["execution", "retried", "attempt"])
def test_an_end_is_remembered_even_when_nothing_was_held(desk, ended):
    assert released(desk, "r1", ended=ended) == ["GONE"]
    assert 59_000 < desk.client.pttl(f"{desk.keys.prefix(0)}d:r1") <= 60_000
    assert desk.acquire("r1") == Ended(retried=ended == "retried")


def test_nothing_is_remembered_unless_asked(desk):
    desk.fence("r1")
    desk.release("r1")

    assert isinstance(desk.acquire("r1"), Held)


@pytest.mark.parametrize("ended", ["execution", "retried"])
def test_an_execution_that_ended_stays_so_when_an_old_attempt_ends_after_it(desk, ended):
    desk.fence("r1", "n2")
    desk.release("r1", "n2", ended=ended)
    desk.release("r1", "n1", ended="attempt", remember=1.0)

    assert desk.acquire("r1", "n3") == Ended(retried=ended == "retried")
    assert desk.client.pttl(f"{desk.keys.prefix(0)}d:r1") > 50_000


def test_a_release_that_arrives_twice_does_not_touch_the_next_holder(desk):
    desk.listen("p")
    desk.fence("r1")
    desk.queue("r2", inbox="p")
    desk.queue("r3", inbox="p")
    desk.release("r1")

    assert not desk.release("r1")
    assert desk.holders() == ["r2"]
    assert desk.waiters() == ["r3"]


def test_the_short_way_sees_the_queue(desk):
    inbox = desk.listen("p")
    desk.fence("r1")
    desk.queue("r2", inbox="p")

    assert released(desk, "r1") == ["RELEASED"]
    assert desk.holders() == ["r2"]
    assert len(inbox.heard()) == 1
