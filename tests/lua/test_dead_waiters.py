"""The queue: who has died or cannot be reached holds nobody up for long."""

from __future__ import annotations

from contextlib import closing

from celery_relock.engine.protocol import Conflict, Held
from tests.support.desk import Desk
from tests.support.waiting import wait_for


def words(messages):
    return [message.split(" ")[:2] for message in messages]


def test_waiters_of_a_process_that_is_gone_are_skipped_and_keep_their_place(desk):
    inbox = desk.listen("p")
    desk.fence("r1")
    for i in range(20):
        desk.queue(f"gone{i}", inbox="gone")
    desk.queue("r2", inbox="p")
    before = desk.waiters()

    desk.release("r1")

    assert desk.holders() == ["r2"]
    assert words(inbox.heard()) == [["granted", "r2"]]
    assert desk.waiters() == before[:-1]


def test_a_waiter_that_is_gone_is_skipped_though_somebody_listens_to_every_channel(desk):
    desk.fence("r1")
    desk.queue("gone", inbox="gone")
    with closing(desk.client.pubsub()) as watcher:
        watcher.psubscribe("*")
        wait_for(lambda: watcher.get_message(timeout=1.0), what="the subscription")
        desk.release("r1")
        assert desk.holders() == []
        assert isinstance(desk.acquire("r2"), Held)


def test_a_waiter_that_was_skipped_is_first_when_it_can_be_reached_again(desk):
    desk.fence("r1")
    desk.queue("r2", inbox="p")
    desk.listen("q")
    desk.queue("r3", inbox="q")
    desk.queue("r4", inbox="q")
    desk.release("r1")
    assert desk.holders() == ["r3"]

    desk.listen("p")
    desk.release("r3")

    assert desk.holders() == ["r2"]
    assert desk.waiters() == ["r4"]


def test_a_newcomer_acquires_when_none_of_the_waiters_can_be_reached(desk):
    desk.fence("r1")
    desk.queue("r2", inbox="gone")
    desk.release("r1")
    assert desk.holders() == []

    assert isinstance(desk.acquire("r3"), Held)
    assert desk.waiters() == ["r2"]


def test_a_waiter_without_a_connection_acquires_by_its_own_call(desk):
    desk.fence("r1")
    desk.queue("r2", inbox="gone")
    desk.queue("r3", inbox="gone")
    desk.release("r1")

    assert isinstance(desk.beat("r3"), Held), "those ahead cannot be reached"
    desk.release("r3")
    assert isinstance(desk.acquire("r2", wait=6.0), Held)


def test_all_the_dead_go_at_once(desk):
    inbox = desk.listen("p")
    desk.fence("r1")
    for i in range(20):
        desk.queue(f"frozen{i}", inbox="p", wait=0.05)
    desk.queue("r2", inbox="p")
    desk.wait_ms(51)

    desk.release("r1")

    assert words(inbox.heard()) == [["granted", "r2"]]
    assert desk.waiters() == []
    assert desk.client.exists(desk.keys.of_lock("w", "a")) == 0


def test_frozen_waiters_that_are_connected_cost_one_lease_in_total(desk):
    desk.listen("frozen")
    desk.listen("p")
    desk.fence("r1")
    for i in range(5):
        desk.queue(f"frozen{i}", inbox="frozen", wait=1.0, lease=1.0)
    desk.queue("r2", inbox="p")
    desk.release("r1")
    assert desk.holders() == ["frozen0"]

    desk.wait_ms(1000)

    assert isinstance(desk.beat("r2"), Held), "the hold and the places behind it lapsed together"


def test_a_dead_waiter_in_the_middle_goes_when_it_comes_to_the_head(desk):
    desk.listen("p")
    desk.fence("r1")
    for run in ("r2", "r3", "r4"):
        desk.queue(run, inbox="p")
    desk.lapse_place("r3")

    desk.release("r1")
    desk.release("r2")

    assert desk.holders() == ["r4"]
    assert desk.waiters() == []


def test_a_place_without_a_record_is_cleared_away(desk):
    desk.listen("p")
    desk.fence("r1")
    desk.queue("lost")
    desk.queue("r2", inbox="p")
    desk.client.hdel(desk.keys.of_lock("w", "a"), "lost")

    desk.release("r1")

    assert desk.holders() == ["r2"]
    assert desk.waiters() == []


