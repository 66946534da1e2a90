"""A second call while one like it is queued, or runs: what is sent, and what the caller gets."""

from __future__ import annotations

import contextlib
import time
import uuid

import pytest
from celery import Celery, chain, chord, group
from celery.app.trace import build_tracer
from celery.beat import ScheduleEntry, Scheduler
from celery.exceptions import TaskRevokedError
from celery.result import EagerResult
from celery.signals import before_task_publish
from kombu import Connection
from kombu.exceptions import OperationalError

from celery_relock import LockedTask, declaration, is_dropped, signals
from celery_relock.declaration import engine_of
from celery_relock.dedup import marker
from celery_relock.engine.protocol import LINE, Conflict
from celery_relock.errors import DuplicateTask, LockConfigError, LockLost, LockUnavailable
from tests.support import leftovers, wait_for
from tests.support.messages import Message
from tests.support.parked import engine_here, lock_of, wait_until_parked

DAY = 86_400.0


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker("tests.dedup.apps.calls", concurrency=3)


@pytest.fixture
def slow(worker):
    """An account whose task runs until the test says `free`."""
    name = f"slow{uuid.uuid4().hex}"
    yield name
    worker.journal.add(f"free {name}")


def _of(worker, account, name="began"):
    return worker.journal.events(name, account=account)


def _began(worker, account, count=1):
    return worker.journal.wait_for("began", 20, count, account=account)


def _free(worker, account):
    worker.journal.add(f"free {account}")


def _mark(task, *args):
    """The marker of a call: how many seconds it lasts if nobody renews it, None without one."""
    name = marker.name_for(task.name, [f"account:{args[0]}"])
    found = marker.look(engine_here(task.app), name)
    return None if found is None else found.remaining


@pytest.mark.parametrize("task", ["starts", "done", "for_two_seconds"])
def test_a_call_while_one_is_queued_gives_the_result_of_that_and_sends_nothing(
    worker, m, account, task
):
    task = getattr(m, task)
    first = task.apply_async((account,), countdown=2)
    others = [task.delay(account), task.delay(account=account), task.s(account).delay()]
    assert {each.id for each in others} == {first.id}
    assert [each.get(timeout=20) for each in others] == [first.id] * 3
    assert len(_of(worker, account)) == 1


def test_until_done_holds_while_it_runs_and_no_longer_than_until_its_result_is_there(
    worker, m, slow
):
    first = m.done.delay(slow)
    _began(worker, slow)
    assert m.done.delay(slow).id == first.id
    assert _mark(m.done, slow) <= 30  # renewed like the lock, so it dies with its worker
    _free(worker, slow)
    first.get(timeout=20)
    second = m.done.delay(slow)
    assert second.get(timeout=20) == second.id != first.id


def test_until_start_lets_one_more_be_queued_while_one_runs(worker, m, slow):
    first = m.starts.delay(slow)
    _began(worker, slow)
    second = m.starts.delay(slow)
    assert second.id != first.id
    wait_for(lambda: _mark(m.starts, slow) > DAY, what="the second one to be parked")
    assert m.starts.delay(slow).id == second.id
    _free(worker, slow)
    second.get(timeout=20)
    assert [e["id"] for e in _of(worker, slow)] == [first.id, second.id]
    assert _mark(m.starts, slow) is None


def test_seconds_count_from_the_publish_and_whatever_the_execution_does(worker, m, account):
    first = m.for_two_seconds.delay(account)
    first.get(timeout=20)
    assert m.for_two_seconds.delay(account).id == first.id
    assert 0 < _mark(m.for_two_seconds, account) <= 2
    wait_for(lambda: _mark(m.for_two_seconds, account) is None)
    assert m.for_two_seconds.delay(account).id != first.id


def test_seconds_go_on_when_the_execution_is_ended_and_not_when_it_never_began(
    worker, m, slow, account
):
    ended = m.for_two_seconds.apply_async((slow,), lock_dedup=60)
    _began(worker, slow)
    never = m.for_two_seconds.apply_async((account,), countdown=1, lock_dedup=60)
    ended.revoke(terminate=True)
    never.revoke()
    wait_for(lambda: {ended.state, never.state} == {"REVOKED"}, 10, "both to be revoked")
    wait_for(lambda: _mark(m.for_two_seconds, account) is None)
    assert _mark(m.for_two_seconds, slow)
    m.for_two_seconds.unmark(slow)


