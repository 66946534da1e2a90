"""What sends parked messages on keeps its own failures to itself, and nothing else."""

from __future__ import annotations

import logging

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from celery_relock import signals  # noqa: F401 - tells the core of Celery's time limit
from celery_relock.engine.parking import Parking, Sender
from celery_relock.engine.protocol import SHARED, Message, Parked, ParkRequest
from celery_relock.errors import LockLost

MESSAGES = [Message("one", "account:7", ""), Message("two", "account:8", "")]


class _Here(Sender):
    """Keeps what it was given."""

    homes = "here"

    def __init__(self):
        self.given = []
        self.answers = True

    def reachable(self):
        return self.homes if self.answers else ""

    def send(self, message):
        self.given.append(message.text)


class _Sender(Sender):
    """Fails with an error and keeps what it was given."""

    homes = "here"

    def __init__(self, error):
        self.error = error
        self.given = []

    def send(self, message):
        self.given.append(message)
        raise self.error


def _publish(error):
    parking = Parking(None)
    parking.sender = _Sender(error)
    parking.publish(MESSAGES)
    return parking.sender


def test_a_message_that_cannot_be_resumed_is_told_and_the_others_are_resumed(caplog):
    with caplog.at_level(logging.WARNING):
        assert _publish(OSError("no broker")).given == MESSAGES
    assert [record.args[0] for record in caplog.records] == ["account:7", "account:8"]


def test_a_broker_that_does_not_answer_is_waited_for_once(caplog):
    with caplog.at_level(logging.WARNING):
        assert _publish(TimeoutError("no answer")).given == MESSAGES[:1]
    assert [record.args[0] for record in caplog.records] == ["account:7"]


@pytest.mark.parametrize("error", [SoftTimeLimitExceeded(), LockLost("lost"), SystemExit()])
def test_a_time_limit_that_strikes_meanwhile_is_not_taken_for_that(error):
    with pytest.raises(type(error)):
        _publish(error)


def test_who_withdraws_a_message_resumes_those_behind_it_though_no_worker_runs(runs):
    first, other = runs(), runs()
    first.engine.parking.sender = here = _Here()
    held = other.held("b")
    for execution_id, names in (("head", ("a", "b")), ("behind", ("a",))):
        asked = first.lease(*names, execution_id=execution_id)
        request = ParkRequest(execution_id, "here", execution_id)
        assert isinstance(first.engine.park(asked, request), Parked)

    assert first.engine.parking.withdraw("head")

    assert here.given == ["behind"]
    other.release(held)


def test_who_shares_its_lock_resumes_who_may_share_it_though_no_worker_runs(runs):
    first = runs()
    first.engine.parking.sender = here = _Here()
    held = first.held("a")
    asked = first.lease("a", execution_id="shares", limits=(SHARED,))
    assert isinstance(first.engine.park(asked, ParkRequest("its text", "here", "task")), Parked)

    assert first.engine.downgrade(held)

    assert here.given == ["its text"]
    first.release(held)


def test_nothing_is_handed_out_for_a_broker_that_does_not_answer_until_it_does(runs):
    first, other = runs(), runs()
    first.engine.parking.sender = here = _Here()
    held = other.held("a")
    asked = first.lease("a", execution_id="waits")
    assert isinstance(first.engine.park(asked, ParkRequest("its text", "here", "task")), Parked)
    other.release(held)

    here.answers = False
    first.engine.parking.resume()
    assert here.given == []

    here.answers = True
    first.engine.parking.resume()
    assert here.given == ["its text"]
