"""What a single call says instead of its task, on each way that it can go."""

from __future__ import annotations

import json
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from datetime import timedelta
from itertools import count

import celery
import pytest
from celery import chain, chord, group
from kombu.exceptions import EncodeError

from celery_relock import Lock, LockedTask, is_dropped, locked
from celery_relock.errors import LockConfigError, LockConflict, LockDeadlock
from tests.support import wait_for


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker("tests.task.apps.calls")


@pytest.fixture
def m(worker):
    token = worker.module.tenant.set("")
    yield worker.module
    worker.module.tenant.reset(token)


@pytest.fixture
def held(m, account):
    """Somebody else has the lock for the account: what runs here does not run inside of it."""
    lock, done = _lock(m, f"account:{account}"), threading.Event()
    held = threading.Event()

    def hold():
        with lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(20)
    yield
    done.set()
    thread.join()


def _lock(m, name):
    return Lock(m.app.conf.relock_url, name, namespace=m.app.conf.relock_namespace)


def test_an_option_of_one_call_holds_for_that_call_in_a_worker(m, account, held):
    dropped = m.look.apply_async((account,), lock_on_conflict="drop")
    failed = m.look.apply_async((account,), lock_on_conflict="raise")
    late = m.look.apply_async((account,), lock_max_wait=timedelta(seconds=0.2))
    waits = m.look.delay(account)

    assert is_dropped(dropped.get(timeout=20))
    for each in (failed, late):
        with pytest.raises(LockConflict):
            each.get(timeout=20)
    wait_for(lambda: waits.state == "BLOCKED", what="the call without options to wait")


@pytest.mark.parametrize("way", ["map", "starmap", "chunks"])
def test_where_the_task_is_called_directly_options_are_told_to_be_of_no_use(
    m, account, way, caplog
):
    items = [account] if way == "map" else [(account,)]
    sent = getattr(m.look, way)(items, *([1] if way == "chunks" else []))
    sent.apply_async(lock_on_conflict="drop").get(timeout=20)

    told = "options lock_on_conflict of a call of celery.{} are not used"
    assert told.format("map" if way == "map" else "starmap") in caplog.text


def test_a_misspelt_option_of_a_call_by_name_is_refused_by_the_worker(m, account):
    sent = m.app.send_task(m.look.name, (account,), lock_maxwait=5)
    with pytest.raises(LockConfigError, match="no option lock_maxwait"):
        sent.get(timeout=20)


def test_an_app_that_is_not_finalized_sends_them_by_name(m, account, held):
    sender = celery.Celery("sender", set_as_current=False, autofinalize=False)
    where = "broker_url", "broker_transport_options", "task_default_queue"
    sender.conf.update({name: m.app.conf[name] for name in where})
    sent = sender.send_task(m.look.name, (account,), lock_on_conflict="drop")

    assert is_dropped(m.app.AsyncResult(sent.id).get(timeout=20))


def test_options_of_a_call_of_a_task_that_takes_no_lock_are_told_to_be_of_no_use(m, caplog):
    m.plain.s().set(lock_max_wait=5, lock_maxwait=5).delay().get(timeout=20)

    assert "options lock_max_wait, lock_maxwait of a call of" in caplog.text
    assert "are not used: it is no LockedTask" in caplog.text


def test_what_a_task_has_set_a_call_sets_to_none(m, account):
    with _lock(m, f"account:{account}"):
        patient = m.hurries.apply_async((account,), lock_max_wait=None)
        with pytest.raises(LockConflict):
            m.hurries.delay(account).get(timeout=20)
        assert patient.state == "BLOCKED"
    assert patient.get(timeout=20) == account


def test_it_is_kept_when_the_call_is_parked_and_resumed(m, account):
    with _lock(m, f"account:{account}"):
        sent = m.look.apply_async((account,), lock_ttl=90)
        wait_for(lambda: sent.state == "BLOCKED", what="the call to be parked")

    name, remaining = sent.get(timeout=20)
    assert name == f"account:{account}"
    assert remaining > 60


def test_it_is_kept_by_a_retry(m, account):
    m.tenant.set("acme:")
    name, remaining = m.retries.apply_async((account,), lock_ttl=90).get(timeout=20)

    assert name == f"acme:account:{account}"
    assert remaining > 60


@pytest.mark.skipif(
    celery.VERSION < (5, 7), reason="Celery 5.4 ends an eager task that retries (test_eager.py)"
)
@pytest.mark.parametrize("prefix", ["", "acme:"])
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_it_is_kept_by_an_eager_retry(m, account, prefix, where):
    m.tenant.set(prefix)
    task = m.retries if where == "outside" else m.applies_a_retry
    name, remaining = task.apply((account,), lock_ttl=90).get()

    assert name == f"{prefix}account:{account}"
    assert remaining > 60


