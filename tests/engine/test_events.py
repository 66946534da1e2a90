"""What is told about locks, and to whom."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator

import pytest

from celery_relock.engine import events
from celery_relock.engine.events import LockEvent, Work
from celery_relock.errors import LockLost
from tests.support.listening import subscribe

LOST = LockEvent("lost", ("a", "b"), "run", "workflow", 17, "it was taken", 12.5)


@pytest.fixture(autouse=True)
def _nobody_else_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_subscriptions", [])


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Without what the engines of earlier tests tell of a Redis that is gone."""
    from_here = caplog.filtering(lambda record: record.module == events.__name__.split(".")[-1])
    with caplog.at_level(logging.DEBUG, "celery_relock"), from_here:
        yield caplog


def test_a_loss_is_a_warning_that_names_lock_owner_fence_and_last_renewal(
    log: pytest.LogCaptureFixture,
) -> None:
    events.tell(LOST)
    [record] = log.records
    at = time.strftime("%H:%M:%S", time.localtime(time.time() - 12.5))
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"lock 'a', 'b' lost: owner workflow, fence 17, last renewal at {at} (12.5 s ago); "
        "it was taken"
    )
    assert record.lock_event == "lost"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "level"),
    [("acquired", logging.DEBUG), ("released", logging.DEBUG), ("conflict", logging.INFO)],
)
def test_what_happens_to_every_lock_is_told_quietly(
    kind: str, level: int, log: pytest.LogCaptureFixture
) -> None:
    events.tell(LockEvent(kind, ("a",), "run", "workflow"))
    [record] = log.records
    assert record.levelno == level
    assert re.fullmatch(f"lock 'a' {kind}: owner workflow", record.getMessage())


def test_listeners_hear_in_their_order() -> None:
    heard: list[str] = []
    end_first = subscribe(lambda event: heard.append(f"first {event.kind}"))
    end_second = subscribe(lambda event: heard.append(f"second {event.kind}"))
    events.tell(LOST)
    end_first()
    events.tell(LOST)
    end_second()
    events.tell(LOST)
    assert heard == ["first lost", "second lost", "second lost"]


def test_a_listener_that_fails_is_logged_and_takes_nothing_from_the_others(
    log: pytest.LogCaptureFixture,
) -> None:
    def fail(event: LockEvent) -> None:
        raise RuntimeError("boom")

    heard: list[LockEvent] = []
    ends = [subscribe(fail), subscribe(heard.append)]
    events.tell(LOST)
    for end in ends:
        end()
    assert heard == [LOST]
    assert any("a listener for lock events failed" in r.getMessage() for r in log.records)


def test_nothing_is_made_of_an_event_that_nobody_would_hear(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "celery_relock"):
        assert not events.wanted("acquired")
        assert events.wanted("lost")
        end = subscribe(lambda event: None)
        assert events.wanted("acquired")
        end()
        assert not events.wanted("acquired")


def test_a_log_record_has_every_fact_as_a_plain_value_of_its_own(
    log: pytest.LogCaptureFixture,
) -> None:
    work = Work(None, "app.charge", "1234-5678", "worker@host")
    events.tell(LockEvent("lost", ("a", "b"), "run", "workflow", 17, "it was taken", 12.5, work))
    [record] = log.records
    told = {name: value for name, value in vars(record).items() if name[:5] in ("lock_", "task_")}
    assert told == {
        "lock_event": "lost",
        "lock_names": ["a", "b"],
        "lock_execution": "run",
        "lock_owner": "workflow",
        "lock_fence": 17,
        "lock_reason": "it was taken",
        "lock_since": 12.5,
        "lock_waited": 0.0,
        "lock_held": 0.0,
        "lock_reentered": False,
        "lock_of_workflow": False,
        "lock_policy": "",
        "task_id": "1234-5678",
        "task_name": "app.charge",
    }
    assert json.loads(json.dumps(told)) == told
    assert "task app.charge[1234-5678]" in record.getMessage()


@pytest.mark.parametrize("kind", ["lost", "reclaimed"])
def test_what_should_not_happen_is_a_warning(kind: str, log: pytest.LogCaptureFixture) -> None:
    events.tell(LockEvent(kind, ("a",), "run", "workflow"))
    assert [record.levelno for record in log.records] == [logging.WARNING]


def test_a_listener_hears_the_kinds_that_it_wants_and_others_are_not_made_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[str] = []
    with caplog.at_level(logging.ERROR, "celery_relock"):
        end = subscribe(lambda event: heard.append(event.kind), {"lost"})
        assert events.wanted("lost")
        assert not events.wanted("acquired")
        events.tell(LockEvent("acquired", ("a",), "run", "workflow"))
        events.tell(LOST)
        end()
    assert heard == ["lost"]


def test_a_loss_that_interrupts_a_listener_goes_on_to_the_work_that_it_is_for() -> None:
    def interrupted(event: LockEvent) -> None:
        raise LockLost("the lock around this one was lost")

    end = subscribe(interrupted)
    try:
        with pytest.raises(LockLost):
            events.tell(LOST)
    finally:
        end()
