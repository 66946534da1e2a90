"""Calls run in the order in which they were sent, whatever way their messages take. On a Redis and
on a RabbitMQ broker.

A message is made late by a queue that the worker does not consume until the test says so.
"""

from __future__ import annotations

import os
import re
import signal
import uuid
from contextlib import closing
from datetime import datetime, timedelta, timezone
from functools import partial

import pytest
from celery import VERSION, chain, chord, group
from kombu.exceptions import EncodeError

from celery_relock import locked
from celery_relock.engine.protocol import LINE
from celery_relock.errors import LockConflict, LockDeadlock
from tests.support import new_namespace, programs, wait_for
from tests.support.messages import Message
from tests.support.parked import engine_here, lock_of

pytestmark = pytest.mark.slow
NO_EXITS = pytest.mark.skipif(
    VERSION < (5, 7),
    reason="this Celery cannot store that a child has exited, and keeps the message",
)


@pytest.fixture(scope="module")
def on_redis(module_worker):
    return module_worker("tests.order.apps.ordered", concurrency=3)


@pytest.fixture(scope="module")
def on_rabbitmq(module_worker, rabbitmq):
    return module_worker(
        "tests.order.apps.ordered",
        concurrency=3,
        namespace=new_namespace(),
        env={"RELOCK_TEST_BROKER": rabbitmq.url},
    )


@pytest.fixture(params=["redis", "rabbitmq"])
def worker(request):
    return request.getfixturevalue(f"on_{request.param}")


ON_REDIS = pytest.mark.parametrize("worker", ["redis"], indirect=True)


@pytest.fixture
def late(worker):
    """A queue whose messages come when the test says so."""

    class Late:
        name = f"late-{uuid.uuid4().hex}"

        def comes(self):
            # A worker that has just begun may not hear it yet.
            control, to = worker.module.app.control, {"destination": [worker.node], "limit": 1}
            add = partial(control.add_consumer, self.name, reply=True, timeout=2, **to)
            wait_for(add, 20, "the worker's answer")

    return Late()


def began(worker, account, count):
    """The calls of an account that have begun, in that order, once there are so many."""
    return worker.journal.wait_for("began", count=count, account=account)


def numbers(events):
    return [event["number"] for event in events]


def looked_at(m, name):
    """A lock or a line, and how many hold it or are parked for it."""
    backend = engine_here(m.app).backend
    (found,) = backend.inspection().survey([backend.keys.lock(name)], 0, 0)
    return found


def waits(m, account, count=1, kind=LINE):
    """So many calls are parked for their turns, or for the lock itself."""

    def parked():
        return looked_at(m, f"{kind}account:{account}").parked

    wait_for(lambda: parked() >= count, 20, f"{count} calls of {account} that wait")


def test_a_call_that_comes_early_waits_for_those_that_were_sent_before(worker, m, account, late):
    m.update.apply_async((account, 1), queue=late.name)
    m.update.delay(account, 2)
    m.update.delay(account, 3)
    waits(m, account, 2)
    late.comes()
    events = began(worker, account, 3)
    assert numbers(events) == [1, 2, 3]
    assert all(event["in_order"] is True for event in events)


@ON_REDIS
@pytest.mark.parametrize(
    ("task", "how"),
    [
        pytest.param("lost", "exits", marks=NO_EXITS),
        ("lost", "slow"),
        ("refused", "slow"),
        ("limited", "slow"),
    ],
)
def test_a_call_that_is_lost_with_its_process_for_good_holds_up_nobody(
    worker, m, account, task, how
):
    """Celery acknowledges the message of a lost process, or rejects it, also with `acks_late`."""
    lost = getattr(m, task)
    lost.delay(account, 1, how)
    first = began(worker, account, 1)[0]
    lost.delay(account, 2)
    if how == "slow" and task != "limited":
        waits(m, account)
        os.kill(first.pid, signal.SIGKILL)
    events = began(worker, account, 2)
    assert numbers(events) == [1, 2]
    assert events[1]["in_order"]


