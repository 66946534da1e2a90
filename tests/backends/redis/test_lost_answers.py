"""A command whose answer was lost is sent again: the caller ends right, nothing is left over."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import redis

from celery_relock.dedup import marker
from celery_relock.engine.lease import Lease, State
from celery_relock.engine.protocol import (
    KEPT,
    LINE,
    Conflict,
    Ended,
    Held,
    Parked,
    ParkRequest,
    PlaceRequest,
    Release,
)
from celery_relock.engine.renewal import keepalive
from celery_relock.errors import LockUnavailable
from tests.support import RedisServer, leftovers, wait_for
from tests.support.desk import Desk
from tests.support.proxy import Proxy
from tests.support.runs import Runs

Scenario = Callable[[Runs, Runs], None]


def acquire_and_release(near: Runs, far: Runs) -> None:
    lease = near.held("a")
    assert [hold.execution_id for hold in far.engine.inspect("a").holds] == [
        lease.claim.execution_id
    ]
    assert near.release(lease)


def extend(near: Runs, far: Runs) -> None:
    lease = near.held("a", lease=10.0)
    assert near.engine.extend(lease, 60.0)
    assert far.engine.inspect("a").holds[0].remaining > 50
    wait_for(lambda: lease.remaining > 50, what="the keep-alive's own renewal")
    assert near.release(lease)


def is_busy(near: Runs, far: Runs) -> None:
    holder = far.held("a")
    lease = near.lease("a")
    answer = near.engine.acquire(lease)
    assert isinstance(answer, Conflict)
    assert answer.owner == holder.claim.owner
    assert near.release(lease)
    assert far.release(holder)


def wait_and_get_in(near: Runs, far: Runs) -> None:
    holder = far.held("a")
    lease = near.lease("a")
    waiter = near.waiting(lease)
    queued = lease.renewed
    keepalive.look_now(near.engine.backend)
    wait_for(lambda: lease.renewed > queued, what="a heartbeat")
    assert far.release(holder)
    assert waiter.entered().fences > holder.fences
    granted = lease.renewed
    keepalive.look_now(near.engine.backend)
    wait_for(lambda: lease.renewed > granted, what="a renewal")
    assert [hold.attempt_id for hold in far.engine.inspect("a").holds] == [lease.claim.attempt_id]
    assert near.release(lease)


def wait_in_vain(near: Runs, far: Runs) -> None:
    holder = far.held("a")
    lease = near.lease("a")
    assert isinstance(near.engine.acquire(lease, 0.2), Conflict)
    assert near.release(lease)
    state = far.engine.inspect("a")
    assert (state.waiting, [hold.execution_id for hold in state.holds]) == (
        0,
        [holder.claim.execution_id],
    )
    assert far.release(holder)


def hand_over_to_another(near: Runs, far: Runs) -> None:
    holder = near.held("a")
    lease = far.lease("a")
    got: list[object] = []
    waiter = threading.Thread(target=lambda: got.append(far.engine.acquire(lease, 60.0)))
    waiter.start()
    wait_for(lambda: near.engine.inspect("a").waiting == 1)
    assert near.release(holder)
    waiter.join(30)
    assert isinstance(got[0], Held)
    assert far.release(lease)


def re_enter(near: Runs, far: Runs) -> None:
    outer = near.held("a", owner="flow")
    inner = near.held("a", owner="flow", ancestors=(outer.claim.execution_id,))
    assert inner.fences == outer.fences
    assert inner.reentered == (True,)
    assert near.release(inner)
    assert [hold.execution_id for hold in far.engine.inspect("a").holds] == [
        outer.claim.execution_id
    ]
    assert near.release(outer)


def take_two(near: Runs, far: Runs) -> None:
    lease = near.held("a", "b")
    assert len(far.engine.inspect("b").holds) == 1
    assert near.release(lease)


def run_in_order(near: Runs, far: Runs) -> None:
    line, marker = f"{LINE}a", "dedup\tt\ta"
    first, second = near.lease(line), near.lease(line)

    def sent(lease: Lease, marked: Lease | None = None) -> int | Conflict:
        run, claim = lease.claim.execution_id, None
        if marked is not None:
            claim = marked.claim._replace(attempt_id=KEPT)
        times = (60.0, 0.0, 0.0, 60.0)
        return near.engine.backend.place(PlaceRequest(line, run, "task", "call", *times, claim))

    mine = near.lease(marker)
    tickets = [sent(first, mine), sent(second)]
    assert isinstance(sent(near.lease(line), near.lease(marker)), Conflict)
    assert far.engine.inspect(line).waiting == 2
    assert len(far.engine.inspect(marker).holds) == 1
    assert isinstance(near.engine.park(second, ParkRequest("text", "home", "task")), Parked)
    assert near.engine.acquire(first).fences == (tickets[0],)
    run, attempt_id = first.claim[:2]
    (message,) = near.engine.backend.release(
        Release([line], run, attempt_id, homes="home")
    ).messages
    assert message.execution_id == second.claim.execution_id
    again = near.lease(line, execution_id=second.claim.execution_id)
    assert near.engine.acquire(again).fences == (tickets[1],)
    assert near.release(again)
    assert near.engine.backend.release(Release([marker], mine.claim.execution_id, KEPT)).had


#: Each scenario with every command that it sends through the proxy: verb, and which of its kind.
COMMANDS: dict[Scenario, list[tuple[str, int]]] = {
    acquire_and_release: [("acquire", 0), ("release", 0)],
    extend: [("acquire", 0), ("renew", 0), ("release", 0)],
    is_busy: [("acquire", 0)],
    wait_and_get_in: [("acquire", 0), ("heartbeat", 0), ("renew", 0), ("release", 0)],
    wait_in_vain: [("acquire", 0), ("release", 0), ("acquire", 1)],
    hand_over_to_another: [("acquire", 0), ("survey", 0), ("release", 0)],
    re_enter: [("acquire", 0), ("acquire", 1), ("release", 0), ("release", 1)],
    take_two: [("acquire", 0), ("release", 0)],
    run_in_order: [
        *(("place", 0), ("place", 1), ("place", 2), ("acquire", 0), ("acquire", 1)),
        *(("release", 0), ("acquire", 2), ("release", 1)),
    ],
}
EVERY_COMMAND = [
    pytest.param(scenario, verb, nth, id=f"{scenario.__name__}-{verb}-{nth}")
    for scenario, commands in COMMANDS.items()
    for verb, nth in commands
]


@pytest.fixture
def both(proxy: Proxy, runs: Callable[..., Runs]) -> tuple[Runs, Runs]:
    """Through the proxy, and past it. The inbox is open, so that every wait goes the same way."""
    near, far = runs(proxy.url), runs()
    near.release(near.held("warm-up"))
    far.release(far.held("warm-up"))
    near.ready()
    far.ready()
    return near, far


@pytest.mark.parametrize("scenario", COMMANDS)
def test_no_command_of_a_scenario_is_left_out_below(
    scenario: Scenario, both: tuple[Runs, Runs], proxy: Proxy
) -> None:
    proxy.seen.clear()
    scenario(*both)
    assert set(proxy.seen) == {verb for verb, _ in COMMANDS[scenario]}


@pytest.mark.parametrize("fault", ["lose_reply", "lose_command"])
@pytest.mark.parametrize(("scenario", "verb", "nth"), EVERY_COMMAND)
def test_any_command_may_be_lost_on_its_way_there_or_back(
    scenario: Scenario,
    verb: str,
    nth: int,
    fault: str,
    both: tuple[Runs, Runs],
    proxy: Proxy,
    client: redis.Redis,
    namespace: str,
) -> None:
    getattr(proxy, fault)(of=verb, after=nth)
    scenario(*both)
    assert proxy.idle, "the fault never came to pass"
    for name in ("a", "b", f"{LINE}a"):
        assert both[1].engine.inspect(name) == ((), 0)
    for key in leftovers(client, namespace):
        assert key.endswith(":meta") or (":d:" in key and 0 < client.pttl(key) <= 60_000)


@pytest.mark.parametrize("lost", ["acquire", "release"])
def test_the_answer_of_an_eval_after_noscript_may_be_lost_too(
    lost: str, both: tuple[Runs, Runs], proxy: Proxy, client: redis.Redis
) -> None:
    near, far = both
    lease = near.lease("a")
    if lost == "release":
        near.engine.acquire(lease)
    client.script_flush()
    proxy.lose_reply(of=lost, after=1)
    if lost == "acquire":
        assert isinstance(near.engine.acquire(lease), Held)
        assert len(far.engine.inspect("a").holds) == 1
    assert near.release(lease)
    assert far.engine.inspect("a").holds == ()


@pytest.mark.parametrize("wait", [0.0, 5.0])
def test_a_claim_that_arrives_after_its_release_acquires_nothing(
    wait: float, proxy: Proxy, runs: Callable[..., Runs], client: redis.Redis, namespace: str
) -> None:
    near, far = runs(proxy.url, socket_timeout=1.0), runs()
    near.release(near.held("warm-up"))
    near.ready()
    late = proxy.hold(of="acquire")
    lease = near.lease("a")
    # Its answer does not come in time, and it is sent again on a new connection.
    assert isinstance(near.engine.acquire(lease, wait), Held)
    assert near.release(lease)
    assert b"ENDED" in late.deliver()
    assert far.engine.inspect("a").holds == ()
    far.release(far.held("a"))


def test_a_claim_that_found_the_lock_busy_acquires_nothing_when_its_copy_comes_late(
    proxy: Proxy, runs: Callable[..., Runs]
) -> None:
    near, far = runs(proxy.url, socket_timeout=1.0), runs()
    near.release(near.held("warm-up"))
    holder = far.held("a")
    late = proxy.hold(of="acquire")
    lease = near.lease("a")
    assert isinstance(near.engine.acquire(lease), Conflict)
    assert near.release(lease)
    far.release(holder)
    assert b"ENDED" in late.deliver()
    assert far.engine.inspect("a").holds == ()


def test_a_claim_that_nobody_answered_acquires_nothing_after_it_was_given_up(
    proxy: Proxy, runs: Callable[..., Runs]
) -> None:
    # The first answer takes longer than all the patience there is, so it is not sent again.
    near, far = runs(proxy.url, socket_timeout=2.5), runs()
    far.release(far.held("warm-up"))  # the server has the scripts
    late = proxy.hold(of="acquire")
    lease = near.lease("a")
    with pytest.raises(LockUnavailable):
        near.engine.acquire(lease)
    assert near.release_at_last(lease)
    assert b"ENDED" in late.deliver()
    assert far.engine.inspect("a").holds == ()


def test_who_asks_again_after_no_answer_gets_nothing_by_a_copy_of_the_first_command(
    proxy: Proxy, runs: Callable[..., Runs]
) -> None:
    near, far = runs(proxy.url, socket_timeout=2.5), runs()
    far.release(far.held("warm-up"))
    late = proxy.hold(of="acquire")
    lease = near.lease("a")
    with pytest.raises(LockUnavailable):
        near.engine.acquire(lease)
    assert isinstance(near.engine.acquire(lease), Held)
    assert near.release(lease)
    assert b"ENDED" in late.deliver()
    assert far.engine.inspect("a").holds == ()


def test_who_asks_again_loses_nothing_by_the_release_that_nobody_answered_at_the_end_of_its_wait(
    proxy: Proxy, runs: Callable[..., Runs]
) -> None:
    near, far = runs(proxy.url, socket_timeout=2.5), runs()
    holder = far.held("a")
    near.ready()
    late = proxy.hold(of="release")
    lease = near.lease("a")
    with pytest.raises(LockUnavailable):
        near.engine.acquire(lease, 0.1)
    far.release(holder)
    assert isinstance(near.engine.acquire(lease), Held)
    assert b"GONE" in late.deliver()
    assert isinstance(far.engine.acquire(far.lease("a")), Conflict)
    assert near.release(lease)


def test_who_asks_again_does_not_take_an_old_grant_for_its_own(
    proxy: Proxy, runs: Callable[..., Runs]
) -> None:
    near, far = runs(proxy.url, socket_timeout=2.5), runs()
    holder = far.held("a")
    near.ready()
    late = proxy.hold(of="acquire")
    lease = near.lease("a", lease=1.0)
    with pytest.raises(LockUnavailable):
        near.engine.acquire(lease, 60.0)
    assert b"WAIT" in late.deliver()
    far.release(holder)
    assert [hold.execution_id for hold in far.engine.inspect("a").holds] == [
        lease.claim.execution_id
    ]
    another = far.held("a", wait=30.0)  # that hold has lapsed
    waiter = near.waiting(lease)
    far.release(another)
    assert waiter.entered().fences > another.fences
    assert near.release(lease)


def test_a_grant_of_a_command_that_was_sent_twice_is_believed_when_a_heartbeat_says_so(
    proxy: Proxy, runs: Callable[..., Runs], redis_url: str, namespace: str
) -> None:
    """It may be of the first one, and have lapsed before the second came."""
    near, far = runs(proxy.url, socket_timeout=1.5), runs()
    near.release(near.held("warm-up"))
    holder = far.held("a")
    near.ready()
    late = proxy.hold(of="acquire")
    lease, got = near.lease("a"), list[object]()
    waits = threading.Thread(target=lambda: got.append(near.engine.acquire(lease, 60.0)))
    waits.start()
    assert b"WAIT" in late.deliver()
    far.release(holder)
    wait_for(lambda: lease._granted_early, what="the notice of the grant")
    desk = Desk(redis_url, namespace)
    desk.lapse(lease.claim.execution_id)
    desk.close()
    another = far.held("a")
    wait_for(lambda: lease.state is not State.ASKED, what="the answer to the second command")
    assert lease.state is State.WAITING
    far.release(another)
    waits.join(30)
    assert isinstance(got[0], Held)
    assert got[0].fences > another.fences
    assert near.release(lease)


def test_who_parks_its_message_again_after_no_answer_keeps_its_place(
    proxy: Proxy, runs: Callable[..., Runs]
) -> None:
    near, far = runs(proxy.url, socket_timeout=2.5), runs()
    holder = far.held("a")
    late = proxy.hold(of="acquire")
    lease, request = near.lease("a"), ParkRequest("text", "home", "task")
    with pytest.raises(LockUnavailable):
        near.engine.park(lease, request)
    assert b"PARKED" in late.deliver()
    assert far.engine.park(far.lease("a"), ParkRequest("other", "home", "task2")) == Parked(1)
    assert isinstance(near.engine.acquire(lease), Conflict)
    assert near.engine.park(lease, request)[:1] == (0,)
    far.release(holder)


def test_a_release_that_arrives_late_takes_nothing_from_the_next_holder(
    proxy: Proxy, runs: Callable[..., Runs]
) -> None:
    near, far = runs(proxy.url, socket_timeout=1.0), runs()
    lease = near.held("a")
    late = proxy.hold(of="release")
    assert near.release(lease)
    again = far.held("a", execution_id=lease.claim.execution_id)
    assert b"GONE" in late.deliver()
    assert [hold.attempt_id for hold in far.engine.inspect("a").holds] == [again.claim.attempt_id]
    far.release(again)


def test_a_claim_that_comes_late_while_its_execution_waits_keeps_the_place_in_line(
    proxy: Proxy, runs: Callable[..., Runs]
) -> None:
    near, far = runs(proxy.url, socket_timeout=1.0), runs()
    near.release(near.held("warm-up"))
    holder = far.held("a")
    near.ready()
    late = proxy.hold(of="acquire")
    lease = near.lease("a")
    waiter = near.waiting(lease)
    assert b"WAIT" in late.deliver()
    assert far.engine.inspect("a").waiting == 1
    far.release(holder)
    assert near.release(waiter.entered())
    assert far.engine.inspect("a") == ((), 0)


def test_the_end_of_an_execution_is_remembered_though_the_answer_was_lost(
    both: tuple[Runs, Runs], proxy: Proxy
) -> None:
    near, far = both
    lease = near.held("a", execution_id="run-1")
    proxy.lose_reply(of="release")
    assert near.engine.release(lease, ended="execution")
    assert far.engine.acquire(far.lease("a", execution_id="run-1")) == Ended()


def test_a_withdrawal_whose_answer_was_lost_has_had_its_message(
    both: tuple[Runs, Runs], proxy: Proxy
) -> None:
    near, far = both
    holder, parked = far.held("a"), near.lease("a")
    assert isinstance(near.engine.park(parked, ParkRequest("text", "home", "task")), Parked)
    proxy.lose_reply(of="withdraw")
    assert near.engine.backend.withdraw(parked.claim.execution_id, 60.0)
    assert not near.engine.backend.withdraw(parked.claim.execution_id, 60.0)
    assert far.release(holder)


def test_a_withdrawal_that_comes_when_its_execution_has_begun_has_had_nothing(
    proxy: Proxy, runs: Callable[..., Runs]
) -> None:
    """Its first copy never came."""
    near, far = runs(proxy.url, socket_timeout=1.5), runs()
    holder, parked = far.held("a"), near.lease("a")
    run = parked.claim.execution_id
    assert isinstance(near.engine.park(parked, ParkRequest("text", "home", "task")), Parked)
    late, had = proxy.hold(of="withdraw"), list[bool]()
    withdraws = threading.Thread(
        target=lambda: had.append(near.engine.backend.withdraw(run, 60.0)), daemon=True
    )
    withdraws.start()
    assert late.arrived.wait(30)
    far.release(holder)
    begun = far.held("a", execution_id=run)
    withdraws.join(30)
    assert had == [False]
    assert far.release(begun)


def test_a_call_that_begins_before_the_second_command_that_replaces_it_was_not_replaced(
    proxy: Proxy, runs: Callable[..., Runs]
) -> None:
    near, far = runs(proxy.url, socket_timeout=1.5), runs()
    near.release(near.held("warm-up"))
    call = marker.Marker("dedup\ttask\ta", marker.DONE)
    assert marker.put(far.engine.backend.acquire, call, "e1", "task-1", 60.0) is None
    there = marker.put(far.engine.backend.acquire, call, "e2", "task-2", 60.0)
    assert there is not None
    late, taken = proxy.hold(of="release"), list[bool]()
    replaces = threading.Thread(
        target=lambda: taken.append(marker.take_away(near.engine, call, there)), daemon=True
    )
    replaces.start()
    assert late.arrived.wait(30)
    begun = marker.lease_of(far.engine, call, "e1", "task-1", 60.0)
    assert isinstance(far.engine.acquire(begun), Held)
    replaces.join(30)
    assert taken == [False]
    assert far.release(begun)


def test_a_forced_release_whose_answer_was_lost_is_not_sent_again(
    both: tuple[Runs, Runs], proxy: Proxy
) -> None:
    """The lock is its next holder's by then."""
    near, far = both
    holder, waiter = far.held("a"), far.lease("a")
    far.waiting(waiter)
    far.engine.backend.force_release("b")  # now the server has the script
    proxy.lose_reply(of="force_release")

    with pytest.raises(
        LockUnavailable, match=r"Cannot release lock .a.: .*not known: look at the lock"
    ):
        near.engine.backend.force_release("a")

    wait_for(lambda: waiter.state is State.HELD)
    wait_for(lambda: holder.state is State.LOST)
    assert [each.execution_id for each in far.engine.inspect("a").holds] == [
        waiter.claim.execution_id
    ]
    assert far.release(waiter)


