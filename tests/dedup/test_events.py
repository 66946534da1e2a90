"""A monitor hears of each call that was swallowed, by Celery's own events."""

from __future__ import annotations

import pytest

from tests.support import wait_for


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker("tests.dedup.apps.calls", concurrency=2, arguments=("-E",))


def _duplicates(monitor, first):
    return [event for event in tuple(monitor.events) if event.get("duplicate_of") == first.id]


def _hears_of(monitor, first, name, account):
    wait_for(lambda: _duplicates(monitor, first), 30, "the event")
    [event] = _duplicates(monitor, first)
    assert (event["type"], event["name"]) == ("lock-duplicate", name)
    assert event["locks"] == [f"account:{account}"]
    assert 0 < event["timestamp"] - event["since"] < 60
    return event


def test_a_call_by_name_that_a_worker_swallows(m, monitor, account):
    first = m.drops.apply_async((account,), countdown=10)
    by_name = m.app.send_task(m.drops.name, (account,), queue=m.app.conf.task_default_queue)
    event = _hears_of(monitor, first, m.drops.name, account)
    assert event["uuid"] == by_name.id


def test_a_call_that_is_swallowed_where_it_is_made_if_such_a_process_sends_events(
    m, monitor, account
):
    first = m.done.apply_async((account,), countdown=10)
    m.done.delay(account)
    m.app.conf.task_send_sent_event = True
    try:
        m.done.delay(account)
    finally:
        m.app.conf.task_send_sent_event = False
    event = _hears_of(monitor, first, m.done.name, account)
    assert event["uuid"] != first.id
