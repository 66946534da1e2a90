"""However an execution ends, or never begins, its call no longer counts; and while it may still
run, it does. On a Redis and on a RabbitMQ broker."""

from __future__ import annotations

import signal
import threading
import time
import uuid

import pytest
from billiard.exceptions import WorkerLostError
from celery import Celery
from celery.contrib.testing.worker import start_worker
from celery.exceptions import TaskRevokedError

from celery_relock import LockedTask
from celery_relock.declaration import engine_of
from celery_relock.dedup import marker
from celery_relock.engine.protocol import KEPT
from tests.support import new_namespace, wait_for
from tests.support.messages import Message
from tests.support.parked import engine_here, lock_of, wait_until_parked

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def on_redis(module_worker):
    return module_worker("tests.dedup.apps.calls", concurrency=2)


@pytest.fixture(scope="module")
def on_rabbitmq(module_worker, rabbitmq):
    worker = module_worker(
        "tests.dedup.apps.calls",
        concurrency=2,
        namespace=new_namespace(),
        env={"RELOCK_TEST_BROKER": rabbitmq.url},
    )
    yield worker
    worker.close()


@pytest.fixture
def worker(request):
    return request.getfixturevalue(f"on_{getattr(request, 'param', 'redis')}")


ON_BOTH = pytest.mark.parametrize("worker", ["redis", "rabbitmq"], indirect=True)
# `test_peer_defects` has the same on Redis.
ON_RABBITMQ = pytest.mark.parametrize("worker", ["rabbitmq"], indirect=True)


def _began(worker, account, count=1):
    return worker.journal.wait_for("began", 20, count, account=account)


def _waits_in_its_slot(task, account):
    """Its execution has its marker, and is in the line for its lock."""
    engine = engine_here(task.app)
    wait_for(lambda: engine.inspect(f"account:{account}").waiting, what="an execution that waits")


def _counts_no_longer(task, account, seconds=10.0):
    """Before its lease, of 30 s, could have ended."""
    wait_for(lambda: task.marked(account, "") is None, seconds, "the call to count no longer")
    again = task.delay(account, "return")
    assert again.get(timeout=20) == account


@pytest.mark.parametrize("how", ["return", "reject"])
def test_when_the_body_has_ended(m, worker, account, how):
    m.ends.delay(account, how)
    _began(worker, account)
    _counts_no_longer(m.ends, account)


def test_when_the_time_is_over(m, worker, account):
    first = m.ends.apply_async((account, "limit"), time_limit=1)
    _began(worker, account)
    assert m.ends.delay(account, "").id == first.id
    _counts_no_longer(m.ends, account)


@pytest.mark.parametrize("how", ["time limit", "revoked", "killed"])
def test_when_the_failure_of_a_killed_one_can_be_seen(m, worker, account, how):
    limit = 1 if how == "time limit" else None
    first = m.ends.apply_async((account, "limit"), time_limit=limit)
    [began] = _began(worker, account)
    if how == "revoked":
        first.revoke(terminate=True, signal="SIGKILL")
    elif how == "killed":
        worker.kill(signal.SIGKILL, pid=began.pid)
    wait_for(first.ready)
    assert m.ends.delay(account, "").id != first.id


@pytest.mark.parametrize("task", ["has_no_limit", "has_no_owner"])
def test_when_it_fails_before_it_asks_for_its_marker(m, worker, account, task):
    task = getattr(m, task)
    task.delay(account)
    wait_for(lambda: task.marked(account) is None, 10, "the call to count no longer")


@ON_RABBITMQ
def test_when_it_is_terminated(m, worker, account):
    first = m.ends.delay(account, "revoke")
    _began(worker, account)
    assert m.ends.delay(account, "").id == first.id
    first.revoke(terminate=True)
    _counts_no_longer(m.ends, account)


def test_when_its_process_is_killed(m, worker, account):
    first = m.ends.delay(account, "kill")
    [began] = _began(worker, account)
    assert m.ends.delay(account, "").id == first.id
    worker.kill(signal.SIGKILL, pid=began.pid)
    with pytest.raises(WorkerLostError):
        first.get(timeout=20)
    _counts_no_longer(m.ends, account)


