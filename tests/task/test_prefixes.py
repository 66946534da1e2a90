"""Which `relock_prefix` has what is sent or called, on each way and at each place."""

from __future__ import annotations

import pytest

# By these names the app has them.
WAYS = [
    *("delay", "by its name", "behind a plain step", "behind two", "as a link", "in a group"),
    *("as a chord's body", "in a locked canvas"),
]
THREADS = ["to_thread", "an executor", "apply", "lock_for", "delay", "by its name"]


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker("tests.task.apps.prefixes", concurrency=3)


@pytest.fixture
def m(worker):
    token = worker.module.tenant.set("")
    yield worker.module
    worker.module.tenant.reset(token)


def _looked(worker, account):
    return worker.journal.wait_for("looked", account=account)[0]["name"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("task", ["sends_for", "sends_for_under_lock"])
def test_what_a_task_sends_for_a_tenant_has_its_prefix_on_each_way(worker, m, account, way, task):
    getattr(m, task).delay("acme:", way, account)

    assert _looked(worker, account) == f"acme:account:{account}"


@pytest.mark.parametrize("way", WAYS)
def test_the_tenant_that_a_task_sets_goes_before_that_of_its_sender(worker, m, account, way):
    m.tenant.set("other:")
    m.sends_for.delay("acme:", way, account)

    assert _looked(worker, account) == f"acme:account:{account}"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("task", ["sends", "sends_under_lock"])
def test_where_a_worker_has_no_tenant_it_is_that_of_the_sender_on_each_way(
    worker, m, account, way, task
):
    m.tenant.set("acme:")
    getattr(m, task).delay(way, account)

    assert _looked(worker, account) == f"acme:account:{account}"


@pytest.mark.parametrize("way", WAYS)
def test_it_is_the_same_from_a_script(worker, m, account, way):
    m.tenant.set("acme:")
    m.send(way, account).get(timeout=20)

    assert _looked(worker, account) == f"acme:account:{account}"


@pytest.mark.parametrize("way", ["delay", "by its name"])
def test_that_a_sender_has_no_tenant_is_carried_too(new_worker, account, way):
    worker = new_worker("tests.task.apps.prefixes", concurrency=1)
    worker.module.leaves.delay("left:").get(timeout=20)
    worker.module.send(way, account).get(timeout=20)

    assert _looked(worker, account) == f"account:{account}"


@pytest.mark.parametrize("how", THREADS)
@pytest.mark.parametrize("task", ["in_a_thread", "in_a_thread_under_lock", "calls_one_that_does"])
def test_it_goes_into_a_thread_that_has_a_copy_of_the_context(m, account, how, task):
    m.tenant.set("acme:")
    found = getattr(m, task).delay(how, account).get(timeout=20)

    assert found == f"acme:account:{account}"
