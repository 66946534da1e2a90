"""A deploy takes locks away, or makes messages fail before their bodies, while they are parked."""

from __future__ import annotations

import json
import uuid

import pytest
from celery.exceptions import NotRegistered

from celery_relock import locked
from celery_relock.admin import Locks
from celery_relock.engine import ids
from celery_relock.errors import LockConfigError, RelockError
from celery_relock.worker import parking
from tests.support import leftovers, wait_for
from tests.support.parked import lock_of, state_of, wait_until_parked

APP = "tests.worker.apps.unlocked"
# What becomes of a parked message of each task.
WITHOUT_LOCK = "off", "plain", "ordered", "dedup"
FAILS = "gone", "names nothing", "has no limit", "has no owner", "is not started", "fits no more"
#: Celery stores no result for it.
DISCARDED = "unreadable", "undecodable"
#: A step of a workflow, whose task is gone.
STEP = "step"
#: It is revoked while somebody else has its lock.
REVOKED = "revoked"
#: These wait for no lock.
DELAYED = "debounced", "kept"


@pytest.fixture(scope="module")
def deployed(module_worker):
    """The worker after the deploy, and the results of what was sent before it: of each task, and of
    a locked task behind it."""
    before = module_worker(APP)
    tasks, results = before.module.app.tasks, {}
    held = [lock_of(before, name) for name in (*WITHOUT_LOCK, *FAILS, *DISCARDED)]
    for lock in held:
        lock.acquire()
        results[lock.name] = [tasks[lock.name].delay(lock.name)]
        wait_until_parked(before, lock.name)
        results[lock.name].append(tasks["still locked"].delay(lock.name))
        wait_until_parked(before, lock.name, 2)
    held.append(lock_of(before, STEP))
    results[STEP] = [_parked_step(before, held[-1], tasks[STEP])]
    results[STEP].append(tasks["still locked"].delay(STEP))
    wait_until_parked(before, STEP, 2)
    results[REVOKED] = [_parked_while_held(before, tasks["gone"])]
    for name in DELAYED:
        results[name] = [tasks[name].delay(name)]
    wait_for(lambda: results["kept"][0].state == "RETRY")
    look = Locks(before.module.app)._look
    messages = {name: look.parked(results[name][0].id).text for name in ("off", "plain")}
    before.stop()
    before.close()
    after = module_worker(APP, namespace=before.namespace, env={"RELOCK_TEST_DEPLOYED": "1"})
    for lock in held:
        lock.release()
    results["kept"].append(tasks["still locked"].delay("kept"))
    after.messages = messages
    yield after, results
    results.clear()  # collected later, they would look for a server that has ended


def _parked_while_held(worker, task):
    assert lock_of(worker, REVOKED, timeout=600).acquire()
    sent = task.delay(REVOKED)
    wait_until_parked(worker, REVOKED)
    return sent


def _parked_step(worker, lock, task):
    """A step whose workflow has lost its lock, which somebody else holds now."""
    sent = locked(task.si(lock.name).set(countdown=3), key=lock.name).delay()
    wait_for(lambda: sent.parent.state == "SUCCESS")
    assert Locks(worker.module.app).release(lock.name), "what was left to the step"
    assert lock.acquire()
    wait_until_parked(worker, lock.name)
    return sent


@pytest.mark.parametrize("name", [*WITHOUT_LOCK, *DELAYED])
def test_a_message_whose_task_has_no_lock_any_more_runs_without(deployed, name):
    after, results = deployed
    assert results[name][0].get(timeout=30) == "after"
    warning = rf"{name}\[{results[name][0].id}\] was sent for a lock that its code declares no more"
    after.wait_for_log(warning)


@pytest.mark.parametrize("name", ["off", "plain"])
@pytest.mark.parametrize("together", [True, False])
def test_a_second_copy_of_its_message_does_not_run(deployed, name, together):
    """It was handed out when the old worker ended, and is published again by the new one."""
    after, results = deployed
    assert results[name][0].get(timeout=30) == "after"
    message = json.loads(after.messages[name])
    task_id = results[name][0].id
    if together:
        task_id = message["headers"]["id"] = str(uuid.uuid4())
        message["headers"]["relock"]["execution_id"] = ids.new_id()
    for _ in range(1 + together):
        parking.publish(after.module.app, json.dumps(message))
    after.wait_for_log(rf"{task_id}\] is a late copy of an execution that has ended")
    assert len(after.journal.events("inside", task=task_id)) == 1


@pytest.mark.parametrize("name", [*FAILS, STEP])
def test_a_message_that_fails_before_its_body_fails(deployed, name):
    errors = {"fits no more": TypeError, "is not started": LookupError}
    errors |= dict.fromkeys(("gone", STEP), NotRegistered)
    with pytest.raises(errors.get(name, LockConfigError)):
        deployed[1][name][0].get(timeout=30)


@pytest.mark.parametrize("name", [*WITHOUT_LOCK, *FAILS, *DISCARDED, STEP, "kept"])
def test_what_waits_behind_it_follows_at_once(deployed, name):
    assert deployed[1][name][1].get(timeout=30) == "after"


def test_what_no_app_has_any_more_is_revoked_and_cannot_be_cancelled(deployed):
    after, results = deployed
    (result,) = results[REVOKED]
    app = after.module.app
    with pytest.raises(RelockError, match="revoke it"):
        Locks(app).cancel(result.id)
    app.control.revoke(result.id)
    with pytest.raises(NotRegistered):
        result.get(timeout=10)
    wait_for(lambda: not state_of(after, REVOKED).waiting, what="an empty queue")
    assert Locks(app).release(REVOKED)


def test_nobody_is_told_of_a_lock_that_the_code_declares_no_more(deployed):
    after, results = deployed
    for result in (results["off"][0], results["off"][1]):
        result.get(timeout=30)
    names = [name for event in after.journal.events("acquired") for name in event["names"]]
    assert "off" in names  # of the locked task behind it
    assert not [name for name in names if name.startswith("execution:")]


def test_nothing_is_left_and_nothing_runs_twice(deployed, client):
    after, results = deployed
    every = [result for name, each in results.items() if name not in DISCARDED for result in each]
    wait_for(lambda: all(result.ready() for result in every))
    wait_for(lambda: [*Locks(after.module.app).find()] == [])
    keys = leftovers(client, after.namespace)
    assert [key for key in keys if client.ttl(key) == -1 and not key.endswith(":meta")] == []
    assert "Cannot release" not in after.log()
    entered = [event["task"] for event in after.journal.events("inside")]
    assert len(entered) == len({*entered})
