"""What goes on failing is told when it begins, now and then, and when it is over."""

from __future__ import annotations

import logging

import pytest

from celery_relock.engine import outage
from celery_relock.engine.outage import Outage
from celery_relock.errors import LockConfigError, LockUnavailable


@pytest.fixture(autouse=True)
def all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "celery_relock")


def fail(of: Outage, error: BaseException) -> None:
    with of:
        raise error


def levels(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.levelname for record in caplog.records]
    caplog.clear()
    return found


def test_each_outage_is_told_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    tried = Outage("lighting the cellar")
    with tried:
        pass
    for _ in range(2):
        for _ in range(3):
            fail(tried, LockUnavailable("no lamp"))
        assert caplog.messages[0].startswith("lighting the cellar failed, trying again: no lamp (")
        assert levels(caplog) == ["WARNING", "DEBUG", "DEBUG"]
        for _ in range(2):
            with tried:
                pass
        assert caplog.messages == ["lighting the cellar works again after 0.0 s"]
        assert levels(caplog) == ["INFO"]


def test_one_that_goes_on_is_told_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = Outage("lighting the cellar")
    fail(tried, LockUnavailable("no lamp"))
    monkeypatch.setattr(outage, "_EVERY", 0.0)
    fail(tried, LockUnavailable("no lamp"))
    assert levels(caplog) == ["WARNING", "WARNING"]


def test_what_fails_after_a_time_without_a_try_is_another_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = Outage("lighting the cellar")
    fail(tried, LockUnavailable("no lamp"))
    monkeypatch.setattr(outage, "_APART", -1.0)
    fail(tried, LockUnavailable("no lamp"))
    assert levels(caplog) == ["WARNING", "WARNING"]


def test_only_what_nobody_has_thought_of_comes_with_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for error in (LockUnavailable("no lamp"), ZeroDivisionError("a lamp of no size")):
        fail(Outage("lighting the cellar"), error)
    assert [record.exc_info is None for record in caplog.records] == [True, False]


def test_what_is_set_up_wrong_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    fail(Outage("lighting the cellar"), LockConfigError("the lamp is bolted to the ceiling"))
    assert levels(caplog) == ["ERROR"]


def test_what_ends_a_thread_gets_out(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SystemExit):
        fail(Outage("lighting the cellar"), SystemExit())
    assert levels(caplog) == []
