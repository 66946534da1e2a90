"""survey, where, and the scan for keys: what people are told of locks; nothing changes by it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_relock.admin.look import Look, Stats
from celery_relock.backends.redis.inspection import Inspection
from celery_relock.engine.protocol import (
    COMES_AGAIN,
    LINE,
    HoldInfo,
    PlaceRequest,
    Release,
    Successor,
)
from celery_relock.errors import LockConfigError
from tests.support import wait_for
from tests.support.backends import backend_of
from tests.support.desk import Desk


@pytest.fixture
def ask(desk):
    return desk.backend.inspection()


def everything(desk):
    return {
        key: desk.client.dump(key)
        for key in desk.client.scan_iter(match=f"{desk.keys.namespace}:*")
    }


def survey(desk, name="a", most=100):
    ask = desk.backend.inspection()
    (found,) = ask.survey(ask.keys_of(name), most, most)
    return found


def names(ask, pattern="*"):
    return sorted({key.partition("}:l:")[2] for keys in ask.keys(pattern) for key in keys})


def test_no_script_reads_all_waiters_of_more_than_one_lock(desk, monkeypatch):
    asked, survey = [], Inspection.survey

    def noted(self, keys, *most):
        asked.append((len(keys), max(most)))
        return survey(self, keys, *most)

    monkeypatch.setattr(Inspection, "survey", noted)
    for name in ("a", "b", "c"):
        desk.fence(f"holds-{name}", names=(name,))
    for name in ("a", "b"):
        desk.queue(f"waits-{name}", names=(name,))
        desk.queue(f"waits-too-{name}", names=(name,))

    found = {lock.name: len(lock.waiters) for lock in Look(desk.backend).find("*", 100, 100)}

    assert found == {"a": 2, "b": 2, "c": 0}
    assert asked[1:] == [(1, 100)] * 2
    assert asked[0] == (3, 1)


def test_holders_and_waiters_are_told_of_in_order_and_nothing_is_changed(desk):
    fence = desk.fence("r1", "n1", owner="o", label="worker 1")
    desk.queue("r2", "n2", label="worker 2")
    desk.park("r3", task="t3", names=("a", "b"), label="worker 3")
    before = everything(desk)

    found = survey(desk)

    assert (found.name, found.held, found.waiting, found.parked) == ("a", 1, 2, 1)
    (first,) = found.holders
    assert (first.execution_id, first.token, first.owner) == ("r1", fence, "o")
    assert (first.task, first.kept, first.shared) == ("worker 1", False, False)
    assert 25 < first.lease_left <= 30
    second, third = found.waiters
    assert (second.position, second.state, second.task) == (1, "waiting", "worker 2")
    assert (third.position, third.state, third.task_id) == (2, "parked", "t3")
    assert third.names == ("a", "b")
    assert fence / 1e6 <= second.since <= third.since <= found.at + 0.001
    assert everything(desk) == before


def test_what_has_lapsed_is_not_told_of(desk):
    desk.fence("r1")
    desk.queue("r2")
    desk.lapse("r1")
    desk.lapse_place("r2")

    found = survey(desk)

    assert (found.held, found.holders, found.waiters) == (0, (), ())


@pytest.mark.parametrize("size", [20, 60])
def test_of_many_holders_and_waiters_the_first_are_told_of_and_all_are_counted(desk, size):
    """Above 32 a lock has an index."""
    fences = [desk.fence(f"r{i}", limit=size) for i in range(size)]
    for i in range(5):
        desk.queue(f"w{i}", limit=size)
    desk.lapse("r0")

    found = survey(desk, most=3)

    assert found.held in (size - 1, size), "an index may not know of a lapsed hold yet"
    assert [hold.token for hold in found.holders] == (fences[1:4] if size < 32 else fences[1:3])
    assert (found.waiting, [place.position for place in found.waiters]) == (5, [1, 2, 3])
    counted = survey(desk, most=0)
    assert counted == replace(found, at=counted.at, holders=(), waiters=())


def test_a_lock_that_was_left_to_thousands_is_no_foreign_key(desk):
    desk.fence("r1", owner="flow")
    successors = " ".join(f"s{number}" for number in range(2000))
    desk.backend.release(Release(("a",), "r1", "n", successor=Successor(successors, 300.0)))

    found = survey(desk, most=3)

    assert (found.foreign, found.held, len(found.holders)) == (False, 2000, 3)


def test_a_message_on_its_way_is_told_of_as_resumed(desk):
    desk.fence("r1")
    desk.park("r2", task="t2")
    desk.release("r1")

    assert [place.state for place in survey(desk).waiters] == ["resumed"]
    desk.lapse_place("r2", back=1)
    assert [place.state for place in survey(desk).waiters] == ["parked"]


def test_where_a_task_is_parked_is_told_with_its_message(desk, ask):
    desk.fence("r1")
    desk.park("r2", task="t2")
    desk.park("r3", task="t3", text="the message")
    before = everything(desk)

    found = ask.parked("t3")

    assert (found.name, found.text, found.waiter.position) == ("a", "the message", 2)
    assert found.waiter.execution_id == "r3"
    assert ask.parked("t4") is None
    assert everything(desk) == before
    desk.withdraw("r3")
    assert ask.parked("t3") is None


def test_where_a_message_is_awaited_is_told_until_it_comes(desk, ask):
    desk.backend.place(PlaceRequest(f"{LINE}a", "r1", "t1", "call", 60.0, 0.0, 0.0, 600.0))

    found = ask.parked("t1")

    assert (found.name, found.waiter.state, found.text) == (f"{LINE}a", "awaited", "")
    desk.fence("r2", names=("b",))
    desk.park("r1", names=("b",), task="t1")
    assert (ask.parked("t1").name, ask.parked("t1").waiter.state) == ("b", "parked")


def test_the_scan_finds_locks_by_the_pattern_of_their_names_and_no_other_keys(desk, ask):
    desk.fence("r1", names=("a", "ab", "b*"))
    desk.queue("r2", names=("a", "w"))
    desk.client.set(f"{desk.keys.namespace}:other", 1)
    desk.client.set(f"{desk.keys.namespace}x:{{0}}:l:a", 1)

    assert names(ask) == ["a", "ab", "b*", "w"]
    assert names(ask, "a*") == ["a", "ab"]
    assert names(ask, r"b\*") == ["b*"]


def test_a_namespace_is_taken_by_the_letter(script_server):
    here, there = (Desk(script_server.url, namespace) for namespace in ("n*[a]", "nx[a]"))
    try:
        here.fence("r1", names=("mine",))
        there.fence("r1", names=("theirs",))
        assert names(here.backend.inspection()) == ["mine"]
    finally:
        here.close()
        there.close()


def test_foreign_keys_are_told_of_and_hide_no_other(desk, ask):
    desk.fence("r1")
    prefix = desk.keys.prefix(0)
    desk.client.set(f"{prefix}l:text", 1)
    desk.client.hset(f"{prefix}l:hash", mapping={"some": "thing"})
    desk.client.hset(f"{prefix}l:large", mapping={f"f{i}": i for i in range(2000)})
    desk.client.set(f"{prefix}l:".encode() + b"\xff\x00", 1)
    desk.client.set(f"{prefix}q:queue", 1)

    desk.client.config_resetstat()

    found = {each.name: each.foreign for keys in ask.keys("*") for each in ask.survey(keys, 9, 9)}

    ours = {"a": False}
    assert found == {**ours, **dict.fromkeys(("text", "hash", "large", "queue", "\\xff\x00"), True)}
    read = desk.client.info("commandstats")["cmdstat_hgetall"]["calls"]
    assert read == 3, "the large one is not read"


def test_the_index_of_many_holds_that_have_ended_before_it_is_no_foreign_key(desk, ask):
    for number in range(40):
        desk.fence(f"r{number}", limit=100)
    desk.client.pexpire(desk.keys.lock("a"), 1)
    desk.wait_ms(2)
    assert desk.client.exists(desk.keys.of_lock("e", "a"), desk.keys.of_lock("f", "a")) == 2

    found = survey(desk)

    assert (found.held, found.foreign) == (0, False)
    assert desk.backend.inspect("a").holds == ()


def test_a_long_name_is_found_by_what_is_kept_of_it(desk, ask):
    name = "n" * 200
    desk.fence("r1", names=(name,))
    (kept,) = names(ask)

    assert len(kept) < 130
    assert [each.held for each in ask.survey(ask.keys_of(kept), 1, 1)] == [0, 1]
    assert [each.held for each in ask.survey(ask.keys_of(name), 1, 1)] == [1]


def test_a_namespace_is_not_begun_by_looking(desk, ask):
    assert ask.has_layout() is False
    assert everything(desk) == {}
    desk.fence("r1")
    assert ask.has_layout() is True
    desk.client.hset(desk.keys.meta(), "schema", 99)
    with pytest.raises(LockConfigError, match=r"another layout.*schema 99"):
        ask.has_layout()


def test_a_lock_is_released_by_its_key(desk, ask):
    fence = desk.fence("r1", owner="o", label="worker 1")
    (key,) = ask.keys_of("a")

    assert ask.force_release(key, "r2") == ()
    assert ask.force_release(key) == (HoldInfo("r1", 0, fence, "", "o", "worker 1"),)
    assert desk.holders() == []


@pytest.mark.parametrize("again", [False, True])
def test_a_call_that_runs_in_its_order_does_not_wait_in_it(desk, ask, again):
    """Though its place stays until it has ended, if its message can come again."""
    line = f"{LINE}a"
    for run in ("r1", "r2"):
        desk.backend.place(PlaceRequest(line, run, f"t-{run}", "call", 60.0, 0.0, 0.0, 600.0))
    owner = COMES_AGAIN if again else ""
    desk.fence("r1", names=(line,), owner=f"{owner}t-r1")
    desk.park("r2", names=(line,), owner=f"{owner}t-r2")

    found = survey(desk, line, most=1)

    assert (found.held, found.waiting, found.parked) == (1, 1, 1)
    assert [(each.execution_id, each.position) for each in found.waiters] == [("r2", 1)]
    assert ask.parked("t-r2").waiter.position == 1


def test_the_longest_wait_in_an_order_counts_though_the_first_call_is_awaited(desk):
    line = f"{LINE}a"
    for run in ("r1", "r2"):
        desk.backend.place(PlaceRequest(line, run, f"t-{run}", "call", 60.0, 0.0, 0.0, 600.0))
    assert Stats.of([survey(desk, line, most=1)]).oldest_wait == 0, "nobody has come"
    desk.leave("r2", names=(line,), owner="t-r2")

    def stats():
        return Stats.of([survey(desk, line, most=1)])

    wait_for(lambda: stats().oldest_wait > 0, what="a millisecond to pass")
    assert stats().oldest_wait_lock == line


@pytest.mark.parametrize("parked", [True, False])
def test_a_call_waits_in_its_order_from_when_its_message_came(desk, ask, parked):
    """What was sent long ago may have been at the broker until now."""
    line, queue = f"{LINE}a", desk.park if parked else desk.queue
    for run in ("r1", "r2"):
        desk.backend.place(PlaceRequest(line, run, f"t-{run}", "call", 60.0, 0.0, 0.0, 600.0))
    sent = desk.now_ms() / 1000
    desk.wait_ms(20)
    desk.fence("r1", names=(line,), owner="t-r1")
    queue("r2", names=(line,), owner="t-r2")
    (waiter,) = survey(desk, line).waiters
    assert waiter.due < sent < sent + 0.019 < waiter.since
    desk.wait_ms(20)
    queue("r2", "n2" if parked else "n", names=(line,), owner="t-r2")

    found = survey(desk, line)

    assert found.waiters[0].since == waiter.since, "it came too early, and waits all the same"
    assert Stats.of([found]).oldest_wait == found.at - waiter.since
    assert not parked or ask.parked("t-r2").waiter.since == waiter.since


def test_an_awaited_call_counts_from_when_it_keeps_a_later_one_waiting(desk):
    line = f"{LINE}a"
    for run in ("r1", "r2"):
        desk.backend.place(PlaceRequest(line, run, f"t-{run}", "call", 60.0, 0.0, 0.0, 600.0))
    desk.wait_ms(20)
    found = survey(desk, line)
    assert [each.since for each in found.waiters] == [found.at] * 2, "they keep nobody waiting"
    came = desk.now_ms() / 1000
    desk.park("r2", names=(line,), owner="t-r2")
    desk.wait_ms(2)

    found = survey(desk, line, most=1)

    assert found.waiters[0].due < came - 0.019
    assert 0 < Stats.of([found]).oldest_wait <= found.at - came + 0.001


@pytest.mark.parametrize("missing", ["exists", "hgetall", "hlen"])
def test_what_a_user_may_not_read_is_no_foreign_key(script_server, desk, missing):
    desk.fence("r1")
    rules = ["on", ">few", "~*", "&*", "+@all", f"-{missing}"]
    desk.client.execute_command("ACL", "SETUSER", f"no-{missing}", *rules)
    url = script_server.url.replace("://", f"://no-{missing}:few@")

    ask = backend_of(url, desk.keys.namespace).inspection()

    with pytest.raises(LockConfigError, match="lacks permissions that locks need"):
        ask.survey(ask.keys_of("a"), 1, 1)
