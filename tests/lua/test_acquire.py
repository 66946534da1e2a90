"""acquire: who gets in, by what right, and what everybody else is told."""

from __future__ import annotations

import pytest

from celery_relock.core.answers import Busy, Duplicate, Ended, Held, Queued


def claim_of(desk, run, nonce="n", *, lease=30_000, wait=0, by_owner=0, lineage="", owner="o"):
    """The raw command for lock "a"."""
    keys = desk.keys.claim(("a",), run)
    return keys, [run, nonce, owner, lease, wait, "inbox", "a person", by_owner, lineage, 1]


def test_a_free_lock_is_held_with_a_fence_and_not_reentered(desk):
    tag, fence, reentered = desk.raw("acquire", *claim_of(desk, "r1"))

    assert (tag, reentered) == ("HELD", 0)
    assert abs(int(fence) / 1000 - desk.now_ms()) < 60_000, "a fence is the server's time in µs"


def test_the_fast_way_leaves_what_the_full_one_does(desk):
    desk.raw("acquire", *claim_of(desk, "r1"))
    fast = desk.client.hgetall(desk.keys.lock("a"))
    # A tombstone of another attempt leads around the fast way.
    desk.give_back("r2", "old", ended="attempt")
    keys, args = claim_of(desk, "r2")
    desk.raw("acquire", [*keys[:2], desk.keys.lock("b")], args)
    full = desk.client.hgetall(desk.keys.lock("b"))

    def shape(fields, run):
        expiry, fence, nonce, owner = fields[run].split(b" ")
        assert abs(int(expiry) - desk.now_ms() - 30_000) < 5_000
        assert len(fence) == 16
        return nonce, owner, fields[b"@" + run]

    assert len(fast) == len(full) == 2
    assert shape(fast, b"r1") == shape(full, b"r2") == (b"n", b"o", b"inbox a person")
    for name in "ab":
        assert 85_000 < desk.client.pttl(desk.keys.lock(name)) <= 90_000


def test_a_stranger_is_told_who_holds_it_and_for_how_long(desk):
    fence = desk.fence("r1", owner="o1", who="worker 1")
    desk.queue("r2")

    tag, index, ms, told, owner, who, waiting = desk.raw("acquire", *claim_of(desk, "r3"))

    assert (tag, index, int(told), owner, who, waiting) == ("BUSY", 1, fence, "o1", "- worker 1", 1)
    assert 25_000 < ms <= 30_000
    answer = desk.take("r3")
    assert answer == Busy("a", answer.remaining, fence, "o1", "worker 1", 1)


def test_busy_names_the_oldest_entry(desk):
    oldest = desk.fence("r1", limit=2)
    desk.fence("r2", limit=2)

    answer = desk.take("r3", limit=2)

    assert (answer.fence, answer.owner) == (oldest, "r1")


def test_a_stranger_that_waits_is_told_its_rank_and_when_to_look_again(desk):
    desk.fence("r1", lease=30)
    desk.fence("r2", lease=20, limit=2)

    assert desk.queue("r3", limit=2) == 0
    tag, rank, ms = desk.raw("acquire", *claim_of(desk, "r4", wait=6000))

    assert (tag, rank) == ("WAIT", 1)
    assert 15_000 < ms <= 20_000, "the lease that ends first"


def test_as_many_entries_as_the_limit_get_in_and_not_one_more(desk):
    fences = [desk.fence(f"r{i}", limit=3) for i in range(3)]

    assert isinstance(desk.take("r3", limit=3), Busy)
    assert len(set(fences)) == 3


def test_a_limit_counts_entries_and_not_holds(desk):
    desk.fence("r1", owner="o", limit=2)
    for i in range(3):
        desk.fence(f"inner{i}", owner="o", lineage=("r1",), limit=2)

    assert isinstance(desk.take("r2", limit=2), Held)
    assert isinstance(desk.take("r3", limit=2), Busy)


def test_a_repeated_command_gets_the_same_answer_and_changes_nothing(desk):
    keys, args = claim_of(desk, "r1")
    first = desk.raw("acquire", keys, args)
    desk.wait_ms(2)

    assert desk.raw("acquire", keys, args) == first
    assert len(desk.client.hgetall(desk.keys.lock("a"))) == 2


