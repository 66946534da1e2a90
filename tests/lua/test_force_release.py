"""force_release: the lock is taken from its holders, who are told, and the next ones acquire it."""

from __future__ import annotations

from celery_relock.engine.protocol import Held


def test_all_holds_are_released_and_told_of(desk):
    one, two = desk.listen("p1"), desk.listen("p2")
    fence = desk.fence("outer", "n1", owner="o", inbox="p1", label="worker 1")
    desk.fence("inner", "n2", owner="o", ancestors=("outer",), inbox="p2", label="worker 2")

    keys = [desk.keys.meta(), desk.keys.lock("a")]
    reply = desk.raw("force_release", keys, [""])

    assert sorted(reply) == [
        ["inner", str(fence), "o", "p2 worker 2"],
        ["outer", str(fence), "o", "p1 worker 1"],
    ]
    assert (one.heard(), two.heard()) == (["lost outer n1"], ["lost inner n2"])
    assert desk.client.exists(desk.keys.lock("a")) == 0
    assert desk.raw("force_release", keys, [""]) == []


def test_one_execution_alone_can_be_released_by_force(desk):
    inbox = desk.listen("p")
    desk.fence("outer", owner="o", inbox="p")
    desk.fence("inner", owner="o", ancestors=("outer",), inbox="p")

    [taken] = desk.backend.force_release("a", "inner")

    assert (taken.execution_id, taken.owner) == ("inner", "o")
    assert desk.holders() == ["outer"]
    assert inbox.heard() == ["lost inner n"]


def test_what_was_released_by_force_is_not_renewed_nor_released_again(desk):
    desk.fence("r1")
    desk.backend.force_release("a")

    assert not desk.renew("r1")
    assert not desk.release("r1")


def test_the_next_waiter_acquires(desk):
    inbox = desk.listen("p")
    desk.fence("r1")
    desk.queue("r2", inbox="p")

    desk.backend.force_release("a")

    assert desk.holders() == ["r2"]
    assert inbox.heard()[0].startswith("granted r2 ")


def test_nobody_acquires_while_another_hold_of_the_permit_lives(desk):
    desk.listen("p")
    desk.fence("outer", owner="o")
    desk.fence("inner", owner="o", ancestors=("outer",))
    desk.queue("r2", inbox="p")

    desk.backend.force_release("a", "outer")

    assert desk.holders() == ["inner"]


def test_what_has_lapsed_is_not_told_of(desk):
    desk.fence("r1", lease=0.04)
    desk.wait_ms(41)

    assert desk.backend.force_release("a") == ()
    assert isinstance(desk.acquire("r2"), Held)


def test_waiters_and_idle_locks_are_left_alone(desk):
    assert desk.backend.force_release("a") == ()
    desk.fence("r1")
    desk.queue("r2")

    assert desk.backend.force_release("a", "r2") == ()
    assert desk.waiters() == ["r2"]
