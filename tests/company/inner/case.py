"""Run by a pytest of its own with `-p celery.contrib.pytest`: an application's tests."""

from __future__ import annotations

import os

import pytest

from celery_relock import Lock, LockedTask, locked

URL, NAMESPACE = os.environ["RELOCK_TEST_URL"], os.environ["RELOCK_TEST_NAMESPACE"]


@pytest.fixture(scope="session")
def celery_config():
    prefix = {"global_keyprefix": f"test-bench:celery:{NAMESPACE}:"}
    return {
        "broker_url": URL,
        "result_backend": URL,
        "broker_transport_options": prefix,
        "result_backend_transport_options": prefix,
        "relock_url": URL,
        "relock_namespace": NAMESPACE,
    }


@pytest.fixture
def charge(celery_app, celery_worker):
    @celery_app.task(base=LockedTask, lock_key="{account}", bind=True, shared=False)
    def charge(self, account):
        return [self.lock.name, self.lock.fence]

    celery_worker.reload()
    return charge


def test_a_locked_task_runs_under_its_lock(charge):
    name, fence = charge.delay("account:1").get(timeout=30)
    assert name == "account:1"
    assert fence > 0


def test_two_calls_have_two_fences(charge):
    first, second = charge.delay("account:1"), charge.delay("account:1")
    assert first.get(timeout=30)[1] < second.get(timeout=30)[1]


def test_a_task_waits_for_a_lock_of_the_test_without_a_slot(charge):
    with Lock(URL, "account:1", namespace=NAMESPACE) as lock:
        waiting = charge.delay("account:1")
        assert charge.delay("account:2").get(timeout=30)[0] == "account:2"  # solo has one slot
        assert not waiting.ready()
        assert lock.fence > 0
    assert waiting.get(timeout=30)[1] > lock.fence


def test_a_workflow_lock_is_free_after_its_last_step(charge):
    steps = charge.si("account:1") | charge.si("account:1")
    (_, fence) = locked(steps, key="account:1").delay().get(timeout=30)
    lock = Lock(URL, "account:1", namespace=NAMESPACE)
    assert lock.acquire(blocking_timeout=2)
    assert lock.fence > fence
    lock.release()
