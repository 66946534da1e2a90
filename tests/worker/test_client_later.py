"""A function in relock_url cannot make its client when the worker starts: an outage like any other,
which is over when it can."""

from __future__ import annotations

import signal

import pytest

from celery_relock.errors import LockUnavailable
from tests.support.apps import LOOK_EVERY
from tests.support.parked import wait_until_parked


def test_a_worker_that_starts_before_its_client_can_be_made_does_afterwards_what_each_does(
    new_worker, account, tmp_path
):
    gate = tmp_path / "up"
    running = new_worker(
        "tests.worker.apps.client_later", env={LOOK_EVERY: "60", "RELOCK_TEST_GATE": str(gate)}
    )
    tasks = running.module
    with pytest.raises(LockUnavailable, match=r"locks\(\) failed .*the vault is not up yet"):
        tasks.raises.delay(account).get(timeout=20)
    assert tasks.runs_all_the_same.delay(account).get(timeout=20) is False, "without its lock"
    back = [
        running.module.app.send_task(tasks.in_order.name, (f"{account} in order",)),
        tasks.comes_back.delay(account),
    ]
    for each in back:
        running.wait_for_log(rf"{each.id}\] retry: .*again in")

    gate.touch()

    # A process that could not make it just now takes the outage for going on for one second more:
    # what is sent to it meanwhile comes back.
    for each in back:
        assert each.get(timeout=30).startswith(account)
    assert tasks.debounced.delay(account).get(timeout=20) == account
    tasks.holds.delay(account)
    held = running.journal.wait_for("holding", timeout=20)[0]
    waits = tasks.comes_back.delay(account)
    wait_until_parked(running, f"account:{account}")
    running.kill(signal.SIGKILL, pid=held.pid)
    assert waits.get(timeout=20) == account
    running.wait_for_log("reclaimed")