def test_a_repeated_command_keeps_its_place_in_the_queue(desk):
    desk.fence("r1")
    assert [desk.queue("r2"), desk.queue("r3")] == [0, 1]

    assert desk.queue("r2") == 0
    assert desk.waiters() == ["r2", "r3"]


def test_a_repeated_command_that_finds_its_grant_has_the_whole_lease(desk):
    inbox = desk.listen("p")
    desk.fence("r1")
    desk.queue("r2", wait=2.0, inbox="p", lease=30)
    desk.give_back("r1")
    assert inbox.heard(), "granted, with what was left of the place"
    assert desk.store.inspect("a").holds[0].remaining <= 2

    desk.fence("r2", wait=2.0, inbox="p", lease=30)

    assert desk.store.inspect("a").holds[0].remaining > 25
    assert desk.client.pttl(desk.keys.lock("a")) > 80_000


def test_a_repeated_command_that_is_let_in_has_the_whole_lease(desk):
    desk.fence("r1")
    desk.queue("r2", wait=2.0, inbox="nobody", lease=30)
    desk.give_back("r1")
    assert desk.holders() == []

    desk.fence("r2", wait=2.0, inbox="nobody", lease=30)

    assert desk.store.inspect("a").holds[0].remaining > 25


def test_another_attempt_of_a_run_that_holds_is_a_duplicate(desk):
    desk.fence("r1", who="worker 1")

    tag, ms, who = desk.raw("acquire", *claim_of(desk, "r1", "other", by_owner=1))

    assert (tag, who) == ("DUPLICATE", "- worker 1")
    assert 25_000 < ms <= 30_000
    assert isinstance(desk.take("r1", "other", wait=6.0), Duplicate)
    assert desk.waiters() == []


def test_another_attempt_of_a_run_that_waits_is_a_duplicate(desk):
    desk.fence("r1")
    desk.queue("r2", who="worker 2")

    answer = desk.take("r2", "other", wait=6.0)

    assert isinstance(answer, Duplicate)
    assert answer.who == "worker 2"
    assert 5 < answer.remaining <= 6


def test_another_attempt_takes_over_when_the_first_has_lapsed(desk):
    fence = desk.fence("r1", lease=0.04)
    assert isinstance(desk.take("r1", "other"), Duplicate)
    desk.wait_ms(41)

    assert desk.fence("r1", "other") > fence
    assert not desk.give_back("r1")
    assert desk.holders() == ["r1"]


def test_another_attempt_takes_over_the_place_of_one_that_died_waiting(desk):
    desk.fence("r1")
    desk.queue("r2", wait=0.04)
    desk.queue("r3")
    desk.wait_ms(41)

    assert desk.queue("r2", "other", inbox="p") == 0
    assert desk.waiters() == ["r2", "r3"]
    inbox = desk.listen("p")
    desk.give_back("r1")
    assert [text.split(" ")[:3] for text in inbox.heard()] == [["granted", "r2", "other"]]


def test_an_attempt_that_does_not_wait_does_not_take_over_a_place(desk):
    desk.fence("r1")
    desk.queue("r2")
    desk.lapse_place("r2")

    assert isinstance(desk.take("r2", "other"), Busy)
    assert desk.beat("r2", "other") is None


def test_a_run_that_ended_is_told_so_whatever_the_attempt(desk):
    desk.fence("r1")
    desk.give_back("r1", ended="run")

    for nonce in ("n", "other"):
        assert desk.raw("acquire", *claim_of(desk, "r1", nonce)) == ["ENDED"]
    assert desk.holders() == []
    assert isinstance(desk.take("r2"), Held)


def test_a_late_copy_of_an_attempt_that_ended_takes_nothing_and_another_attempt_does(desk):
    desk.fence("r1")
    desk.give_back("r1", ended="attempt")

    assert desk.take("r1") == Ended()
    assert isinstance(desk.take("r1", "other"), Held)


def test_late_copies_of_several_attempts_take_nothing(desk):
    for nonce in ("n1", "n2", "n12"):
        desk.fence("r1", nonce)
        desk.give_back("r1", nonce, ended="attempt")

    assert [desk.take("r1", nonce) for nonce in ("n1", "n2", "n12")] == [Ended()] * 3
    assert isinstance(desk.take("r1", "n"), Held), "a part of a nonce is another nonce"


