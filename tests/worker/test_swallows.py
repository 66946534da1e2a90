"""A class's own `__call__` that handles every Exception, and calls that wait for their lock."""

from __future__ import annotations

import pytest
from celery import chain

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker("tests.worker.apps.swallows", concurrency=2)


def counted(worker, account):
    names = [e.name for e in worker.journal.events(account=account)]
    return {name: names.count(name) for name in names}


@pytest.mark.parametrize("policy", ["wait", "retry"])
@pytest.mark.parametrize("kind", ["Answers", "Retries", "Translates", "Mixed", "Behind"])
def test_what_waits_is_not_ended_by_who_handles_every_exception(worker, account, kind, policy):
    module = worker.module
    call = module.app.tasks[f"{kind} {policy}"].s(account)
    failed = module.failed.si(account)
    sent = [chain(call, module.then.s()).apply_async(link_error=[failed]) for _ in range(3)]
    assert [each.get(timeout=30) for each in sent] == [account] * 3
    assert counted(worker, account) == {"body": 3, "then": 3}
    worker.wait_for_log(r"__call__ handles the exception that tells that this call waits")


def test_an_error_of_the_body_is_its_own_to_handle(worker, account):
    assert worker.module.app.tasks["fails once"].delay(account).get(timeout=20) == account
    assert counted(worker, account) == {"body": 2}
