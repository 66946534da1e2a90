"""Which `relock_prefix` has what is sent or called, on each way and at each place."""

from __future__ import annotations

import uuid

import celery
import pytest
from celery import Celery

from celery_relock import Lock, is_dropped, locked
from celery_relock.admin import Locks
from tests.support import wait_for
from tests.support.parked import wait_until_parked

# By these names the app has them.
WAYS = [
    *("delay", "by its name", "behind a plain step", "behind two", "as a link", "in a group"),
    *("as a chord's body", "in a locked canvas"),
]
THREADS = ["to_thread", "an executor", "apply", "lock_for", "delay", "by its name"]
# Where a sender sends to, and where the locks live.
_WHERE = [
    *("broker_url", "broker_transport_options", "result_backend"),
    *("result_backend_transport_options", "task_default_queue", "relock_url", "relock_namespace"),
]
_SINCE_57 = pytest.mark.skipif(
    celery.VERSION < (5, 7), reason="only from Celery 5.7 on does it fail the task at once"
)
ENDS = [
    *("fails", "is killed", "is too long"),
    *(pytest.param(how, marks=_SINCE_57) for how in ("is rejected", "exits")),
]


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


@pytest.mark.parametrize(
    ("knows", "expected"),
    [
        ({}, "left:"),
        ({"relock_prefix": "acme:"}, "acme:"),
        ({"relock_prefix": lambda: ""}, ""),
    ],
    ids=["no prefix", "a prefix", "no tenant"],
)
def test_a_locked_canvas_has_the_prefix_of_the_worker_if_its_sender_knows_none(
    new_worker, account, knows, expected
):
    worker = new_worker("tests.task.apps.prefixes", concurrency=1)
    m = worker.module
    m.leaves.delay("left:").get(timeout=20)
    with Celery("sender", set_as_current=False) as sender:
        sender.conf.update({name: m.app.conf[name] for name in _WHERE}, **knows)
        plain = sender.signature(m.plain.name, immutable=True)
        name, where = f"account:{account}", (m.app.conf.relock_url, m.app.conf.relock_namespace)
        with Lock(where[0], f"{expected}{name}", namespace=where[1]):
            dropped = locked(plain, key=name, on_conflict="drop").delay().get(timeout=20)

    assert is_dropped(dropped)


@pytest.mark.parametrize("how", THREADS)
@pytest.mark.parametrize("task", ["in_a_thread", "in_a_thread_under_lock", "calls_one_that_does"])
def test_it_goes_into_a_thread_that_has_a_copy_of_the_context(m, account, how, task):
    m.tenant.set("acme:")
    found = getattr(m, task).delay(how, account).get(timeout=20)

    assert found == f"acme:account:{account}"


@pytest.mark.parametrize("how", THREADS)
def test_in_a_thread_the_innermost_body_says_it(m, account, how):
    m.tenant.set("other:")
    found = m.applies_for.delay("acme:", how, account).get(timeout=20)

    assert found == f"acme:account:{account}"


def _options(how):
    return {"is too long": {"time_limit": 1}, "has expired": {"expires": -1}}.get(how, {})


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("task", ["works", "works_without_lock"])
def test_an_error_callback_has_that_of_the_task_that_failed(worker, m, account, how, task):
    m.tenant.set("acme:")
    callback = m.look.si(account)
    getattr(m, task).apply_async((how, account), link_error=callback, **_options(how))

    assert _looked(worker, account) == f"acme:account:{account}"


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("callback", ["called_back", "called_back_under_lock"])
def test_one_that_celery_calls_has_it_too_and_what_it_calls_and_sends(
    worker, m, account, how, callback
):
    m.tenant.set("acme:")
    callback = getattr(m, callback).s()
    m.works.apply_async((how, account), link_error=callback, **_options(how))

    for each in (f"{account}-called", f"{account}-sent"):
        assert _looked(worker, each) == f"acme:account:{each}"


@pytest.mark.parametrize("how", [*ENDS, "has expired"])
def test_the_error_callback_of_a_chord_has_that_of_the_member_that_failed(worker, m, account, how):
    m.tenant.set("acme:")
    _send_chord(m, m.works_without_lock.si(how, account).set(**_options(how)), account)

    assert _looked(worker, account) == f"acme:account:{account}"


def test_the_error_callback_of_a_chord_has_that_of_the_member_that_was_revoked(worker, m, account):
    m.tenant.set("acme:")
    member = _send_chord(m, m.works_without_lock.si("lasts", account), account)
    wait_for(lambda: member.state == "STARTED", what="the member to begin")
    member.revoke(terminate=True)

    assert _looked(worker, account) == f"acme:account:{account}"


@pytest.mark.filterwarnings("ignore:Call to deprecated setex")
def test_it_has_that_also_of_a_member_that_somebody_cancels(worker, m, account):
    m.tenant.set("acme:")
    with m.look.lock_for(f"{account}-held"):
        member = _send_chord(m, m.look.si(f"{account}-held"), account)
        wait_until_parked(worker, f"acme:account:{account}-held")  # BLOCKED is stored before
        m.tenant.set("")
        assert Locks(m.app).cancel(member.id)

    assert _looked(worker, account) == f"acme:account:{account}"


def _send_chord(m, member, account):
    member = member.set(task_id=uuid.uuid4().hex)
    m.sends_chord.delay(member, m.look.si(f"{account}-body").on_error(m.look.si(account)))
    return m.app.AsyncResult(member.id)


def test_a_tasks_own_hook_has_it_where_its_process_is_gone(worker, m, account):
    m.tenant.set("acme:")
    how = "is too long" if celery.VERSION >= (5, 7) else "fails"
    m.works.apply_async((how, account), **_options(how))

    assert _looked(worker, f"{account}-on_failure") == f"acme:account:{account}-on_failure"
