"""A lock with many holds costs what a small one costs, and is the same lock (B4)."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from celery_relock.engine.protocol import (
    SHARED,
    Conflict,
    Held,
    OtherAttempt,
    Queued,
    Release,
    Renewal,
    Successor,
)

MANY = 40


def index(desk, name="a"):
    return [f"{desk.keys.prefix(0)}{kind}:{name}" for kind in "efo"]


def commands_of(desk, work):
    """How many commands the server executes for some work, by name; those in scripts included."""

    def counts():
        stats = desk.client.info("commandstats").items()
        return Counter({name.removeprefix("cmdstat_"): each["calls"] for name, each in stats})

    before = counts()
    work()
    return counts() - before


def pair(desk, run, **more):
    assert isinstance(desk.acquire(run, **more), Held)
    assert desk.release(run, names=more.get("names", ("a",)))


def assert_costs_no_more_than_some_free_locks(desk, full):
    """Whoever reads all holds of a lock does it by HGETALL, one command however many there are."""
    free = commands_of(desk, lambda: pair(desk, "free", names=("b",)))
    assert not {"hgetall", "hvals", "hscan"} & full.keys(), full
    # An index is three sets, to be kept and compared. Their time: `python -m benchmarks growth`.
    assert full.total() <= 4 * free.total(), (full, free)


def test_a_semaphore_of_a_thousand_costs_no_more_than_some_free_locks(desk):
    for number in range(999):
        desk.fence(f"h{number}", limit=1000)
    assert len(desk.holders()) == 999

    full = commands_of(desk, lambda: pair(desk, "one", limit=1000))
    assert_costs_no_more_than_some_free_locks(desk, full)
    desk.fence("last", limit=1000)
    assert isinstance(desk.acquire("one-too-many", limit=1000), Conflict)


def test_five_thousand_successors_cost_no_more_than_some_free_locks(desk):
    """Of one workflow: all in one permit, which each of them joins and leaves."""
    desk.fence("first", owner="flow")
    successors = " ".join(f"s{number}" for number in range(5000))
    desk.backend.release(Release(("a",), "first", "n", successor=Successor(successors, 300.0)))
    assert len(desk.holders()) == 5000

    def join_and_leave(execution):
        answer = desk.acquire(execution, owner="flow")
        assert isinstance(answer, Held)
        assert answer.reentered == (True,)
        assert desk.release(execution, ended="execution")

    assert_costs_no_more_than_some_free_locks(desk, commands_of(desk, lambda: join_and_leave("s8")))


def test_what_many_hold_is_told_and_ends_as_usual(desk):
    first = desk.fence("h0", limit=100, owner="o0", lease=300)
    for number in range(1, MANY):
        desk.fence(f"h{number}", limit=100, owner=f"o{number}", lease=30 + number)
    assert desk.client.exists(*index(desk)) == 3

    answer = desk.acquire("other", limit=MANY, label="")
    assert isinstance(answer, Conflict)
    assert (answer.fence, answer.owner) == (first, "o0"), "the oldest permit"
    waits = desk.acquire("other", limit=MANY, wait=6.0)
    assert isinstance(waits, Queued)
    assert 25 < waits.recheck <= 31, "the next lease that ends"
    desk.client.hset(
        desk.keys.lock("a"),
        "h7",
        b"1 " + desk.client.hget(desk.keys.lock("a"), "h7").split(b" ", 1)[1],
    )
    desk.client.zadd(index(desk)[0], {"h7": 1})
    assert isinstance(desk.beat("other"), Held), "a lease that ran out makes room"
    for run in desk.holders():
        desk.release(run)
    assert desk.client.exists(desk.keys.lock("a"), *index(desk)) == 0


def test_many_holds_are_all_released_by_force(desk):
    for number in range(MANY):
        desk.fence(f"h{number}", limit=100)

    released = desk.backend.force_release("a")
    assert {hold.execution_id for hold in released} == {f"h{n}" for n in range(MANY)}
    assert desk.holders() == []
    assert desk.backend.force_release("a") == ()
    assert isinstance(desk.acquire("other"), Held)


def test_re_entry_finds_its_permit_among_many(desk):
    fences = {f"h{n}": desk.fence(f"h{n}", limit=100, owner=f"o{n % 7}") for n in range(MANY)}

    by_owner = desk.acquire("inner", owner="o3", by_owner=True)
    assert by_owner.fences == (max(fences[f"h{n}"] for n in range(MANY) if n % 7 == 3),)
    by_ancestor = desk.acquire("child", owner="o1", ancestors=("h1", "h2"))
    assert by_ancestor.fences == (fences["h1"],), "h2 is of another owner"
    assert by_ancestor.reentered == (True,)
    desk.release("h1")
    assert isinstance(desk.acquire("other", limit=MANY), Conflict), "the child holds the permit"
    desk.release("child")
    assert isinstance(desk.acquire("other", limit=MANY), Held)


@pytest.mark.parametrize("first_to_end", ["parent", "child"])
def test_a_permit_that_cools_is_one_permit_and_open_to_nobody_among_many(desk, first_to_end):
    for number in range(MANY):
        desk.fence(f"h{number}", limit=100)
    desk.fence("parent", limit=100, owner="flow")
    desk.fence("child", limit=100, owner="flow", ancestors=("parent",))

    def cool(run):
        desk.backend.release(Release(("a",), run, "n", successor=Successor(f"cooldown.{run}", 0.3)))

    if first_to_end == "parent":
        desk.release("parent")
        cool("child")
    else:
        cool("child")
        desk.release("parent")

    assert isinstance(desk.acquire("other", limit=MANY + 1), Conflict)
    inner = desk.acquire("inner", limit=100, owner="flow", by_owner=True)
    assert inner.reentered == (False,)
    desk.release("inner")
    desk.wait_ms(301)
    assert isinstance(desk.acquire("other", limit=MANY + 1), Held)
    assert isinstance(desk.acquire("one-too-many", limit=MANY + 1), Conflict)


def test_a_kept_hold_goes_on_to_the_owner_of_its_successor_among_many(desk):
    for number in range(MANY):
        desk.fence(f"h{number}", limit=100)
    fence = desk.fence("first", limit=100, owner="flow")
    desk.backend.release(Release(("a",), "first", "n", successor=Successor("next", 30.0)))
    assert desk.fence("next", limit=100, owner="another") == fence

    assert desk.fence("inner", limit=100, owner="another", by_owner=True) == fence
    assert desk.fence("late", limit=100, owner="flow", by_owner=True) > fence
    assert isinstance(desk.acquire("other", limit=MANY + 2), Conflict)
    assert isinstance(desk.acquire("other", limit=MANY + 3), Held)


def test_a_hold_that_was_kept_too_long_is_joined_by_nobody_among_many(desk):
    for number in range(MANY):
        desk.fence(f"h{number}", limit=100)
    fence = desk.fence("first", limit=100, owner="flow")
    desk.backend.release(Release(("a",), "first", "n", successor=Successor("next", 0.05)))
    desk.wait_ms(51)

    assert desk.fence("next", limit=100, owner="flow") > fence


def test_what_is_kept_of_many_who_share_the_lock_is_not_joined_alone(desk):
    for number in range(MANY):
        desk.fence(f"h{number}", limit=SHARED)
    desk.fence("first", limit=SHARED, owner="flow")
    desk.backend.release(Release(("a",), "first", "n", successor=Successor("next", 30.0)))

    assert isinstance(desk.acquire("next", owner="flow"), Conflict)


def test_another_attempt_is_a_duplicate_among_many(desk):
    for number in range(MANY):
        desk.fence(f"h{number}", limit=100)
    fence = desk.fence("one", limit=100)

    assert isinstance(desk.acquire("one", "n2", limit=100), OtherAttempt)
    assert desk.fence("one", limit=100) == fence, "sent again"
    assert desk.release("one")


def test_renewals_reach_the_index(desk):
    others = [f"h{number}" for number in range(MANY)]
    for each in (*others, "last"):
        desk.fence(each, limit=100)
    short = [Renewal("a", each, "n", 0.05) for each in others]
    assert all(desk.backend.renew([*short, Renewal("a", "last", "n", 120.0)]))
    desk.wait_ms(51)

    assert isinstance(desk.acquire("other", limit=100), Held)
    assert desk.holders() == ["last", "other"]
    assert desk.client.zcard(index(desk)[0]) == 2
    for key in (desk.keys.lock("a"), *index(desk)):
        assert desk.client.pttl(key) > 150_000


@pytest.mark.parametrize("lost", [(0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_an_index_that_does_not_fit_is_built_anew(desk, lost):
    for number in range(MANY):
        desk.fence(f"h{number}", limit=100)
    desk.client.delete(*[index(desk)[i] for i in lost])

    assert isinstance(desk.acquire("refused", limit=1), Conflict)
    assert desk.client.exists(*index(desk)) == 3, "though nothing was acquired"
    assert isinstance(desk.acquire("other", limit=100), Held)
    assert isinstance(desk.acquire("one-too-many", limit=MANY + 1), Conflict)
    assert isinstance(desk.acquire("last", limit=MANY + 2), Held)
    assert [desk.client.zcard(key) for key in index(desk)] == [MANY + 2, MANY + 2, 2 * MANY + 4]


def test_a_lock_whose_holds_somebody_deleted_is_free(desk):
    for number in range(MANY):
        desk.fence(f"h{number}", limit=100)
    desk.client.delete(desk.keys.lock("a"))

    assert isinstance(desk.acquire("r1"), Held)
    assert desk.client.exists(*index(desk)) == 0
    assert isinstance(desk.acquire("r2"), Conflict)
    desk.release("r1")
    assert isinstance(desk.acquire("r2"), Held)


def test_a_lease_that_becomes_longer_does_so_in_the_index(desk):
    for number in range(MANY):
        desk.fence(f"h{number}", limit=100, lease=5.0)
    desk.fence("h0", limit=100, lease=100.0)

    ends = index(desk)[0]
    assert desk.client.zscore(ends, "h0") > desk.client.zscore(ends, "h1") + 60_000


def test_a_hold_that_somebody_deleted_keeps_nobody_out(desk):
    for number in range(MANY):
        desk.fence(f"h{number}", limit=100)
    desk.client.hdel(desk.keys.lock("a"), "h0", "@h0")

    assert isinstance(desk.acquire("other", limit=MANY), Held)


def test_a_hold_that_somebody_put_in_the_place_of_another_is_in_the_index_too(desk):
    for number in range(MANY):
        desk.fence(f"h{number}", limit=100)
    key = desk.keys.lock("a")
    record, label = desk.client.hmget(key, "h0", "@h0")
    desk.client.hset(key, mapping={"new": record, "@new": label})
    desk.client.hdel(key, "h0", "@h0")
    desk.client.zadd(index(desk)[0], {"h0": 1})

    assert isinstance(desk.acquire("other", limit=MANY), Conflict)
    assert desk.client.zscore(index(desk)[1], "new")
    assert not desk.client.zscore(index(desk)[1], "h0")


def test_a_renewal_that_did_not_reach_the_index_counts_all_the_same(desk):
    """It does not while the lock's slot moves between two nodes."""
    for number in range(MANY):
        desk.fence(f"h{number}", limit=100)
    desk.client.zadd(index(desk)[0], {"h0": 1})

    assert isinstance(desk.acquire("other", limit=MANY), Conflict)
    assert "h0" in desk.holders()
    assert desk.client.zscore(index(desk)[0], "h0") > desk.now_ms()


