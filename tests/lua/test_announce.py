"""A channel is consumed while some worker says so."""

from __future__ import annotations


def key(desk, channel="c"):
    return desk.keys.live(channel)


def test_a_channel_is_consumed_until_its_workers_cease_to_count(desk):
    assert not desk.backend.consumed("c")
    desk.backend.announce(["c", "d"], "w1", 6.0)
    desk.backend.announce(["c"], "w2", 6.0)
    assert desk.backend.consumed("c")
    assert desk.backend.consumed("d")

    desk.backend.announce(["c"], "w1", 0)
    assert desk.backend.consumed("c")
    desk.backend.announce(["c"], "w2", 0)
    assert not desk.backend.consumed("c")
    assert desk.backend.consumed("d")


def test_a_worker_that_says_nothing_more_does_not_count(desk):
    desk.backend.announce(["c"], "dead", 6.0)
    desk.client.zadd(key(desk), {"dead": 1})

    assert not desk.backend.consumed("c")


def test_a_note_from_before_the_clock_was_set_back_does_not_count(desk):
    desk.backend.announce(["c"], "dead", 6.0)
    desk.client.zincrby(key(desk), 3_600_000, "dead")

    assert not desk.backend.consumed("c")


def test_who_announces_removes_what_does_not_count_any_more(desk):
    desk.backend.announce(["c"], "dead", 6.0)
    desk.client.zadd(key(desk), {"dead": 1})
    desk.backend.announce(["c"], "w1", 6.0)
    assert desk.client.zrange(key(desk), 0, -1) == [b"w1"]

    desk.client.zincrby(key(desk), 3_600_000, "w1")
    desk.backend.announce(["c"], "w2", 6.0)
    assert desk.client.zrange(key(desk), 0, -1) == [b"w2"]


def test_who_only_asks_writes_nothing(desk):
    desk.backend.announce(["c"], "w", 6.0)
    desk.client.zadd(key(desk), {"dead": 1})
    assert desk.backend.consumed("c")
    assert desk.client.zrange(key(desk), 0, -1) == [b"dead", b"w"]


def test_it_leaves_nothing_behind(desk):
    desk.backend.announce(["c"], "w", 6.0)
    assert 6000 < desk.client.pttl(key(desk)) <= 60_000

    desk.backend.announce(["c"], "w", 0)
    desk.backend.consumed("never announced")
    assert not desk.client.exists(key(desk), key(desk, "never announced"))
