"""A worker sends what it has no code for by name: of a canvas that is still no duplicate."""

from __future__ import annotations

import uuid

import pytest
from celery import chain, chord

from celery_relock import is_dropped
from tests.support import new_namespace


@pytest.fixture(scope="module")
def namespace():
    return new_namespace()


@pytest.fixture(scope="module")
def stores(module_worker, namespace):
    return _service(module_worker, namespace, "stores")


@pytest.fixture(scope="module", params=["sends", "plain"])
def other(request, module_worker, stores, namespace):
    """A service with the library loaded, and one that does without it."""
    return _service(module_worker, namespace, request.param)


def _service(module_worker, namespace, name):
    env = {"RELOCK_TEST_SERVICE": name}
    # No namespace of their own: they are told apart by their queues.
    return module_worker("tests.dedup.apps.services", namespace=namespace, env=env)


@pytest.fixture
def queued(stores):
    """A call that is queued throughout, and its name."""
    name = uuid.uuid4().hex
    call = stores.module.stores.apply_async((name,), countdown=60)
    yield name
    call.revoke()


def _stored(stores, name, count):
    return [e["number"] for e in stores.journal.wait_for("stored", 20, count, account=name)]


def test_the_last_step_of_a_chain_runs(stores, other, queued):
    steps = chain(other.module.first.s(queued), other.module.store(queued, 3).set(immutable=True))
    assert steps.apply_async().get(timeout=20) == 3
    assert stores.module.stores.marked(queued)


def test_the_body_of_a_chord_runs(stores, other):
    call = stores.module.totals.apply_async(([],), countdown=60)
    members = [other.module.number.s(each) for each in (1, 2)]
    assert chord(members, other.module.total()).apply_async().get(timeout=20) == 3
    call.revoke()


def test_a_link_is_called(stores, other, queued):
    link = other.module.store(queued, 4).set(immutable=True)
    other.module.first.apply_async((queued,), link=link)
    assert _stored(stores, queued, 1) == [4]


def test_a_call_out_of_the_body_of_a_plain_task_runs(stores, other, queued):
    """It may as well be a step that somebody waits for."""
    called = stores.module.app.AsyncResult(other.module.calls.delay(queued).get(timeout=20))
    assert called.get(timeout=20) == 5


@pytest.fixture(scope="module")
def sends(module_worker, stores, namespace):
    return _service(module_worker, namespace, "sends")


def test_a_call_out_of_the_body_of_a_locked_task_is_a_duplicate(stores, sends, queued):
    called = stores.module.app.AsyncResult(sends.module.locked.delay(queued).get(timeout=20))
    assert is_dropped(called.get(timeout=20))


def test_what_comes_after_a_locked_task_runs(stores, sends, queued):
    link = sends.module.store(queued, 7).set(immutable=True)
    last = sends.module.store(queued, 8).set(immutable=True)
    locked = sends.module.locked.s(queued).set(link=[link])
    assert chain(locked, last).apply_async().get(timeout=20) == 8
    assert sorted(_stored(stores, queued, 2)) == [7, 8]