@ON_REDIS
def test_calls_of_two_apps_with_a_broker_each_run_in_the_order_in_which_they_were_sent(
    worker, m, account, late, module_worker, rabbitmq
):
    its_own = f"own-{uuid.uuid4().hex}"  # another worker of this module consumes the usual queue
    second = module_worker(
        "tests.order.apps.ordered",
        concurrency=2,
        arguments=("-Q", its_own),
        env={"RELOCK_TEST_BROKER": rabbitmq.url},
    )
    with closing(second):
        update = second.module.update
        m.update.apply_async((account, 1), queue=late.name)
        update.apply_async((account, 2), queue=its_own)
        waits(m, account)
        m.update.delay(account, 3)
        update.apply_async((account, 4), queue=its_own)
        waits(m, account, 3)
        late.comes()
        events = began(worker, account, 4)
    assert numbers(events) == [1, 2, 3, 4]
    assert len({event.pid for event in events}) >= 2


def test_a_burst_by_way_of_two_queues_and_with_priorities_runs_in_order(worker, m, account, late):
    late.comes()
    for number in range(30):
        how = {"queue": late.name} if number % 3 else {}
        m.update.apply_async((account, number), priority=number % 10, **how)
    assert numbers(began(worker, account, 30)) == list(range(30))


def test_others_use_the_lock_while_calls_wait_for_their_turns(worker, m, account, late):
    m.update.apply_async((account, 1), queue=late.name)
    m.update.delay(account, 2)
    waits(m, account)
    assert m.unordered.delay(account, 9).get(timeout=20) == 9
    late.comes()
    assert numbers(began(worker, account, 3)) == [9, 1, 2]


@ON_REDIS
def test_a_late_call_is_passed_over_and_told_so_when_it_comes(worker, m, account, late):
    m.hasty.apply_async((account, 1), queue=late.name, task_id=f"late-{account}")
    m.hasty.delay(account, 2)
    assert [(e["number"], e["in_order"]) for e in began(worker, account, 1)] == [(2, True)]
    worker.wait_for_log(rf"'account:{account}' passed, task .*hasty\[late-{account}\].*passed over")
    (told,) = worker.journal.wait_for(f"passed late-{account}", 20)
    assert list(told["names"]) == [f"account:{account}"]
    late.comes()
    assert [(e["number"], e["in_order"]) for e in began(worker, account, 2)][1] == (1, False)


@ON_REDIS
def test_a_step_that_waits_for_the_lost_lock_of_its_workflow_is_late(worker, m, account, late):
    mine = f"{account}-mine"
    step = m.hasty.si(account, 1).set(queue=late.name)
    begins = m.unordered.si(f"{account}-else", 0)
    locked(chain(begins, step), key=f"account:{mine}", gap_ttl=0.5).delay()
    began(worker, f"{account}-else", 1)
    with lock_of(worker, f"account:{mine}"):  # when the gap is over
        late.comes()
        waits(m, mine, kind="")
        m.hasty.delay(account, 2)
        began(worker, account, 1)
    events = began(worker, account, 2)
    assert [(e["number"], e["in_order"]) for e in events] == [(2, True), (1, False)]


@ON_REDIS
def test_a_call_that_loses_its_turn_while_it_waits_for_its_lock_says_so(worker, m, account):
    name = f"account:{account}"
    with lock_of(worker, name):
        m.update.apply_async((account, 1), lock_on_conflict="block")
        wait_for(lambda: looked_at(m, name).waiting, what="it to wait in its slot")
        engine_here(m.app).backend.force_release(LINE + name)
    (told,) = began(worker, account, 1)
    assert not told["in_order"]
    worker.wait_for_log(f"does not run in the order of '{name}': it lost its turn")


@ON_REDIS
@pytest.mark.parametrize("how", ["revoked", "expired", "not sent", "forgotten"])
def test_a_call_that_does_not_come_holds_up_nobody(worker, m, account, late, how):
    options = {"expires": 1.0} if how == "expired" else {}
    if how == "not sent":
        with pytest.raises(EncodeError):
            m.update.delay(account, object())
    else:
        first = m.update.apply_async((account, 1), queue=late.name, **options)
    m.update.delay(account, 2)
    if how in ("revoked", "forgotten"):
        waits(m, account)
        first.revoke()
    assert numbers(began(worker, account, 1)) == [2]


