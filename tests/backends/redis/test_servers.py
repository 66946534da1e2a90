"""The core of it on every kind of server at hand: hold, renew, wait, park, and a restart."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from celery_relock.engine.protocol import Conflict, Held, Parked, ParkRequest
from celery_relock.engine.renewal import keepalive
from tests.support import RedisServer, leftovers, wait_for
from tests.support.missing import binary_of
from tests.support.runs import Outbox, Runs

DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


@pytest.fixture(scope="module", params=["this machine's Redis", "Redis 6.2", "Valkey"])
def server(request: pytest.FixtureRequest, redis_binary: str) -> Iterator[RedisServer]:
    started = RedisServer(*DURABLE, binary=binary_of(request.param, redis_binary))
    yield started
    started.stop()


@pytest.fixture
def start(server: RedisServer, runs: Callable[..., Runs]) -> Callable[[], Runs]:
    """Engines as if each were a process of its own."""
    return lambda: runs(server.url)


def test_a_lock_is_held_by_one_and_renewed_and_released(
    start: Callable[[], Runs], server: RedisServer, namespace: str
) -> None:
    one, two = start(), start()
    holder = one.held("a")
    renewed = holder.renewed
    keepalive.look_now(one.engine.backend)
    wait_for(lambda: holder.renewed > renewed)
    newcomer = two.lease("a")
    assert isinstance(two.engine.acquire(newcomer), Conflict)
    assert one.release(holder)
    assert two.release(two.held("a"))
    assert leftovers(server.client(), namespace) == [f"{namespace}:{{0}}:meta"]


def test_whoever_waits_acquires_by_a_message(start: Callable[[], Runs]) -> None:
    one, two = start(), start()
    holder = one.held("a")
    waiter = two.lease("a")
    thread = two.waiting(waiter)
    assert one.release(holder)
    thread.entered()
    assert waiter.fences > holder.fences
    assert two.release(waiter)


def test_what_is_parked_outlives_a_killed_server_and_is_resumed(
    start: Callable[[], Runs], server: RedisServer
) -> None:
    one, two = start(), start()
    outbox = Outbox()
    one.engine.parking.sender = outbox
    holder = one.held("a", lease=60.0)
    parked = two.lease("a")
    answer = two.engine.park(parked, ParkRequest("text", "h", "task", None, 10))
    assert isinstance(answer, Parked), answer
    server.kill()
    server.restart(keep_data=True)
    assert one.release(holder)
    assert outbox.sent == [parked.claim.execution_id]
    arrived = two.lease("a", execution_id=parked.claim.execution_id)
    assert isinstance(two.engine.acquire(arrived), Held)
    assert arrived.fences > holder.fences
    assert two.release(arrived)