def test_redis_pys_own_lock_says_no_while_its_token_holds_the_key(
    proxy: Proxy, redis_server: RedisServer, namespace: str
) -> None:
    """What the scenarios above are there for: SET NX, sent again, finds its own first copy."""
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    # As redis-py 8 has it without being asked.
    again = {"retry": Retry(NoBackoff(), 3), "retry_on_error": [redis.ConnectionError]}
    with redis.Redis.from_url(proxy.url, **again) as through:
        through.ping()
        proxy.lose_reply(of="SET")
        lock = through.lock(f"{namespace}:theirs", timeout=5)
        assert lock.acquire(blocking=False, token="mine") is False
        with redis_server.client() as direct:
            assert direct.get(f"{namespace}:theirs") == b"mine"
            direct.delete(f"{namespace}:theirs")


def test_a_marker_is_not_shortened_by_a_command_that_comes_again_late(
    runs: Callable[..., Runs],
) -> None:
    near = runs()
    engine, call = near.engine, marker.Marker("dedup\ttask\ta", marker.START)
    marker.put(engine.backend.acquire, call, "e1", "task-1", 10.0)
    marker.extend(engine, call.name, "e1", 600.0)
    marker.extend(engine, call.name, "e1", 60.0)

    assert engine.inspect(call.name).holds[0].remaining > 500
