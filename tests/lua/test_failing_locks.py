"""What a call cannot do for one of several locks keeps none of the others from it, and is told."""

from __future__ import annotations

import json
import logging

import pytest

from celery_relock.engine.protocol import Held, Queued, Release, Renewal, Successor
from celery_relock.errors import LockConfigError
from tests.support import wait_for


def garble(desk, run, name="a", **amiss):
    """What no version writes is in a place, and the scripts take the place for one of theirs."""
    place = desk.place(run, name) | amiss
    desk.client.hset(desk.keys.of_lock("w", name), run, json.dumps(place))


@pytest.fixture
def told(caplog):
    """Waits until the log says what has failed, and for which key or execution."""
    caplog.set_level(logging.DEBUG, "celery_relock")

    def hears(what):
        said = "serving other executions failed, trying again: "
        wait_for(lambda: said in caplog.text and f"({what})" in caplog.text, what="the warning")

    return hears


def test_a_release_lets_others_in_at_one_lock_though_it_cannot_at_another(desk, told):
    desk.fence("r1", names=("a", "b"))
    desk.park("garbled")
    desk.park("r2", names=("b",))
    garble(desk, "garbled", limits=None)

    assert desk.release("r1", names=("a", "b"))

    assert desk.out() == ["r2"]
    told(desk.keys.lock("a"))


def test_a_hold_that_cannot_be_left_to_its_retry_is_told(desk, told):
    desk.fence("r1")
    desk.client.rpush(desk.keys.tombstone("retry"), "somebody's")
    to = Successor("retry", 9.0)

    assert desk.backend.release(Release(("a",), "r1", "n", successor=to)).had

    told(desk.keys.lock("a"))


def test_a_release_that_does_nothing_at_all_is_an_error(desk):
    desk.client.set(desk.keys.lock("a"), "somebody's")

    with pytest.raises(LockConfigError, match="a key is in use for something else"):
        desk.release("r1", names=("a", "b"))


def test_a_look_at_what_is_parked_tells_what_it_put_off_and_goes_on(desk, told):
    for name in ("a", "b"):
        desk.fence(f"holds-{name}", names=(name,))
        desk.park(f"parked-{name}", names=(name,))
    garble(desk, "parked-a", limits=None)
    desk.release("holds-b", names=("b",), home="")
    desk.all_due()

    assert desk.resume() == ["parked-b"]

    told("a")
    assert 55_000 < desk.client.zscore(desk.keys.due(), "l a") - desk.now_ms() <= 60_000


def test_a_waiter_that_cannot_have_its_turn_keeps_its_place_and_so_do_the_others(desk, told):
    desk.fence("holds-b", names=("b",))
    desk.queue("waits-b", names=("b",))
    desk.fence("holds-a")
    desk.queue("garbled", wait=60.0)
    desk.queue("waits-a")
    garble(desk, "garbled", limits=None)
    desk.lapse("holds-a")

    beats = [Renewal(name, f"waits-{name}", "n", 30.0, 6.0) for name in "ab"]
    answers = desk.backend.heartbeat(beats)

    assert [type(answer) for answer in answers] == [Queued, Queued]
    told(desk.keys.lock("a"))
    desk.client.hdel(desk.keys.of_lock("w", "a"), "garbled")
    assert isinstance(desk.beat("waits-a"), Held)


def test_a_place_that_cannot_be_kept_is_not_called_lost(desk, told):
    desk.fence("r1")
    desk.queue("r2")
    garble(desk, "r2", life="x", expiry="9e15")

    assert isinstance(desk.beat("r2"), Queued)
    told(desk.keys.lock("a"))


def test_a_message_that_cannot_be_put_off_keeps_no_other_from_it(desk, told):
    for name in ("a", "b"):
        desk.fence(f"holds-{name}", names=(name,))
        desk.park(f"parked-{name}", names=(name,))
        desk.release(f"holds-{name}", names=(name,))
    garble(desk, "parked-a", back="x")

    desk.backend.arrived(["parked-a", "parked-b"], 60.0)

    assert desk.place("parked-b", "b")["back"] - desk.now_ms() > 55_000
    told("parked-a")