@ON_RABBITMQ
def test_when_it_is_killed_and_delivered_again(m, worker, account):
    first = m.ends_late.delay(account, "kill once")
    [began] = _began(worker, account)
    worker.kill(signal.SIGKILL, pid=began.pid)
    assert first.get(timeout=20) == account
    assert len(_began(worker, account, 2)) == 2
    _counts_no_longer(m.ends_late, account)


@ON_RABBITMQ
def test_when_it_was_revoked_before_it_began(m, worker, account):
    first = m.ends.apply_async((account, "return"), countdown=2)
    assert m.ends.delay(account, "return").id == first.id
    first.revoke()
    with pytest.raises(TaskRevokedError):
        first.get(timeout=20)
    _counts_no_longer(m.ends, account)


@ON_BOTH
def test_when_it_was_revoked_while_it_was_parked(m, worker, account):
    slow = f"slow{account}"
    m.without.delay(slow)
    _began(worker, slow)
    first = m.starts.delay(slow)
    wait_until_parked(worker, f"account:{slow}")
    first.revoke()
    with pytest.raises(TaskRevokedError):
        first.get(timeout=20)
    wait_for(lambda: m.starts.marked(slow) is None, what="the call to count no longer")
    worker.journal.add(f"free {slow}")


def test_when_somebody_waits_for_it_and_it_was_revoked_while_it_was_parked(m, worker, account):
    slow = f"slow{account}"
    m.without.delay(slow)
    _began(worker, slow)
    step = m.done.apply_async((slow,), link=m.without.si(account))
    wait_until_parked(worker, f"account:{slow}")
    step.revoke()
    with pytest.raises(TaskRevokedError):
        step.get(timeout=20)
    # Not by `marked`, which asks for the state, too: it may be stored nowhere.
    name = marker.name_for(m.done.name, [f"account:{slow}"])
    wait_for(lambda: marker.look(engine_here(m.app), name) is None, what="its marker to go")
    worker.journal.add(f"free {slow}")


@ON_RABBITMQ
def test_when_it_has_expired(m, worker, account):
    first = m.ends.apply_async((account, "return"), countdown=1.5, expires=1)
    assert m.ends.delay(account, "return").id == first.id
    with pytest.raises(TaskRevokedError):
        first.get(timeout=20)
    _counts_no_longer(m.ends, account)


def test_a_call_by_name_that_does_not_fit_and_has_expired_has_no_marker_to_release(m, worker):
    sent = m.app.send_task(
        m.ends.name, (1, 2, 3), countdown=1, expires=0.5, queue=m.app.conf.task_default_queue
    )
    with pytest.raises(TaskRevokedError):
        sent.get(timeout=20)
    assert "cannot be made up for" not in worker.log()


@ON_RABBITMQ
def test_an_execution_counts_through_its_retries(m, worker, account):
    first = m.ends.delay(account, "retry")
    for tries in (1, 2):
        _began(worker, account, tries)
        wait_for(lambda: first.state == "RETRY", what="the retry")
        assert m.ends.delay(account, "retry").id == first.id
    assert first.get(timeout=20) == account
    assert [e["retries"] for e in _began(worker, account)] == [0, 1, 2]
    _counts_no_longer(m.ends, account)


def test_a_retry_that_the_body_does_not_wait_for_counts_too(m, worker, account):
    first = m.ends.delay(account, "retry and go on")
    first.get(timeout=20)
    assert m.ends.delay(account, "").id == first.id
    _began(worker, account, 2)
    _counts_no_longer(m.ends, account)


def test_a_call_counts_through_retries_that_celery_makes_of_errors(m, worker, account):
    first = m.fails_first.delay(account, "once")
    wait_for(lambda: first.state == "RETRY", what="the retry")
    assert m.fails_first.delay(account, "once").id == first.id
    assert first.get(timeout=20) == account
    assert [e["retries"] for e in _began(worker, account)] == [0, 1]
    _counts_no_longer(m.fails_first, account)


@pytest.mark.parametrize("until", ["start", "done"])
def test_a_call_counts_through_retries_that_celery_makes_of_conflicts(m, worker, account, until):
    task = m.app.tasks[f"conflicts_until_{until}"]
    with lock_of(worker, f"account:{account}"):
        first = task.delay(account)
        wait_for(lambda: first.state == "RETRY", what="the retry")
        assert task.delay(account).id == first.id
    assert task.delay(account).id == first.id
    assert first.get(timeout=20) == account
    assert len(_began(worker, account)) == 1
    _counts_no_longer(task, account)


