"""The server's clock is set forward, back, and right again: leases end early or late, and no more.

Only the time of day jumps (libfaketime). What processes measure by their monotonic clock does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from celery_relock.engine.events import LockEvent
from celery_relock.engine.lease import State
from celery_relock.engine.protocol import Conflict, Held, OtherAttempt, Queued
from celery_relock.engine.renewal import keepalive
from tests.support import RedisServer, leftovers, wait_for
from tests.support.clock import server_with_a_clock
from tests.support.desk import Desk
from tests.support.runs import Runs, Waiting

HOUR = 3600.0


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    started = server_with_a_clock()
    yield started
    started.stop()


@pytest.fixture(autouse=True)
def on_time(server: RedisServer) -> None:
    server.set_clock(0)


@pytest.fixture
def start(server: RedisServer, runs: Callable[..., Runs]) -> Callable[[], Runs]:
    """Engines as if each were a process of its own."""
    return lambda: runs(server.url)


@pytest.fixture
def desk(server: RedisServer, namespace: str) -> Iterator[Desk]:
    """For holds that nobody renews: their process is dead."""
    opened = Desk(server.url, namespace)
    yield opened
    opened.close()


def waiter_of(runs: Runs, **claim: float) -> Waiting:
    return runs.waiting(runs.lease("a", **claim))


class TestSetForward:
    def test_every_lease_ends_and_its_holder_is_told_at_its_next_renewal(
        self, server: RedisServer, start: Callable[[], Runs], lost: list[LockEvent]
    ) -> None:
        one, two = start(), start()
        holder = one.held("a", lease=6.0)
        server.set_clock(HOUR)
        newcomer = two.held("a", lease=60.0)
        # Two may believe that they hold it until then; the fences tell them apart.
        assert newcomer.fences > holder.fences
        wait_for(lambda: lost)
        assert (lost[0].execution_id, holder.lost) == (holder.claim.execution_id, True)
        # Not by its own clock, when the whole lease would be over.
        assert lost[0].reason == "the server does not have the hold any more"
        assert one.release(holder) is False
        assert two.release(newcomer)

    def test_a_release_before_that_renewal_tells_of_the_loss(
        self, server: RedisServer, start: Callable[[], Runs], lost: list[LockEvent]
    ) -> None:
        one = start()
        holder = one.held("a", lease=60.0)
        server.set_clock(HOUR)
        assert one.release(holder) is False
        assert [event.execution_id for event in lost] == [holder.claim.execution_id]

    def test_those_who_wait_acquire_one_after_the_other(
        self, server: RedisServer, start: Callable[[], Runs]
    ) -> None:
        one = start()
        one.held("a", lease=60.0)
        waiters = [waiter_of(start(), lease=1.2), waiter_of(start(), lease=1.2)]
        server.set_clock(HOUR)
        # Their places have ended as well, so it is anybody's turn.
        wait_for(lambda: any(waiter.lease.state is State.HELD for waiter in waiters))
        waiters.sort(key=lambda waiter: waiter.lease.state is not State.HELD)
        first = waiters[0].entered()
        assert waiters[1].is_alive()
        assert waiters[0].runs.release(first)
        second = waiters[1].entered()
        assert second.fences > first.fences
        assert waiters[1].runs.release(second)

    def test_what_is_parked_stays_and_is_resumed(self, server: RedisServer, desk: Desk) -> None:
        desk.fence("holder", lease=60.0)
        desk.park("one")
        desk.park("two")
        server.set_clock(HOUR)
        assert desk.resume() == ["one"]
        assert desk.fence("one", "n2") > 0
        desk.release("one", "n2")
        assert desk.out() == ["two"]
        assert desk.fence("two", "n2") > 0
        desk.release("two", "n2")


class TestSetBack:
    def test_a_live_holder_keeps_the_lock_and_hands_it_over_as_always(
        self, server: RedisServer, start: Callable[[], Runs], lost: list[LockEvent]
    ) -> None:
        one, two = start(), start()
        holder = one.held("a", lease=60.0)
        waiter = waiter_of(two)
        renewed = holder.renewed
        server.set_clock(-HOUR)
        keepalive.look_now(one.engine.backend)
        wait_for(lambda: holder.renewed > renewed)
        assert waiter.is_alive()
        assert one.release(holder)
        assert two.release(waiter.entered())
        assert lost == []

    def test_a_renewal_makes_the_lease_as_long_as_it_should_be(
        self, server: RedisServer, start: Callable[[], Runs]
    ) -> None:
        one = start()
        holder = one.held("a", lease=60.0)
        server.set_clock(-HOUR)
        keepalive.look_now(one.engine.backend)
        wait_for(lambda: one.engine.inspect("a").holds[0].remaining <= 60.0)
        assert one.release(holder)

    def test_a_dead_process_at_the_head_of_the_queue_holds_up_nobody(
        self, server: RedisServer, start: Callable[[], Runs], desk: Desk
    ) -> None:
        one, two = start(), start()
        holder = one.held("a", lease=60.0)
        desk.queue("dead", inbox="nobody")
        waiter = waiter_of(two)
        server.set_clock(-HOUR)
        assert one.release(holder)
        assert two.release(waiter.entered())

    def test_what_is_parked_is_resumed_by_the_holder(self, server: RedisServer, desk: Desk) -> None:
        desk.fence("holder", lease=60.0)
        desk.park("one")
        server.set_clock(-HOUR)
        desk.release("holder")
        assert desk.out() == ["one"]
        assert desk.fence("one", "n2") > 0
        desk.release("one", "n2")


def test_a_lock_that_was_deleted_by_hand_is_free_and_its_line_moves_on(
    server: RedisServer, start: Callable[[], Runs], desk: Desk
) -> None:
    desk.fence("dead")
    desk.park("parked")
    waiter = waiter_of(start(), lease=1.2)
    server.set_clock(-HOUR)
    desk.client.delete(desk.keys.lock("a"))
    desk.park("newcomer")
    assert desk.resume() == ["parked"]
    assert desk.fence("parked", "n2") > 0
    desk.release("parked", "n2")
    assert waiter.runs.release(waiter.entered())
    assert desk.resume() == ["newcomer"]
    desk.withdraw("newcomer")


class TestSetBackWhenSomebodyDied:
    """What nobody renews any more ends late: not by the hour, but by as long as it was given."""

    def test_a_dead_holder_costs_no_more_than_two_leases(
        self, server: RedisServer, start: Callable[[], Runs], desk: Desk
    ) -> None:
        desk.fence("dead", lease=1.0)
        waiter = waiter_of(start())
        server.set_clock(-HOUR)
        assert waiter.runs.release(waiter.entered())

    def test_who_asks_is_told_of_no_longer_time(self, server: RedisServer, desk: Desk) -> None:
        desk.fence("dead", lease=30.0)
        server.set_clock(-HOUR)
        (hold,) = desk.backend.inspect("a").holds
        assert 29.0 <= hold.remaining <= 60.0
        answer = desk.acquire("other")
        assert isinstance(answer, Conflict)
        assert answer.remaining <= 60.0

    def test_a_renewed_hold_ends_as_soon(self, server: RedisServer, desk: Desk) -> None:
        desk.fence("dead", lease=0.5)
        assert desk.renew("dead", lease=1.0)
        server.set_clock(-HOUR)
        wait_for(lambda: isinstance(desk.acquire("other"), Held))
        desk.release("other")

    def test_a_copy_of_a_dead_waiter_takes_its_place_over(
        self, server: RedisServer, desk: Desk
    ) -> None:
        desk.fence("holder", lease=60.0)
        desk.queue("waiter", "dead", wait=1.0, inbox="nobody")
        server.set_clock(-HOUR)
        answer = desk.acquire("waiter", "copy", wait=6.0)
        assert isinstance(answer, OtherAttempt)
        assert answer.remaining <= 1.0
        wait_for(lambda: isinstance(desk.acquire("waiter", "copy", wait=6.0), Queued))
        desk.release("waiter", "copy")
        desk.release("holder")

    def test_what_is_parked_behind_the_dead_is_resumed(
        self, server: RedisServer, desk: Desk
    ) -> None:
        desk.fence("dead", lease=1.0)
        desk.park("one")
        desk.resume()  # as every worker does each second
        server.set_clock(-HOUR)
        wait_for(lambda: desk.resume() == ["one"])
        assert desk.fence("one", "n2") > 0
        desk.release("one", "n2")

    def test_a_message_that_got_lost_is_sent_again(self, server: RedisServer, desk: Desk) -> None:
        desk.fence("holder")
        desk.park("one")
        desk.release("holder")
        assert desk.out() == ["one"]
        desk.resume()
        server.set_clock(-HOUR)
        wait_for(lambda: desk.resume() == ["one"])
        assert desk.fence("one", "n2") > 0
        desk.release("one", "n2")

    def test_a_parked_execution_waits_no_longer_than_it_may(
        self, server: RedisServer, desk: Desk
    ) -> None:
        desk.fence("holder", lease=600.0)
        desk.park("one", patience=1.0)
        desk.resume()
        server.set_clock(-HOUR)
        wait_for(lambda: desk.resume() == ["one"])
        desk.withdraw("one")
        desk.release("holder")

    def test_what_is_parked_afterwards_waits_for_as_long_as_it_may(
        self, server: RedisServer, desk: Desk
    ) -> None:
        desk.fence("holder", lease=600.0)
        desk.park("before")
        desk.resume()
        desk.withdraw("before")
        desk.resume()
        server.set_clock(-HOUR)
        desk.park("since", patience=600.0)
        assert desk.resume() == []
        desk.withdraw("since")
        desk.release("holder")


class TestFences:
    def test_they_rise_whatever_the_clock_does(self, server: RedisServer, desk: Desk) -> None:
        seen = [desk.fence("first")]
        desk.release("first")
        for number, clock in enumerate((HOUR, 0, -HOUR, 0, 24 * HOUR, 0)):
            server.set_clock(clock)
            seen.append(desk.fence(f"r{number}"))
            desk.release(f"r{number}")
        assert seen == sorted(set(seen))

    def test_they_rise_when_the_data_is_lost_and_the_clock_is_right(self, desk: Desk) -> None:
        before = desk.fence("r1")
        desk.client.delete(desk.keys.meta(), desk.keys.lock("a"))
        assert desk.fence("r2") > before

    def test_only_if_both_come_together_they_repeat_until_the_clock_has_passed_the_last(
        self, server: RedisServer, desk: Desk
    ) -> None:
        """A failover to a master that lacks the last writes and whose clock is behind. What is
        promised is said in lua/README.md; `min_replicas` or one time for all servers prevents it.
        """
        before = desk.fence("r1")
        desk.client.delete(desk.keys.meta(), desk.keys.lock("a"))
        server.set_clock(-HOUR)
        behind = desk.fence("r2")
        assert before - (HOUR + 60) * 1e6 < behind < before
        desk.release("r2")
        assert desk.fence("r3") > behind, "they rise from there"
        desk.release("r3")
        server.set_clock(0)
        assert desk.fence("r4") > before

    def test_they_rise_for_those_who_were_in_the_queue(
        self, server: RedisServer, start: Callable[[], Runs]
    ) -> None:
        one, two = start(), start()
        holder = one.held("a")
        waiter = waiter_of(two)
        server.set_clock(-HOUR)
        one.release(holder)
        entered = waiter.entered()
        assert entered.fences > holder.fences
        two.release(entered)


def test_forward_back_and_right_again_leaves_nothing_behind(
    server: RedisServer, desk: Desk, namespace: str
) -> None:
    for number, clock in enumerate((HOUR, -HOUR, 0)):
        desk.fence(f"holder{number}")
        answer = desk.acquire(f"waiter{number}", wait=6.0, inbox="nobody")
        assert isinstance(answer, Queued)
        server.set_clock(clock)
        desk.release(f"holder{number}", ended="execution")
        desk.release(f"waiter{number}", ended="execution")
    found = {key.split(":")[-1] for key in leftovers(desk.client, namespace)}
    kept = {key for key in leftovers(desk.client, namespace) if desk.client.pttl(key) == -1}
    assert kept == {desk.keys.meta()}
    assert "a" not in found, found
