"""Who waited has as long a lease, and hears of as much, as who got the lock at once (B2, B3)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from celery_relock.engine.lease import Lease, State
from celery_relock.engine.protocol import Held
from tests.engine.conftest import Runs
from tests.support import wait_for


def waits(runs: Runs, lease: Lease, watcher: Runs) -> Callable[[], Any]:
    """Let a lease wait in a thread of its own. Returns what gives the answer."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(runs.engine.acquire(lease, 20.0)))
    thread.start()
    name = lease.claim.names[-1]
    wait_for(
        lambda: lease.state is State.WAITING and watcher.engine.inspect(name).waiting > 0,
        what="the waiter",
    )

    def answer() -> Any:
        thread.join(20)
        return answers[0]

    return answer


@pytest.mark.parametrize("names", [("a",), ("a", "b", "c")], ids=["one name", "several names"])
def test_who_waited_has_its_full_lease_in_the_grant(
    runs: Callable[..., Runs], names: tuple[str, ...]
) -> None:
    one, two = runs(), runs()
    first = one.held(*names)
    lease = two.lease(*names, lease=40.0)
    answer = waits(two, lease, one)
    one.release(first)
    for name in names:
        [hold] = one.engine.inspect(name).holds
        assert hold.execution_id == lease.claim.execution_id
        assert hold.remaining > 38
    assert isinstance(answer(), Held)
    assert lease.remaining > 30, "this side believes in it, too"
    two.release(lease)


def test_who_waited_and_joins_its_owner_has_its_full_lease(runs: Callable[..., Runs]) -> None:
    one, two, three = runs(), runs(), runs()
    first = one.held("a")
    flow = {"owner": "flow", "by_owner": True, "lease": 40.0}
    left, right = two.lease("a", **flow), three.lease("a", **flow)
    answers = waits(two, left, one), waits(three, right, one)
    one.release(first)
    holds = {hold.execution_id: hold.remaining for hold in one.engine.inspect("a").holds}
    assert set(holds) == {left.claim.execution_id, right.claim.execution_id}
    assert min(holds.values()) > 38
    assert all(isinstance(answer(), Held) for answer in answers)
    two.release(left)
    three.release(right)


@pytest.mark.parametrize("names", [("a",), ("a", "b")], ids=["one name", "several names"])
@pytest.mark.parametrize("waited", [False, True], ids=["at once", "waited"])
def test_a_forced_release_is_heard_at_once_however_the_lock_was_acquired(
    runs: Callable[..., Runs], waited: bool, names: tuple[str, ...]
) -> None:
    one, two = runs(), runs()
    lease = two.lease(*names, lease=60.0)
    if waited:
        first = one.held(*names)
        answer = waits(two, lease, one)
        one.release(first)
        assert isinstance(answer(), Held)
    else:
        assert isinstance(two.engine.acquire(lease), Held)
    # What is held for so long is worth a connection on which its process hears.
    wait_for(lambda: two.engine.inbox.listening.hears, what="the inbox")
    began = time.monotonic()
    one.engine.backend.force_release(names[0])
    wait_for(lambda: lease.lost, what="the news")
    assert time.monotonic() - began < 10  # and not at the next renewal, after 20 s
    two.release(lease)