@ON_REDIS
@pytest.mark.parametrize(
    ("task", "how", "expected"),
    [
        ("update", "slow retry", [1, 1, 2]),
        ("lets_pass", "slow retry", [1, 2, 1]),
        ("retried", "slow fail", [1, 1, 2]),
        ("retries_outside", "before", [2, 1]),
        ("retries_outside", "after", [1, 2, 1]),
    ],
)
def test_a_retry_keeps_its_place_or_goes_to_the_end(worker, m, account, task, how, expected):
    ordered = getattr(m, task)
    first = ordered.delay(account, 1, how)
    ordered.delay(account, 2, "")
    worker.journal.add(f"free {account}")
    events = began(worker, account, len(expected))
    assert numbers(events) == expected
    in_order = [event["in_order"] for event in events]
    assert in_order == [*[True] * (len(expected) - 1), expected[-1] == 2]
    first.get(timeout=20)
    told = rf"{first.id}\] does not run in the order"
    if task == "retries_outside":
        worker.wait_for_log(told)
    else:
        assert not re.search(told, worker.log())


@ON_REDIS
def test_a_retry_with_another_lock_name_leaves_its_place(worker, m, account):
    m.careful.delay(account, 1, "retry elsewhere")
    m.careful.delay(account, 2)
    began(worker, f"{account}-else", 1)
    assert numbers(began(worker, account, 2)) == [1, 2]
    worker.journal.add(f"free {account}-else")
    assert [event["in_order"] for event in began(worker, f"{account}-else", 1)] == [True]


@ON_REDIS
def test_a_retry_that_celery_makes_of_a_conflict_keeps_its_place(worker, m, account):
    with lock_of(worker, f"account:{account}"):
        first = m.raises.delay(account, 1)
        wait_for(lambda: first.state == "RETRY", what="the retry")
    m.raises.delay(account, 2)
    events = began(worker, account, 2)
    assert numbers(events) == [1, 2]
    assert [event["in_order"] for event in events] == [True, True]


@ON_REDIS
@pytest.mark.parametrize("task", ["update", "careful"])
def test_a_call_that_is_revoked_while_it_waits_for_its_retry_holds_up_nobody(
    worker, m, account, task
):
    first = getattr(m, task).delay(account, 1, "retry in an hour")
    m.update.delay(account, 2)
    began(worker, account, 1)
    waits(m, account)
    first.revoke()
    assert numbers(began(worker, account, 2)) == [1, 2]


@ON_REDIS
def test_a_call_that_fails_or_gives_up_holds_up_nobody(worker, m, account, late):
    failing = m.update.delay(account, 1, "fail")
    m.impatient.apply_async((account, 2), queue=late.name)
    gives_up = m.impatient.delay(account, 3)
    with pytest.raises(
        LockConflict, match=r"were sent before.*; lock_order='sent', lock_max_wait=1"
    ):
        gives_up.get(timeout=20)
    with pytest.raises(ConnectionError):
        failing.get(timeout=20)
    late.comes()
    m.update.delay(account, 4)
    assert numbers(began(worker, account, 3)) == [1, 2, 4]


@pytest.mark.parametrize(("how", "before"), [("slow", []), ("retry, slow", [1])])
@pytest.mark.parametrize(("task", "expected"), [("careful", [1, 1, 2]), ("update", [1, 2])])
def test_a_killed_call_runs_again_before_those_behind_if_its_message_comes_again(
    worker, m, account, task, how, before, expected
):
    ordered, expected = getattr(m, task), [*before, *expected]
    ordered.delay(account, 1, how)
    slow = began(worker, account, len(before) + 1)[-1]
    ordered.delay(account, 2)
    waits(m, account)
    os.kill(slow.pid, signal.SIGKILL)
    worker.journal.add(f"free {account}")
    events = began(worker, account, len(expected))
    assert numbers(events) == expected
    assert all(event["in_order"] for event in events)