def test_raise_names_the_call_that_is_there(m, account):
    first = m.raises.apply_async((account,), countdown=60)
    with pytest.raises(DuplicateTask, match=f"{account}.*{first.id}.*'raise'") as caught:
        m.raises.delay(account)
    assert caught.value.task_id == first.id
    assert caught.value.name == f"account:{account}"
    first.revoke()


def test_drop_gives_a_result_that_says_so(m, account):
    first = m.drops.apply_async((account,), countdown=60)
    result = m.drops.delay(account)
    assert isinstance(result, EagerResult)
    assert is_dropped(result.get())
    assert result.get()["of"] == first.id
    first.revoke()


# Celery's own, where it stores a result in the process of the test.
@pytest.mark.filterwarnings("ignore:Call to deprecated setex")
@pytest.mark.parametrize("where", ["held for its countdown", "parked"])
def test_replace_revokes_the_queued_one_and_the_last_one_runs(worker, m, slow, where):
    if where == "parked":
        m.without.delay(slow)
        _began(worker, slow)
        first = m.replaces.delay(slow, "first")
        wait_for(lambda: first.state == "BLOCKED", what="it to wait")
    else:
        first = m.replaces.apply_async((slow, "first"), countdown=60)
    # Else it might begin before the third is sent.
    second = m.replaces.apply_async((slow, "second"), countdown=60)
    third = m.replaces.delay(slow, "third")
    assert len({first.id, second.id, third.id}) == 3
    _free(worker, slow)
    assert third.get(timeout=20) == third.id
    for gone in (first, second):
        with pytest.raises(TaskRevokedError, match="replaced by"):
            gone.get(timeout=20)
    ran = [tuple(e["more"]) for e in _of(worker, slow) if e["more"]]
    assert ran == [("third",)]


# Celery's own, where it stores a result in the process of the test.
@pytest.mark.filterwarnings("ignore:Call to deprecated setex")
@pytest.mark.parametrize("where", ["held for its countdown", "parked"])
@pytest.mark.parametrize("task", ["replaces_in_order", "replaces_late_in_order"])
def test_a_replaced_call_holds_up_nobody_in_its_order(worker, m, slow, task, where):
    task = getattr(m, task)
    running = m.in_order.delay(slow, "running")
    _began(worker, slow)
    first = task.apply_async((slow, "first"), countdown=0 if where == "parked" else 1)
    if where == "parked":
        wait_for(lambda: first.state == "BLOCKED", what="it to wait for its turn")
    last, behind = task.delay(slow, "last"), m.in_order.delay(slow, "behind")
    _free(worker, slow)
    assert running.get(timeout=20) == running.id
    assert last.get(timeout=20) == last.id
    assert behind.get(timeout=20) == behind.id
    with pytest.raises(TaskRevokedError, match="replaced by"):
        first.get(timeout=20)
    ran = [e["more"] for e in _of(worker, slow)]
    assert ran == [["running"], ["last"], ["behind"]]


def test_a_replaced_call_leaves_its_place_in_its_order_at_once(m, account):
    for _ in range(2):
        last = m.replaces_in_order.apply_async((account,), countdown=60)
    assert engine_here(m.app).inspect(f"{LINE}account:{account}").waiting == 1
    last.revoke()


@pytest.mark.parametrize("kind", ["chain", "chord", "link", "retry"])
def test_what_somebody_waits_for_is_not_replaced(worker, m, account, kind):
    step, after, task = m.replaces.si(account, "a step"), m.counts.si(f"{account}-2", 1), m.replaces
    waited = None
    if kind == "retry":
        task = m.replaces_and_retries
        waited = task.delay(account, "retries")
        wait_for(lambda: waited.state == "RETRY", what="the retry")
    with lock_of(worker, f"account:{account}"):
        if kind == "chain":
            waited = chain(step, after).apply_async()
        elif kind == "chord":
            waited = chord([step, after], m.add.si(1, 2)).apply_async()
        elif kind == "link":
            waited = step.apply_async(link=after)
        wait_until_parked(worker, f"account:{account}")
        last = task.delay(account, "last")
    assert waited.get(timeout=30)
    assert last.get(timeout=20)


