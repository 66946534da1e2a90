"""Sentences about holders, for people."""

from __future__ import annotations

import os
import re
import socket
import time

import pytest

from celery_relock.engine import ids
from celery_relock.engine.events import describe_conflict, duration, label_of
from celery_relock.engine.protocol import LINE, Conflict, OtherAttempt

TASK_ID = "0f8fad5b-d9cb-469f-a165-70867728950e"


def test_a_holder_says_its_work_its_whole_task_id_and_its_process() -> None:
    here = f"{socket.gethostname()}:{os.getpid()}"
    assert label_of("shop.pay", TASK_ID) == f"shop.pay[{TASK_ID}] {here}"
    assert label_of("Lock") == f"Lock {here}"


def test_of_a_long_task_name_the_middle_is_left_out_and_of_an_id_nothing() -> None:
    label = label_of("shop." + "x" * 200 + ".charge_the_card", "nightly-" + "7" * 200)
    assert re.match(r"shop\.x+…x+\.charge_the_card\[nightly-7{200}\] ", label)
    assert len(label.partition("[")[0]) == 101


def test_a_conflict_names_lock_holder_workflow_age_lease_and_queue() -> None:
    fence = int((time.time() - 90) * 1e6)
    owner = ids.short(TASK_ID)
    text = describe_conflict("b", Conflict("a", 12.4, fence, owner, "shop.pay web:7", 3))
    assert text == (
        f"the lock 'a' is held by shop.pay web:7 (workflow {TASK_ID}) for 1m30s, "
        "its lease has 12 s left, 3 waiting for it"
    )


def test_a_conflict_with_a_hold_that_is_kept_says_so_and_that_no_process_works() -> None:
    fence = int((time.time() - 90) * 1e6)
    answer = Conflict("a", 241, fence, "w", "shop.pay web:7", 3, kept=True)
    assert describe_conflict("a", answer) == (
        "the lock 'a' is kept for the next step, or the retry, of shop.pay web:7 (workflow w), "
        "which no process runs now, for 4m01s more, 3 waiting for it"
    )


def test_a_conflict_with_a_holder_of_no_name_and_no_queue_is_told_as_well() -> None:
    text = describe_conflict("a", Conflict("a", 12.4, int(time.time() * 1e6), "w", "", 0))
    assert "an unnamed holder" in text
    assert "waiting for it" not in text


def test_a_lock_that_nobody_has_but_others_were_first() -> None:
    text = describe_conflict("a", Conflict("a", 0, 0, "", "", 2))
    assert text == "the lock 'a' is free, but 2 waiters are ahead"
    text = describe_conflict("a", Conflict("a", 0, 0, "", "", 1))
    assert text == "the lock 'a' is free, but 1 waiter is ahead"


def test_who_shares_a_lock_is_not_said_to_have_shared_it_all_the_time() -> None:
    begun = time.time() - 90
    answer = Conflict("a", 12.4, int(begun * 1e6), "w", "shop.report web:7", 3, shared=True)
    assert "is shared by shop.report web:7 (workflow w) without a break for 1m30s, its" in (
        describe_conflict("a", answer)
    )


def test_a_claim_that_could_share_a_lock_is_told_that_an_exclusive_one_waits_ahead() -> None:
    fence = int(time.time() * 1e6)
    answer = Conflict("a", 12.4, fence, "w", "x", 3, shared=True, outranked=True)
    assert ", and an exclusive execution waits ahead" in describe_conflict("a", answer)


def test_a_duplicate_is_told_as_another_copy_of_the_execution() -> None:
    text = describe_conflict("a", OtherAttempt(8.2, "shop.pay web:7"))
    assert text == (
        "another copy of this execution holds or awaits the lock 'a' (shop.pay web:7), "
        "for 8 s more if it has died"
    )


def test_a_duplicate_in_an_order_is_told_by_the_name_that_its_user_wrote() -> None:
    text = describe_conflict(f"{LINE}a", OtherAttempt(8.2, "shop.pay web:7"))
    assert text == (
        "another copy of this execution has its turn or awaits it in the order of 'a' "
        "(shop.pay web:7), for 8 s more if it has died"
    )


def test_a_conflict_of_which_nothing_is_known_is_told_as_one() -> None:
    assert describe_conflict("a", None) == "the lock 'a' is held by another execution"


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