@ON_REDIS
def test_the_place_of_a_call_whose_sender_is_killed_before_it_is_sent_is_free(worker, m, account):
    m.dies_while_it_sends.delay(account, 1)
    wait_for(
        lambda: (
            looked_at(m, f"{LINE}account:{account}").waiting == 0
            and worker.journal.events(f"dies {account}")
        ),
        20,
        "the reaper",
    )
    m.update.delay(account, 2)
    assert numbers(began(worker, account, 1)) == [2]


SENDER = """
from tests.order.apps.ordered import update

class Stuck:
    def __repr__(self):  # for the message, when the place has been taken
        os.write(1, b"stuck\\n")
        time.sleep(600)

for account in {accounts}:
    threading.Thread(target=update.delay, args=(account, 1, Stuck())).start()
"""


@ON_REDIS
def test_each_call_that_a_killed_process_was_about_to_send_leaves_its_place(worker, m):
    """A process that is no worker, and sends with several threads at once."""
    accounts = [uuid.uuid4().hex for _ in range(3)]
    where = worker.settings["RELOCK_TEST_URL"], worker.namespace
    first = f"import os; os.environ.update({worker.settings!r})"
    sender = programs.start(SENDER.format(accounts=accounts), *where, first=first)
    assert [sender.stdout.readline() for _ in accounts] == ["stuck\n"] * 3
    for account in accounts:
        m.update.delay(account, 2)
        waits(m, account)
    sender.kill()
    programs.finish(sender, code=-signal.SIGKILL)
    for account in accounts:
        (event,) = began(worker, account, 1)
        assert (event["number"], event["in_order"]) == (2, True)


@ON_REDIS
@pytest.mark.parametrize(("task", "how"), [("careful", "slow reject"), ("refused", "slow fail")])
def test_a_call_whose_message_is_rejected_for_good_holds_up_nobody(worker, m, account, task, how):
    getattr(m, task).delay(account, 1, how)
    m.update.delay(account, 2)
    waits(m, account)
    worker.journal.add(f"free {account}")
    assert numbers(began(worker, account, 2)) == [1, 2]


@ON_REDIS
def test_calls_with_a_countdown_run_by_the_time_at_which_they_are_due(worker, m, account):
    now = datetime.now(timezone.utc)
    m.update.apply_async((account, 1), eta=now + timedelta(seconds=6))
    m.update.delay(account, 2)
    m.update.apply_async((account, 3), eta=now + timedelta(seconds=5))
    assert numbers(began(worker, account, 3)) == [2, 3, 1]


@ON_REDIS
def test_chains_groups_and_chords_of_one_name_come_to_their_ends(worker, m, account):
    steps = chain(m.update.si(account, 1), m.update.si(account, 2))
    assert steps.apply_async().get(timeout=20) == 2
    members = group(m.update.si(account, number) for number in (3, 4, 5))
    assert members.apply_async().get(timeout=20) == [3, 4, 5]
    sums = chord([m.update.si(account, number) for number in (6, 7)], m.total.s())
    assert sums.apply_async().get(timeout=20) == 13
    assert numbers(began(worker, account, 7)) == [1, 2, 3, 4, 5, 6, 7]


@ON_REDIS
def test_the_steps_of_a_workflow_lock_do_not_wait_for_their_turns(worker, m, account, late):
    m.update.apply_async((account, 1), queue=late.name)
    steps = chain(m.update.si(account, 2), m.update.si(account, 3))
    assert locked(steps, key=f"account:{account}").apply_async().get(timeout=20) == 3
    late.comes()
    events = began(worker, account, 3)
    assert [(e["number"], e["in_order"]) for e in events] == [(2, False), (3, False), (1, True)]