def test_a_descendant_joins_the_entry_of_its_ancestor(desk):
    fence = desk.fence("outer", owner="o")

    answer = desk.take("inner", owner="o", lineage=("elsewhere", "outer"))

    assert answer == Held((fence,), (True,))
    assert desk.take("inner", owner="o", lineage=("elsewhere", "outer")) == answer


@pytest.mark.parametrize(
    ("why", "owner", "lineage"),
    [
        ("another owner's", "stranger", ("outer",)),
        ("no hold at all", "o", ("forged",)),
        ("a hold of another owner", "o", ("other",)),
        ("none", "o", ()),
    ],
)
def test_lineage_that_is_not_a_live_hold_of_the_same_owner_admits_nobody(desk, why, owner, lineage):
    desk.fence("outer", owner="o", limit=2)
    desk.fence("other", owner="other", limit=2)

    assert isinstance(desk.take("inner", owner=owner, lineage=lineage, limit=2), Busy), why


def test_lineage_of_a_hold_that_has_lapsed_admits_nobody(desk):
    desk.fence("outer", owner="o", lease=0.04)
    desk.wait_ms(41)
    desk.fence("stranger")

    assert isinstance(desk.take("inner", owner="o", lineage=("outer",)), Busy)


def test_siblings_of_one_owner_exclude_each_other(desk):
    desk.fence("s1", owner="o")

    assert isinstance(desk.take("s2", owner="o"), Busy)


def test_by_owner_every_run_of_the_owner_joins_and_nobody_else(desk):
    fence = desk.fence("r1", owner="o")

    assert desk.fence("r2", owner="o", by_owner=True) == fence
    assert isinstance(desk.take("r3", owner="p", by_owner=True), Busy)


def test_a_run_joins_the_newest_entry_that_admits_it(desk):
    desk.fence("r1", owner="o", limit=2)
    newest = desk.fence("r2", owner="o", limit=2)

    assert desk.fence("r3", owner="o", lineage=("r1", "r2"), limit=2) == newest
    assert desk.fence("r4", owner="o", by_owner=True, limit=2) == newest


def test_reentry_never_waits_behind_the_queue(desk):
    fence = desk.fence("outer", owner="o")
    desk.queue("w1")
    desk.queue("w2")

    assert desk.fence("inner", owner="o", lineage=("outer",)) == fence
    assert desk.waiters() == ["w1", "w2"]


def test_a_run_that_waited_and_may_join_now_leaves_the_queue(desk):
    fence = desk.fence("outer", owner="o")
    desk.queue("inner", owner="o")

    assert desk.fence("inner", owner="o", lineage=("outer",), wait=6.0) == fence
    assert desk.waiters() == []
    assert desk.client.exists(desk.keys.waiters("a")) == 0


def test_a_lapsed_hold_is_out_of_the_way_to_the_millisecond(desk):
    desk.fence("r1", lease=0.05)
    assert isinstance(desk.take("r2"), Busy)
    desk.wait_ms(51)

    assert isinstance(desk.take("r2"), Held)
    assert desk.holders() == ["r2"]


def test_a_lapsed_inner_hold_ends_alone(desk):
    fence = desk.fence("outer", owner="o")
    desk.fence("inner", owner="o", lineage=("outer",), lease=0.04)
    desk.wait_ms(41)

    assert isinstance(desk.take("stranger"), Busy)
    assert desk.holders() == ["outer"]
    assert desk.fence("outer", owner="o") == fence


def test_an_entry_lives_as_long_as_any_hold_in_it(desk):
    fence = desk.fence("outer", owner="o", lease=0.04)
    desk.fence("inner", owner="o", lineage=("outer",))
    desk.wait_ms(41)

    assert isinstance(desk.take("stranger"), Busy)
    assert desk.fence("inmost", owner="o", lineage=("inner",)) == fence


def test_who_waits_may_be_any_text(desk):
    desk.fence("r1", who='"quoted" \\ {braces} é \n line')
    desk.queue("r2", who='"quoted" \\ {braces} é \n line')

    state = desk.store.inspect("a")
    assert state.holds[0].who == state.waiters[0].who == '"quoted" \\ {braces} é \n line'
    assert isinstance(desk.take("r3", wait=6.0), Queued)
