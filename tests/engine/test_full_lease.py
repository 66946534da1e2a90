"""Who waited has as long a lease, and hears of as much, as who got the lock at once (B2, B3)."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from celery_relock.engine.protocol import Held
from tests.support import wait_for
from tests.support.runs import Runs


@pytest.mark.parametrize("names", [("a",), ("a", "b", "c")], ids=["one name", "several names"])
def test_who_waited_has_its_full_lease_in_the_grant(
    runs: Callable[..., Runs], names: tuple[str, ...]
) -> None:
    one, two = runs(), runs()
    first = one.held(*names)
    lease = two.lease(*names, lease=40.0)
    waiter = two.waiting(lease)
    one.release(first)
    for name in names:
        [hold] = one.engine.inspect(name).holds
        assert hold.execution_id == lease.claim.execution_id
        assert hold.remaining > 38
    waiter.entered()
    assert lease.remaining > 30, "this side believes in it, too"
    two.release(lease)


def test_who_waited_and_joins_its_owner_has_its_full_lease(runs: Callable[..., Runs]) -> None:
    one, two, three = runs(), runs(), runs()
    first = one.held("a")
    flow = {"owner": "flow", "by_owner": True, "lease": 40.0}
    left, right = two.lease("a", **flow), three.lease("a", **flow)
    waiters = two.waiting(left), three.waiting(right)
    one.release(first)
    holds = {hold.execution_id: hold.remaining for hold in one.engine.inspect("a").holds}
    assert set(holds) == {left.claim.execution_id, right.claim.execution_id}
    assert min(holds.values()) > 38
    for waiter in waiters:
        waiter.runs.release(waiter.entered())


@pytest.mark.parametrize("names", [("a",), ("a", "b")], ids=["one name", "several names"])
@pytest.mark.parametrize("waited", [False, True], ids=["at once", "waited"])
def test_a_forced_release_is_heard_at_once_however_the_lock_was_acquired(
    runs: Callable[..., Runs], waited: bool, names: tuple[str, ...]
) -> None:
    one, two = runs(), runs()
    lease = two.lease(*names, lease=60.0)
    if waited:
        first = one.held(*names)
        waiter = two.waiting(lease)
        one.release(first)
        waiter.entered()
    else:
        assert isinstance(two.engine.acquire(lease), Held)
    # What is held for so long is worth a connection on which its process hears.
    wait_for(lambda: two.engine.inbox.listening.hears, what="the inbox")
    began = time.monotonic()
    one.engine.backend.force_release(names[0])
    wait_for(lambda: lease.lost, what="the news")
    assert time.monotonic() - began < 10  # and not at the next renewal, after 20 s
    two.release(lease)