def test_it_goes_by_a_signature_in_a_canvas(m, account, held):
    sent = chain(
        m.by_task.si(account), m.look.si(account).set(lock_on_conflict="drop")
    ).apply_async()

    assert is_dropped(sent.get(timeout=20))


LONG = 90
CANVASES = {
    "chain": lambda m, long: chain(m.report.si("other"), long),
    "chain of plain tasks": lambda m, long: chain(m.plain.si(), m.plain.si(), long),
    "group": lambda m, long: group(long, long),
    "group in a chain": lambda m, long: chain(m.plain.si(), group(long, long)),
    "chord": lambda m, long: chord([m.report.si("other"), m.plain.si()], long),
    "chord of plain tasks": lambda m, long: chord([m.plain.si(), m.plain.si()], long),
    "chord in a chain": lambda m, long: chain(m.plain.si(), chord([long, m.plain.si()], long)),
    "chain in a chord": lambda m, long: chord([m.plain.si()] * 2, chain(m.plain.si(), long)),
    "locked": lambda m, long: locked(chain(m.plain.si(), long), key="canvas"),
}


def _all(found):
    return found if isinstance(found[0], list) else [found]


@pytest.mark.parametrize("canvas", CANVASES)
def test_it_goes_by_each_signature_of_a_canvas(m, account, canvas):
    made = CANVASES[canvas](m, m.look.si(account).set(lock_ttl=LONG))
    for name, remaining in _all(made.delay().get(timeout=20)):
        assert name == f"account:{account}"
        assert remaining > 60


def test_it_goes_by_a_link_and_in_an_argument(m, account):
    long, linked = m.look.si(account).set(lock_ttl=LONG), uuid.uuid4().hex
    m.plain.apply_async(link=long.clone().set(task_id=linked))
    given = m.sends.delay(long.clone().set(lock_ttl=LONG))
    named = m.sends.apply_async(kwargs={"signature": long.clone().set(lock_ttl=LONG)})
    for task_id in (linked, given.get(timeout=20), named.get(timeout=20)):
        assert m.app.AsyncResult(task_id).get(timeout=20)[1] > 60
    failed = m.cools.apply_async((account, "fails"), link_error=long.clone().set(lock_ttl=LONG))
    with pytest.raises(ValueError, match="fails"):
        failed.get(timeout=20)


@pytest.mark.parametrize("canvas", ["chain", "chord", "chain in a chord", "locked"])
def test_a_timedelta_in_a_later_step_is_refused_where_the_canvas_is_sent(m, account, canvas):
    long = m.look.si(account).set(lock_ttl=timedelta(seconds=LONG))
    assert long.delay().get(timeout=20)[1] > 60
    with pytest.raises(EncodeError, match="timedelta"):
        CANVASES[canvas](m, long).delay()


def test_it_goes_with_a_call_by_name(m, account, held):
    sent = m.app.send_task(m.look.name, (account,), lock_on_conflict="drop")
    wrong = m.app.send_task(m.look.name, (account,), lock_on_conflict="dorp")

    assert is_dropped(sent.get(timeout=20))
    with pytest.raises(LockConfigError, match="'dorp'"):
        wrong.get(timeout=20)


def test_it_holds_for_apply_and_for_eager_calls(m, account, held):
    assert is_dropped(m.look.apply((account,), lock_on_conflict="drop").get())
    m.app.conf.task_always_eager = True
    try:
        assert is_dropped(m.look.apply_async((account,), lock_on_conflict="drop").get())
    finally:
        m.app.conf.task_always_eager = False


def test_what_a_caller_of_a_duplicate_gets_can_be_said_by_the_call(m, account):
    with _lock(m, f"report:{account}"):
        first = m.report.apply_async((account,), countdown=60)
        assert m.report.delay(account).id == first.id
        assert is_dropped(m.report.apply_async((account,), lock_on_duplicate="drop").get())
    first.revoke()


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("lock_key", "other", "belongs to the task"),
        ("lock_limit", 2, "belongs to the task"),
        ("lock_reentrant", "workflow", "belongs to the task"),
        ("lock_dedpu", "until_done", "Did you mean lock_dedup"),
        ("lock_max_wait", -1, "cannot be used"),
        ("lock_on_conflict", print, "cannot be a callable here"),
    ],
)
@pytest.mark.parametrize("way", ["apply_async", "apply"])
def test_what_decides_who_excludes_whom_and_what_is_wrong_is_refused(
    m, account, option, value, says, way
):
    with pytest.raises(LockConfigError, match=f"a call of {m.look.name}.*{says}"):
        getattr(m.look, way)((account,), **{option: value})