# Celery's own, where it stores a result in the process of the test.
@pytest.mark.filterwarnings("ignore:Call to deprecated setex")
def test_what_a_call_that_runs_may_be_replaced_by_is_said_by_its_own_mode(worker, m, slow):
    first = m.replaces_until_done.delay(slow, "first")
    _began(worker, slow)
    later = m.replaces_until_done.apply_async((slow, "later"), lock_dedup="until_start")
    assert later.id == first.id
    _free(worker, slow)
    assert first.get(timeout=20) == first.id


# Celery's own, where it stores a result in the process of the test.
@pytest.mark.filterwarnings("ignore:Call to deprecated setex")
def test_a_replaced_call_stays_revoked_where_celery_stores_started(worker, m, account):
    first = m.replaces_and_tracks.apply_async((account, "first"), countdown=3)
    second = m.replaces_and_tracks.delay(account, "second")
    _free(worker, account)
    assert second.get(timeout=20) == second.id
    worker.wait_for_log(rf"{first.id}\] (parked|waits|was replaced|is a late)")
    with pytest.raises(TaskRevokedError, match="replaced by"):
        first.get(timeout=20)


# Celery's own, where it stores a result in the process of the test.
@pytest.mark.filterwarnings("ignore:Call to deprecated setex")
def test_within_the_seconds_only_one_that_has_not_begun_is_replaced(worker, m, slow):
    replaced = m.once_a_minute.apply_async((slow, "first"), countdown=2)
    last = m.once_a_minute.delay(slow, "second")
    [began] = _began(worker, slow)
    assert began["id"] == last.id != replaced.id
    assert m.once_a_minute.delay(slow).id == last.id  # it runs
    _free(worker, slow)
    assert last.get(timeout=20) == last.id
    assert m.once_a_minute.delay(slow).id == last.id  # it has run
    assert 30 < _mark(m.once_a_minute, slow) <= 60
    with pytest.raises(TaskRevokedError):
        replaced.get(timeout=20)
    assert len(_of(worker, slow)) == 1


def test_one_that_runs_is_not_replaced_but_followed(worker, m, slow):
    first = m.replaces.delay(slow, "first")
    _began(worker, slow)
    second = m.replaces.delay(slow, "second")
    _free(worker, slow)
    assert (first.get(timeout=20), second.get(timeout=20)) == (first.id, second.id)


@pytest.mark.parametrize("never", [False, None])
def test_a_call_can_be_made_whatever_is_queued(worker, m, account, never):
    first = m.done.apply_async((account,), countdown=2)
    second = m.done.apply_async((account,), lock_dedup=never)
    assert second.get(timeout=20) == second.id != first.id
    assert m.done.delay(account).id == first.id  # which still is the one that counts
    assert first.get(timeout=20) == first.id


def test_a_single_call_of_any_task_can_ask_for_it(m, account):
    first = m.without.apply_async((account,), countdown=2, lock_dedup="until_done")
    again = m.without.apply_async((account,), lock_dedup="until_done")
    assert again.id == first.id
    assert m.without.delay(account).id != first.id
    first.get(timeout=20)
    with pytest.raises(LockConfigError, match="lock_dedup='until_dnoe'"):
        m.without.apply_async((account,), lock_dedup="until_dnoe")


def test_a_single_call_says_what_becomes_of_a_duplicate(m, account):
    own = {"lock_dedup": "until_done", "lock_on_duplicate": "raise"}
    first = m.without.apply_async((account,), countdown=2, **own)
    with pytest.raises(DuplicateTask) as raised:
        m.without.apply_async((account,), **own)
    assert raised.value.task_id == first.id
    first.get(timeout=30)


def test_tasks_of_two_kinds_are_no_duplicates_of_each_other(m, account):
    first = m.done.apply_async((account,), countdown=60)
    second = m.starts.delay(account)
    assert second.get(timeout=20) == second.id != first.id
    first.revoke()


