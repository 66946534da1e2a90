"""A deploy changes the lock options of a task while its calls wait: old code and new code use one
Redis, one broker and one name of the task."""

from __future__ import annotations

import json
from contextlib import closing

import pytest
from celery import chain, chord

from celery_relock.admin import Locks
from celery_relock.errors import LockConflict
from tests.support import wait_for
from tests.support.parked import lock_of, wait_until_parked

APP = "tests.worker.apps.deployed"


@pytest.fixture
def deployed(new_worker):
    """Start a worker with a version of the code: `deployed(lock_limit=2)`."""

    def start(**options):
        return new_worker(APP, env={"RELOCK_TEST_OPTIONS": json.dumps(options)})

    return start


def wait_until_nothing_is_left(worker):
    look = Locks(worker.module.app)
    wait_for(lambda: not [*look.find()], what="nobody holds or waits for a lock")


@pytest.mark.parametrize(
    "ends",
    [{"lock_on_conflict": "drop"}, {"lock_on_conflict": "raise"}, {"lock_max_wait": 0.1}],
    ids=["drop", "raise", "max_wait"],
)
def test_a_parked_call_that_ends_at_the_lock_of_the_new_code_does_not_run_later(
    deployed, account, ends
):
    with closing(deployed()) as before:
        first = lock_of(before, f"account:{account}")
        assert first.acquire()
        charged = before.module.charge.delay(account)
        wait_until_parked(before, first.name)
    after = deployed(lock_key="new:{account}", **ends)
    with lock_of(after, f"new:{account}"):
        first.release()
        if ends == {"lock_on_conflict": "drop"}:
            assert charged.get(timeout=30)["relock"] == "dropped"
        else:
            with pytest.raises(LockConflict):
                charged.get(timeout=30)
        # Not only when its message comes once more, and is known as a copy.
        assert not Locks(after.module.app).get(first.name).waiting
    wait_until_nothing_is_left(after)
    assert after.journal.events("charged") == []


@pytest.mark.parametrize("keys", [["other:{account}"], ["account:{account}"]], ids=["all", "one"])
def test_what_was_kept_for_a_retry_by_the_old_names_is_free_when_it_has_the_new_ones(
    deployed, account, keys
):
    with closing(
        deployed(lock_key=["account:{account}", "also:{account}"], lock_keep_on_retry=True)
    ) as before:
        charged = before.module.charge.delay(account, 5)
        wait_for(lambda: charged.state == "RETRY")
        before.stop()  # its message, which is not due yet, goes back to its queue
    after = deployed(lock_key=keys)
    charged.get(timeout=60)
    wait_until_nothing_is_left(after)


@pytest.mark.parametrize(
    ("own", "options"),
    [
        ({"lock_max_wait": 60}, {"lock_on_conflict": "drop"}),
        ({"lock_max_parked": 5}, {"lock_on_conflict": "retry"}),
        ({"lock_keep_on_retry": True}, {"lock_order": "sent", "lock_order_retry": "end"}),
        ({"lock_cooldown": 5}, {"lock_hold": "workflow"}),
    ],
    ids=["max_wait", "max_parked", "keep_on_retry", "cooldown"],
)
def test_a_queued_call_runs_whose_own_option_the_new_code_has_no_use_for(
    deployed, account, own, options
):
    with closing(deployed()) as before:
        before.stop()
        charged = before.module.charge.apply_async((account,), **own)
    after = deployed(**options)
    charged.get(timeout=30)
    wait_until_nothing_is_left(after)
    assert len(after.journal.events("charged")) == 1


@pytest.mark.parametrize("how", ["as the next step", "as a link", "as a chord's body"])
def test_what_is_behind_a_queued_call_is_sent_whatever_own_option_it_has(deployed, account, how):
    with closing(deployed()) as before:
        before.stop()
        charge = before.module.charge
        behind = charge.si(f"{account}-behind").set(lock_max_wait=60)
        if how == "as a link":
            charged = charge.apply_async((account,), link=behind)
        elif how == "as the next step":
            charged = chain(charge.si(account), behind).delay()
        else:
            charged = chord([charge.si(account)], behind).delay()
    after = deployed(lock_on_conflict="drop")
    charged.get(timeout=30)
    after.journal.wait_for("charged", account=f"{account}-behind")
