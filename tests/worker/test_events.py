"""What happens to locks is told: to monitors as Celery events, to the application as signals."""

from __future__ import annotations

import os
import re
import time
import uuid

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from celery_relock import Lock, locked, signals
from celery_relock.errors import LockConflict
from tests.support import new_namespace, wait_for
from tests.support.monitor import Monitor
from tests.support.parked import lock_of, state_of, wait_until_parked
from tests.support.proxy import Proxy

APP = "tests.worker.apps.events"


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker(APP, concurrency=2, arguments=("-E",))


def _told(worker, kind, account, count=1, timeout=30.0):
    """What a receiver in the worker was told of this test's lock, first thing first."""

    def found(events):
        return [e for e in events if e.name == kind and f"account:{account}" in e["names"]]

    return found(worker.journal.wait_for(lambda events: len(found(events)) >= count, timeout))


@pytest.fixture
def held(worker, account):
    sent = worker.module.holds.delay(account)
    worker.journal.wait_for("held", account=account)
    yield sent
    worker.journal.add(f"free {account}")
    sent.get(timeout=20, propagate=False)


def test_a_monitor_hears_which_task_acquired_which_lock_and_released_it(worker, monitor, account):
    sent = worker.module.works.delay(account)
    fence = sent.get(timeout=20)
    monitor.wait(sent.id, "task-succeeded")
    acquired = monitor.wait(sent.id, "lock-acquired")
    released = monitor.wait(sent.id, "lock-released")
    assert acquired["name"] == "tests.worker.apps.events.works"
    assert acquired["locks"] == released["locks"] == [f"account:{account}"]
    assert acquired["fence"] == released["fence"] == fence
    assert acquired["owner"]
    assert acquired["hostname"] == monitor.of(sent.id, "task-succeeded")[0]["hostname"]
    assert len(monitor.of(sent.id, "lock-")) == 2


def test_the_state_that_a_monitor_keeps_of_a_task_stays_celerys_own(worker, monitor, account):
    sent = worker.module.works.delay(account)
    sent.get(timeout=20)
    monitor.wait(sent.id, "lock-released")
    monitor.wait(sent.id, "task-succeeded")
    assert monitor.state.tasks[sent.id].state == "SUCCESS"
    own = [event["type"] for event in monitor.events if "lock" in event["type"]]
    assert own
    assert all(kind.startswith("lock-") for kind in own)


def test_a_lock_that_a_plain_task_acquires_is_told_as_that_tasks(worker, monitor, account):
    sent = worker.module.uses_a_lock.delay(account)
    fence = sent.get(timeout=20)
    acquired = monitor.wait(sent.id, "lock-acquired")
    assert acquired["fence"] == fence
    assert acquired["name"] == "tests.worker.apps.events.uses_a_lock"


def test_a_conflict_is_told_with_the_holder(worker, monitor, account, held):
    sent = worker.module.raises.delay(account)
    with pytest.raises(LockConflict):
        sent.get(timeout=20)
    conflict = monitor.wait(sent.id, "lock-conflict")
    assert f"holds[{held.id}]" in conflict["reason"]
    [signal] = _told(worker, "conflict", account)
    assert signal["sender"] == "tests.worker.apps.events.raises"
    assert signal["task_id"] == sent.id


def test_one_more_than_lock_max_parked_is_told_as_a_failure(worker, monitor, account, held):
    parked = worker.module.parks_one.delay(account)
    wait_until_parked(worker, f"account:{account}")
    refused = worker.module.parks_one.delay(account)
    with pytest.raises(LockConflict):
        refused.get(timeout=20)
    told = [each for each in _told(worker, "conflict", account, 3) if each["task_id"] == refused.id]
    assert [each["policy"] for each in told] == ["wait", "raise"]
    assert "which is lock_max_parked" in told[1]["reason"]
    worker.journal.add(f"free {account}")
    parked.get(timeout=20)


@pytest.mark.parametrize("is_parked", [True, False])
def test_a_task_that_waits_is_blocked_in_a_monitor_until_its_body_begins(
    worker, monitor, account, is_parked
):
    """Also where the lock is released when the message is about to be parked."""
    with lock_of(worker, f"account:{account}"):
        sent = worker.module.holds.delay(account)
        blocked = monitor.wait(sent.id, "task-blocked")
        assert blocked["lock"] == f"account:{account}"
        assert blocked["owner"] == state_of(worker, f"account:{account}").holders[0].owner
        assert blocked["holder"].endswith(f":{os.getpid()}")
        if is_parked:
            wait_until_parked(worker, f"account:{account}")
            monitor.wait(sent.id, "task-started")  # Celery's own, of a delivery without a body
            assert monitor.state.tasks[sent.id].state == "BLOCKED"
    wait_for(lambda: monitor.state.tasks[sent.id].state == "STARTED", what="the body in a monitor")
    worker.journal.add(f"free {account}")
    monitor.wait(sent.id, "task-succeeded")
    if is_parked:
        wait_for(lambda: len(monitor.of(sent.id, "task-started")) == 2, what="both deliveries")
    assert monitor.state.tasks[sent.id].state == "SUCCESS"
    assert len(monitor.of(sent.id, "task-blocked")) == 1