def test_nothing_that_celery_sends_for_a_canvas_is_taken_for_a_duplicate(worker, m, account):
    queued = m.counts.apply_async((account,), countdown=30)
    steps = chain(m.counts.si(account, 1), m.counts.si(account, 2), m.add.s(10)).apply_async()
    members = group(m.counts.si(account, 3), m.counts.si(account, 3)).apply_async()
    body = chord([m.counts.si(account, 4), m.counts.si(account, 4)], m.total.s()).apply_async()
    linked = m.counts.apply_async((account, 5), link=m.counts.si(account, 6))
    assert steps.get(timeout=30) == 12
    assert members.get(timeout=30) == [3, 3]
    assert body.get(timeout=30) == 8
    assert linked.get(timeout=30) == 5
    _began(worker, account, 8)
    assert m.counts.delay(account).id == queued.id
    queued.revoke()


@pytest.mark.parametrize("state", ["is queued", "runs"])
def test_a_call_by_name_finds_out_when_it_is_to_run(worker, m, slow, state):
    if state == "runs":
        first = m.drops.delay(slow)
        _began(worker, slow)
    else:
        first = m.drops.apply_async((slow,), countdown=3)
    by_name = m.app.send_task(m.drops.name, (slow,), queue=m.app.conf.task_default_queue)
    found = by_name.get(timeout=20)
    assert is_dropped(found)
    assert found["of"] == first.id
    assert m.drops.delay(slow).get()["of"] == first.id  # the other one's marker was left alone
    _free(worker, slow)
    assert first.get(timeout=20) == first.id


def test_a_call_by_name_fails_where_duplicates_are_errors(m, account):
    first = m.raises.apply_async((account,), countdown=3)
    by_name = m.app.send_task(m.raises.name, (account,), queue=m.app.conf.task_default_queue)
    with pytest.raises(DuplicateTask) as caught:
        by_name.get(timeout=20)
    assert caught.value.task_id == first.id
    assert first.get(timeout=20) == first.id


@pytest.mark.parametrize(("name", "told"), [("drops", "SUCCESS"), ("raises", "FAILURE")])
def test_a_copy_of_a_call_by_name_that_was_a_duplicate_does_not_run_when_the_other_is_over(
    worker, m, slow, name, told
):
    twin = Message(worker, getattr(m, name), slow)
    first = twin.task.delay(slow)
    _began(worker, slow)
    twin.deliver()
    wait_for(lambda: twin.result.state == told)
    _free(worker, slow)
    assert first.get(timeout=20) == first.id
    twin.deliver()
    worker.wait_for_log(rf"{twin.id}\] is a late copy")
    assert twin.result.state == told
    assert [event["id"] for event in _of(worker, slow, "began")] == [first.id]


def test_a_call_by_name_counts_once_it_runs_or_is_parked(worker, m, slow):
    send, queue = m.app.send_task, m.app.conf.task_default_queue
    running = send(m.done.name, (slow,), queue=queue)
    _began(worker, slow)
    assert m.done.delay(slow).id == running.id
    parked = send(m.starts.name, (slow,), queue=queue)
    wait_for(lambda: parked.state == "BLOCKED", what="it to be parked")
    assert m.starts.delay(slow).id == parked.id
    _free(worker, slow)
    assert parked.get(timeout=20) == parked.id


def test_two_calls_by_name_with_one_id_both_run(worker, m, slow):
    calls = []
    for number in (1, 2):
        own = {"task_id": calls[0].id} if calls else {}
        sent = m.app.send_task(
            m.done.name, (slow, number), queue=m.app.conf.task_default_queue, **own
        )
        calls.append(sent)
        _began(worker, slow)
    wait_until_parked(worker, f"account:{slow}")
    _free(worker, slow)
    _began(worker, slow, 2)
    wait_for(lambda: len(_of(worker, slow, "ended")) == 2, what="both to end")
    assert calls[1].get(timeout=20) == calls[0].id


def test_a_call_by_name_takes_the_place_of_one_that_may_be_replaced(worker, m, account):
    first = m.replaces.apply_async((account, "first"), countdown=2)
    by_name = m.app.send_task(
        m.replaces.name, (account, "second"), queue=m.app.conf.task_default_queue
    )
    assert by_name.get(timeout=20) == by_name.id
    with pytest.raises(TaskRevokedError):
        first.get(timeout=20)


