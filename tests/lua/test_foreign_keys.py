"""A key that somebody else wrote, or garbled, hurts its own lock and no other (B5)."""

from __future__ import annotations

import contextlib
import random

import pytest

from celery_relock.engine.protocol import Ended, Held, Queued, Renewal
from celery_relock.errors import LockConfigError

KINDS = {
    "string": lambda client, key: client.set(key, "somebody's"),
    "list": lambda client, key: client.rpush(key, "x"),
    "set": lambda client, key: client.sadd(key, "x"),
    "zset": lambda client, key: client.zadd(key, {"x": 1}),
    "hash": lambda client, key: client.hset(key, "r1", "somebody's"),
    "stream": lambda client, key: client.xadd(key, {"x": "y"}),
}
KEYS = ["lock", "queue", "waiters", "ends", "fences", "owners"]


def key_of(desk, which, name):
    """A key of a lock. The last three are the index of a lock with many holds."""
    return desk.keys.of_lock(which[0], name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", KEYS)
def test_one_foreign_key_costs_the_others_of_its_batch_nothing(desk, which, kind):
    for name in ("b", "c"):
        desk.fence(f"holds-{name}", names=(name,))
        desk.queue(f"waits-{name}", names=(name,))
    desk.fence("holds-a")
    desk.queue("waits-a")
    key = key_of(desk, which, "a")
    desk.client.delete(key)
    KINDS[kind](desk.client, key)

    beats = [Renewal(name, f"waits-{name}", "n", 30.0, 6.0) for name in "bac"]
    answers = desk.backend.heartbeat(beats)
    assert isinstance(answers[0], Queued)
    assert isinstance(answers[2], Queued)
    kept = desk.backend.renew([Renewal(name, f"holds-{name}", "n", 30.0) for name in "bac"])
    assert (kept[0], kept[2]) == (True, True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", KEYS)
def test_one_foreign_key_keeps_nothing_from_being_resumed(desk, which, kind):
    for name in ("a", "b"):
        desk.fence(f"holds-{name}", names=(name,))
        desk.park(f"parked-{name}", names=(name,))
    desk.release("holds-b", names=("b",), home="")  # nobody here can send it
    key = key_of(desk, which, "a")
    desk.client.delete(key)
    KINDS[kind](desk.client, key)

    desk.all_due()

    assert "parked-b" in desk.resume()


def test_several_names_are_released_though_one_of_them_is_somebody_elses(desk):
    assert isinstance(desk.acquire("r1", names=("a", "b", "c")), Held)
    desk.client.set(desk.keys.lock("b"), "somebody's")

    assert desk.release("r1", names=("a", "b", "c"))
    assert desk.holders("a") == desk.holders("c") == []
    desk.fence("r2", names=("a",))


def test_a_garbled_place_is_passed_over(desk):
    desk.listen("p")
    desk.fence("r1")
    for number, junk in enumerate((b"{", b"[1, 2]", b"\xff", b'{"expiry": "x"}', b"null", b"")):
        desk.queue(f"junk{number}", inbox="p")
        desk.client.hset(desk.keys.of_lock("w", "a"), f"junk{number}", junk)
    desk.queue("r2", inbox="p")

    desk.release("r1")

    assert desk.holders() == ["r2"]


@pytest.mark.parametrize("lost", ["queue", "waiters"])
@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("comes", [(), ("a", "b")])
def test_a_place_that_is_lost_at_one_of_several_locks_keeps_nobody_waiting_at_the_other(
    desk, name, lost, comes
):
    both, other = ("a", "b"), ("a", "b")[name == "a"]
    desk.fence("r0", names=both)
    desk.park("r1", names=both)
    desk.park("r2", names=(other,))
    desk.client.delete(key_of(desk, lost, name))
    if comes:
        desk.park("r3", names=comes)
    desk.release("r0", names=both)
    resumed = desk.out()
    for _ in range(2):
        desk.all_due()
        resumed += desk.resume()

    assert resumed == ["r1"]
    assert isinstance(desk.acquire("r1", "n2", names=both), Held)
    desk.release("r1", "n2", names=both, ended="execution")
    assert desk.out() == ["r2"]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_written_over_a_lock_the_other_goes_on(desk, seed):
    """Random junk over the keys of one lock, hostile names, and all verbs of the other."""
    dice = random.Random(seed)
    hostile = dice.choice(["{}", "l:", "}:l:x", "a\u2028b", "%d%s", "*", "-", "'\"", "é" * 40])
    desk.fence("holds-a")
    desk.queue("waits-a")
    desk.park("parked-a")
    for name in dice.sample(["lock", "queue", "waiters"], 2):
        key = key_of(desk, name, "a")
        desk.client.delete(key)
        dice.choice(list(KINDS.values()))(desk.client, key)
    names = (hostile,)
    fence = desk.fence("r1", names=names)
    desk.queue("r2", names=names)
    desk.park("r3", names=names)
    for _ in range(3):
        desk.all_due()
        desk.resume()
        beats = [
            Renewal(name, run, "n", 30.0, 6.0) for name, run in (("a", "waits-a"), (hostile, "r2"))
        ]
        assert isinstance(desk.backend.heartbeat(beats)[1], Queued)
        assert desk.backend.renew(
            [Renewal("a", "holds-a", "n", 9.0), Renewal(hostile, "r1", "n", 9.0)]
        )[1]
    for command in (lambda: desk.acquire("r9"), lambda: desk.release("holds-a"), desk.holders):
        with contextlib.suppress(LockConfigError):  # its own lock may say what is wrong with it
            command()
    desk.release("r1", names=names)
    assert desk.fence("r2", names=names) > fence


@pytest.mark.parametrize("kind", ["string", "hash"])
@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
@pytest.mark.parametrize("how", ["waits", "is parked", "is dead"])
def test_who_waits_for_a_foreign_key_and_another_lock_keeps_nobody_from_the_other(
    desk, how, names, kind
):
    desk.listen("p")
    desk.fence("r0", names=names)
    if how == "is parked":
        desk.park("both", names=names)
    else:
        desk.queue("both", names=names, inbox="p")
    desk.queue("r1", names=("b",), inbox="p")
    if how == "is dead":
        desk.lapse_place("both", names[0])
    desk.client.delete(desk.keys.lock("a"))
    KINDS[kind](desk.client, desk.keys.lock("a"))

    desk.release("r0", names=("b",))
    assert desk.holders("b") == ["r1"]
    desk.park("r2", names=("b",))
    desk.release("r1", names=("b",))
    assert desk.out() == ["r2"]
    desk.fence("r2", "n2", names=("b",))
    desk.release("r2", "n2", names=("b",))
    desk.fence("r3", names=("b",))


def test_a_foreign_key_keeps_nobody_from_the_lock_that_its_owner_holds(desk):
    both, owned = ("a", "b"), {"owner": "o", "by_owner": True}
    desk.listen("p")
    desk.fence("r0", names=both)
    desk.queue("both", names=both, inbox="p", **owned)
    for run in ("r1", "r2"):
        desk.queue(run, names=("b",), inbox="p", **owned)
    desk.client.set(desk.keys.lock("a"), "somebody's")

    desk.release("r0", names=("b",))

    assert desk.holders("b") == ["r1", "r2"]


def test_a_foreign_key_ahead_in_another_queue_holds_up_nobody(desk):
    desk.listen("p")
    desk.fence("r0", names=("b", "c"))
    desk.park("foreign", names=("a", "b"))
    desk.queue("r1", names=("b", "c"), inbox="p")
    desk.client.set(desk.keys.lock("a"), "somebody's")

    desk.release("r0", names=("b",))
    desk.release("r0", names=("c",))

    assert desk.holders("b") == desk.holders("c") == ["r1"]


def test_a_foreign_key_keeps_the_others_that_have_arrived_from_nothing(desk):
    for name in ("a", "b"):
        desk.fence("r0", names=(name,))
        desk.park(f"on {name}".replace(" ", "-"), names=(name,))
        desk.release("r0", names=(name,))
    desk.out()
    desk.client.set(desk.keys.lock("a"), "somebody's")
    before = desk.place("on-b", "b")["back"]

    desk.backend.arrived(["on-a", "on-b"], 60.0)

    assert desk.place("on-b", "b")["back"] > before + 50_000


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_who_waits_for_a_foreign_key_is_told_and_not_kept_waiting(desk, names):
    desk.fence("r0", names=names)
    desk.queue("both", names=names)
    desk.client.set(desk.keys.lock("a"), "somebody's")

    assert desk.release("r0", names=("b",))
    beats = [Renewal(name, "both", "n", 30.0, 6.0) for name in names]
    assert None in desk.backend.heartbeat(beats)
    with pytest.raises(LockConfigError):
        desk.acquire("both", names=names)


def test_a_foreign_key_among_the_holders_of_others_hides_no_lock(desk):
    """The search for a deadlock visits what the holder waits for."""
    desk.fence("r0", names=("a",))
    desk.fence("holder", names=("c",))
    desk.queue("holder2", names=("a", "b"), stuck=("holder",))
    desk.client.set(desk.keys.lock("a"), "somebody's")

    desk.queue("r1", names=("c",), stuck=("r1",))


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_names_the_key_that_is_foreign(desk, kind):
    KINDS[kind](desk.client, desk.keys.lock("a"))

    with pytest.raises(LockConfigError) as error:
        desk.acquire("r1", names=("b", "a"))
    assert desk.keys.lock("a") in str(error.value)


NEEDS = {
    "fence": lambda desk: desk.fence("r3", names=("b",)),
    "parked": lambda desk: desk.park("r4"),
    "bytes": lambda desk: desk.park("r4"),
    "clock": lambda desk: desk.resume(),
}


@pytest.mark.parametrize("field", NEEDS)
def test_a_number_that_is_none_is_told_with_what_to_do(desk, field):
    desk.fence("r1")
    desk.park("r2")
    desk.client.hset(desk.keys.meta(), field, "somebody's")

    with pytest.raises(LockConfigError, match=f"meta: delete its field.*{field}"):
        NEEDS[field](desk)
    desk.client.hdel(desk.keys.meta(), field)
    NEEDS[field](desk)


@pytest.mark.parametrize("which", ["queue", "messages"])
def test_a_release_lets_others_in_though_a_key_of_one_lock_is_somebody_elses(desk, which):
    desk.fence("r1", names=("a", "b"))
    desk.park("r2")
    desk.park("r3", names=("b",))
    key = key_of(desk, which, "a")
    desk.client.delete(key)
    desk.client.set(key, "somebody's")

    assert desk.release("r1", names=("a", "b"), ended="execution")

    assert desk.out() == ["r3"]
    assert desk.acquire("r1", "late", names=("b",)) == Ended()


def test_a_label_that_is_not_utf_8_is_shown_in_one_way(desk):
    desk.fence("r1")
    desk.client.hset(desk.keys.lock("a"), "@r1", b"- the \xff worker")
    [hold] = desk.backend.inspect("a").holds
    assert desk.acquire("r2").label == hold.label == "the \\xff worker"
