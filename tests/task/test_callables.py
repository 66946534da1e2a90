"""What is raised inside of an option's callable and is no fault of it: a time limit, and what says
how the task ends."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded

from celery_relock.errors import LockConfigError, LockLost
from celery_relock.options import LockOptions
from celery_relock.worker import events  # noqa: F401  # as in a worker
from celery_relock.worker.message import owner_of
from tests.support import wait_for
from tests.support.parked import lock_of, wait_until_parked

ENDINGS = [SoftTimeLimitExceeded(), LockLost("gone"), Ignore(), Reject(), Retry()]
STATE = "ENDED BY ITS CALLABLE"


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker("tests.task.apps.callables")


@pytest.mark.parametrize(
    "kind", ["lock_key", "lock_key_of_self", "lock_limit", "lock_mode", "lock_owner"]
)
def test_a_time_limit_in_a_callable_is_that_of_the_task(worker, account, kind):
    assert worker.module.slow[kind].delay(account).get(timeout=20) == 1


def test_a_time_limit_in_a_policy_is_that_of_the_task(worker, account):
    with lock_of(worker, f"account:{account}"):
        sent = worker.module.slow["lock_on_conflict"].delay(account)
        wait_until_parked(worker, f"account:{account}")  # its state may be the RETRY before
    assert sent.get(timeout=20) == 1


def is_ended_by_its_callable(sent):
    # Celery 5.7 makes a failure of a message that is rejected for good.
    return sent.state == STATE or isinstance(sent.result, Reject)


@pytest.mark.parametrize("how", ["ignore", "reject"])
def test_a_callable_can_end_its_task(worker, account, how):
    sent = worker.module.ends_by_key.delay(account, how)
    wait_for(lambda: is_ended_by_its_callable(sent), what="the task to end")
    with lock_of(worker, f"account:{account}"):
        held = worker.module.ends_by_policy.delay(account, how)
        wait_for(lambda: is_ended_by_its_callable(held), what="the task to end")
    # Its messages are done with, and it left nothing in the way.
    assert worker.module.ends_by_key.delay(account, "").get(timeout=20) == 0
    assert is_ended_by_its_callable(sent)
    assert is_ended_by_its_callable(held)


def test_a_callable_can_retry_its_task(worker, account):
    assert worker.module.ends_by_key.delay(account, "retry").get(timeout=20) == 1
    with lock_of(worker, f"account:{account}"):
        sent = worker.module.ends_by_policy.delay(account, "retry")
        wait_until_parked(worker, f"account:{account}")  # its state may be the RETRY before
    assert sent.get(timeout=20) == 1


def test_where_a_task_is_sent_nothing_ends_it(worker, account):
    """Else what a callable raises would end the task that sends it."""
    task = worker.module.ends_by_key_where_it_is_sent
    says = rf"task {task.name}: .*Ignore\(\).* does not run here"
    merged = partial(task.apply_async, lock_debounce=1)
    for call in (task.delay, task.lock_for, task.marked, lambda *args: merged(args)):
        with pytest.raises(LockConfigError, match=says):
            call(account, "ignore_here")


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: type(ending).__name__)
@pytest.mark.parametrize("option", ["limit", "mode", "owner"])
def test_it_arrives_as_it_was_raised(ending, option):
    def raises(*_, **__):
        raise ending

    asked = partial(owner_of, raises, SimpleNamespace(id="1", root_id="1", is_eager=False))
    if option != "owner":
        asked = partial(LockOptions(**{option: raises}).limit_for, {})
    with pytest.raises(type(ending)):
        asked()