def test_the_last_call_runs_also_if_the_first_waits_for_the_retry_of_its_conflict(
    m, worker, account
):
    task = m.app.tasks["conflicts_and_is_replaced"]
    with lock_of(worker, f"account:{account}"):
        first = task.delay(account, "old")
        wait_for(lambda: first.state == "RETRY", what="the retry")
    last = task.delay(account, "new")
    assert last.id != first.id
    assert last.get(timeout=20) == account


def test_a_call_counts_through_the_retry_that_celery_makes_of_a_reject(m, worker, account):
    m.rejects_first.delay(account)
    assert [e["retries"] for e in _began(worker, account, 2)] == [0, 1]
    wait_for(lambda: m.rejects_first.marked(account) is None, 10, "it to count no longer")


def test_a_call_counts_no_longer_when_celery_makes_no_more_retries_of_its_errors(
    m, worker, account
):
    first = m.fails_first.delay(account, "always")
    with pytest.raises(LookupError):
        first.get(timeout=20)
    assert len(_began(worker, account)) == 3
    [failed] = worker.journal.wait_for("failed", account=account)
    assert not failed["marked"], "on_failure can send it again"


def test_a_retry_that_is_revoked_counts_no_longer(m, worker, account):
    first = m.ends.delay(account, "retry")
    wait_for(lambda: first.state == "RETRY", what="the retry")
    first.revoke()
    with pytest.raises(TaskRevokedError):
        first.get(timeout=20)
    _counts_no_longer(m.ends, account)


def test_a_retry_that_exits_before_it_is_told_of_counts_no_longer(module_worker, account):
    worker = module_worker("tests.dedup.apps.calls", pool="threads", namespace=new_namespace())
    task = worker.module.exits_in_its_retry
    task.delay(account)
    worker.journal.wait_for("gone", account=account)
    wait_for(lambda: task.marked(account) is None, what="the call to count no longer")


def test_until_start_counts_until_the_first_try_and_every_retry_runs(m, worker, account):
    first = m.tries_again.delay(account)
    wait_for(lambda: first.state == "RETRY", what="the retry")
    second = m.tries_again.delay(account)
    assert second.id != first.id
    assert first.get(timeout=20) == second.get(timeout=20) == account
    assert len(_began(worker, account)) == 6
    assert m.tries_again.marked(account) is None


@ON_BOTH
def test_one_that_goes_back_to_the_queue_still_counts(m, worker, account):
    first = m.ends_late.delay(account, "requeue")
    _began(worker, account, 2)
    assert m.ends_late.marked(account, "").id == first.id
    worker.journal.add(f"free {account}")
    assert first.get(timeout=20) == account
    assert len(_began(worker, account, 2)) == 2
    _counts_no_longer(m.ends_late, account)


def test_one_that_is_put_back_when_it_was_acknowledged_is_lost_and_counts_no_longer(
    m, worker, account
):
    m.ends.delay(account, "requeue")
    _began(worker, account)
    _counts_no_longer(m.ends, account)


def test_a_copy_of_one_that_has_begun_is_no_call_that_is_queued(m, worker, account):
    slow = f"slow{account}"
    message = Message(worker, m.starts, slow)
    message.deliver()
    _began(worker, slow)
    message.deliver()
    worker.wait_for_log(rf"{message.id}\] (parked|waits)")  # behind the first
    assert m.starts.marked(slow) is None
    second = m.starts.delay(slow)
    worker.journal.add(f"free {slow}")
    assert second.get(timeout=20) == second.id
    assert [e["id"] for e in _began(worker, slow)] == [message.id, second.id]


def test_a_second_copy_of_its_message_acquires_nothing_and_frees_nothing(m, worker, account):
    slow = f"slow{account}"
    message = Message(worker, m.done, slow, with_header=False)
    message.deliver()
    _began(worker, slow)
    message.deliver()
    worker.wait_for_log(rf"(?s){message.id}.*received.*{message.id}.*received")
    assert m.done.delay(slow).id == message.id
    worker.journal.add(f"free {slow}")
    assert message.result.get(timeout=20) == message.id
    wait_for(lambda: m.done.marked(slow) is None, what="the call to count no longer")
    second = m.done.delay(slow)
    assert second.get(timeout=20) == second.id


