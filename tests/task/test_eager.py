"""Tasks that run where they are called: `task_always_eager`, `apply()`, one inside of another."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from contextvars import ContextVar

import celery
import pytest
from celery import chain, chord, group
from celery.exceptions import Ignore, Reject

from celery_relock import Lock, LockedTask
from celery_relock.declaration import engine_of
from celery_relock.engine.protocol import LINE
from celery_relock.errors import LockConflict
from tests.support import make_app, wait_for
from tests.support.parked import state_of

pytestmark = [
    # Celery's own way to store a result, with redis-py 8.
    pytest.mark.filterwarnings("ignore:Call to deprecated:DeprecationWarning"),
    # To look for a result that is not to be stored is the point here.
    pytest.mark.filterwarnings("ignore:Results are not stored:RuntimeWarning"),
]


class _Eager:
    """An app without workers, and what its tasks have seen."""

    def __init__(self, **settings):
        self.app = make_app("eager", task_always_eager=True, **settings)
        self.seen = []
        self.module = self  # as a Worker has one

    def task(self, body, **options):
        common = {"bind": True, "base": LockedTask, "lock_key": "account", "shared": False}

        def seeing(task, *args):
            holds = len(state_of(self, "account").holders)
            self.seen.append((task.lock.fence, task.lock.reentered, holds))
            return body(task, *args)

        return self.app.task(**{**common, "name": body.__name__, **options})(seeing)

    def lock(self):
        conf = self.app.conf
        return Lock(conf.relock_url, "account", namespace=conf.relock_namespace)


@pytest.fixture(params=[False, True], ids=["kept nowhere", "stored"])
def eager(request, redis_url, namespace, monkeypatch):
    monkeypatch.setenv("RELOCK_TEST_URL", redis_url)
    monkeypatch.setenv("RELOCK_TEST_NAMESPACE", namespace)
    made = _Eager(task_store_eager_result=request.param)
    made.stores = request.param
    yield made
    assert not made.lock().locked()
    made.app.close()


@contextmanager
def _held_by_a_stranger(eager):
    """In a thread of its own: what this thread holds, its eager tasks would enter."""
    over = threading.Event()

    def hold():
        with eager.lock():
            over.wait(20)

    stranger = threading.Thread(target=hold)
    stranger.start()
    wait_for(eager.lock().locked)
    try:
        yield
    finally:
        over.set()
        stranger.join(20)


def _stored(eager, result):
    return eager.app.backend.get_task_meta(result.id)["status"]


@pytest.mark.parametrize("option", [{"dedup": 60}, {"debounce": 60}, {"order": "sent"}])
def test_what_says_whether_and_when_a_call_is_sent_says_nothing_of_one_that_runs_here(
    eager, option
):
    def each(task): ...

    task = eager.task(each, **{f"lock_{name}": value for name, value in option.items()})
    task.delay()
    task.delay()
    assert len(eager.seen) == 2
    assert not engine_of(eager.app).inspect(LINE + "account").waiting


@pytest.mark.parametrize("how", ["delay", "apply"])
def test_an_eager_task_holds_its_lock_for_its_body(eager, how):
    task = eager.task(lambda self, value: value)
    result = task.delay(7) if how == "delay" else task.apply((7,))
    assert result.get() == 7
    assert [(reentered, holds) for _, reentered, holds in eager.seen] == [(False, 1)]
    assert _stored(eager, result) == ("SUCCESS" if eager.stores else "PENDING")


def test_eager_tasks_inside_of_one_another_re_enter_the_same_lock(eager):
    def nests(self, deep):
        if deep:
            nested.delay(deep - 1).get(disable_sync_subtasks=False)
            nested.apply((0,)).get(disable_sync_subtasks=False)
        return deep

    nested = eager.task(nests)
    assert nested.delay(2).get() == 2
    fence = eager.seen[0][0]
    assert eager.seen == [(fence, False, 1), *[(fence, True, 1)] * 4]


def test_an_eager_conflict_waits_and_then_is_the_result(eager):
    task = eager.task(lambda self: None, lock_max_wait=0.2)
    with _held_by_a_stranger(eager):
        result = task.delay()
        assert result.state == "FAILURE"
        with pytest.raises(LockConflict, match="account"):
            result.get()
        assert _stored(eager, result) == ("FAILURE" if eager.stores else "PENDING")
        eager.app.conf.task_eager_propagates = True
        with pytest.raises(LockConflict, match="account"):
            task.delay()
        assert eager.lock().locked()
    assert eager.seen == []


def test_an_eager_task_re_enters_a_lock_that_its_caller_holds(eager):
    task = eager.task(lambda self: None)
    with eager.lock() as held:
        task.delay().get()
        assert eager.seen == [(held.fence, True, 1)]
        assert held.owned()


def test_an_eager_task_goes_on_when_the_lock_is_free(eager):
    task = eager.task(lambda self: "done", lock_max_wait=20)
    results = []
    with _held_by_a_stranger(eager):
        caller = threading.Thread(target=lambda: results.append(task.delay()))
        caller.start()
        wait_for(lambda: state_of(eager, "account").waiting)
        assert results == []
    caller.join(20)
    assert [result.get() for result in results] == ["done"]


@pytest.mark.parametrize(
    ("error", "state"),
    [(ValueError, "FAILURE"), (Ignore, "IGNORED"), (Reject, "REJECTED"), (SystemExit, None)],
)
def test_an_eager_lock_is_free_however_the_body_ends(eager, error, state):
    def ends(self):
        raise error

    task = eager.task(ends)
    if state is None:
        with pytest.raises(SystemExit):
            task.delay()
    else:
        assert task.delay().state == state
    assert len(eager.seen) == 1


@pytest.mark.skipif(
    celery.VERSION < (5, 7),
    reason="Celery 5.4 runs an eager task that has a __call__ of its own under a blank request, "
    "locked or not, so its retry() ends it",
)
def test_each_attempt_of_an_eager_retry_acquires_the_lock_for_itself(eager):
    def retries(self):
        if self.request.retries < 2:
            raise self.retry(countdown=0)
        return "done"

    eager.task(retries).delay()
    fences, reentered, holds = zip(*eager.seen, strict=True)
    assert list(fences) == sorted(set(fences))
    assert (reentered, holds) == ((False,) * 3, (1,) * 3)


@pytest.mark.parametrize("shape", ["chain", "group", "chord"])
def test_the_steps_of_an_eager_canvas_acquire_the_lock_one_after_another(eager, shape):
    task = eager.task(lambda self, *values: "done")
    step = task.si()
    canvas = {"chain": chain, "group": group}.get(shape, lambda *steps: chord(steps, step))
    canvas(step, step, step).apply_async().get()
    assert {(reentered, holds) for _, reentered, holds in eager.seen} == {(False, 1)}
    assert len({fence for fence, _, _ in eager.seen}) == (4 if shape == "chord" else 3)


@pytest.mark.parametrize("key", ["account", False])
def test_a_direct_call_from_inside_of_one_has_no_header_of_ours(eager, key):
    @eager.app.task(bind=True, base=LockedTask, lock_key=key, shared=False)
    def body(task, inside=False):
        return task.request.headers if inside else task(inside=True)

    assert body.apply().get() == {}


@pytest.mark.parametrize("way", ["delay", "apply"])
def test_who_calls_without_a_tenant_says_so_as_in_a_message(eager, way):
    tenant = ContextVar("tenant", default="")
    eager.app.conf.relock_prefix = tenant.get

    class Sets(LockedTask):
        def __call__(self, *args, **kwargs):
            token = tenant.set("acme:")
            try:
                return super().__call__(*args, **kwargs)
            finally:
                tenant.reset(token)

    @eager.app.task(base=Sets, bind=True, lock_key="account")
    def named(self):
        return self.lock.name

    assert getattr(named, way)().get() == "account"