def test_a_task_that_cannot_be_parked_is_never_blocked_in_a_monitor(worker, monitor, account, held):
    large = {"headers": {"large": "x" * 1_000_000}}
    sent = worker.module.works.apply_async((account,), **large)
    wait_for(lambda: len(monitor.of(sent.id, "task-retried")) > 1, what="the second time")
    shown = {event["type"] for event in monitor.of(sent.id, "task")}
    assert shown - {"task-sent"} == {"task-received", "task-started", "task-retried"}
    assert sent.state == "RETRY"


def test_a_parked_task_that_is_revoked_is_revoked_in_a_monitor(worker, monitor, account):
    with lock_of(worker, f"account:{account}"):
        sent = worker.module.works.delay(account)
        monitor.wait(sent.id, "task-blocked")
        worker.module.app.control.revoke(sent.id)
        monitor.wait(sent.id, "task-revoked")
        wait_for(lambda: monitor.state.tasks[sent.id].state == "REVOKED", what="its last state")


def test_the_log_says_what_a_parked_task_waits_for_with_ids_to_be_pasted(worker, account, held):
    sent = worker.module.works.delay(account)
    of = APP
    worker.wait_for_log(
        rf"Task {of}\.works\[{sent.id}\] parked: the lock 'account:{account}' is "
        rf"held by {of}\.holds\[{held.id}\] \S+:\d+ \(workflow {held.id}\) for \d"
    )
    assert f"{sent.id}] ignored" not in worker.log()


def test_a_loss_is_told_though_the_body_does_not_notice(worker, monitor, account, held):
    assert lock_of(worker, f"account:{account}")._engine.backend.force_release(f"account:{account}")
    lost = monitor.wait(held.id, "lock-lost")
    assert lost["locks"] == [f"account:{account}"]
    # By its inbox, if that is open already, or by the next renewal.
    assert re.search("released by force|does not have the hold", lost["reason"])
    assert lost["hostname"] == monitor.wait(held.id, "task-started")["hostname"]
    [signal] = _told(worker, "lost", account)
    assert signal["sender"] == "tests.worker.apps.events.holds"
    assert signal["thread"] != "MainThread"
    assert signal["fence"] == lost["fence"] > 0


def test_what_is_freed_for_a_dead_process_is_told_with_the_task_that_it_ran(worker, monitor):
    account = uuid.uuid4().hex
    sent = worker.module.is_killed.delay(account)
    [held] = worker.journal.wait_for("held", account=account)
    worker.kill(pid=held.pid)
    reclaimed = monitor.wait(sent.id, "lock-reclaimed")
    assert reclaimed["locks"] == [f"account:{account}"]
    assert reclaimed["name"] == "tests.worker.apps.events.is_killed"
    assert f"process {held.pid} " in reclaimed["reason"]
    [signal] = _told(worker, "reclaimed", account)
    assert (signal["sender"], signal["task_id"]) == (None, sent.id)
    assert signal["by"] == worker.pid
    worker.wait_for_log(rf"WARNING.*account:{account}' reclaimed.*is_killed\[{sent.id}\]")


def test_a_task_without_events_has_none_of_its_lock_either(worker, monitor, account):
    unseen = worker.module.works_unseen.delay(account)
    unseen.get(timeout=20)
    seen = worker.module.works.delay(account)
    monitor.wait(seen.id, "lock-released")
    assert monitor.of(unseen.id, "lock-") == []
    _told(worker, "released", account, count=2)  # signals need no monitor


def test_a_receiver_may_ask_for_one_task_alone_and_one_that_raises_harms_nobody(worker, account):
    fence = worker.module.works.delay(account).get(timeout=20)
    worker.module.raises.delay(account).get(timeout=20)
    [alone] = _told(worker, "of works alone", account)
    assert alone["sender"] == "tests.worker.apps.events.works"
    every = _told(worker, "acquired", account)
    assert [event["sender"].rpartition(".")[2] for event in every] == ["works", "raises"]
    assert every[0]["fence"] == fence
    worker.wait_for_log("this receiver is broken")


def test_each_wait_is_told_how_it_began_and_how_long_it_took(worker, account, held):
    tasks = worker.module
    parked = tasks.works.delay(account)
    [left] = _told(worker, "parked", account)
    assert (left["sender"], left["task_id"]) == (tasks.works.name, parked.id)
    dropped = tasks.drops.delay(account)
    assert dropped.get(timeout=20)["relock"] == "dropped"
    [gone] = _told(worker, "dropped", account)
    assert (gone["sender"], gone["task_id"]) == (tasks.drops.name, dropped.id)
    waiting = tasks.blocks.delay(account)
    [begun] = _told(worker, "waiting", account)
    assert (begun["sender"], begun["task_id"]) == (tasks.blocks.name, waiting.id)
    assert [e["policy"] for e in _told(worker, "conflict", account, 2)] == ["wait", "drop"]

    began = time.monotonic()
    worker.journal.add(f"free {account}")
    assert waiting.get(timeout=20)
    parked.get(timeout=20)
    took = time.monotonic() - began
    [resumed] = _told(worker, "resumed", account)
    assert (resumed["sender"], resumed["task_id"]) == (tasks.works.name, parked.id)
    [inline] = _told(worker, "reentered", account)
    assert (inline["sender"], inline["task_id"]) == (tasks.works.name, waiting.id)
    released = {e["task_id"]: e for e in _told(worker, "released", account, 3)}
    acquired = {e["task_id"]: e for e in _told(worker, "acquired", account, 3)}
    assert set(released) == set(acquired) == {held.id, parked.id, waiting.id}
    assert acquired[held.id]["waited"] == 0.0 < released[held.id]["held"]
    for each in (parked.id, waiting.id):
        assert 0 < acquired[each]["waited"] < took + released[held.id]["held"]
        assert 0 < released[each]["held"] < took