def test_a_call_that_does_not_count_has_no_retry_that_does(m, worker, account):
    first = m.ends.apply_async((account, "retry"), lock_dedup=False)
    for tries in (1, 2):
        _began(worker, account, tries)
        wait_for(lambda: first.state == "RETRY", what="the retry")
        assert m.ends.marked(account, "retry") is None
    headers = [e["header"] for e in _began(worker, account, 3)]
    assert [each["options"] for each in headers] == [{"dedup": False}] * 3
    assert first.get(timeout=20) == account


# Celery's own, where it stores a result in the process of the test.
@pytest.mark.filterwarnings("ignore:Call to deprecated setex")
def test_the_last_call_wins_over_one_that_waits_in_a_slot(m, worker, account):
    slow = f"slow{account}"
    m.without.delay(slow)
    _began(worker, slow)
    first = m.replaces_in_its_slot.delay(slow, "first")
    _waits_in_its_slot(m.replaces_in_its_slot, slow)
    second = m.replaces_in_its_slot.delay(slow, "second")
    assert second.id != first.id
    worker.journal.add(f"free {slow}")
    assert second.get(timeout=20) == second.id
    with pytest.raises(TaskRevokedError):
        first.get(timeout=20)
    assert [e["more"] for e in _began(worker, slow)] == [[], ["second"]]


# Celery's own, where it stores a result in the process of the test.
@pytest.mark.filterwarnings("ignore:Call to deprecated setex")
@pytest.mark.parametrize("task", ["replaced_at_the_gate", "replaced_late_at_the_gate"])
def test_one_that_is_replaced_between_showing_blocked_and_parking_is_revoked(
    m, worker, account, task
):
    slow, task = f"slow{account}", getattr(m, task)
    m.without.delay(slow)
    _began(worker, slow)
    first = task.delay(slow, "first")
    worker.journal.wait_for("at the gate", id=first.id)
    second = task.delay(slow, "second")
    assert m.app.AsyncResult(first.id).state == "REVOKED"  # another object: it remembers that
    for each in (first, second):
        worker.journal.add(f"open {each.id}")
    worker.wait_for_log(rf"{first.id}\] (parked|waits|was replaced|is a late)")
    with pytest.raises(TaskRevokedError, match="replaced by"):
        first.get(timeout=20)
    worker.journal.add(f"free {slow}")
    assert second.get(timeout=20) == second.id
    assert [e["more"] for e in _began(worker, slow)] == [[], ["second"]]


# Celery's own, where it stores a result in the process of the test.
@pytest.mark.filterwarnings("ignore:Call to deprecated setex")
def test_one_that_begins_while_a_later_call_is_about_to_replace_it_is_not_replaced(
    m, worker, account, monkeypatch
):
    """It arrives after the later call has looked at its marker, and is to begin before that looks
    again: the one must not believe that it was replaced while the other believes that it runs."""
    slow, task = f"slow{account}", m.replaces_in_its_slot
    m.without.delay(slow)
    _began(worker, slow)
    first = task.apply_async((slow, "first"), countdown=1)
    backend = engine_here(m.app).backend
    release, arrives = type(backend).release, [True]

    def release_late(*args, **how):
        if not arrives:
            return release(backend, *args, **how)
        arrives.clear()
        _waits_in_its_slot(task, slow)
        released = release(backend, *args, **how)
        worker.journal.add(f"free {slow}")
        worker.wait_for_log(rf"{first.id}\] (was replaced|is a late|parked|succeeded)")
        return released

    monkeypatch.setattr(backend, "release", release_late)
    second = task.delay(slow, "second")
    assert second.get(timeout=20) == second.id != first.id
    assert first.get(timeout=20) == first.id
    assert [e["more"] for e in _began(worker, slow)] == [[], ["first"], ["second"]]


# Celery's own, where it stores a result in the process of the test.
@pytest.mark.filterwarnings("ignore:Call to deprecated setex")
@pytest.mark.parametrize("task", ["replaces", "replaces_until_done", "once_a_minute"])
def test_one_that_arrives_while_a_later_call_replaces_it_does_not_run(
    m, worker, account, monkeypatch, task
):
    """Its marker is gone, and nothing else is known of it yet."""
    task = getattr(m, task)
    first = task.apply_async((account, "first"), countdown=1)
    backend = engine_here(m.app).backend
    release, arrives = type(backend).release, [True]

    def go_on_late(*args, **how):
        released = release(backend, *args, **how)
        if arrives:
            arrives.clear()
            worker.wait_for_log(rf"{first.id}\] (was replaced|is a late|succeeded)")
        return released

    monkeypatch.setattr(backend, "release", go_on_late)
    second = task.delay(account, "second")
    assert second.get(timeout=20) == second.id != first.id
    with pytest.raises(TaskRevokedError, match="replaced by"):
        first.get(timeout=20)
    assert [e["more"] for e in _began(worker, account)] == [["second"]]


