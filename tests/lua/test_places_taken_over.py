"""Places that another attempt takes over, or asks for again."""

from __future__ import annotations

from celery_relock.engine.protocol import Claim, Held, Parked, Queued
from tests.support.simple import in_a_row, wait

PLAIN = ["r2", "r3", "r4"]


def again(desk, run: str, attempt_id: str = "n2", **more):
    """Another attempt, or another command, of an execution."""
    facts = {"owner": run, "names": ("a",), "limits": (1,), "lease": 30.0, **more}
    return desk.backend.acquire(Claim(run, attempt_id, **facts), 6.0, "p-2")


def test_a_place_that_is_taken_over_stays_where_it_is(desk):
    in_a_row(desk, *PLAIN)
    desk.lapse_place("r3")

    assert isinstance(again(desk, "r3", by_owner=True), Queued)
    assert desk.waiters() == PLAIN
    assert desk.place("r3")["inbox"] == "p-2"


def test_a_place_that_is_asked_for_again_stays_where_it_is(desk):
    in_a_row(desk, *PLAIN)

    assert isinstance(again(desk, "r3", "n", limits=(2,)), Queued)
    assert desk.waiters() == PLAIN


def test_a_copy_of_the_holder_is_parked_before_all(desk):
    in_a_row(desk, *PLAIN)

    assert isinstance(desk.leave("r1", "n2"), Parked)
    assert desk.waiters() == ["r1", *PLAIN]
    for key in ("q:a", "w:a", "m:a"):
        assert desk.client.pttl(desk.keys.prefix(0) + key) == -1
    wait(desk, "r5")
    assert desk.client.pttl(desk.keys.of_lock("q", "a")) == -1


def test_who_parks_in_its_place_is_not_granted_but_resumed(desk):
    inbox = desk.listen("p-1")
    in_a_row(desk, *PLAIN)
    desk.lapse_place("r2")

    assert isinstance(desk.leave("r2", "n2"), Parked)
    desk.release("r1")

    assert desk.out() == ["r2"]
    assert inbox.heard() == []
    assert isinstance(desk.acquire("r2", "n3"), Held)


def test_who_parks_in_its_place_before_a_very_long_queue_is_resumed_too(desk):
    in_a_row(desk, *[f"w{i}" for i in range(300)])
    desk.lapse_place("w0")

    assert isinstance(desk.leave("w0", "n2"), Parked)
    desk.release("r1")

    assert desk.out() == ["w0"]


def test_a_place_is_taken_over_though_one_of_its_lines_is_gone(desk):
    in_a_row(desk, "r2")
    desk.fence("other", names=("b",))
    wait(desk, "r3", names=("a", "b"), limits=(1, 1))
    desk.lapse_place("r3")
    # Heartbeats of r2 keep the one line, nobody those of the other.
    desk.client.delete(desk.keys.of_lock("q", "b"), desk.keys.of_lock("w", "b"))

    assert isinstance(again(desk, "r3", names=("a", "b"), limits=(1, 1)), Queued)
    assert desk.waiters("a") == ["r2", "r3"]
    assert desk.waiters("b") == ["r3"]