def test_beat_with_the_code_of_the_task_does_not_pile_up(m, account):
    entry = ScheduleEntry("report", m.done.name, schedule=60, args=(account,), app=m.app)
    entry.options = {"countdown": 2}
    beat = Scheduler(m.app, lazy=True)
    first, second = beat.apply_async(entry), beat.apply_async(entry)
    assert second.id == first.id
    assert first.get(timeout=20) == first.id


def test_the_marker_outlasts_a_countdown_and_ends_with_the_message(m, account):
    far = m.done.apply_async((account,), countdown=3 * DAY)
    assert 4 * DAY - 60 < _mark(m.done, account) <= 4 * DAY
    far.revoke()
    short = uuid.uuid4().hex
    m.done.apply_async((short,), countdown=3, expires=10)
    assert 10 < _mark(m.done, short) <= 11  # a worker's clock may be a second behind


def test_a_call_that_expires_behind_others_swallows_nothing_from_then_on(m, account):
    """A worker that is busy discards its message much later."""
    where = {"queue": f"nobody-{account}"}
    first = m.done.apply_async((account,), expires=1.5, **where)
    assert m.done.apply_async((account,), **where).id == first.id
    wait_for(lambda: _mark(m.done, account) is None, what="its expiry")
    assert m.done.apply_async((account,), **where).id != first.id


def test_a_caller_that_is_killed_before_it_has_sent_leaves_a_marker_for_a_minute(m, account):
    seconds = []

    def _sends(**_):
        seconds.append(_mark(m.done, account))

    before_task_publish.connect(_sends)
    try:
        call = m.done.apply_async((account,), countdown=60)
    finally:
        before_task_publish.disconnect(_sends)
    assert 30 < seconds[0] <= 60
    assert _mark(m.done, account) > DAY
    call.revoke()


def test_a_call_that_could_not_be_sent_leaves_no_marker(m, account):
    with (
        Connection("redis://127.0.0.1:1/0", transport_options={"max_retries": 0}) as nowhere,
        pytest.raises(OperationalError),
    ):
        m.done.apply_async((account,), connection=nowhere, retry=False)
    assert _mark(m.done, account) is None
    assert m.done.delay(account).get(timeout=20)


def test_a_message_that_was_lost_can_be_forgotten(m, account):
    assert m.done.marked(account) is None
    lost = m.done.apply_async((account,), queue=f"nobody-{account}")
    assert m.done.delay(account).id == m.done.marked(account).id == lost.id
    assert _mark(m.done, account) <= DAY
    assert m.done.unmark(account) is True
    assert m.done.unmark(account) is False
    assert m.done.delay(account).get(timeout=20)


def _use_namespace(app, namespace):
    app.conf.relock_namespace = namespace
    declaration.forget_engine(app)


@pytest.fixture
def other_locks(m):
    """A caller with another namespace than the worker: it never hears what becomes of its calls."""
    namespace = m.app.conf.relock_namespace
    _use_namespace(m.app, f"other-{namespace}")
    yield
    _use_namespace(m.app, namespace)


@pytest.mark.parametrize("task", ["done", "raises", "starts"])
def test_a_call_whose_result_is_final_swallows_nothing(m, account, other_locks, task):
    task = getattr(m, task)
    first = task.delay(account)
    assert first.get(timeout=20) == first.id
    assert _mark(task, account)  # nobody took it off
    assert task.marked(account) is None
    second = task.delay(account)
    assert second.get(timeout=20) == second.id != first.id


def test_a_call_that_was_revoked_elsewhere_swallows_nothing(m, account, other_locks):
    first = m.done.apply_async((account,), countdown=2)
    assert m.done.delay(account).id == first.id
    first.revoke()
    with pytest.raises(TaskRevokedError):
        first.get(timeout=20)
    second = m.done.delay(account)
    assert second.get(timeout=20) == second.id != first.id


def test_seconds_count_though_the_result_is_final(m, account, other_locks):
    first = m.for_two_seconds.delay(account)
    first.get(timeout=20)
    assert m.for_two_seconds.delay(account).id == first.id
    once = m.done.apply_async((account,), lock_dedup=60)
    once.get(timeout=20)
    assert m.done.delay(account).id == once.id


