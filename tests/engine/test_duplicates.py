"""Two attempts of one execution: the second is a duplicate, neither a repeat nor a re-entry."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from celery_relock.engine import lease as lease_module
from celery_relock.engine.protocol import Conflict, Ended, Held, OtherAttempt, Parked, ParkRequest
from tests.support.companion import running
from tests.support.proxy import Proxy
from tests.support.runs import Runs

HOLD = """
here = engine()
taken = held(here, "a", execution_id="run-1", seconds={lease})
say("held")
input()
here.release(taken, ended="execution")
say("gone")
input()
"""


def test_a_duplicate_is_told_how_long_the_first_attempt_lives_and_who_it_is(
    runs: Callable[..., Runs],
) -> None:
    one, two = runs(), runs()
    first = one.held("a", execution_id="run-1", label="sync[42] host:1", lease=20.0)
    answer = two.engine.acquire(two.lease("a", execution_id="run-1"))
    assert isinstance(answer, OtherAttempt)
    assert 19 < answer.remaining <= 20
    assert answer.label == "sync[42] host:1"
    one.release(first)


def test_a_duplicate_does_not_re_enter_by_its_own_executions_ancestors(
    runs: Callable[..., Runs],
) -> None:
    one, two = runs(), runs()
    first = one.held("a", execution_id="run-1", owner="flow")
    copy = two.lease("a", execution_id="run-1", owner="flow", ancestors=("run-1",), by_owner=True)
    assert isinstance(two.engine.acquire(copy), OtherAttempt)
    two.release(copy)
    assert one.release(first)


def test_a_duplicate_that_waits_is_told_so_when_the_first_attempt_ends_cleanly(
    runs: Callable[..., Runs],
) -> None:
    one, two = runs(), runs()
    first = one.held("a", execution_id="run-1")
    answers: list[object] = []
    copy = two.lease("a", execution_id="run-1", lease=1.0)
    waiter = threading.Thread(target=lambda: answers.append(two.engine.acquire(copy, 30.0)))
    waiter.start()
    assert one.engine.release(first, ended="execution")
    waiter.join(30)
    assert answers == [Ended()]
    assert two.release(copy)


def test_a_duplicate_acquires_after_a_first_attempt_that_shall_run_again(
    runs: Callable[..., Runs],
) -> None:
    one, two = runs(), runs()
    first = one.held("a", execution_id="run-1")
    assert one.engine.release(first)
    second = two.held("a", execution_id="run-1")
    assert second.fences > first.fences
    two.release(second)


def test_a_duplicate_takes_over_when_the_first_attempt_was_killed(
    runs: Callable[..., Runs], redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "WAITER_LEASE", 60.0)  # else it looks again after 10 s
    here = runs()
    with running(HOLD.format(lease=1.0), redis_url, namespace) as first:
        assert first.line() == "held"
        fence = here.engine.inspect("a").holds[0].fence
        copy = here.lease("a", execution_id="run-1")
        assert isinstance(here.engine.acquire(copy), OtherAttempt)
        first.kill()
        started = time.monotonic()
        assert isinstance(here.engine.acquire(copy, 30.0), Held)
        assert time.monotonic() - started < 8
        assert copy.fences[0] > fence
        assert here.release(copy)


def test_a_first_attempt_that_was_taken_over_finds_out_and_frees_nothing(
    runs: Callable[..., Runs], redis_url: str, namespace: str
) -> None:
    here = runs()
    with running(HOLD.format(lease=0.5), redis_url, namespace) as first:
        assert first.line() == "held"
        first.freeze()
        copy = here.lease("a", execution_id="run-1")
        assert isinstance(here.engine.acquire(copy, 30.0), Held)
        first.resume()
        first.tell()
        assert first.line() == "gone"
        held = here.engine.inspect("a").holds
        assert [hold.attempt_id for hold in held] == [copy.claim.attempt_id]
        assert here.release(copy)


def test_a_duplicate_has_no_place_in_the_queue_beside_the_first_attempt(
    runs: Callable[..., Runs],
) -> None:
    one, two = runs(), runs()
    holder = one.held("a")
    first, copy = one.lease("a", execution_id="run-1"), two.lease("a", execution_id="run-1")
    waiter = one.waiting(first)
    two.ready()
    assert isinstance(two.engine.acquire(copy, 0.1), OtherAttempt)
    assert one.engine.inspect("a").waiting == 1
    two.release(copy)
    one.release(holder)
    assert one.release(waiter.entered())


@pytest.mark.parametrize("command", [0, 1])
def test_a_late_copy_of_a_command_of_an_attempt_that_has_parked_acquires_for_nobody(
    runs: Callable[..., Runs], proxy: Proxy, command: int
) -> None:
    process, other = runs(proxy.url, socket_timeout=0.5), runs()
    process.release(process.held("warm"))
    holder, lease = other.held("a"), process.lease("a", execution_id="run-1")
    copy = proxy.hold("acquire", after=command)
    assert isinstance(process.engine.acquire(lease), Conflict)
    assert isinstance(process.engine.park(lease, ParkRequest("message", "home", "task")), Parked)
    assert other.engine.inspect("a").waiting == 1
    other.release(holder)
    back = other.held("a", execution_id="run-1")
    other.release(back)  # by a worker that puts its message back
    copy.deliver()
    state = other.engine.inspect("a")
    assert (state.holds, state.waiting) == ((), 0)
