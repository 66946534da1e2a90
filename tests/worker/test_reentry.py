"""A locked task may call what needs the same lock: it re-enters, and never waits for itself."""

from __future__ import annotations

import time

import pytest

from celery_relock.engine import ids
from celery_relock.errors import LockConfigError, LockConflict
from tests.support import new_namespace
from tests.support.messages import send_in_protocol_1
from tests.support.parked import lock_of, wait_until_free
from tests.support.permits import permits

INLINE = [
    "calls_directly",
    "calls_three_deep",
    "applies",
    "applies_under_a_direct_call",
    "calls_itself",
    "calls_a_signature",
    "enters_a_lock_object",
    "survives_the_failure_of_a_callee",
]


@pytest.fixture(scope="module")
def reentry(module_worker):
    return module_worker("tests.worker.apps.reentry", concurrency=2)


def chain_of(result):
    """The result of a call, of what it called, and so on inwards."""
    found = []
    while result is not None:
        found.append(result)
        result = result.get("inner")
    return found


@pytest.mark.parametrize("name", INLINE)
def test_what_is_called_inline_re_enters_with_the_same_fence(reentry, account, name):
    task = getattr(reentry.module, name)
    calls = chain_of(task.delay(account).get(timeout=20))
    assert len(calls) >= 2
    assert [call["reentered"] for call in calls] == [False, *[True] * (len(calls) - 1)]
    assert len({call["fence"] for call in calls}) == 1
    # The call stack says it all: an inner call costs no hold of its own, and ends none.
    assert {call.get("holds", 1) for call in calls} == {1}
    assert not lock_of(reentry, f"account:{account}").locked()
    assert len(permits(reentry.journal.events(), f"account:{account}")) == 1


@pytest.mark.parametrize("name", INLINE)
def test_the_same_holds_for_a_direct_call_outside_of_tasks(reentry, account, name):
    calls = chain_of(getattr(reentry.module, name)(account))
    assert [call["reentered"] for call in calls] == [False, *[True] * (len(calls) - 1)]
    assert len({call["fence"] for call in calls}) == 1
    assert not lock_of(reentry, f"account:{account}").locked()


def test_a_task_that_calls_itself_for_a_lock_that_is_held_is_not_sent_again(reentry, account):
    # It finds its own message's request there; to send that again would run the outer body twice.
    other = f"{account}-other"
    with lock_of(reentry, f"account:{other}"):
        result = reentry.module.calls_itself_for_another.delay(account, other)
        with pytest.raises(LockConflict, match=other):
            result.get(timeout=20)
    assert len(permits(reentry.journal.events(), f"account:{account}")) == 1


def test_items_of_starmap_re_enter_the_lock_of_the_caller(reentry, account):
    result = reentry.module.maps.delay(account).get(timeout=20)
    assert [item["reentered"] for item in result["inner"]] == [True, True]
    assert {item["fence"] for item in result["inner"]} == {result["fence"]}


def test_items_of_a_starmap_message_acquire_the_lock_one_after_another(reentry, account):
    take = reentry.module.take
    items = take.starmap([(account,), (account,)]).delay().get(timeout=20)
    assert [item["reentered"] for item in items] == [False, False]
    assert items[0]["fence"] < items[1]["fence"]


def test_a_call_of_run_itself_acquires_the_lock_too(reentry, account):
    result = reentry.module.calls_run_of_another.delay(account).get(timeout=20)
    assert result["inner"] == {"holds": 1}


def test_of_two_locks_the_one_that_a_caller_has_is_re_entered_and_the_other_is_acquired(
    reentry, account
):
    second = f"{account}-second"
    result = reentry.module.half_covers.delay(account, second).get(timeout=20)
    both, after = result["inner"]
    assert both["fences"][f"account:{account}"] == result["fence"]
    assert both["fences"][f"account:{second}"] > result["fence"]
    assert not both["reentered"]
    assert both["holds"] == 1
    assert after == {"after": 0}
    assert result["holds"] == 1, "the inner release freed the lock of the outer call"


