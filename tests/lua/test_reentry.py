"""acquire: who joins a permit that lives already, and who does not."""

from __future__ import annotations

import pytest

from celery_relock.engine.protocol import Conflict, Held


def test_a_limit_counts_permits_and_not_holds(desk):
    desk.fence("r1", owner="o", limit=2)
    for i in range(3):
        desk.fence(f"inner{i}", owner="o", ancestors=("r1",), limit=2)

    assert isinstance(desk.acquire("r2", limit=2), Held)
    assert isinstance(desk.acquire("r3", limit=2), Conflict)


def test_a_descendant_joins_the_permit_of_its_ancestor(desk):
    fence = desk.fence("outer", owner="o")

    answer = desk.acquire("inner", owner="o", ancestors=("elsewhere", "outer"))

    assert answer == Held((fence,), (True,))
    assert desk.acquire("inner", owner="o", ancestors=("elsewhere", "outer")) == answer


@pytest.mark.parametrize(
    ("why", "owner", "ancestors"),
    [
        ("another owner's", "stranger", ("outer",)),
        ("no hold at all", "o", ("forged",)),
        ("a hold of another owner", "o", ("other",)),
        ("none", "o", ()),
    ],
)
def test_an_ancestor_without_a_live_hold_of_the_same_owner_admits_nobody(
    desk, why, owner, ancestors
):
    desk.fence("outer", owner="o", limit=2)
    desk.fence("other", owner="other", limit=2)

    assert isinstance(desk.acquire("inner", owner=owner, ancestors=ancestors, limit=2), Conflict), (
        why
    )


def test_an_ancestor_whose_hold_has_lapsed_admits_nobody(desk):
    desk.fence("outer", owner="o", lease=0.04)
    desk.wait_ms(41)
    desk.fence("stranger")

    assert isinstance(desk.acquire("inner", owner="o", ancestors=("outer",)), Conflict)


def test_siblings_of_one_owner_exclude_each_other(desk):
    desk.fence("s1", owner="o")

    assert isinstance(desk.acquire("s2", owner="o"), Conflict)


def test_by_owner_every_execution_of_the_owner_joins_and_nobody_else(desk):
    fence = desk.fence("r1", owner="o")

    assert desk.fence("r2", owner="o", by_owner=True) == fence
    assert isinstance(desk.acquire("r3", owner="p", by_owner=True), Conflict)


def test_an_execution_joins_the_newest_permit_that_admits_it(desk):
    desk.fence("r1", owner="o", limit=2)
    newest = desk.fence("r2", owner="o", limit=2)

    assert desk.fence("r3", owner="o", ancestors=("r1", "r2"), limit=2) == newest
    assert desk.fence("r4", owner="o", by_owner=True, limit=2) == newest


def test_reentry_never_waits_behind_the_queue(desk):
    fence = desk.fence("outer", owner="o")
    desk.queue("w1")
    desk.queue("w2")

    assert desk.fence("inner", owner="o", ancestors=("outer",)) == fence
    assert desk.waiters() == ["w1", "w2"]


def test_an_execution_that_waited_and_may_join_now_leaves_the_queue(desk):
    fence = desk.fence("outer", owner="o")
    desk.queue("inner", owner="o")

    assert desk.fence("inner", owner="o", ancestors=("outer",), wait=6.0) == fence
    assert desk.waiters() == []
    assert desk.client.exists(desk.keys.of_lock("w", "a")) == 0


def test_a_lapsed_inner_hold_ends_alone(desk):
    fence = desk.fence("outer", owner="o")
    desk.fence("inner", owner="o", ancestors=("outer",), lease=0.04)
    desk.wait_ms(41)

    assert isinstance(desk.acquire("stranger"), Conflict)
    assert desk.holders() == ["outer"]
    assert desk.fence("outer", owner="o") == fence


def test_a_permit_lives_as_long_as_any_hold_in_it(desk):
    fence = desk.fence("outer", owner="o")
    desk.fence("inner", owner="o", ancestors=("outer",))
    desk.lapse("outer")

    assert isinstance(desk.acquire("stranger"), Conflict)
    assert desk.fence("inmost", owner="o", ancestors=("inner",)) == fence
