"""What piles up has bounds that an app can set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from celery_relock.dedup import marker
from celery_relock.engine.protocol import Full, Parked, ParkRequest
from tests.support.proxy import Proxy


def test_an_end_is_remembered_as_long_as_the_app_says(
    runs: Callable[..., Any], client: redis.Redis, namespace: str
) -> None:
    process = runs()
    process.engine.configure(remember=100.0, most_parked=(1, 1))
    lease = process.held("a")
    assert process.engine.release(lease, ended="execution")
    left = client.pttl(f"{namespace}:{{0}}:d:{lease.claim.execution_id}")
    assert 90_000 < left <= 100_000


@pytest.mark.parametrize("end", ["drop", "take_away"])
def test_a_call_without_its_dedup_marker_is_remembered_as_long_as_the_app_says(
    end: str, runs: Callable[..., Any], client: redis.Redis, namespace: str
) -> None:
    engine = runs().engine
    engine.configure(remember=10_000.0, most_parked=(1, 1))
    made = marker.Marker("dedup\tt\ta", marker.DONE)
    assert marker.put(engine.backend.acquire, made, "call", "task", 60.0) is None
    if end == "drop":
        assert marker.drop(engine, made.name, "call", ended=True)
    else:
        found = marker.look(engine, made.name)
        assert found is not None
        assert marker.take_away(engine, made, found)
    left = client.pttl(f"{namespace}:{{0}}:d:{marker.hold_id('call')}")
    assert 9_000_000 < left <= 10_000_000


def test_of_two_apps_with_one_engine_the_most_counts(runs: Callable[..., Any]) -> None:
    engine = runs().engine
    engine.configure(60.0, (5, 10))
    assert (engine.remember, engine.most_parked) == (60.0, (5, 10))
    engine.configure(30.0, (7, 9))
    assert (engine.remember, engine.parking.remember, engine.most_parked) == (60.0, 60.0, (7, 10))


def test_an_app_has_a_bound_for_all_that_it_parks(runs: Callable[..., Any]) -> None:
    process = runs()
    process.engine.configure(60.0, (1, 1000))
    held = [process.held("a"), process.held("b")]
    request = ParkRequest("message", "home", "task")
    assert isinstance(process.engine.park(process.lease("a"), request), Parked)
    assert process.engine.park(process.lease("b"), request) == Full("", 1, len("message"))
    for lease in held:
        process.release(lease)


def test_a_late_copy_of_what_was_told_that_there_is_no_room_parks_for_nobody(
    runs: Callable[..., Any], proxy: Proxy
) -> None:
    process, other = runs(proxy.url, socket_timeout=0.5), runs()
    process.release(process.held("warm"))
    holder, first, second = other.held("a"), other.lease("a"), process.lease("a")
    request = ParkRequest("message", "home", "task", most=1)
    assert isinstance(other.engine.park(first, request), Parked)
    copy = proxy.hold("acquire")
    answer = process.engine.park(second, request)
    assert isinstance(answer, Full)
    assert answer.repeated
    process.release(second)
    other.engine.parking.withdraw(first.claim.execution_id)
    copy.deliver()
    assert not other.engine.inspect("a").waiting
    other.release(holder)
