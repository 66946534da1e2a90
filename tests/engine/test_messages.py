"""Sentences about holders, for people."""

from __future__ import annotations

import os
import time

import pytest

from celery_relock.engine.events import describe_conflict, duration, label_of
from celery_relock.engine.protocol import Conflict, Duplicate


def test_a_holder_says_its_work_its_task_and_its_process() -> None:
    label = label_of("shop.pay", "0123456789abcdef")
    assert label.startswith("shop.pay[01234567] ")
    assert label.endswith(f":{os.getpid()}")


@pytest.mark.parametrize(
    "work", ["t", "shop.billing.tasks.very.deep.package.of.tasks.charge_the_card", "支付" * 40, ""]
)
def test_a_holder_fits_into_55_bytes_and_keeps_its_process_id(work: str) -> None:
    label = label_of(work, "0123456789abcdef")
    assert len(label.encode()) <= 55
    assert label.endswith(str(os.getpid()))
    assert "\ufffd" not in label


def test_of_a_long_task_name_the_end_is_kept() -> None:
    assert "charge_the_card[01234567] " in label_of(
        "shop.billing.tasks.very.deep.package.of.tasks.charge_the_card", "0123456789abcdef"
    )


def test_a_conflict_names_lock_holder_workflow_age_lease_and_queue() -> None:
    fence = int((time.time() - 90) * 1e6)
    text = describe_conflict("b", Conflict("a", 12.4, fence, "workflow-1", "shop.pay web:7", 3))
    assert text == (
        "the lock 'a' is held by shop.pay web:7 (workflow workflow-1) for 1m30s, "
        "its lease has 12 s left, 3 wait for it"
    )


def test_a_conflict_with_a_holder_of_no_name_and_no_queue_is_told_as_well() -> None:
    text = describe_conflict("a", Conflict("a", 12.4, int(time.time() * 1e6), "w", "", 0))
    assert "an unnamed holder" in text
    assert "wait for it" not in text


def test_a_lock_that_nobody_has_but_others_were_first() -> None:
    text = describe_conflict("a", Conflict("a", 0, 0, "", "", 2))
    assert text == "the lock 'a' is promised to 2 that wait for it already"


def test_a_duplicate_is_told_as_another_copy_of_the_run() -> None:
    text = describe_conflict("a", Duplicate(8.2, "shop.pay web:7"))
    assert text == (
        "another copy of this execution holds or awaits the lock 'a' (shop.pay web:7), "
        "for 8 s more if it has died"
    )


def test_a_conflict_of_which_nothing_is_known_is_told_as_one() -> None:
    assert describe_conflict("a", None) == "the lock 'a' is held by somebody else"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0.0 s"),
        (0.04, "0.0 s"),
        (12.34, "12.3 s"),
        (59.94, "59.9 s"),
        (59.96, "1m00s"),
        (61.9, "1m01s"),
        (3599.9, "59m59s"),
        (3600, "1h00m"),
        (7500, "2h05m"),
    ],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text
