"""Claims for several locks: all or none, and no order of names that could deadlock."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import redis

from celery_relock.engine.lease import State
from celery_relock.engine.platform import clock
from celery_relock.engine.protocol import Conflict, Held
from celery_relock.engine.renewal import keepalive
from tests.support import leftovers
from tests.support.companion import running
from tests.support.long import LONG
from tests.support.runs import Runs

# Each of four threads and a process beside them; the short form has some hundred turns in all.
TURNS_EACH = 60 if LONG else 25
TURNS = """
import random
here = engine()
names = {names}
for turn in range({turns}):
    taken = held(here, *random.sample(names, 2), wait=20.0)
    here.release(taken)
say("done")
"""


def test_all_are_acquired_with_one_fence_and_released_together(
    runs: Callable[..., Runs], client: redis.Redis, namespace: str
) -> None:
    one = runs()
    lease = one.held("a", "b", "c")
    assert len(lease.fences) == 3
    assert len(set(lease.fences)) == 1
    for name in "abc":
        assert [hold.execution_id for hold in one.engine.inspect(name).holds] == [
            lease.claim.execution_id
        ]
    assert one.release(lease)
    assert leftovers(client, namespace) == [f"{namespace}:{{0}}:meta"]


def test_none_is_acquired_while_one_is_held(runs: Callable[..., Runs]) -> None:
    one, two = runs(), runs()
    holder = one.held("b")
    lease = two.lease("a", "b", "c")
    answer = two.engine.acquire(lease)
    assert isinstance(answer, Conflict)
    assert (answer.name, answer.owner) == ("b", holder.claim.owner)
    assert two.engine.inspect("a").holds == two.engine.inspect("c").holds == ()
    two.release(lease)
    one.release(holder)


def test_a_waiter_for_two_acquires_when_both_are_free_and_not_before(
    runs: Callable[..., Runs], client: redis.Redis, namespace: str
) -> None:
    one, two = runs(), runs()
    left, right = one.held("a"), one.held("b")
    lease = two.lease("a", "b")
    thread = two.waiting(lease)
    one.release(left)
    assert one.engine.inspect("a").holds == ()
    assert lease.state is State.WAITING
    one.release(right)
    thread.entered()
    assert len(set(lease.fences)) == 1
    assert two.release(lease)
    assert leftovers(client, namespace) == [f"{namespace}:{{0}}:meta"]


def test_a_newcomer_for_one_does_not_overtake_a_waiter_for_two(runs: Callable[..., Runs]) -> None:
    one, two = runs(), runs()
    holder = one.held("b")
    lease = two.lease("a", "b")
    thread = two.waiting(lease)
    newcomer = one.lease("a")
    assert isinstance(one.engine.acquire(newcomer), Conflict)
    one.release(newcomer)
    one.release(holder)
    thread.join(30)
    assert two.release(lease)


def test_waiters_for_both_orders_acquire_one_after_the_other(runs: Callable[..., Runs]) -> None:
    one, two = runs(), runs()
    holder = one.held("a", "b")
    first, second = one.lease("a", "b"), two.lease("b", "a")
    first_thread = one.waiting(first)
    second_thread = two.waiting(second)
    one.release(holder)
    first_thread.entered()
    assert second.state is State.WAITING
    one.release(first)
    second_thread.entered()
    assert two.release(second)


def test_a_lock_that_is_re_entered_keeps_its_fence_though_the_other_was_waited_for(
    runs: Callable[..., Runs],
) -> None:
    one, two = runs(), runs()
    outer = one.held("a", owner="flow")
    stranger = two.held("b")
    inner = one.lease("a", "b", owner="flow", ancestors=(outer.claim.execution_id,))
    thread = one.waiting(inner)
    two.release(stranger)
    thread.entered()
    assert inner.fences[0] == outer.fences[0]
    assert inner.fences[1] > stranger.fences[0]
    assert inner.reentered == (True, False)
    assert one.release(inner)
    assert [hold.execution_id for hold in two.engine.inspect("a").holds] == [
        outer.claim.execution_id
    ]
    assert one.release(outer)


def test_a_waiter_for_two_that_gives_up_leaves_both_queues(
    runs: Callable[..., Runs], client: redis.Redis, namespace: str
) -> None:
    one, two = runs(), runs()
    holder = one.held("a")
    lease = two.lease("a", "b")
    assert isinstance(two.engine.acquire(lease, 0.1), Conflict)
    two.release(lease)
    free = one.held("b")
    one.release(free)
    one.release(holder)
    assert leftovers(client, namespace) == [f"{namespace}:{{0}}:meta"]


def test_processes_and_threads_that_want_any_two_of_three_never_deadlock(
    runs: Callable[..., Runs], redis_url: str, namespace: str, client: redis.Redis
) -> None:
    one = runs()
    names = ["a", "b", "c"]
    inside = dict.fromkeys(names, 0)

    def work() -> None:
        for _ in range(TURNS_EACH):
            chosen = random.sample(names, 2)
            lease = one.held(*chosen, wait=20.0)
            for name in chosen:
                inside[name] += 1
                assert inside[name] == 1
            for name in chosen:
                inside[name] -= 1
            assert one.release(lease)

    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    with running(TURNS.format(names=names, turns=TURNS_EACH), redis_url, namespace) as other:
        threads = [threading.Thread(target=guarded) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)
        assert other.line() == "done"
    assert failures == []
    assert leftovers(client, namespace) == [f"{namespace}:{{0}}:meta"]


def test_a_repeat_of_the_claim_holds_the_same(runs: Callable[..., Runs]) -> None:
    one = runs()
    lease = one.held("a", "b")
    again = one.engine.backend.acquire(lease.claim)
    assert isinstance(again, Held)
    assert again.fences == lease.fences
    assert one.release(lease)


def test_a_waiter_for_two_gets_in_though_what_it_might_have_joined_was_released_by_force(
    runs: Callable[..., Runs],
) -> None:
    one, two = runs(), runs()
    two.ready()
    outer, other = one.held("a", owner="flow"), one.held("b")
    waiter = two.lease("a", "b", owner="flow", ancestors=(outer.claim.execution_id,))
    thread = two.waiting(waiter, None)
    assert len(one.engine.backend.force_release("a")) == 1
    one.release(other)
    thread.entered()
    assert two.release(waiter)


def test_a_lock_that_is_not_left_to_a_retry_is_not_missed_by_a_renewal_on_its_way(
    runs: Callable[..., Runs],
) -> None:
    one = runs()
    lease = one.held("a", "b")
    renewals, sent = lease.renewals(), clock()
    lease.narrow((True, False))
    keepalive._renewal_answered(lease, renewals, sent, [True, False])
    assert not lease.lost
    keepalive._renewal_answered(lease, renewals, sent, [False, True])
    assert lease.lost
