"""What a task declares, what it then sees as `self.lock`, and errors that say what to do."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier
from unittest import mock

import pytest
from celery import Celery, Task
from celery.exceptions import SoftTimeLimitExceeded

from celery_relock import LockedTask, signals
from celery_relock.admin import Locks
from celery_relock.declaration import declaration, engine_of
from celery_relock.errors import (
    LockConfigError,
    LockConflict,
    LockLost,
    LockUnavailable,
    RelockError,
)
from celery_relock.worker.company import lacks_base
from celery_relock.worker.message import ENTER
from celery_relock.worker.parking import home
from tests.support import Worker, make_app, wait_for
from tests.support.parked import lock_of
from tests.support.ports import free_port


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker("tests.task.apps.declaration", concurrency=1)


@pytest.fixture
def app(monkeypatch, redis_url, namespace):
    monkeypatch.setenv("RELOCK_TEST_URL", redis_url)
    monkeypatch.setenv("RELOCK_TEST_NAMESPACE", namespace)
    made = make_app("tests.task.declared")
    yield made
    made.close()


def charge(account):
    return account


async def charge_later(account):
    raise AssertionError


def charge_for(self, account):
    return self.lock.remaining


@pytest.mark.parametrize("name", ["shows", "shows_unbound", "annotated_with_a_function"])
def test_the_lock_tells_its_name_owner_fence_and_what_is_left_of_it(worker, account, name):
    sent = getattr(worker.module, name).delay(account)
    seen = sent.get(timeout=20)
    assert seen.pop("fence") > 1.7e15, "not a time in µs"
    assert 9 < seen.pop("remaining") <= 11, "relock_ttl=11 is the default of this app"
    assert seen == {
        "name": f"account:{account}",
        "owner": sent.id,
        "reentered": False,
        "continuous": True,
        "lost": False,
    }


def test_a_task_that_is_named_like_one_of_celery_has_its_lock(worker, account):
    seen = worker.module.named_like_one_of_celery.delay(account).get(timeout=20)
    assert seen["name"] == f"account:{account}"


@pytest.mark.parametrize("base", [{}, {"lock_key": "account"}, {"lock_key": "account:{account}"}])
def test_the_tasks_of_celery_lock_nothing_whatever_the_class_of_all_tasks_says(app, base):
    app.task_cls = type("Base", (LockedTask,), {"abstract": True, **base})
    app.finalize()
    assert {"celery.map", "celery.chunks", "celery.chord_unlock"} <= set(app.tasks)
    of_celery = [t for t in app.tasks.values() if type(t).__module__.startswith("celery.")]
    assert len(of_celery) >= 9
    for task in of_celery:
        assert isinstance(task, LockedTask)
        assert declaration(type(task)).rule.off


def test_a_body_of_no_module_has_its_lock(app):
    made = {}
    exec("def charge(account): return account", {"__builtins__": {}}, made)
    task = app.task(base=LockedTask, name="charge", lock_key="account:{account}")(made["charge"])
    assert task.lock_for("7").name == "account:7"


def test_two_locks_are_shown_as_one_hold(worker, account):
    seen = worker.module.shows_two.delay(account).get(timeout=20)
    assert seen["name"] == f"account:{account}, other:{account}"
    assert set(seen["fences"]) == {f"account:{account}", f"other:{account}"}
    assert seen["fence"] == max(seen["fences"].values())


def test_a_lost_lock_is_told_by_check(worker, account):
    seen = worker.module.loses_its_lock.delay(account).get(timeout=20)
    assert (seen["before"], seen["after"], seen["continuous"]) == (False, True, False)
    assert seen["remaining"] == 0
    assert f"account:{account}" in seen["error"]
    assert "lost" in seen["error"]
    assert "lost by a caller" in seen["inner"]


def test_there_is_no_lock_to_show_outside_of_the_body(worker, account):
    with pytest.raises(
        RelockError, match=r"declaration.shows holds no lock here.*while the body runs"
    ):
        _ = worker.module.shows.lock
    said = worker.module.asks_in_a_thread.delay(account).get(timeout=20)
    assert "holds no lock here" in said
    with pytest.raises(RelockError, match="lock_key is not False"):
        worker.module.has_no_lock.delay(account).get(timeout=20)


@pytest.mark.parametrize(
    "read",
    [
        inspect.getmembers,
        mock.create_autospec,
        lambda task: mock.Mock(spec=task),
        lambda task: hasattr(task, "lock") and pytest.fail("there is a lock"),
    ],
    ids=["getmembers", "autospec", "spec", "hasattr"],
)
def test_whoever_reads_all_that_a_task_has_finds_no_lock_where_there_is_none(app, read):
    read(app.task(base=LockedTask, lock_key="account:{account}")(charge))


def test_an_error_arrives_at_the_client_with_its_message_and_attributes(worker):
    with pytest.raises(LockConflict) as caught:
        worker.module.raises_a_conflict.delay().get(timeout=20)
    error = caught.value
    assert error.reason == "in the way"
    assert (error.name, error.owner, error.remaining) == ("account:7", "somebody", 1.5)


def test_annotations_of_the_settings_count(worker, account):
    seen = worker.module.annotated.delay(account).get(timeout=20)
    assert seen["name"] == f"account:{account}"
    assert 6 < seen["remaining"] <= 7


def test_a_setting_of_the_app_is_no_option_of_a_task(app):
    with pytest.raises(LockConfigError, match=r"relock_key is a setting of the app.* lock_key"):
        app.task(base=LockedTask, relock_key="account:{account}")(charge).lock  # noqa: B018


def test_an_annotation_with_a_misspelt_option_is_told(app):
    app.conf.task_annotations = {"charge": {"lock_onconflict": "raise"}}
    app.task(base=LockedTask, name="charge")(charge)
    with pytest.raises(LockConfigError, match=r"task charge: .*lock_on_conflict"):
        app.finalize()


def test_an_option_that_is_set_afterwards_counts_from_the_next_call(app, account):
    task = app.task(base=LockedTask, bind=True, name="charge", lock_key="account:{account}")(
        charge_for
    )
    app.finalize()
    assert 25 < task(account) <= 30
    task.lock_ttl = 5
    assert 4 < task(account) <= 5
    task.lock_ttl = "soon"
    with pytest.raises(LockConfigError, match="task charge: lock_ttl='soon'"):
        task(account)


def test_a_worker_takes_a_task_with_an_option_set_afterwards_for_a_locked_one(worker, account):
    with lock_of(worker, f"account:{account}"):
        sent = worker.module.set_afterwards.delay(account)
        wait_for(lambda: sent.state == "BLOCKED", what="the task to be parked")
    assert 4 < sent.get(timeout=20) <= 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lock_tll": 5}, "task charge: .*lock_tll.*lock_ttl"),
        ({"lock_on_conflict": "wat"}, "task charge: lock_on_conflict='wat'"),
        ({"lock_key": "account:{acount}"}, "charge.*acount.*account"),
        ({"lock_key": lambda acount: ""}, "charge.*acount"),
        ({"lock_key": lambda *args: ""}, r"charge.*lock_key .*has \*args alone, .*always be empty"),
        ({"lock_key": 7}, "charge.*lock_key.*7"),
        ({"lock_owner": 7}, "task charge: lock_owner=7"),
        ({"lock_owner": lambda: "x"}, "task charge: lock_owner=.*callable of the request"),
        ({"lock_on_conflict": lambda: "drop"}, "task charge: lock_on_conflict=.*of the conflict"),
        (
            {"lock_debounce": 1, "lock_debounce_reduce": lambda earlier: earlier},
            "task charge: lock_debounce_reduce=.*of two dicts",
        ),
        ({"lock_limit": 0}, "task charge: lock_limit=0"),
        ({"lock_limit": lambda acount: 2}, "task charge: .*lock_limit wants 'acount'.*'account'"),
        ({"lock_mode": lambda acount: "shared"}, "task charge: .*lock_mode wants 'acount'"),
        (
            {"lock_on_conflict": charge_later},
            "task charge: lock_on_conflict=<function charge_later",
        ),
        ({"lock_limit": max}, "task charge: .*lock_limit does not tell which arguments"),
    ],
)
def test_what_is_declared_wrongly_is_told_when_the_app_is_finalized(app, options, message):
    app.task(base=LockedTask, name="charge", **options)(charge)
    with pytest.raises(LockConfigError, match=message):
        app.finalize()


@pytest.mark.parametrize("option", ["limit", "mode"])
def test_a_callable_of_the_app_that_wants_another_argument_is_told_as_early(app, option):
    app.conf[f"relock_{option}"] = lambda tenant: 3
    app.task(base=LockedTask, name="charge", lock_key="account:{account}")(charge)
    with pytest.raises(LockConfigError, match=f"task charge: .*lock_{option} wants 'tenant'"):
        app.finalize()


def charge_in_parts(account):
    yield account


async def charge_in_parts_later(account):
    yield account


@pytest.mark.parametrize("body", [charge_later, charge_in_parts, charge_in_parts_later])
def test_a_body_whose_lines_would_run_after_the_release_is_refused(app, body):
    app.task(base=LockedTask, name="unlocked", lock_key=False)(body)
    app.task(base=LockedTask, name="charge", lock_key="account:{account}")(body)
    with pytest.raises(LockConfigError, match=r"task charge: its body is a coroutine"):
        app.finalize()


@pytest.mark.parametrize("body", [charge_later, charge_in_parts, charge_in_parts_later])
def test_one_that_hides_it_is_refused_before_a_line_of_it_runs(app, account, body):
    @app.task(base=LockedTask, name="charge", lock_key="account:{account}")
    def task(account):
        return body(account)

    app.finalize()
    with pytest.raises(LockConfigError, match=r"task charge: its body is a coroutine"):
        task(account)
    with pytest.raises(LockConfigError, match=r"task charge: its body is a coroutine"):
        task.apply((account,)).get()


def test_an_option_that_is_patched_for_a_while_counts_again_as_it_was_declared(app, account):
    options = {"lock_key": "account:{account}", "lock_ttl": 30}
    task = app.task(base=LockedTask, bind=True, name="charge", **options)(charge_for)
    app.finalize()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "lock_ttl", 5)
        assert 4 < task(account) <= 5
    assert 25 < task(account) <= 30
    with mock.patch.object(task, "lock_key", False), pytest.raises(RelockError):
        task(account)
    assert 25 < task(account) <= 30


def test_a_body_that_re_entered_its_lock_is_interrupted_when_that_is_lost(app, account):
    options = {"lock_key": "account:{account}", "lock_ttl": 1}

    @app.task(base=LockedTask, name="inner", lock_on_lost="raise", **options)
    def inner(account, loses):
        if loses:
            assert Locks(app).release(f"account:{account}")
            time.sleep(20)

    @app.task(base=LockedTask, name="outer", **options)
    def outer(account):
        inner(account, False)
        with pytest.raises(LockLost, match=f"'account:{account}'.*its last renewal was"):
            inner(account, True)
        with pytest.raises(LockLost, match="lost by a caller"):
            inner(account, False)
        return "went on"

    app.finalize()
    assert outer(account) == "went on"


def test_a_callable_that_a_decorator_has_wrapped_gets_all_arguments_by_their_names(app, account):
    def wrapped(*args, **kwargs):
        return f"account:{args}{kwargs}"

    app.task(base=LockedTask, bind=True, name="charge", lock_key=wrapped)(charge_for)
    app.finalize()
    assert app.tasks["charge"].lock_for(account).name == f"account:(){{'account': {account!r}}}"


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_what_a_body_forks_is_told_that_its_parent_has_the_lock(app, account):
    @app.task(base=LockedTask, bind=True, name="forks", lock_key="account:{account}")
    def forks(self, account):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                self.lock.check()
            except LockLost as error:
                os.write(write, str(error).encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(write)
        self.lock.check()
        with os.fdopen(read) as said:
            return said.read()

    app.finalize()
    assert forks(account).startswith(f"the lock 'account:{account}' (fence ")
    assert f"is held by process {os.getpid()} alone" in forks(account)


def test_the_loss_of_a_coroutine_s_lock_is_told_as_one_in_a_thread_of_the_body(app, account):
    @app.task(base=LockedTask, bind=True, name="hands_on", lock_key="account:{account}")
    def hands_on(self, account):
        hold = self.lock
        assert Locks(app).release(f"account:{account}")
        wait_for(lambda: hold.lost)
        with ThreadPoolExecutor(1) as pool, pytest.raises(LockLost) as lost:
            pool.submit(hold.check).result()
        return str(lost.value)

    async def call():
        async with hands_on.async_lock_for(account):
            said.append(hands_on(account))

    app.finalize()
    said = []
    with suppress(LockLost):
        asyncio.run(call())
    assert re.search(rf"'account:{account}' \(fence \d+\) was lost: .*last renewal", said[0])


def test_without_locks_there_is_none_to_lose_in_whatever_thread(app, account):
    app.conf.relock_enabled = False
    options = {"lock_key": "account:{account}", "lock_on_lost": "raise"}
    task = app.task(base=LockedTask, name="charge", **options)(charge)

    @app.task(base=LockedTask, name="outer", lock_key="account:{account}")
    def outer(account):
        return task(account)

    app.finalize()
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(task, account).result() == account
        assert thread.submit(outer, account).result() == account


def test_an_error_in_a_callable_is_told_as_such_and_not_as_a_wrong_answer(app, account):
    options = {"lock_key": "account:{account}", "lock_limit": lambda account: {}[account]}
    task = app.task(base=LockedTask, name="charge", **options)(charge)
    app.finalize()
    with pytest.raises(LockConfigError, match="the callable in lock_limit raised KeyError"):
        task(account)


@pytest.mark.parametrize(
    ("option", "policy"), [("raise", "raise"), ("retry", "raise"), ("run", "run")]
)
def test_who_listens_hears_that_redis_could_not_be_reached(app, account, option, policy):
    app.conf.relock_url = f"redis://127.0.0.1:{free_port()}"
    options = {"lock_key": "account:{account}", "lock_on_unavailable": option}
    task = app.task(base=LockedTask, name="charge", **options)(charge)
    app.finalize()
    heard = []

    def hear(sender, names, reason, policy, **_):
        heard.append((sender, names, "cannot be reached" in reason, policy))

    signals.lock_unavailable.connect(hear)
    try:
        with suppress(LockUnavailable):
            task(account)
    finally:
        signals.lock_unavailable.disconnect(hear)
    assert heard == [(task, (f"account:{account}",), True, policy)]


def test_who_listens_hears_of_a_body_that_runs_without_its_lock(app, account):
    app.conf.relock_url = f"redis://127.0.0.1:{free_port()}"
    options = {"lock_key": "account:{account}", "lock_on_unavailable": "run"}
    task = app.task(base=LockedTask, name="charge", **options)(charge)
    app.finalize()
    heard = []

    def hear(names, reason, **_):
        heard.append((names, "RUNS WITHOUT ITS LOCK" in reason))

    signals.lock_unprotected.connect(hear)
    try:
        assert task(account) == account
    finally:
        signals.lock_unprotected.disconnect(hear)
    assert heard == [((f"account:{account}",), True)]


def test_a_time_limit_that_strikes_in_the_apps_prefix_stays_one(app, account):
    def prefix():
        raise SoftTimeLimitExceeded

    app.conf.relock_prefix = prefix
    task = app.task(base=LockedTask, name="charge", lock_key="account:{account}")(charge)
    app.finalize()
    with pytest.raises(SoftTimeLimitExceeded):
        task(account)


def test_what_a_double_star_catches_reaches_the_callables_of_limit_and_mode(app, account):
    options = {"lock_limit": lambda n: n, "lock_key": "account:{account}"}

    @app.task(base=LockedTask, name="limited", **options)
    def limited(**given):
        return Locks(app).get(f"account:{account}").held

    @app.task(base=LockedTask, name="shared", lock_key=None, lock_mode=lambda how: how)
    def shared(**given):
        return given

    app.finalize()
    lock = limited.lock_for(account=account, n=2)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lock.acquire).result()
        assert limited.apply(kwargs={"account": account, "n": 2}).get() == 2
        with pytest.raises(LockConflict):
            limited.apply(kwargs={"account": account, "n": 1}, lock_max_wait=0.1).get()
        other.submit(lock.release).result()
    assert shared(how="shared") == {"how": "shared"}


def test_a_call_without_a_name_has_no_lock_of_the_prefix_alone(app):
    app.conf.relock_prefix = "shop:"
    task = app.task(base=LockedTask, name="charge", lock_key="{account}")(charge)
    app.finalize()
    with pytest.raises(LockConfigError, match="is empty"):
        task("")


def test_a_worker_does_not_start_with_an_unknown_option(redis_url, namespace):
    with pytest.raises(AssertionError, match="the worker ended") as caught:
        Worker("tests.task.apps.misspelt", redis_url, namespace)
    log = str(caught.value)
    assert "LockConfigError" in log
    assert "misspelt.charge" in log
    assert "Did you mean lock_ttl?" in log


def test_without_any_redis_the_call_says_which_setting_to_set(account):
    app = Celery("none", broker="amqp://nowhere", set_as_current=False)
    task = app.task(base=LockedTask, shared=False, name="charge", lock_key="account:{account}")(
        charge
    )
    app.finalize()
    with pytest.raises(LockConfigError, match="relock_url"):
        task(account)
    app.close()


def test_a_task_that_is_bound_to_two_apps_is_declared_for_each(app, account):
    class Charge(LockedTask):
        name = "charge"
        lock_key = "account:{account}"

        def run(self, account):
            return self.lock.remaining

    second = Celery("second", broker="memory://", set_as_current=False)
    second.conf.update(app.conf.changes)
    second.conf.relock_ttl = 3
    app.register_task(Charge())
    assert declaration(Charge).options.ttl == 30
    again = second.register_task(Charge())
    assert declaration(Charge).options.ttl == 3
    assert 2 < again(account) <= 3
    second.close()


def test_a_class_without_a_name_is_declared_by_that_of_its_only_task(app, account):
    class Base(LockedTask):
        abstract = True
        region = "north"
        lock_key: object = "{self.region}:{account}"

        def run(self, account):
            return self.lock.name

    class South(Base):
        def __init__(self):
            self.region = "south"

    class ByTask(Base):
        lock_key = "{task}"

    class Both(ByTask):
        lock_ttl = "soon"

    where = f"{__name__}."
    assert app.register_task(South())(account) == f"south:{account}"
    assert app.register_task(ByTask())(account) == f"{where}ByTask"
    assert declaration(ByTask).options.task == f"{where}ByTask"
    with pytest.raises(LockConfigError, match=rf"task {where}Both: lock_ttl='soon'"):
        app.register_task(Both())
    second = Celery("second", broker="memory://", set_as_current=False)
    second.conf.update(app.conf.changes)
    assert second.register_task(ByTask())(account) == f"{where}ByTask"
    assert declaration(ByTask).app is second
    second.close()


def test_a_class_without_a_name_is_one_task(app, account):
    class Charge(LockedTask):
        lock_key = "{self.region}:{account}"

        def __init__(self, region="nowhere"):
            self.name, self.region = f"charge.{region}", region

        def run(self, account):
            return self.lock.name

    assert app.register_task(Charge("north"))(account) == f"north:{account}"
    with pytest.raises(LockConfigError, match=r"Charge.*charge\.north, charge\.south.*a subclass"):
        app.register_task(Charge("south"))


@pytest.mark.parametrize("how", ["run", "delay", "marked"])
def test_a_class_that_nobody_has_registered_works_as_a_plain_one_does(
    app, account, how, monkeypatch
):
    class Charge(LockedTask):
        name = "charges"
        lock_key = "account:{account}"

        def run(self, account):
            return self.lock.name

    monkeypatch.setattr(Charge, "_app", app)  # else it is the current one's
    task = Charge()
    if how == "run":
        assert task.run(account) == f"account:{account}"
    else:
        assert task.delay(account).id if how == "delay" else task.marked(account) is None


def test_a_callable_in_an_option_can_be_a_method_of_any_kind(app):
    asked = []

    class Charge(LockedTask):
        name, region = "charge", "eu"

        @classmethod
        def lock_key(cls, account):
            return f"{cls.region}:{account}"

        @staticmethod
        def lock_limit(account):
            return len(account)

        def lock_owner(self, request):
            asked.append(self)
            return "owner"

        def run(self, account):
            pass

    task = app.register_task(Charge())
    assert declaration(Charge).limits({"account": "four"}) == {"eu:four": 4}
    task.apply(("a",)).get()
    assert asked == [task]


def test_a_first_parameter_self_without_bind_says_what_to_add(app):
    app.task(base=LockedTask, lock_key="a", shared=False)(charge_for)
    with pytest.raises(LockConfigError, match=r"charge_for has a parameter called self: .*bind="):
        app.finalize()


def test_an_option_without_its_prefix_is_told(app, caplog):
    options = {"max_wait": 5, "lock_max_wait": 5, "on_conflict": "drop", "limit": 3}

    class Base(LockedTask):
        # `order` and `_lock_key` can be attributes for the class's own use
        key, order, _lock_key = "a:{account}", 7, "mine"

    app.task(base=Base, name="charge", shared=False, **options)(charge)
    app.finalize()
    told = [each.split(", which")[0] for each in caplog.messages if "is no option" in each]
    assert told == [f"task charge has {each}" for each in (
        "key='a:{account}'", "limit=3", "on_conflict='drop'"
    )]  # fmt: skip


@pytest.mark.parametrize(
    ("written", "option"),
    [
        ("lockkey", "lock_key"),
        ("LOCK_MAX_WAIT", "lock_max_wait"),
        ("onConflict", "lock_on_conflict"),
        ("once", "lock_dedup"),
        ("unique_on", "lock_key"),
        ("raise_on_duplicate", "lock_on_duplicate"),
    ],
)
def test_an_option_that_is_written_in_another_way_is_told(app, caplog, written, option):
    app.task(base=LockedTask, name="charge", shared=False, **{written: "x"})(charge)
    app.finalize()
    assert [each for each in caplog.messages if "is no option" in each] == [
        f"task charge has {written}='x', which is no option of its lock. The option is {option}"
    ]


def test_a_class_without_a_name_that_is_not_registered_says_so(account):
    class Charge(LockedTask):
        lock_key = "account:{account}"

        def run(self, account):
            raise AssertionError

    with pytest.raises(LockConfigError, match=r"Charge has no name.*register_task"):
        Charge().s(account)


def test_a_subclass_of_a_task_has_options_of_its_own(app):
    class Charge(LockedTask):
        name = "charge"
        lock_key = "account:{account}"
        lock_ttl = 5

        def run(self, account):
            return account

    class Refund(Charge):
        name = "refund"
        lock_ttl = 9

    app.register_task(Charge())
    app.register_task(Refund())
    assert declaration(Charge).options.ttl == 5
    assert declaration(Refund).options.ttl == 9


def test_a_plain_task_of_the_same_app_is_left_alone(app):
    plain = app.task(name="plain")(charge)
    app.finalize()
    assert type(plain._get_current_object()).__call__ is Task.__call__
    assert not hasattr(plain, "__relock__")


def test_two_apps_that_come_to_one_redis_in_two_threads_at_once_both_resume_messages(redis_url):
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as threads:
            for number in range(300):
                apps = [
                    Celery(f"{name}{number}", broker="memory://", set_as_current=False)
                    for name in ("one", "two")
                ]
                for each in apps:
                    each.conf.update(relock_url=redis_url, relock_namespace=f"race{number}")
                together = Barrier(2)
                engine, other = threads.map(
                    lambda app, together=together: (together.wait(), engine_of(app))[1], apps
                )
                assert engine is other
                assert {home(app) for app in apps} == set(engine.parking.sender.homes.split())
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize(
    "option",
    [{"lock_dedup": "until_start"}, {"lock_order": "sent"}, {"lock_debounce": 1}],
    ids=lambda option: next(iter(option)),
)
def test_a_class_that_runs_its_body_for_several_messages_tells_not_which_call_has_run(app, option):
    batched = {"base": LockedTask, "lock_key": "a", "Strategy": "celery_batches:strategy"}
    app.task(charge, name="plain", **batched)
    app.task(charge, name="whose", **batched, **option)
    with pytest.raises(LockConfigError, match=rf"task whose: {next(iter(option))}=.* its own"):
        app.finalize()


def test_a_lock_is_refused_where_messages_say_nothing_of_their_workflow(app):
    app.conf.task_protocol = 1
    app.task(base=LockedTask, lock_key=False, shared=False, name="unlocked")(charge)
    app.finalize()  # it has the task of `locked`, too, which nobody uses
    with pytest.raises(LockConfigError, match=r"task .*charge: .*task_protocol=1"):
        app.task(base=LockedTask, lock_key="a", shared=False)(charge)


def test_what_an_annotation_says_of_all_tasks_is_no_lock_of_plain_ones_nor_of_a_workflow(app):
    app.conf.task_annotations = {"*": {"lock_key": "one", "lock_dedup": "until_start"}}
    locked = app.task(base=LockedTask, shared=False)(charge)
    plain = app.task(shared=False, name="plain")(charge)
    app.finalize()

    assert locked.lock_for("6").name == "one"
    assert lacks_base(app.tasks[plain.name]) == []
    entering = declaration(type(app.tasks[ENTER]))
    assert entering.rule.off
    assert entering.options.dedup is None


def test_what_the_class_of_all_tasks_says_of_locks_and_queues_is_not_for_that_of_a_workflow(app):
    told = {"lock_key": "one", "lock_dedup": "until_start", "queue": "slow", "acks_late": True}
    app.task_cls = type("Base", (LockedTask,), {"abstract": True, **told})
    app.finalize()
    entering = app.tasks[ENTER]
    assert declaration(type(entering)).rule.off
    assert declaration(type(entering)).options.dedup is None
    assert entering.queue is None
    assert entering.acks_late, "it is one of these tasks"
