"""renew: a live hold is extended; nothing else is, and nothing is brought back."""

from __future__ import annotations

import pytest

from celery_relock.engine.protocol import Renewal


def renewed(desk, *claims):
    """The raw reply for (lock, execution, attempt, lease ms)."""
    keys = [desk.keys.lock(claim[0]) for claim in claims]
    return desk.raw("renew", keys, [" ".join(map(str, (*claim[1:], 0))) for claim in claims])


def test_a_hold_lives_for_a_whole_lease_from_now(desk):
    fence = desk.fence("r1", lease=5, owner="o", label="w")
    assert renewed(desk, ("a", "r1", "n", 30_000)) == [1]

    [hold] = desk.backend.inspect("a").holds
    assert (hold.execution_id, hold.fence, hold.attempt_id, hold.owner, hold.label) == (
        "r1",
        fence,
        "n",
        "o",
        "w",
    )
    assert 25 < hold.remaining <= 30


def test_a_lease_can_be_made_shorter(desk):
    desk.fence("r1", lease=30)

    assert desk.renew("r1", lease=1.0)
    assert desk.backend.inspect("a").holds[0].remaining <= 1


def test_a_renewal_that_is_only_to_make_it_longer_makes_no_lease_shorter(desk):
    desk.fence("r1", lease=30)

    assert desk.backend.renew([Renewal("a", "r1", "n", 1.0, longer=True)]) == [True]
    assert desk.backend.inspect("a").holds[0].remaining > 29
    assert desk.backend.renew([Renewal("a", "r1", "n", 60.0, longer=True)]) == [True]
    assert desk.backend.inspect("a").holds[0].remaining > 59


def test_a_hold_that_has_lapsed_is_lost_though_nobody_has_looked(desk):
    desk.fence("r1", lease=0.04)
    desk.wait_ms(41)

    assert renewed(desk, ("a", "r1", "n", 30_000)) == [0]
    assert desk.holders() == []


def test_a_late_renewal_does_not_bring_back_what_was_released(desk):
    desk.fence("r1")
    desk.release("r1")

    assert renewed(desk, ("a", "r1", "n", 30_000)) == [0]
    assert desk.client.exists(desk.keys.lock("a")) == 0


@pytest.mark.parametrize("attempt_id", ["other", "min", "%S+"])
def test_another_attempt_extends_nothing(desk, attempt_id):
    desk.fence("r1", "mine", lease=2.0)

    assert renewed(desk, ("a", "r1", attempt_id, 30_000)) == [0]
    assert desk.backend.inspect("a").holds[0].remaining <= 2


def test_a_waiter_is_no_hold(desk):
    desk.fence("r1")
    desk.queue("r2")

    assert renewed(desk, ("a", "r2", "n", 30_000)) == [0]


def test_each_hold_of_a_call_has_its_own_answer_in_order(desk):
    desk.fence("r1", names=("a",))
    desk.fence("r2", names=("b",))
    desk.fence("r3", names=("c",))
    desk.lapse("r2", "b")

    assert renewed(
        desk, ("c", "r3", "n", 9000), ("b", "r2", "n", 9000), ("a", "r1", "n", 9000)
    ) == [
        1,
        0,
        1,
    ]


def test_more_than_one_batch_comes_back_in_order(desk):
    names = [f"lock{i}" for i in range(250)]
    for name in names:
        desk.fence("r1", names=(name,))
    for name in names[::7]:
        desk.lapse("r1", name)

    kept = desk.backend.renew([Renewal(name, "r1", "n", 30.0) for name in names])

    assert kept == [i % 7 != 0 for i in range(250)]


def test_a_key_that_somebody_overwrote_costs_the_others_nothing(desk):
    desk.fence("r1", names=("a",))
    desk.client.set(desk.keys.lock("b"), "somebody's")
    desk.client.hset(desk.keys.lock("c"), "r1", "no record of ours")

    assert renewed(desk, ("b", "r1", "n", 9), ("c", "r1", "n", 9), ("a", "r1", "n", 30_000)) == [
        0,
        0,
        1,
    ]
    assert desk.client.get(desk.keys.lock("b")) == b"somebody's"
    assert desk.client.hget(desk.keys.lock("c"), "r1") == b"no record of ours"


def test_the_key_outlives_the_longest_lease_in_it(desk):
    desk.fence("long", owner="o", lease=200)
    desk.fence("short", owner="o", ancestors=("long",), lease=2)
    desk.renew("short", lease=2)
    assert desk.client.pttl(desk.keys.lock("a")) > 200_000

    desk.renew("short", lease=400)
    assert 400_000 < desk.client.pttl(desk.keys.lock("a")) <= 460_000


def test_a_key_without_a_lifetime_gets_one(desk):
    desk.fence("r1")
    desk.client.persist(desk.keys.lock("a"))

    desk.renew("r1")

    assert desk.client.pttl(desk.keys.lock("a")) > 30_000


def test_a_key_never_ends_before_a_hold_that_is_renewed_in_time(desk):
    desk.fence("r1", lease=30)
    key = desk.keys.lock("a")
    for left in (80_000, 40_000, 31_500, 30_500, 100):
        desk.client.pexpire(key, left)
        desk.renew("r1", lease=30)
        assert desk.client.pttl(key) > 30_000