# Celery's own, where it stores a result in the process of the test.
@pytest.mark.filterwarnings("ignore:Call to deprecated setex")
def test_a_call_by_name_is_no_duplicate_of_one_that_is_over(m, account):
    first = m.drops.apply_async((account,), queue=f"nobody-{account}")
    m.app.backend.store_result(first.id, "elsewhere", "SUCCESS")
    by_name = m.app.send_task(m.drops.name, (account,), queue=m.app.conf.task_default_queue)
    assert by_name.get(timeout=20) == by_name.id


@pytest.fixture
def heard():
    """What the receivers of `lock_duplicate` are told."""
    told = []

    def hear(**arguments):
        told.append(arguments)

    signals.lock_duplicate.connect(hear)
    yield told
    signals.lock_duplicate.disconnect(hear)


@pytest.mark.parametrize("task", ["done", "raises", "drops", "starts", "for_two_seconds"])
def test_a_swallowed_call_is_told(m, account, task, heard, caplog):
    caplog.set_level("INFO", "celery_relock")
    task, before = getattr(m, task), time.time()
    first = task.apply_async((account,), countdown=2)
    with contextlib.suppress(DuplicateTask):
        task.apply_async((account,))
    [told] = heard
    assert told["sender"].name == task.name
    assert told["duplicate_of"] == first.id != told["task_id"]
    assert told["names"] == (f"account:{account}",)
    assert before - 1 < told["since"] < time.time() + 1
    [record] = [each for each in caplog.records if account in each.getMessage()]
    assert (record.lock_event, record.lock_duplicate_of) == ("duplicate", first.id)
    line = record.getMessage()
    assert f"{task.name}[{told['task_id']}] is a duplicate of {task.name}[{first.id}]" in line
    first.get(timeout=20)


# Celery's own, where it stores a result in the process of the test.
@pytest.mark.filterwarnings("ignore:Call to deprecated setex")
def test_a_call_that_is_sent_is_not_told_as_a_duplicate(m, account, heard):
    m.replaces.apply_async((account,), countdown=2)
    last = m.replaces.delay(account)
    last.get(timeout=20)
    assert not heard


def test_a_call_by_name_that_is_swallowed_is_told_in_the_workers_log(worker, m, account):
    first = m.drops.apply_async((account,), countdown=3)
    by_name = m.app.send_task(m.drops.name, (account,), queue=m.app.conf.task_default_queue)
    worker.wait_for_log(
        rf"INFO.*{by_name.id}\] is a duplicate of .*{first.id}\].*account:{account}"
    )


def test_a_call_that_cannot_be_made_is_not_asked_about(m, account):
    for ask in (m.ends.marked, m.ends.unmark, m.ends.delay):
        with pytest.raises(TypeError, match=r"ends\(account, how\) cannot be called with"):
            ask(account)


def test_nothing_is_left_behind_when_all_is_over(worker, m, client, account):
    for task in (m.starts, m.done, m.raises):
        task.delay(account).get(timeout=20)
    namespace = m.app.conf.relock_namespace
    assert not [key for key in leftovers(client, namespace) if account in key]


def _app(**settings):
    app = Celery("away", broker="memory://", set_as_current=False, **settings)

    @app.task(base=LockedTask, lock_dedup="until_done", shared=False)
    def strict(x): ...

    @app.task(
        base=LockedTask, bind=True, lock_dedup="until_done", lock_on_unavailable="run", shared=False
    )
    def lenient(self, x):
        there = marker.look(engine_of(self.app), marker.name_for(self.name, self.lock.names))
        return self.AsyncResult(self.request.id).state, there is not None and there.begun

    app.finalize()
    return strict, lenient


def test_without_redis_a_call_fails_or_is_sent_as_the_task_says(caplog):
    strict, lenient = _app()
    strict.app.conf.relock_url = "redis://127.0.0.1:1/0"
    with pytest.raises(LockUnavailable):
        strict.delay(1)
    assert lenient.delay(1).id != lenient.delay(1).id
    assert "sent without looking for duplicates" in caplog.text