def test_the_owner_is_the_workflow_wherever_in_it_the_call_is(reentry, account):
    sent = reentry.module.applies_under_a_direct_call.apply_async(
        (account,), root_id="workflow-1", parent_id="workflow-1"
    )
    calls = chain_of(sent.get(timeout=20))
    assert len(calls) == 3
    assert {call["workflow"] for call in calls} == {"workflow-1"}
    assert {call["owner"] for call in calls} == {"workflow-1"}


def test_a_locked_task_under_an_unlocked_one_belongs_to_its_workflow(reentry, account):
    sent = reentry.module.unlocked.delay(account)
    result = sent.get(timeout=20)
    assert ids.full(result["workflow"]) == result["inner"]["owner"] == sent.id
    assert not result["inner"]["reentered"]


def test_the_owner_may_be_the_task_alone(reentry, account):
    sent = reentry.module.owned_by_the_task.apply_async((account,), root_id="workflow-2")
    result = sent.get(timeout=20)
    assert result["owner"] == sent.id
    assert result["inner"]["reentered"]


def test_the_owner_may_be_what_a_callable_says(reentry, account):
    result = reentry.module.owned_by_a_callable.delay(account).get(timeout=20)
    assert result["owner"] == f"of-{account[:10]}"
    assert result["inner"]["reentered"]


def test_a_callable_that_names_no_owner_is_told_with_task_and_option(reentry, account):
    result = reentry.module.owned_by_nobody.delay(account)
    with pytest.raises(LockConfigError, match=r"owned_by_nobody.*lock_owner.*returned None"):
        result.get(timeout=20)


def test_a_direct_call_under_a_lock_object_re_enters_it(reentry, account):
    lock = lock_of(reentry, f"account:{account}")
    with lock:
        result = reentry.module.calls_directly(account)
        assert result["reentered"]
        assert result["fence"] == lock.fence
        assert lock.owned(), "the inner call gave the outer lock back"
    assert not lock.locked()


def test_two_direct_calls_outside_of_tasks_are_strangers(reentry, account):
    reentry.module.take.delay(account, seconds=5.0)
    reentry.journal.wait_for("enter", lock=f"account:{account}")
    started = time.monotonic()
    with pytest.raises(LockConflict, match=r"lock_max_wait=0.2 s") as caught:
        reentry.module.impatient(account)
    assert 0.15 < time.monotonic() - started < 4.5
    assert caught.value.name == f"account:{account}"
    assert caught.value.owner


def test_a_first_protocol_message_takes_its_own_id_for_the_workflow(module_worker, account):
    # It carries neither root nor parent, nor a header of ours.
    worker = module_worker(
        "tests.worker.apps.reentry",
        namespace=new_namespace(),
        concurrency=2,
    )
    sent = send_in_protocol_1(worker.module.calls_three_deep, account)
    calls = chain_of(sent.get(timeout=20))
    assert {call["owner"] for call in calls} == {sent.id}
    assert [call["reentered"] for call in calls] == [False, True, True, True, True, True]
    both = [send_in_protocol_1(worker.module.take, account, 0.3) for _ in range(2)]
    fences = [one.get(timeout=20)["fence"] for one in both]
    assert len(set(fences)) == 2
    assert len(permits(worker.journal.events(), f"account:{account}")) == 3


@pytest.mark.parametrize("where", ["nowhere", "in a variable"])
@pytest.mark.parametrize("task", ["a locked task", "a lock in a plain task"])
def test_a_lock_that_a_task_leaves_behind_is_not_re_entered_by_the_next(
    module_worker, account, where, task
):
    worker = module_worker("tests.worker.apps.reentry", concurrency=1)
    worker.module.leaves_a_lock.delay(account, where).get(timeout=20)
    if task == "a locked task":
        with pytest.raises(LockConflict):
            worker.module.impatient.delay(account).get(timeout=20)
    else:
        assert worker.module.asks_for_the_lock.delay(account).get(timeout=20) is False
    worker.close()


@pytest.mark.parametrize(
    "name",
    [
        "called_under_its_lock",
        "called_under_another_lock",
        "plain_called_under_a_lock",
        "begins_under_its_lock",
    ],
)
def test_a_lock_that_a_task_acquires_around_its_body_is_re_entered_by_the_body(
    reentry, account, name
):
    assert getattr(reentry.module, name).delay(account).get(timeout=20) is True
    wait_until_free(reentry, f"account:{account}")  # by a signal after the result
