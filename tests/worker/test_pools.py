"""Acquire, re-enter, release, take turns: in every kind of worker pool."""

from __future__ import annotations

import pytest

from tests.support.parked import lock_of
from tests.support.permits import permits


@pytest.fixture(scope="module", params=["prefork", "threads", "gevent", "eventlet", "solo"])
def worker(request, module_worker):
    if request.param in ("gevent", "eventlet"):
        pytest.importorskip(request.param)
    namespace = f"ns-pool-{request.param}-{id(request)}"
    return module_worker(
        "tests.worker.apps.reentry", pool=request.param, concurrency=4, namespace=namespace
    )


@pytest.mark.parametrize("name", ["calls_three_deep", "applies_under_a_direct_call"])
def test_a_task_acquires_its_lock_re_enters_it_and_releases_it(worker, name):
    call = getattr(worker.module, name).delay(name).get(timeout=20)
    fence, owner = call["fence"], call["owner"]
    assert not call["reentered"]
    while call := call["inner"]:
        assert (call["fence"], call["owner"], call["reentered"]) == (fence, owner, True)
        assert call["holds"] == 1
    assert not lock_of(worker, f"account:{name}").locked()


def test_executions_for_one_account_take_turns_and_others_run_beside_them(worker):
    take = worker.module.take
    sent = [take.delay(account, 0.2) for account in ("a", "a", "b", "a")]
    assert all(result.get(timeout=30)["fence"] for result in sent)
    events = worker.journal.events()
    assert len(permits(events, "account:a")) == 3
    assert len(permits(events, "account:b")) == 1