def test_a_workflow_lock_that_was_parked_tells_how_long_it_has_waited(worker, account, held):
    sent = locked(worker.module.works.s(account), key=f"account:{account}").delay()
    [parked] = _told(worker, "parked", account)
    worker.journal.add(f"free {account}")
    sent.get(timeout=20)
    acquired = {e["task_id"]: e for e in _told(worker, "acquired", account, 3)}
    assert acquired[parked["task_id"]]["waited"] > 0
    assert acquired[held.id]["waited"] == 0.0


def test_a_renewal_that_fails_is_told(redis_server, namespace):
    heard: list[dict] = []

    def hear(**told):
        heard.append(told)

    signals.lock_unrenewed.connect(hear)
    try:
        with Proxy(redis_server.port) as proxy:
            lock = Lock(proxy.url, "a", timeout=1.5, namespace=namespace)
            lock.acquire()
            proxy.refuse()
            wait_for(lambda: heard, what="a renewal that failed")
    finally:
        signals.lock_unrenewed.disconnect(hear)
    assert heard[0]["names"] == ("a",)
    assert heard[0]["fence"] > 0
    assert "Redis" in heard[0]["reason"]


def test_a_time_limit_that_strikes_in_a_receiver_ends_the_task_all_the_same(worker, account):
    started = time.monotonic()
    with pytest.raises(SoftTimeLimitExceeded):
        worker.module.meets_a_slow_receiver.delay(account).get(timeout=20)
    assert time.monotonic() - started < 10
    assert worker.journal.events("cut short")
    assert not lock_of(worker, f"account:{account}").locked()


def test_a_broker_that_is_away_keeps_nobody_from_working(worker, account):
    started = time.monotonic()
    assert worker.module.works_without_a_broker.delay(account).get(timeout=20) > 0
    assert time.monotonic() - started < 15
    worker.wait_for_log("WARNING.*lock events cannot be sent")
    assert worker.log().count("lock events cannot be sent") == 1


def test_where_no_events_are_wanted_none_are_sent(module_worker):
    quiet = module_worker(APP, concurrency=1, namespace=new_namespace())
    monitor = Monitor(quiet.module.app)
    sent = quiet.module.works.delay("7")
    sent.get(timeout=20)
    assert _told(quiet, "released", "7")
    # What the client publishes comes after whatever the task had sent.
    with quiet.module.app.events.default_dispatcher() as dispatcher:
        dispatcher.send("end-of-test", uuid="end")
    monitor.wait("end", "end-of-test")
    assert monitor.of(sent.id, "lock-") == []
    monitor.close()


@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_other_pools_tell_the_same(module_worker, account, pool):
    running = module_worker(APP, pool=pool, namespace=new_namespace(), arguments=("-E",))
    monitor = Monitor(running.module.app)
    sent = running.module.holds.delay(account)
    monitor.wait(sent.id, "lock-acquired")
    name = f"account:{account}"
    assert lock_of(running, name)._engine.backend.force_release(name)
    assert monitor.wait(sent.id, "lock-lost")["locks"] == [name]
    running.journal.add(f"free {account}")
    sent.get(timeout=20)
    monitor.close()


def test_a_lock_outside_of_tasks_is_told_by_signals_alone(redis_url, namespace):
    heard: list[tuple[str, object, dict]] = []

    def hear(signal=None, sender=None, **told):
        heard.append((signal.name, sender, told))

    every = [each for name, each in vars(signals).items() if name.startswith("lock_")]
    for signal in every:
        signal.connect(hear)
    try:
        with Lock(redis_url, "a", namespace=namespace) as lock:
            assert not Lock(redis_url, "a", namespace=namespace).acquire(blocking=False)
            fence = lock.fence
    finally:
        for signal in every:
            signal.disconnect(hear)
    assert [name for name, _, _ in heard] == ["lock_acquired", "lock_conflict", "lock_released"]
    assert {sender for _, sender, _ in heard} == {None}
    for name, _, told in heard:
        assert set(told) == getattr(signals, name).providing_args
    assert heard[0][2]["names"] == ("a",)
    assert heard[0][2]["fence"] == heard[2][2]["fence"] == fence
    assert "is held by" in heard[1][2]["reason"]
