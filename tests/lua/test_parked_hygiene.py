"""What parking leaves in Redis: nothing when all is done, no walk through a long line meanwhile."""

from __future__ import annotations

import re

import pytest

from celery_relock.engine.protocol import Conflict, Message, Parked
from tests.lua import test_lines
from tests.support import leftovers
from tests.support.desk import Desk
from tests.support.worker import ROOT

CATALOGUE = ROOT / "lua" / "README.md"

LONG = "account:" + "ü" * 100


def others(desk):
    """Every key but the one that stays, by its kind."""
    keys = leftovers(desk.client, desk.keys.namespace)
    return sorted(key.split(":", 2)[2] for key in keys if key != desk.keys.meta())


@pytest.mark.parametrize("names", [("a",), ("a", "b")])
@pytest.mark.parametrize("end", ["execution", "withdraw", "take back", "wait", "owed"])
def test_when_all_have_left_nothing_is_left(desk, names, end):
    desk.fence("r1", names=names)
    desk.park("r2", names=names, patience=50)
    if end == "withdraw":
        desk.withdraw("r2", remember=0.001)
        desk.wait_ms(2)
    elif end == "take back":
        desk.release("r2", names=names)
    elif end == "wait":
        desk.queue("r2", "back", names=names)
        desk.release("r2", "back", names=names)
    desk.release("r1", names=names, home="" if end == "owed" else "h")
    if end in ("execution", "owed"):
        desk.fence("r2", "back", names=names)
        desk.release("r2", "back", names=names)

    assert others(desk) == []


def test_the_keys_of_the_parked_have_no_lifetime_and_those_of_the_waiting_have(desk):
    desk.fence("r1")
    desk.queue("r2")
    desk.park("r3")
    desk.beat("r2")
    for key in ("q:a", "w:a", "m:a", "parked", "due"):
        assert desk.client.pttl(desk.keys.prefix(0) + key) == -1, key

    desk.withdraw("r3", remember=0.001)

    for key in ("q:a", "w:a"):
        assert 0 < desk.client.pttl(desk.keys.prefix(0) + key) <= 66_000, key
    desk.wait_ms(2)
    assert others(desk) == ["l:a", "q:a", "w:a"]


def test_every_key_and_its_type_is_in_the_catalogue(desk):
    table = CATALOGUE.read_text("utf-8").partition("## Parked executions")[0]
    rows = re.findall(r"^\| `([^`]+)` \| ([a-z ]+) \|", table, re.MULTILINE)
    known = {name.split("<")[0]: kind.replace("sorted set", "zset") for name, kind in rows}
    for name in ("dedup", "debounce", "order"):  # locks like any other, but for the name
        assert known.pop(f"l:{name}⇥") == known["l:"]
    desk.fence("r1", names=("a", "b"))
    desk.park("r2", names=("a", "b"), patience=50)
    desk.queue("r3", stuck=("outer",))
    desk.fence("r4", names=("c",))
    desk.backend.announce(["home:queue"], "worker", 5.0)
    for number in range(40):  # so many that they have an index
        desk.fence(f"s{number}", names=("semaphore",), limit=50)
    desk.queue("waits", names=("semaphore",), limit=1)
    for call in ("late", "behind"):
        test_lines.place(desk, call, gap=0.0)
    assert isinstance(test_lines.arrive(desk, "behind"), Conflict)
    assert isinstance(test_lines.arrive(desk, "behind"), int), "the other was not passed over"
    test_lines.place(desk, "sent")
    desk.release("r1", names=("a", "b"), ended="execution", home="")

    found = {}
    for key in leftovers(desk.client, desk.keys.namespace):
        kind, colon, _ = key.split(":", 2)[2].partition(":")
        found[kind + colon] = desk.client.type(key).decode()

    channels = {name for name, kind in known.items() if kind == "channel"}
    assert found == {name: kind for name, kind in known.items() if name not in channels}


def test_of_several_locks_each_keeps_its_line_while_somebody_is_parked_there(desk):
    desk.fence("r1", names=("a", "b"))
    desk.queue("blocked", names=("a",))
    desk.park("both", names=("a", "b"))
    desk.park("r2", names=("b",))

    desk.withdraw("both")

    assert 0 < desk.client.pttl(desk.keys.of_lock("q", "a")) <= 66_000
    assert desk.client.pttl(desk.keys.of_lock("q", "b")) == -1


def test_a_lock_with_a_long_name_is_found_again(desk):
    desk.fence("r1", names=(LONG,))
    assert desk.leave("r2", names=(LONG,), patience=0.0) == Parked(0)
    assert desk.resume() == ["r2"]
    desk.all_due()
    desk.lapse("r1", LONG)
    desk.lapse_place("r2", LONG, back=1)
    assert desk.resume() == ["r2"]

    desk.release("r2", names=(LONG,))
    desk.release("r1", names=(LONG,))
    assert others(desk) == []


def test_a_lock_with_a_strange_name_is_found_again(desk):
    name = 'a "b"\\c\x00/{d} l r'
    desk.fence("r1", names=(name, "z"))
    desk.park("r2", names=(name, "z"))

    desk.release("r1", names=(name, "z"))

    assert desk.messages() == [Message("r2", name, "text of r2")]


def calls_of(desk, command):
    """How many commands the server works through for one of ours, by name."""

    def counted():
        stats = desk.client.info("commandstats")
        ours = ("cmdstat_info", "cmdstat_eval", "cmdstat_evalsha")
        return {name: calls["calls"] for name, calls in stats.items() if name not in ours}

    before = counted()
    command()
    made = {name: calls - before.get(name, 0) for name, calls in counted().items()}
    return {name: calls for name, calls in made.items() if calls}


def fill(desk, count):
    """A long line of parked executions behind one that is there already."""
    prefix = desk.keys.prefix(0)
    record = desk.client.hget(f"{prefix}w:a", "first")
    now = desk.now_ms() * 1000
    for start in range(0, count, 1000):
        runs = [f"p{i}" for i in range(start, min(start + 1000, count))]
        desk.client.zadd(f"{prefix}q:a", {run: now + int(run[1:]) for run in runs})
        desk.client.hset(f"{prefix}w:a", mapping=dict.fromkeys(runs, record))
        desk.client.hset(f"{prefix}m:a", mapping=dict.fromkeys(runs, "text"))
        desk.client.hset(f"{prefix}parked", mapping=dict.fromkeys(runs, "a"))


def commands(desk):
    """One after the other, what may happen at a lock with a line of parked executions."""
    yield lambda: desk.park("new", most=20_000)
    yield lambda: desk.acquire("newcomer")
    yield lambda: desk.acquire("p3", "early")
    yield lambda: desk.release("r1")
    yield lambda: desk.fence("first", "back")
    yield lambda: desk.release("first", "back", ended="execution")
    yield lambda: desk.acquire("p0", "back")
    yield lambda: desk.withdraw("p5")
    yield lambda: desk.backend.force_release("a")
    yield lambda: desk.resume()
    yield lambda: desk.backend.inspect("a")


def test_no_command_walks_through_ten_thousand_parked_executions(desk, script_server):
    long = Desk(script_server.url, f"{desk.keys.namespace}-long")
    for each, count in ((desk, 10), (long, 10_000)):
        each.fence("r1")
        each.park("first")
        fill(each, count)

    for few, many in zip(commands(desk), commands(long), strict=True):
        assert calls_of(desk, few) == calls_of(long, many)

    assert len(long.waiters()) == 10_000 - 1
    long.client.delete(*leftovers(long.client, long.keys.namespace))
    long.close()