def test_the_prefix_of_the_sender_is_that_of_the_worker_and_of_all_that_is_called_inside(
    m, account
):
    m.tenant.set("acme:")
    direct, inside = m.look.delay(account), m.looks_inside.delay(account)
    name = f"acme:account:{account}"

    assert direct.get(timeout=20)[0] == name
    assert inside.get(timeout=20)[0] == name
    assert m.look.lock_for(account).name == name
    assert m.look.apply((account,)).get()[0] == name
    assert m.look(account)[0] == name
    assert m.app.send_task(m.look.name, (account,)).get(timeout=20)[0] == name


def test_tenants_exclude_nobody_but_themselves_and_have_duplicates_of_their_own(m, account):
    m.tenant.set("acme:")
    with m.look.lock_for(account):
        waits = m.look.delay(account)
        wait_for(lambda: waits.state == "BLOCKED", what="the tenant's own call to wait")
        m.tenant.set("other:")
        assert m.look.delay(account).get(timeout=20)[0] == f"other:account:{account}"
    waits.get(timeout=20)

    first = m.report.apply_async((account,), countdown=60)
    assert m.report.marked(account) == first
    m.tenant.set("acme:")
    assert m.report.marked(account) is None
    first.revoke()


@pytest.mark.parametrize("sender", ["acme:", ""])
@pytest.mark.parametrize("key", ["account:{account}", "finished"])
def test_a_locked_canvas_has_the_prefix_of_whoever_sends_it(m, account, key, sender):
    key = key.replace("finished", f"account:{account}")
    m.tenant.set("other:")
    stored = json.dumps(locked(chain(m.says_whether_reentered.si(account)), key=key))

    def canvas():
        return m.app.signature(json.loads(stored))

    in_place = locked(chain(m.says_whether_reentered.si(account)), key=key)
    m.tenant.set(sender)
    assert canvas().delay().get(timeout=20)
    assert chain(m.plain.si(), canvas()).delay().get(timeout=20)
    assert in_place.apply().get()
    with m.look.lock_for(account):
        dropped = canvas().apply_async(lock_on_conflict="drop")
        assert is_dropped(dropped.get(timeout=20))


def test_a_locked_canvas_whose_names_were_made_with_their_prefix_keeps_them(m, account):
    canvas = locked(chain(m.look.si(account)), key=f"account:{account}")
    spec = canvas.tasks[0].args[0]
    spec["names"] = [f"acme:{name}" for name in spec.pop("unprefixed")]
    m.tenant.set("acme:")

    with m.look.lock_for(account):
        assert is_dropped(canvas.apply_async(lock_on_conflict="drop").get(timeout=20))


@pytest.mark.parametrize("key", ["", "a\nb", "x" * 5000])
def test_a_locked_canvas_has_a_name_that_a_lock_can_have(m, account, key):
    with pytest.raises(LockConfigError, match="the lock name"):
        locked(chain(m.look.si(account)), key=key)


def test_a_prefix_that_cannot_be_had_fails_the_call_before_anything_is_sent(m, account):
    m.tenant.set(42)

    with pytest.raises(LockConfigError, match="relock_prefix must return text, not 42"):
        m.look.delay(account)


def test_a_name_can_hold_the_tasks_name_and_its_attributes_and_arguments_win(m):
    assert m.by_task("7") == f"{m.by_task.name}:7"
    assert m.by_argument("mine") == "mine"
    assert m.by_region() == "region:north"


@pytest.mark.parametrize("name", ["of_team", "of_team_by_template"])
def test_each_name_of_a_task_has_a_limit_of_its_own(m, name):
    task, release = getattr(m, name), threading.Event()
    begun = [threading.Event() for _ in "abc"]

    def body(number):
        begun[number].set()
        return release.wait(30)

    def run(team, number):
        return threading.Thread(target=task, args=(team, lambda: body(number)))

    threads = [run(team, number) for number, team in enumerate("abc")]
    try:
        for number, (thread, each) in enumerate(zip(threads, begun, strict=True)):
            thread.start()
            assert each.wait(20)
            with pytest.raises(LockConflict, match="'team:a'" if number < 2 else "'all'"):
                task("a", print)
        with pytest.raises(LockConflict, match="'all'"):
            task("d", print)
    finally:
        release.set()
        for thread in threads:
            if thread.is_alive():
                thread.join()


def test_a_call_asks_once_for_its_names_also_where_each_has_a_limit_of_its_own(m, account):
    numbers = count()
    names = ["all", lambda: f"{account}:{next(numbers)}"]

    _declare(m, lock_key=names, lock_limit=[3, 1])

    assert next(numbers) == 1


def _declare(m, **options):
    @m.app.task(name=uuid.uuid4().hex, base=LockedTask, **options)
    def declared(): ...

    return declared()