def test_a_long_row_of_the_dead_is_worked_off_in_parts(desk):
    desk.fence("r1")
    desk.queue("frozen")
    desk.lapse_place("frozen")
    record = desk.client.hget(desk.keys.of_lock("w", "a"), "frozen")
    dead = {f"dead{i}": i for i in range(700)}
    desk.client.zadd(desk.keys.of_lock("q", "a"), dead)
    desk.client.hset(desk.keys.of_lock("w", "a"), mapping=dict.fromkeys(dead, record))

    desk.release("r1")
    assert len(desk.waiters()) == 701 - 256
    assert isinstance(desk.acquire("r2"), Conflict), (
        "whether anybody alive is ahead is not known yet"
    )
    assert isinstance(desk.acquire("r2"), Held)
    assert desk.waiters() == []


def test_a_dead_waiter_does_not_acquire_with_its_owner(desk):
    inbox = desk.listen("p")
    desk.fence("stranger")
    desk.queue("first", owner="o", by_owner=True, inbox="p")
    desk.queue("dead", owner="o", by_owner=True, inbox="p")
    desk.queue("last")
    desk.lapse_place("dead")

    desk.release("stranger")

    assert desk.holders() == ["first"]
    assert words(inbox.heard()) == [["granted", "first"]]
    assert desk.waiters() == ["last"], "cleared away, as it came to the head"


def _unheard_for(desk: Desk, run: str, seconds: float) -> int:
    """Turn the clock: so long ago its turn came first, and it was not reached. Returns when."""
    assert "unheard" in desk.place(run)
    since = int(desk.now_ms() - seconds * 1000)
    desk.lapse_place(run, unheard=since)
    return since


def test_a_waiter_that_lives_and_cannot_hear_is_passed_over_no_longer_than_a_place_lives(desk):
    desk.listen("p")
    desk.fence("r1")
    desk.queue("deaf", inbox="gone")
    for run in ("r2", "r3", "r4"):
        desk.queue(run, inbox="p")

    desk.release("r1")
    assert desk.holders() == ["r2"], "it can be reached at once, or is dead"
    since = _unheard_for(desk, "deaf", 5.0)
    desk.release("r2")
    assert desk.holders() == ["r3"], "it can be dead"
    assert abs(desk.place("deaf")["unheard"] - since) < 1000, "the first time counts"
    _unheard_for(desk, "deaf", 6.0)
    desk.release("r3")

    (hold,) = desk.backend.inspect("a").holds
    assert hold.execution_id == "deaf", "its heartbeats came, or its place would have lapsed"
    assert 5 < hold.remaining <= 6, "if it has died meanwhile, it costs what a place does"
    assert isinstance(desk.beat("deaf"), Held)
    assert desk.backend.inspect("a").holds[0].remaining > 29
    assert desk.waiters() == ["r4"]


def test_a_dead_waiter_that_was_passed_over_is_never_served(desk):
    desk.listen("p")
    desk.fence("r1")
    desk.queue("dead", inbox="gone", wait=0.05)
    desk.queue("r2", inbox="p")
    desk.queue("r3", inbox="p")
    desk.release("r1")
    assert desk.holders() == ["r2"]
    desk.wait_ms(51)

    desk.release("r2")

    assert desk.holders() == ["r3"]
    assert desk.waiters() == []


def test_a_waiter_for_several_locks_that_cannot_hear_is_known_as_such_at_each_of_them(desk):
    both = ("a", "b")
    desk.fence("r1")
    desk.queue("deaf", names=both, inbox="gone")
    desk.release("r1")
    assert desk.place("deaf", "a")["unheard"] == desk.place("deaf", "b")["unheard"]
    desk.fence("r2", names=("b",))
    _unheard_for(desk, "deaf", 6)

    desk.release("r2", names=("b",))

    assert desk.holders("a") == desk.holders("b") == ["deaf"]


def test_where_the_channel_is_forbidden_the_heartbeat_finds_the_grant(desk, script_server):
    user = desk.keys.namespace
    desk.client.acl_setuser(user, enabled=True, passwords=["+p"], keys=["*"], commands=["+@all"])
    desk.client.execute_command("ACL", "SETUSER", user, "resetchannels")
    url = script_server.url.replace("//", f"//{user}:p@")
    mute = Desk(url, desk.keys.namespace)
    mute.fence("r1")
    mute.queue("r2", inbox="p")

    assert mute.release("r1")
    assert mute.holders() == ["r2"]
    assert isinstance(mute.beat("r2"), Held)
    mute.close()
    desk.client.acl_deluser(user)