@ON_REDIS
@pytest.mark.parametrize("last", ["behind", "other", "first"])
def test_workflows_that_would_wait_for_each_other_by_way_of_a_line_are_told(
    worker, m, account, late, last
):
    """Of `behind` the next step is in the line behind the first call, whose lock `other` has."""
    mine, of = f"{account}-mine", {each: f"{account}-{each}" for each in ("behind", "other")}

    def flow(which, key, step):
        begins = m.unordered.si(of[which], 0, "slow")
        return locked(chain(begins, step), key=f"account:{key}").apply_async()

    def goes_on(which):
        worker.journal.add(f"free {of[which]}")

    behind = flow("behind", mine, m.update.si(account, 2))
    other = flow("other", account, m.unordered.si(mine, 3))
    for each in of.values():
        began(worker, each, 1)
    m.update.apply_async((account, 1), **({"queue": late.name} if last == "first" else {}))
    if last != "first":
        waits(m, account, kind="")
    if last != "behind":
        goes_on("behind")
        waits(m, account)
    if last != "other":
        goes_on("other")
        waits(m, mine, kind="")
    late.comes() if last == "first" else goes_on(last)

    told, free = (other, behind) if last == "other" else (behind, other)
    with pytest.raises(LockDeadlock) as caught:
        told.get(timeout=20)
    assert f"its turn for 'account:{account}' (lock_order)" in str(caught.value)
    assert caught.value.name == f"account:{mine if last == 'other' else account}"
    free.get(timeout=20)
    run = [1, 2] if last == "other" else [1]
    events = began(worker, account, len(run))
    assert numbers(events) == run
    assert all(event["in_order"] for event in events)


@ON_REDIS
def test_a_retry_that_the_body_does_not_raise_keeps_its_place(worker, m, account):
    m.update.delay(account, 1, "retry and go on")
    m.update.delay(account, 2)
    events = began(worker, account, 3)
    assert [(e["number"], e["in_order"]) for e in events] == [(1, True), (1, True), (2, True)]


@ON_REDIS
def test_a_call_by_name_has_no_place_until_it_arrives(worker, m, account, late):
    m.update.apply_async((account, 1), queue=late.name)
    m.app.send_task(m.update.name, (account, 2))
    waits(m, account)
    late.comes()
    events = began(worker, account, 2)
    assert [(e["number"], e["in_order"]) for e in events] == [(1, True), (2, False)]


def held_by_another(worker, account):
    """The lock of an account, for one who has no place in its order."""
    return lock_of(worker, f"account:{account}")


@ON_REDIS
def test_a_retry_that_has_expired_before_it_is_due_holds_nobody_up(worker, m, account):
    m.update.apply_async((account, 1, "retry in an hour"), expires=2)
    began(worker, account, 1)
    m.update.delay(account, 2)
    assert numbers(began(worker, account, 2)) == [1, 2]


@ON_REDIS
def test_a_call_without_a_place_says_once_that_it_is_out_of_order_when_it_runs(worker, m, account):
    told = f"does not run in the order of 'account:{account}': it was sent without a place"
    with held_by_another(worker, account):
        m.app.send_task(m.update.name, (account, 1))
        waits(m, account, kind="")
        assert told not in worker.log()
    began(worker, account, 1)
    worker.wait_for_log(told)
    m.update.apply_async((account, 2)).get(timeout=20)
    assert worker.log().count(told) == 1


@ON_REDIS
def test_a_call_from_a_sender_without_this_library_that_waits_for_the_lock_is_followed(
    worker, m, account
):
    with held_by_another(worker, account):
        Message(worker, m.update, account, 1, with_header=False).deliver()
        waits(m, account, kind="")
    m.update.delay(account, 2)
    assert numbers(began(worker, account, 2)) == [1, 2]


@ON_REDIS
def test_a_message_that_was_parked_and_has_to_wait_for_its_turn_again_waits(worker, m, account):
    m.careful.delay(account, 1, "slow")
    began(worker, account, 1)
    name = f"account:{account}"  # of its place, which it took when it first came
    again = {"parked_at": LINE + name, "attempts": 1, "order": (name, 0)}
    Message(worker, m.careful, account, 2, **again).deliver()
    waits(m, account)
    worker.journal.add(f"free {account}")
    assert numbers(began(worker, account, 2)) == [1, 2]