@pytest.mark.parametrize("way", ["apply_async", "apply"])
def test_a_setting_of_the_app_is_no_option_of_a_call(m, account, way):
    says = rf"call of {m.report.name}: relock_ttl is a setting of the app.* lock_ttl"
    with pytest.raises(LockConfigError, match=says):
        getattr(m.report, way)((account,), relock_ttl=3)


def test_limits_that_do_not_fit_the_names_are_refused_at_declaration(m):
    with pytest.raises(LockConfigError, match=r"2 numbers for 1 lock names"):
        _declare(m, lock_key="a", lock_limit=[1, 2])
    with pytest.raises(LockConfigError, match="which is not a part"):
        _declare(m, lock_key=["a"], lock_limit={"b": 2})
    with pytest.raises(LockConfigError, match="lock_limit"):
        _declare(m, lock_key=["a"], lock_limit=[0])


def test_lock_for_is_the_lock_of_the_call_with_the_tasks_options(m, account, held):
    lock = m.look.lock_for(account=account)
    assert (lock.name, lock.timeout) == (f"account:{account}", 30)

    assert not lock.acquire(blocking=False)
    with pytest.raises(LockConfigError, match="2 locks"):
        m.of_team.lock_for("a", print)
    with pytest.raises(TypeError):
        m.look.lock_for()


def test_a_direct_call_that_has_waited_in_vain_says_for_how_long_it_may(m, account, held):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("celery_relock.options._PATIENCE", 0.2)
        with pytest.raises(LockConflict, match=r"direct call waits for 0\.2 s without a lock_max"):
            m.look(account)


def test_outside_of_a_task_a_thread_with_a_copy_of_the_context_re_enters_no_lock(m, account):
    with m.look.lock_for(account), ThreadPoolExecutor() as pool:
        assert m.look(account)[0] == f"account:{account}"
        copied = copy_context()
        with pytest.raises(LockDeadlock, match="by who has started this thread"):
            pool.submit(copied.run, m.look, account).result(20)
    with ThreadPoolExecutor() as pool:
        assert pool.submit(copied.run, m.look, account).result(20)[0] == f"account:{account}"


def test_a_prefix_goes_through_a_plain_task_to_the_locked_one_behind_it(m, account):
    m.tenant.set("acme:")
    name, _ = chain(m.plain.si(), m.look.si(account)).delay().get(timeout=20)

    assert name == f"acme:account:{account}"


def test_apply_inside_of_a_body_has_the_prefix_of_the_body_and_re_enters(m, account):
    m.tenant.set("acme:")
    name, reentered = m.applies_inside.delay(account).get(timeout=20)

    assert (name, reentered) == (f"acme:account:{account}", True)


def test_an_option_of_a_retry_goes_before_that_of_the_call(m, account):
    _, remaining = m.retries.apply_async((account, 90), lock_ttl=20).get(timeout=20)

    assert remaining > 60


def test_dedup_can_be_called_off_in_a_call_by_name(m, account):
    with _lock(m, f"report:{account}"):
        first = m.report.apply_async((account,), countdown=60)
        sent = m.app.send_task(m.report.name, (account,), lock_dedup=False)
        wait_for(lambda: sent.state == "BLOCKED", what="the call by name to wait for its lock")
    assert sent.get(timeout=20) == account
    first.revoke()


def test_a_locked_canvas_takes_options_when_it_is_applied(m, account, held):
    canvas = locked(chain(m.look.si(account)), key="account:{account}")

    assert is_dropped(canvas.apply_async(lock_on_conflict="drop").get(timeout=20))


def test_an_eager_locked_canvas_that_is_dropped_says_so(m, account, held):
    canvas = locked(chain(m.look.si(account)), key="account:{account}", on_conflict="drop")

    assert is_dropped(canvas.apply().get())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lock_on_conflict": "raise", "lock_max_wait": 5}, "is never used"),
        ({"lock_dedup": "bogus"}, "cannot be used"),
    ],
)
@pytest.mark.parametrize("way", ["apply_async", "apply"])
def test_options_of_a_call_are_held_against_each_other(m, account, way, options, says):
    with pytest.raises(LockConfigError, match=says):
        getattr(m.look, way)((account,), **options)


@pytest.mark.parametrize("sender", ["sends", "sends_under_lock"])
def test_they_are_in_a_body_too(m, account, sender):
    call = m.hurries.si(account).set(lock_on_conflict="raise", lock_max_wait=5)
    sent = getattr(m, sender).delay(call)

    with pytest.raises(LockConfigError, match="is never used"):
        sent.get(timeout=20)


def test_a_locked_canvas_has_one_limit(m, account):
    with pytest.raises(LockConfigError, match="a whole number from 1"):
        locked(chain(m.look.si(account)), key="account:{account}", limit=[3])
