"""A deploy takes `lock_order` off while calls wait in the line."""

from __future__ import annotations

from contextlib import closing

import pytest

from celery_relock.engine.protocol import LINE
from tests.support.parked import lock_of, wait_until_parked

APP = "tests.order.apps.taken_off"


@pytest.mark.parametrize("key", ["account:{account}", "other:{account}"])
def test_calls_that_took_their_places_when_they_arrived_come_one_after_the_other_without_pause(
    worker, account, key
):
    name = f"account:{account}"
    with closing(worker(APP, env={"RELOCK_TEST_ORDER": "sent"})) as before, lock_of(before, name):
        for number in range(6):  # by its name: the place is taken where the message arrives
            before.module.app.send_task(before.module.charge.name, (account, number))
            wait_until_parked(before, LINE + name if number else name, max(number, 1))
    after = worker(APP, env={"RELOCK_TEST_KEY": key})
    after.journal.wait_for(lambda found: len(found) == 6, timeout=12)
    assert [e["number"] for e in after.journal.events("charged")] == list(range(6))