def test_what_has_lapsed_is_dropped_though_somebody_deleted_one_of_the_holds(desk):
    for number in range(MANY):
        desk.fence(f"h{number}", limit=100)
    for run in ("h0", "h1"):
        desk.lapse(run)
    desk.client.zadd(index(desk)[0], {"h0": 1, "h1": 2})
    desk.client.hdel(desk.keys.lock("a"), "h0", "@h0")

    assert isinstance(desk.acquire("other", limit=100), Held)
    assert desk.client.hget(desk.keys.lock("a"), "h1") is None
    assert desk.client.zcard(index(desk)[0]) == MANY - 1


def test_a_clock_that_was_set_back_puts_off_no_end_among_many(desk):
    key, later = desk.keys.lock("a"), 3_600_000
    for number in range(MANY):
        desk.fence(f"h{number}", limit=100, lease=1.5)
    for run, record in desk.client.hgetall(key).items():
        if not run.startswith(b"@"):
            expiry, rest = record.split(b" ", 1)
            desk.client.hset(key, run, b"%d %b" % (int(expiry) + later, rest))
            desk.client.zadd(index(desk)[0], {run: int(expiry) + later})
    answer = desk.acquire("other", limit=MANY)
    assert isinstance(answer, Conflict)
    assert answer.remaining <= 2.1
    desk.wait_ms(2100)
    assert isinstance(desk.acquire("other"), Held)