@pytest.fixture(scope="module")
def without_results(module_worker):
    return module_worker(
        "tests.dedup.apps.calls",
        concurrency=2,
        namespace=new_namespace(),
        env={"RELOCK_TEST_RESULTS": "none"},
    )


@pytest.mark.parametrize("task", ["replaces", "replaces_late", "forgets_in_its_slot"])
def test_the_last_call_wins_also_where_no_result_is_stored(without_results, account, caplog, task):
    worker, slow = without_results, f"slow{account}"
    worker.module.without.delay(slow)
    _began(worker, slow)
    task = getattr(worker.module, task)
    in_its_slot = task is worker.module.forgets_in_its_slot
    first = task.apply_async((slow, "first"), countdown=0 if in_its_slot else 1)
    if in_its_slot:
        _waits_in_its_slot(task, slow)
    task.delay(slow, "second")
    if not in_its_slot:
        worker.wait_for_log(rf"{first.id}\] (parked|waits|was replaced|is a late)")
    worker.journal.add(f"free {slow}")
    _began(worker, slow, 2)
    worker.wait_for_log(rf"{first.id}\] (parked|waits|was replaced|is a late)")
    wait_for(lambda: task.marked(slow) is None, what="both to be over")
    assert [e["more"] for e in _began(worker, slow)] == [[], ["second"]]
    assert not caplog.records
    assert "Traceback" not in worker.log()


@pytest.fixture(scope="module")
def alone(module_worker):
    """A worker that may be killed."""
    return module_worker("tests.dedup.apps.calls", concurrency=1, namespace=new_namespace())


def test_an_execution_that_takes_longer_than_the_lease_counts_until_its_worker_is_killed(
    alone, account
):
    task = alone.module.ends_by_its_lease
    first = task.delay(account, "kill")
    [began] = _began(alone, account)
    longer = time.monotonic() + 1.5 * task.lock_ttl
    while time.monotonic() < longer:
        assert task.marked(account, "").id == first.id
        time.sleep(0.1)
    alone.kill(signal.SIGKILL)
    alone.kill(signal.SIGKILL, pid=began.pid)
    wait_for(lambda: task.marked(account, "") is None, 2 * task.lock_ttl, "the lease to end")


def test_it_counts_until_its_last_retry_ended_though_one_came_before_the_marker_was_left_to_it(
    monkeypatch,
):
    app = Celery(uuid.uuid4().hex, broker="memory://", backend="cache+memory://")
    app.conf.update(
        relock_url="memory://",
        task_default_queue=uuid.uuid4().hex,
        broker_transport_options={"polling_interval": 0.01},  # instead of a second
    )
    engine, begun = engine_of(app), threading.Event()

    def before_start(*_):
        if comes_thrice.request.retries == 2:
            wait_for(is_left, what="the marker to be left to the last one")

    options = {"lock_key": "a", "lock_dedup": "until_done", "before_start": before_start}

    @app.task(base=LockedTask, bind=True, shared=False, **options)
    def comes_thrice(self):
        if self.request.retries == 1:
            begun.set()
            wait_for(is_left, what="the marker to be left to this one")
        if self.request.retries < 2:
            raise self.retry(countdown=0)

    def is_left():
        holds = engine.inspect(marker.name_for(comes_thrice.name, ["a"])).holds
        return [hold.attempt_id for hold in holds] == [KEPT]

    def mark_as_retry(*args, **more):
        if not comes_thrice.request.retries:
            assert begun.wait(20)  # the retry is quicker than this
        return mark(*args, **more)

    mark = type(app.backend).mark_as_retry
    monkeypatch.setattr(type(app.backend), "mark_as_retry", mark_as_retry)
    with start_worker(app, pool="threads", concurrency=2, perform_ping_check=False):
        result = comes_thrice.delay()
        wait_for(lambda: result.state == "SUCCESS", what="the last one")
        wait_for(lambda: comes_thrice.marked() is None, 10, "the call to count no longer")
