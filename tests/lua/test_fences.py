"""Fences: strictly increasing and exact, whatever happened to the counter or the clock."""

from __future__ import annotations

import pytest

from celery_relock.engine.protocol import Held

YEARS_AHEAD = 2**53 - 1000


def fences_by_every_way(desk):
    """One fence from each place that makes one: fast way, full way, grant, claim of two locks."""
    found = [desk.fence("r1")]
    desk.queue("r2", inbox="p")
    desk.queue("r3", inbox="gone")
    desk.release("r1")
    found.append(desk.backend.inspect("a").holds[0].fence)
    desk.release("r2")
    found.append(desk.fence("r3", wait=6.0))
    desk.release("r3")
    answer = desk.acquire("r4", names=("a", "b"))
    assert isinstance(answer, Held)
    desk.release("r4", names=("a", "b"))
    return [*found, answer.fences[0]]


@pytest.fixture
def listening(desk):
    desk.listen("p")
    return desk


def test_every_way_to_acquire_a_lock_gives_a_higher_fence(listening):
    found = [fence for _ in range(3) for fence in fences_by_every_way(listening)]

    assert found == sorted(set(found))


def test_fences_are_the_servers_time(listening):
    before = listening.now_ms() * 1000
    found = fences_by_every_way(listening)

    assert before < found[0] <= found[-1] < listening.now_ms() * 1000 + 10


def test_fences_go_on_by_one_when_the_clock_is_set_back(listening):
    listening.fence("r0", names=("z",))
    listening.client.hset(listening.keys.meta(), "fence", YEARS_AHEAD)

    found = fences_by_every_way(listening)

    assert found[0] == YEARS_AHEAD + 1, "exact in every digit"
    assert found == sorted(set(found))
    assert found[-1] < YEARS_AHEAD + 20
    assert int(listening.client.hget(listening.keys.meta(), "fence")) == found[-1]


def test_fences_go_on_when_the_counter_is_lost(listening):
    found = fences_by_every_way(listening)
    listening.client.delete(listening.keys.meta())

    found += fences_by_every_way(listening)

    assert found == sorted(set(found))


@pytest.mark.parametrize("way", ["fast", "full", "granted", "beaten"])
def test_a_counter_that_was_lost_begins_again_with_the_time_whichever_way_comes_first(
    listening, way
):
    before = listening.fence("r0", names=("a", "b") if way in ("granted", "beaten") else ("z",))
    if way in ("granted", "beaten"):
        listening.queue("r1", inbox="p" if way == "granted" else "gone")
        listening.lapse("r0")
    listening.client.delete(listening.keys.meta())
    {
        "fast": lambda: listening.acquire("r1"),
        "full": lambda: listening.acquire("r1", names=("a", "b")),
        "granted": lambda: listening.acquire("r2"),
        "beaten": lambda: listening.beat("r1"),
    }[way]()

    [hold] = listening.backend.inspect("a").holds
    assert hold.execution_id == "r1"
    assert before < hold.fence < listening.now_ms() * 1000 + 10


def test_fences_go_on_when_a_lock_is_deleted(listening):
    first = listening.fence("r1")
    listening.client.delete(listening.keys.lock("a"))

    assert listening.fence("r2") > first


def test_one_counter_serves_all_locks(desk):
    found = [desk.fence("r1", names=(f"lock{i}",)) for i in range(20)]

    assert found == sorted(set(found))


def test_reentry_and_repeats_spend_no_fence(desk):
    fence = desk.fence("outer", owner="o")
    spent = desk.client.hget(desk.keys.meta(), "fence")

    desk.fence("outer", owner="o")
    desk.fence("inner", owner="o", ancestors=("outer",))
    desk.fence("other", owner="o", by_owner=True)
    desk.renew("outer")
    desk.acquire("stranger")

    assert desk.client.hget(desk.keys.meta(), "fence") == spent == str(fence).encode()


def test_nobody_is_told_of_a_grant_that_the_server_may_not_write(desk):
    inbox = desk.listen("p")
    desk.fence("r1")
    desk.queue("r2", inbox="p")
    desk.lapse("r1")
    # Another type where the counter is: the first thing that a grant has to write.
    desk.client.delete(desk.keys.meta())
    desk.client.set(desk.keys.meta(), "somebody's")

    with pytest.raises(Exception, match="WRONGTYPE"):
        desk.raw("force_release", [desk.keys.meta(), desk.keys.lock("a")], [""])
    assert inbox.heard() == []
    assert desk.client.get(desk.keys.meta()) == b"somebody's"
