"""A server that takes no more memory, or no writes: who holds or waits goes on (B9)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from celery_relock.engine.protocol import (
    LINE,
    SHARED,
    Downgraded,
    Ended,
    Held,
    Queued,
    Release,
    Renewal,
    Successor,
)
from celery_relock.errors import LockUnavailable


@pytest.fixture
def full(desk) -> Iterator[None]:
    """Lets the server be out of memory from the call on, until the test ends."""
    yield lambda: desk.client.config_set("maxmemory", "1")
    desk.client.config_set("maxmemory", "0")


def test_who_releases_frees_its_hold_and_the_next_one_gets_it(desk, full):
    inbox = desk.listen("p")
    desk.fence("r1")
    desk.queue("r2", inbox="p")
    desk.queue("r3", inbox="p")
    full()

    assert desk.release("r1", ended="execution")
    assert [message.split(" ")[1] for message in inbox.heard()] == ["r2"]
    assert desk.release("r2", ended="attempt")
    assert desk.holders() == ["r3"]
    assert desk.release("r3")
    assert desk.holders() == []


def test_the_end_of_who_has_lost_its_hold_is_remembered(desk, full):
    desk.fence("r1")
    desk.backend.force_release("a", "r1")
    full()

    assert not desk.release("r1", ended="execution")
    desk.client.config_set("maxmemory", "0")
    assert isinstance(desk.acquire("r1", "n2"), Ended)


def test_holds_are_renewed_and_places_kept(desk, full):
    desk.fence("r1", lease=1.5)
    desk.queue("r2", wait=1.5)
    full()

    for _ in range(4):
        desk.wait_ms(500)
        assert desk.backend.renew([Renewal("a", "r1", "n", 1.5, longer=True)]) == [True]
        assert isinstance(desk.beat("r2", wait=1.5), Queued)
    assert desk.backend.force_release("a", "r1")
    assert isinstance(desk.beat("r2"), Held)


def test_a_hold_is_left_to_its_successor_and_a_message_withdrawn(desk, full):
    fence = desk.fence("r1")
    desk.park("r2")
    full()

    desk.backend.release(Release(("a",), "r1", "n", successor=Successor("r3", 30.0)))
    assert desk.backend.inspect("a").holds[0].fence == fence
    assert desk.withdraw("r2")
    assert desk.waiters() == []


def test_parked_executions_are_resumed_run_and_come_back_too_early(desk, full):
    desk.fence("r1")
    for run in ("r2", "r3"):
        desk.park(run)
    desk.lapse("r1")
    desk.all_due()
    full()

    assert desk.resume() == ["r2"]
    desk.backend.arrived(["r2"], 60.0)
    assert desk.place("r2")["back"] > desk.now_ms() + 50_000, "its worker has no slot for it"
    desk.fence("r2", "n2")
    desk.park("r3", "n2")
    assert desk.release("r2", "n2", ended="execution")
    assert desk.out() == ["r3"]


def test_a_successor_gets_the_hold_that_is_kept_for_it(desk, full):
    fence = desk.fence("r1")
    desk.backend.release(Release(("a",), "r1", "n", successor=Successor("r1", 30.0)))
    full()

    assert desk.fence("r1", "n2") == fence
    assert desk.fence("r1", "n2") == fence, "its command is repeated"


def test_an_exclusive_hold_is_shared(desk, full):
    desk.fence("r1")
    full()

    assert desk.backend.downgrade(("a",), "r1", "n") == Downgraded()
    assert desk.backend.inspect("a").holds[0].shared


def test_newcomers_are_told_that_the_server_takes_nothing(desk, full):
    desk.fence("r1")
    full()

    for name in ("a", "b"):
        with pytest.raises(LockUnavailable):
            desk.acquire("r2", names=(name,), wait=6.0)
    desk.client.config_set("maxmemory", "0")
    assert isinstance(desk.acquire("r2", names=("b",)), Held)


@pytest.mark.parametrize(("name", "limit"), [("a", SHARED), (f"{LINE}a", 1)])
def test_where_nothing_may_be_written_nobody_is_told_of_a_grant(desk, name, limit):
    """A newcomer's command would let in those that could not be reached when their turn came."""
    of: dict[str, Any] = {"names": (name,), "limit": limit}
    desk.fence("r1", **of)
    desk.queue("between", names=(name,))
    desk.queue("r2", **of, inbox="p")
    for run in ("between", *(["r1"] if limit else [])):
        desk.release(run, names=(name,))
    inbox = desk.listen("p")
    desk.client.config_set("min-replicas-to-write", "1")
    try:
        with pytest.raises(LockUnavailable):
            desk.acquire("r3", **of)
    finally:
        desk.client.config_set("min-replicas-to-write", "0")

    assert inbox.heard() == []
    desk.acquire("r3", **of)
    assert [words.split(" ")[:2] for words in inbox.heard()] == [["granted", "r2"]]


def test_where_nothing_may_be_written_a_release_says_so_and_can_be_repeated(desk):
    desk.fence("r1")
    desk.queue("r2")
    desk.client.config_set("min-replicas-to-write", "1")
    try:
        with pytest.raises(LockUnavailable):
            desk.release("r1")
        with pytest.raises(LockUnavailable):
            desk.renew("r1")
    finally:
        desk.client.config_set("min-replicas-to-write", "0")
    assert desk.release("r1")
    assert isinstance(desk.beat("r2"), Held)