@pytest.mark.parametrize("seed", range(4))
def test_with_an_index_all_comes_to_the_same_as_without(desk, seed):
    """Random acquires and releases: beside a lock with an index stands a model of its permits."""
    dice, holds = random.Random(seed), {}
    for number in range(MANY):
        holds[f"base{number}"] = (
            desk.fence(f"base{number}", limit=90, owner=f"o{number % 9}"),
            f"o{number % 9}",
        )
    for step in range(150):
        permits = {fence for fence, _ in holds.values()}
        if dice.random() < 0.45 and holds:
            run = dice.choice(list(holds))
            assert desk.release(run)
            del holds[run]
            continue
        owner, by_owner = f"o{dice.randrange(12)}", dice.random() < 0.5
        ancestors = tuple(dice.sample(list(holds), min(2, len(holds))))
        limit = dice.choice([20, 45, 90])
        answer = desk.acquire(
            f"r{step}", owner=owner, by_owner=by_owner, ancestors=ancestors, limit=limit
        )
        mine = [f for run, (f, o) in holds.items() if o == owner and (by_owner or run in ancestors)]
        if mine:
            assert answer.fences == (max(mine),)
        elif len(permits) < limit:
            assert isinstance(answer, Held)
            assert answer.fences[0] > max(permits, default=0)
        else:
            assert isinstance(answer, Conflict)
            assert answer.fence == min(permits)
            continue
        holds[f"r{step}"] = (answer.fences[0], owner)
    assert desk.holders() == sorted(holds)
