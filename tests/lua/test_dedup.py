"""The marker of a queued call, as the scripts keep it: a hold that nobody renews, for one run."""

from __future__ import annotations

import pytest

from celery_relock.dedup import marker
from celery_relock.engine import ids
from celery_relock.engine.engine import Engine
from celery_relock.engine.protocol import KEPT, Ended, Held, OtherAttempt, Release, Successor
from tests.support import leftovers

NAME = marker.name_for("app.report", ["report:42"])
MARKER = marker.Marker(NAME, marker.DONE)


@pytest.fixture
def engine(desk) -> Engine:
    return Engine(desk.backend)


def _put(engine, run, keep=60.0):
    return marker.put(engine.backend.acquire, MARKER, run, f"task-{run}", keep)


def _arrive(engine, run, attempt_id=None):
    attempt_id = attempt_id or ids.new_attempt_id()
    return engine.backend.acquire(marker._claim(MARKER, run, f"task-{run}", 30.0, attempt_id))


def _leave(engine, run, attempt_id, **options):
    return engine.backend.release(Release([NAME], marker.hold_id(run), attempt_id, **options)).had


def _remaining(engine):
    return [round(hold.remaining) for hold in engine.inspect(NAME).holds]


def test_the_first_call_gets_it_and_the_next_hears_whose_it_is(engine):
    assert _put(engine, "r1") is None
    found = _put(engine, "r2")
    assert (found.task_id, found.execution_id) == ("task-r1", "r1")
    assert 59 < found.remaining <= 60
    assert marker.look(engine, NAME).task_id == "task-r1"


def test_a_command_that_is_sent_twice_is_no_duplicate_of_itself(engine):
    assert _put(engine, "r1") is _put(engine, "r1") is None
    assert len(engine.inspect(NAME).holds) == 1


def test_a_copy_of_the_senders_command_does_not_shorten_what_the_sender_has_extended(engine):
    _put(engine, "r1")
    marker.extend(engine, NAME, "r1", 86_400.0)
    assert _put(engine, "r1") is None
    assert _remaining(engine) == [86_400]


def test_an_execution_takes_over_its_own_which_lives_as_long_as_its_lease(engine):
    _put(engine, "r1")
    assert isinstance(_arrive(engine, "r1"), Held)
    assert _remaining(engine) == [30]
    assert isinstance(_arrive(engine, "r1"), OtherAttempt)
    assert _put(engine, "r2").execution_id == "r1"


def test_what_has_begun_is_not_dropped_by_a_sender(engine):
    _put(engine, "r1")
    _arrive(engine, "r1", "n1")
    assert marker.drop(engine, NAME, "r1") is False
    assert _leave(engine, "r1", "n1")
    assert _put(engine, "r2") is None


def test_an_execution_that_comes_again_leaves_it_to_itself(engine, desk, namespace):
    _put(engine, "r1")
    _arrive(engine, "r1", "n1")
    assert _leave(engine, "r1", "n1", successor=Successor(marker.hold_id("r1"), 600.0))
    assert _remaining(engine) == [600]
    assert _put(engine, "r2").task_id == "task-r1"
    assert isinstance(_arrive(engine, "r1", "n2"), Held)
    assert _leave(engine, "r1", "n2")
    assert not [key for key in leftovers(desk.client, namespace) if "report" in key]


def test_an_execution_whose_first_attempt_was_killed_leaves_it_to_itself_all_the_same(engine):
    _put(engine, "r1")
    _arrive(engine, "r1", "n1")
    _leave(engine, "r1", "n1", ended="killed", remember=60.0)
    _arrive(engine, "r1", "n2")
    _leave(engine, "r1", "n2", successor=Successor(marker.hold_id("r1"), 600.0))
    assert _remaining(engine) == [600]


def test_an_execution_that_has_ended_gets_and_is_left_nothing(engine):
    _put(engine, "r1")
    _arrive(engine, "r1", "n1")
    # Another attempt has begun meanwhile, and the marker was to go with that.
    _leave(engine, "r1", KEPT, ended="execution", remember=60.0)
    _leave(engine, "r1", "n1", successor=Successor(marker.hold_id("r1"), 600.0))
    assert _remaining(engine) == []
    assert isinstance(_arrive(engine, "r1"), Ended)


def _replace(engine, run, attempt_id=KEPT):
    return _leave(engine, run, attempt_id, ended="replaced", remember=60.0)


def test_a_call_that_was_replaced_hears_so_whenever_it_arrives(engine):
    _put(engine, "r1")
    assert _replace(engine, "r1")
    assert _put(engine, "r2") is None
    assert _arrive(engine, "r1") == _arrive(engine, "r1") == Ended(replaced=True)
    assert _leave(engine, "r2", KEPT)
    assert _arrive(engine, "r1") == Ended(replaced=True)


def test_a_call_that_was_replaced_is_left_nothing(engine):
    _put(engine, "r2")
    assert _replace(engine, "r2")
    _put(engine, "r1")
    _arrive(engine, "r1", "n1")
    assert _leave(engine, "r1", "n1", successor=Successor(marker.hold_id("r2"), 600.0))
    assert _remaining(engine) == []


def test_a_call_that_has_begun_meanwhile_was_not_replaced(engine):
    _put(engine, "r1")
    _arrive(engine, "r1", "n1")
    assert not _replace(engine, "r1")
    assert isinstance(_arrive(engine, "r1", "n1"), Held)
    _leave(engine, "r1", "n1", ended="execution", remember=60.0)
    assert not _replace(engine, "r1", "n1")
    assert _arrive(engine, "r1") == Ended()


def test_a_retry_gets_it_from_the_execution_before(engine):
    _put(engine, "r1")
    _arrive(engine, "r1", "n1")
    assert _leave(engine, "r1", "n1", successor=Successor(marker.hold_id("r2"), 600.0))
    assert _put(engine, "r3").task_id == "task-r1"
    assert isinstance(_arrive(engine, "r2"), Held)
    assert _put(engine, "r3").execution_id == "r2"