@ON_REDIS
def test_a_late_copy_that_waits_for_its_turn_until_the_result_is_stored_holds_up_nobody(
    worker, m, account
):
    """It waits for the result, but not for so long: then it has to run, as far as it knows."""
    call = Message(worker, m.careful, account, 1, "stored late")
    call.deliver()
    worker.journal.wait_for("storing", account=account)
    m.careful.delay(account, 2, "slow")
    began(worker, account, 2)
    call.deliver()
    waits(m, account)
    worker.journal.add(f"store {account}")
    assert call.result.get(timeout=20) == 1
    worker.journal.add(f"free {account}")
    m.careful.delay(account, 3)
    assert numbers(began(worker, account, 3)) == [1, 2, 3]


@ON_REDIS
def test_a_late_copy_that_waits_for_the_lock_until_the_result_is_stored_holds_up_nobody(
    worker, m, account
):
    call = Message(worker, m.careful, account, 1, "stored late")
    call.deliver()
    worker.journal.wait_for("storing", account=account)
    with held_by_another(worker, account):
        call.deliver()
        waits(m, account, kind="")
        worker.journal.add(f"store {account}")
        assert call.result.get(timeout=20) == 1
    m.careful.delay(account, 2)
    assert numbers(began(worker, account, 2)) == [1, 2]


@ON_REDIS
@pytest.mark.parametrize("how", ["revoked", "expired"])
def test_a_call_by_name_that_ends_while_it_waits_for_the_lock_leaves_the_order(
    worker, m, account, how
):
    with held_by_another(worker, account):
        options = {"expires": 2.0} if how == "expired" else {}
        first = m.app.send_task(m.update.name, (account, 1), **options)
        waits(m, account, kind="")
        wait_for(lambda: looked_at(m, f"{LINE}account:{account}").waiting == 1)
        if how == "revoked":
            first.revoke()
        worker.wait_for_log(rf"Discarding revoked task: .*{first.id}", 20)
        # A tombstone would let it go later, for as long as there is one.
        wait_for(lambda: not looked_at(m, f"{LINE}account:{account}").waiting, 20, "the end")


@ON_REDIS
def test_the_marker_of_a_retry_that_goes_to_the_end_goes_with_it(worker, m, account):
    m.once_to_its_end.delay(account, 1, "slow retry")
    worker.journal.add(f"free {account}")
    began(worker, account, 2)
    wait_for(lambda: m.once_to_its_end.marked(account, 1) is None, 20, "the end of the marker")


@ON_REDIS
def test_a_duplicate_takes_no_place(worker, m, account, late):
    first = m.once.apply_async((account, 1), queue=late.name)
    assert m.once.delay(account, 1).id == first.id
    m.update.delay(account, 2)
    waits(m, account)
    late.comes()
    assert numbers(began(worker, account, 2)) == [1, 2]


@ON_REDIS
def test_eager_and_direct_calls_have_no_order(m, account):
    assert m.update.apply((account, 1)).get() == 1
    assert m.update(account, 2) == 2
    events = m.journal.events("began", account=account)
    assert [event["in_order"] for event in events] == [None, None]


@ON_REDIS
def test_a_call_whose_lock_name_cannot_be_told_any_more_holds_nobody_up(m, account):
    m.has_no_name.delay(account)
    assert m.update.delay(account, 1).get(timeout=20) == 1
    assert m.has_no_name.marked(account) is None


@ON_REDIS
@pytest.mark.parametrize("how", ["executed", "revoked"])
def test_a_call_whose_options_do_not_fit_the_workers_declaration_holds_nobody_up(
    worker, m, account, late, how
):
    task = m.declared_anew
    task.lock_order_retry = "keep"
    first = task.apply_async((account,), queue=late.name, lock_keep_on_retry=True)
    if how == "revoked":
        m.app.control.revoke(first.id, reply=True, limit=1, timeout=5)
    late.comes()
    assert m.update.delay(account, 2).get(timeout=20) == 2
    wait_for(lambda: task.marked(account) is None, 10, "the end of the marker")
