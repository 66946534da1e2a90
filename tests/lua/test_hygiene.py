"""What is in Redis: little for a held lock, nothing for an idle one, never somebody else's."""

from __future__ import annotations

import pytest

from celery_relock.engine import ids
from celery_relock.engine.protocol import Held
from celery_relock.errors import LockConfigError
from tests.support import leftovers


def others(desk):
    """Every key but the one that stays."""
    return [key for key in leftovers(desk.client, desk.keys.namespace) if key != desk.keys.meta()]


def test_a_held_lock_is_one_key_of_at_most_300_bytes(bare):
    run, owner, attempt_id = ids.new_id(), ids.new_id(), ids.new_attempt_id()
    label = "x" * 55
    bare.fence(
        run, attempt_id, owner=owner, names=("account:42",), label=label, inbox=ids.new_attempt_id()
    )

    assert others(bare) == [bare.keys.lock("account:42")]
    key = bare.keys.lock("account:42")
    assert bare.client.memory_usage(key) <= 300
    assert bare.client.object("encoding", key) in (b"ziplist", b"listpack")


def test_a_renewed_or_granted_lock_is_no_larger(bare):
    bare.listen("p")
    run = ids.new_id()
    bare.fence(run, names=("account:42",), owner=ids.new_id())
    size = bare.client.memory_usage(bare.keys.lock("account:42"))
    bare.queue(ids.new_id(), names=("account:42",), inbox="p", owner=ids.new_id())
    bare.renew(run, name="account:42")
    bare.release(run, names=("account:42",))

    assert others(bare) == [bare.keys.lock("account:42")]
    # An allocator gives out steps of 8 or 16 bytes.
    assert bare.client.memory_usage(bare.keys.lock("account:42")) <= size + 16


def test_an_idle_lock_is_no_key(bare):
    bare.fence("r1")
    bare.queue("r2", inbox="gone")
    bare.queue("r3", names=("a", "b"), inbox="gone")
    bare.fence("inner", ancestors=("r1",), owner="r1")
    for run, names in [("inner", "a"), ("r1", "a"), ("r2", "a"), ("r3", "ab")]:
        bare.release(run, names=tuple(names))

    assert others(bare) == []


def test_every_key_but_the_counter_has_a_lifetime_a_little_above_its_lease(bare):
    bare.fence("r1", lease=30)
    bare.queue("r2", wait=6.0)
    bare.queue("r3", wait=6.0, names=("a", "b"))
    bare.release("r4", ended="execution", remember=100)

    for key in others(bare):
        lease = 100 if ":d:" in key else 30 if ":l:" in key else 6
        grace = 0 if ":d:" in key else 60
        assert lease * 1000 - 5_000 < bare.client.pttl(key) <= (lease + grace) * 1000, key
    assert bare.client.pttl(bare.keys.meta()) == -1


@pytest.mark.parametrize("way", ["fast", "full", "joined", "granted", "beaten"])
def test_a_lock_has_a_lifetime_whichever_way_it_was_acquired(bare, way):
    bare.listen("p")
    bare.acquire("r1", names=("a", "b") if way == "full" else ("a",), lease=3)
    if way == "joined":
        bare.fence("r2", owner="r1", ancestors=("r1",), lease=300)
    if way in ("granted", "beaten"):
        bare.queue("r2", inbox="p")
        bare.release("r1")
    if way == "beaten":
        bare.beat("r2", lease=300)

    longest = max(hold.remaining for hold in bare.backend.inspect("a").holds) * 1000
    assert longest + 50_000 < bare.client.pttl(bare.keys.lock("a")) <= longest + 60_100


def test_what_everybody_left_lying_goes_by_itself(bare):
    bare.fence("r1", lease=1.0)
    bare.queue("r2", wait=1.0)
    bare.lapse("r1")
    bare.lapse_place("r2")
    for key in others(bare):
        assert 0 < bare.client.pttl(key) <= 61_000
        bare.client.pexpire(key, 1)
    bare.wait_ms(2)

    assert others(bare) == []
    assert isinstance(bare.acquire("r3"), Held)


def test_a_flushed_script_cache_is_not_noticed(desk):
    desk.fence("r1")
    desk.queue("r2")
    for command in (
        lambda: desk.fence("r1"),
        lambda: desk.renew("r1"),
        lambda: desk.beat("r2"),
        lambda: desk.holders(),
        lambda: desk.backend.force_release("a", "nobody"),
        lambda: desk.release("r1"),
    ):
        desk.client.script_flush()
        command()

    assert desk.waiters() == ["r2"]


FOREIGN = {
    "a string": lambda client, key: client.set(key, "somebody's"),
    "a list": lambda client, key: client.rpush(key, "somebody's"),
    "another hash": lambda client, key: client.hset(key, "r1", "somebody's"),
}


@pytest.mark.parametrize("what", FOREIGN)
@pytest.mark.parametrize("verb", ["take", "queue", "two", "force", "inspect", "release"])
def test_somebody_elses_key_is_an_error_and_stays_as_it_is(bare, what, verb):
    key = bare.keys.lock("a")
    FOREIGN[what](bare.client, key)
    before = bare.client.dump(key)
    verbs = {
        "take": lambda: bare.acquire("r1"),
        "queue": lambda: bare.acquire("r1", wait=6.0),
        "two": lambda: bare.acquire("r1", names=("b", "a"), wait=6.0),
        "force": lambda: bare.backend.force_release("a"),
        "inspect": lambda: bare.backend.inspect("a"),
        "release": lambda: bare.release("r1"),
    }

    with pytest.raises(LockConfigError):
        verbs[verb]()

    assert bare.client.dump(key) == before
    assert bare.client.pttl(key) == -1
    assert others(bare) == [key]


@pytest.mark.parametrize("which", ["queue", "waiters"])
def test_somebody_elses_queue_is_an_error_and_stays_as_it_is(bare, which):
    key = bare.keys.of_lock(which[0], "a")
    bare.fence("r1")
    if which == "waiters":
        bare.client.zadd(bare.keys.of_lock("q", "a"), {"r2": 1})
    bare.client.set(key, "somebody's")

    with pytest.raises(LockConfigError):
        bare.acquire("r3", wait=6.0)
    assert bare.client.get(key) == b"somebody's"
    assert bare.client.hkeys(bare.keys.lock("a")) == [b"r1", b"@r1"]