@pytest.fixture
def app_without_replicas(redis_url, namespace):
    """Where the server has executed what fails, as when only the answer is lost."""
    return {
        "relock_url": redis_url,
        "relock_namespace": namespace,
        "relock_min_replicas": 1,
        "relock_min_replicas_timeout": 0.1,
    }


def test_a_call_that_was_not_sent_is_not_marked_though_it_had_a_marker(app_without_replicas):
    strict, _ = _app(**app_without_replicas)
    with pytest.raises(LockUnavailable):
        strict.delay(1)
    wait_for(lambda: strict.marked(1) is None, what="its marker to go")


@pytest.mark.parametrize("task", ["starts", "in_order_once"])
def test_a_late_copy_of_the_command_of_a_duplicate_marks_nothing(m, account, task, monkeypatch):
    """The command was sent twice, as its first answer did not come; the first copy comes late."""
    task, backend = getattr(m, task), engine_here(m.app).backend
    verb = "acquire" if task is m.starts else "place"
    ask, sent = getattr(backend, verb), []

    def ask_twice(asked):
        sent.append(asked)
        answer = ask(asked)
        is_taken = not isinstance(answer, Conflict)
        return answer if is_taken else answer._replace(repeated=True)

    first = task.apply_async((account,), countdown=60)
    monkeypatch.setattr(backend, verb, ask_twice)
    assert task.delay(account).id == first.id
    wait_for(lambda: not engine_here(m.app).later._calls, what="it to be made up for")
    task.unmark(account)  # the first one has ended
    ask(sent[-1])
    assert task.marked(account) is None
    waiting = engine_here(m.app).inspect(f"{LINE}account:{account}").waiting
    assert waiting == (1 if task is m.in_order_once else 0), "the place of the first one"
    first.revoke()


@pytest.mark.parametrize("policy", ["existing", "replace"])
def test_a_call_that_is_sent_without_a_look_for_duplicates_is_none_of_itself(
    app_without_replicas, redis_url, namespace, policy
):
    _, lenient = _app(**app_without_replicas)
    message = {}

    def look(headers, **_):
        message.update(headers)

    before_task_publish.connect(look)
    sent = lenient.delay(1)
    assert lenient.marked(1).id == sent.id
    of = {"relock_url": redis_url, "relock_namespace": namespace}
    _, arrives = _app(**of, result_backend="cache+memory://")
    arrives.lock_on_duplicate = policy
    trace = build_tracer(arrives.name, arrives, app=arrives.app)
    result = trace(sent.id, (1,), {}, {**message, "hostname": "here"})
    state, has_marker = result.retval
    assert state == "PENDING", "it ran, and was not revoked by itself"
    assert has_marker, "for as long as it runs"


def test_a_task_that_always_runs_at_once_asks_nobody():
    strict, _ = _app()
    strict.app.conf.update(task_always_eager=True, relock_url="redis://127.0.0.1:1/0")
    strict.lock_on_unavailable = "run"
    assert strict.delay(1).id != strict.delay(1).id


def test_a_task_without_a_lock_name_has_no_duplicates():
    app = Celery("none", broker="memory://", set_as_current=False)

    @app.task(base=LockedTask, lock_key=False, lock_dedup="until_done", shared=False)
    def nameless(): ...

    with pytest.raises(LockConfigError, match=r"lock_dedup.*lock_key=False"):
        app.finalize()


def test_a_call_without_a_lock_name_cannot_ask_for_duplicates():
    app = Celery("free", broker="memory://", set_as_current=False)

    @app.task(base=LockedTask, lock_key=False, shared=False)
    def free(): ...

    app.finalize()
    with pytest.raises(LockConfigError, match=r"lock_dedup='until_done'.*lock_key=False"):
        free.apply_async(lock_dedup="until_done")
    assert free.apply_async(lock_dedup=False).id


def test_a_loss_that_strikes_as_the_marker_is_extended_ends_the_body_that_sends(
    m, account, monkeypatch
):
    def strike(*_):
        raise LockLost("the lock of the body")

    monkeypatch.setattr(marker, "extend", strike)
    with pytest.raises(LockLost):
        m.done.delay(account)
