"""A task that runs in a context of its own leaves nothing behind, and nothing of it sticks."""

from __future__ import annotations

import pytest
from celery import chain

from celery_relock import locked
from tests.support import new_namespace, wait_for
from tests.support.parked import lock_of


@pytest.fixture(scope="module", params=["prefork", "threads", "gevent"])
def worker(request, module_worker):
    return module_worker(
        "tests.worker.apps.contexts", pool=request.param, namespace=new_namespace()
    )


def _is_free(worker, account):
    with lock_of(worker, f"account:{account}", blocking_timeout=10):
        pass


@pytest.mark.parametrize("name", ["keeps", "retries_itself"])
def test_its_lock_is_kept_for_its_retry_and_free_then(worker, account, name):
    assert getattr(worker.module, name).delay(account).get(timeout=20) == [1, True]
    _is_free(worker, account)


def test_its_dedup_marker_goes_on_to_its_retry_and_is_free_then(worker, account):
    task = worker.module.is_marked
    sent = task.delay(account)
    wait_for(lambda: sent.state == "RETRY")
    assert task.delay(account).id == sent.id
    assert sent.get(timeout=20) == [1, True]
    wait_for(lambda: task.marked(account) is None, 10, "the marker to be free")


def test_its_line_goes_on_to_its_retry_and_to_the_next(worker, account):
    first, second = (worker.module.has_its_turn.delay(account) for _ in range(2))
    assert first.get(timeout=20) == second.get(timeout=20) == [1, True]


@pytest.mark.parametrize("name", ["plain_step", "locked_step"])
def test_a_step_leaves_its_workflow_lock_to_the_next(worker, account, name):
    step = getattr(worker.module, name)
    steps = chain(step.si(account), step.si(account), step.si(account))
    sent = locked(steps, key=f"account:{account}").delay()
    assert sent.get(timeout=20) is not False
    _is_free(worker, account)


def test_what_it_holds_for_its_chain_goes_on_to_the_next(worker, account):
    holds = worker.module.holds
    assert chain(holds.si(account), holds.si(account)).delay().get(timeout=20) is True
    _is_free(worker, account)


def test_a_step_begins_beside_the_end_of_the_one_before_it(worker, account):
    steps = worker.module.lingers.si(account, 1), worker.module.is_last.si(account, 2)
    locked(chain(*steps), key=f"account:{account}", on_conflict="raise").delay().get(timeout=20)
