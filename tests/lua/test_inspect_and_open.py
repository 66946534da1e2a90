"""inspect: tells and changes nothing. open: two layouts never share a namespace."""

from __future__ import annotations

import pytest

from celery_relock.backends.redis.keys import SCHEMA, Keys
from celery_relock.engine.protocol import HoldInfo, LockState
from celery_relock.errors import LockConfigError


def everything(desk):
    found = {}
    for key in sorted(desk.client.scan_iter(match=f"{desk.keys.namespace}:*")):
        found[key] = desk.client.dump(key)
    return found


def test_holders_are_told_and_how_many_wait(desk):
    fence = desk.fence("r1", "n1", owner="o", label="worker 1")
    desk.queue("r2")
    desk.queue("r3")

    state = desk.backend.inspect("a")

    assert [hold._replace(remaining=0) for hold in state.holds] == [
        HoldInfo("r1", 0, fence, "n1", "o", "worker 1")
    ]
    assert state.waiting == 2
    assert 25 < state.holds[0].remaining <= 30


def test_what_has_lapsed_is_not_told_of_and_nothing_is_changed(desk):
    desk.fence("r1")
    desk.queue("r2")
    desk.lapse("r1")
    desk.lapse_place("r2")
    before = everything(desk)

    assert desk.backend.inspect("a") == LockState((), 1), "its place is still there"
    assert everything(desk) == before


@pytest.mark.parametrize("size", [20, 200])
def test_of_many_holders_the_first_are_told_or_those_who_are_asked_for(desk, size):
    """Above 32 a lock has an index."""
    fences = [desk.fence(f"r{number}", limit=size) for number in range(size)]

    assert [hold.fence for hold in desk.backend.inspect("a").holds] == fences[:10]
    assert [hold.fence for hold in desk.backend.inspect("a", most=3).holds] == fences[:3]
    some = desk.backend.inspect("a", ("r17", "r1", "nobody"), most=1).holds
    assert [hold.execution_id for hold in some] == ["r1", "r17"]
    assert some[0] == desk.backend.inspect("a").holds[1]._replace(remaining=some[0].remaining)


def test_of_many_holders_no_more_are_read_than_are_told(desk):
    for number in range(200):
        desk.fence(f"r{number}", limit=0)
    desk.client.config_resetstat()

    desk.backend.inspect("a", ("r100",))
    desk.backend.inspect("a", most=3)

    calls = desk.client.info("commandstats")
    assert "cmdstat_hgetall" not in calls
    assert calls["cmdstat_hmget"]["calls"] == 1 + 3


def test_who_holds_is_told_though_the_first_of_many_have_lapsed(desk):
    for number in range(40):
        desk.fence(f"r{number}", limit=40, lease=0.3 if number < 5 else 30.0)
    desk.wait_ms(301)

    state = desk.backend.inspect("a", most=2)

    assert [hold.execution_id for hold in state.holds] == ["r5", "r6"]


@pytest.mark.parametrize("only", [(), ("r1",)])
def test_a_foreign_key_is_an_error_that_names_the_key(desk, only):
    desk.fence("r1")
    desk.client.hset(desk.keys.lock("a"), "some", "thing")

    with pytest.raises(LockConfigError, match="inspect lock 'a': a key is in use") as error:
        desk.backend.inspect("a", only)
    assert desk.keys.lock("a") in str(error.value)


def test_an_idle_lock_has_nothing_to_tell_and_gets_no_key(bare):
    before = everything(bare)

    assert bare.backend.inspect("a") == LockState((), 0)
    assert everything(bare) == before


def test_the_first_client_writes_the_layout_down(desk):
    desk.acquire("r1")

    layout = desk.client.hmget(desk.keys.meta(), "schema", "buckets")
    assert layout == [str(SCHEMA).encode(), b"1"]
    assert desk.raw("open", [desk.keys.meta()], [SCHEMA, 1]) == ["OK"]


@pytest.mark.parametrize(("schema", "buckets"), [(SCHEMA + 1, 1), (SCHEMA, 64)])
def test_a_client_of_another_layout_is_told_which_one_it_met(desk, schema, buckets):
    desk.raw("open", [desk.keys.meta()], [schema, buckets])

    assert desk.raw("open", [desk.keys.meta()], [SCHEMA, 1]) == ["OTHER", str(schema), str(buckets)]
    with pytest.raises(LockConfigError, match=f"schema {schema}, {buckets} buckets"):
        desk.acquire("r1")
    assert desk.client.exists(desk.keys.lock("a")) == 0


def test_a_fence_counter_without_a_layout_gets_one(desk):
    desk.client.hset(Keys(desk.keys.namespace).meta(), "fence", 5)

    desk.acquire("r1")

    assert desk.client.hget(desk.keys.meta(), "schema") == str(SCHEMA).encode()
