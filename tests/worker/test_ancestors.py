"""A task that a live holder spawned enters with it, however deep; nobody else does."""

from __future__ import annotations

from contextvars import Context

import pytest
from celery.beat import ScheduleEntry, Scheduler

from celery_relock import is_dropped
from celery_relock.engine import ids
from celery_relock.errors import LockConflict
from celery_relock.worker import message
from tests.support.parked import lock_of, wait_until_parked
from tests.support.permits import permits

CONCURRENCY = 4


@pytest.fixture(scope="module")
def family(module_worker):
    return module_worker("tests.worker.apps.ancestors", concurrency=CONCURRENCY)


def fences_of(worker, account):
    return permits(worker.journal.events(), f"account:{account}")


def result_of(worker, task_id):
    return worker.module.app.AsyncResult(task_id).get(timeout=20)


def wait_for_the_warning(worker, account, parent, task="counts"):
    return worker.wait_for_log(
        rf"{task}\[\S{{36}}\] waits for the lock .*{account}.* which its own "
        rf"ancestor \S+\[{parent.id}\].*"
    )[0]


def everyone_in(result):
    """The results of a call and of all that it waited for."""
    if isinstance(result, dict):
        return [result, *everyone_in(result["inner"])]
    return [one for each in result for one in everyone_in(each)] if isinstance(result, list) else []


@pytest.mark.parametrize(
    ("name", "more", "count"),
    [
        ("waits_for_a_child", (), 2),
        ("waits_by_name", (), 2),
        ("waits_deeper", (3,), 4),
        ("waits_through_unlocked_tasks", (), 2),
        ("waits_for_what_a_child_calls_in_a_thread", (), 2),
        ("waits_for_a_chain", (), 4),
        ("waits_for_a_chord", (), 2),
        ("waits_for_an_added_member", (), 3),
        ("waits_for_a_retried_child", (), 2),
        ("waits_for_a_replaced_child", (), 2),
    ],
)
def test_what_a_holder_spawned_and_waits_for_re_enters_with_its_fence(
    family, account, name, more, count
):
    told = getattr(family.module, name).delay(account, *more).get(timeout=20)
    found = everyone_in(told)
    assert len(found) == count
    assert [one["reentered"] for one in found] == [False, *[True] * (count - 1)]
    assert {one["fence"] for one in found} == {told["fence"]}
    assert fences_of(family, account) == [told["fence"]], "they were not one entry"
    # The body of a task that was replaced may end after all others.
    with lock_of(family, f"account:{account}") as stranger:
        assert stranger.fence > told["fence"]


def test_a_child_with_another_lock_as_well_passes_who_waits_for_both(family, account):
    sent = family.module.waits_for_a_child_that_needs_another_lock_as_well.delay(account)
    wait_until_parked(family, f"account:{account}")
    family.journal.add("parked", account=account)
    other, told = sent.get(timeout=20)
    assert told == result_of(family, other) == "had both"


def test_a_link_that_is_sent_after_its_task_re_enters_by_the_holder_above_both(family, account):
    told = family.module.waits_for_a_link.delay(account).get(timeout=20)
    assert fences_of(family, account) == [told["fence"]]


def test_a_child_that_outlives_its_parent_keeps_the_permit(family, account):
    parent = family.module.leaves_a_child_behind.delay(account).get(timeout=20)
    stranger = lock_of(family, f"account:{account}")
    assert not stranger.acquire(blocking=False), "the lock went with the parent"
    family.journal.add("go on", account=account)
    child = result_of(family, parent["inner"])
    assert child["reentered"]
    assert child["fence"] == parent["fence"]
    assert stranger.acquire(blocking_timeout=5)
    assert stranger.fence > parent["fence"]
    stranger.release()


def test_what_replaces_a_task_may_re_enter_before_its_body_has_left(family, account):
    told = family.module.is_replaced.delay(account).get(timeout=20)
    replaced = family.journal.events("replacing", account=account)
    assert told["reentered"]
    assert told["fence"] == replaced[0]["fence"]


def test_a_retry_does_not_re_enter_while_the_body_before_it_is_on_its_way_out(family, account):
    told = family.module.retries_and_leaves_slowly.delay(account).get(timeout=20)
    assert not told["reentered"]
    assert len(fences_of(family, account)) == 2


def test_siblings_that_an_unlocked_task_spawned_exclude_each_other(family, account):
    works = family.module.works
    sent = family.module.fans_out.delay(account, works.name).get(timeout=20)
    told = [result_of(family, each) for each in sent]
    assert not any(one["reentered"] for one in told)
    assert len(fences_of(family, account)) == 4


def test_members_of_a_group_that_a_client_sends_exclude_each_other(family, account):
    from celery import group

    told = group(family.module.works.s(account) for _ in range(4)).delay().get(timeout=20)
    assert not any(one["reentered"] for one in told)
    assert len(fences_of(family, account)) == 4


def test_by_workflow_all_siblings_hold_it_at_once(family, account):
    meets = family.module.meets_its_siblings
    sent = family.module.fans_out.delay(account, meets.name).get(timeout=20)
    told = [result_of(family, each) for each in sent]
    assert len({one["fence"] for one in told}) == 1
    assert sorted(one["reentered"] for one in told) == [False, True, True, True]


def test_inline_alone_keeps_a_spawned_task_out(family, account):
    parent = family.module.sends_a_child_that_may_not_re_enter.delay(account).get(timeout=20)
    child = result_of(family, parent["inner"])
    assert not child["reentered"]
    assert child["fence"] > parent["fence"]


def test_a_thread_of_a_task_has_no_ancestors(family, account):
    parent = family.module.sends_from_a_thread.delay(account).get(timeout=20)
    child = result_of(family, parent["inner"])
    assert not child["reentered"]
    assert child["fence"] > parent["fence"]


def test_what_beat_and_send_task_send_has_no_ancestors(family, account):
    app, take = family.module.app, family.module.take
    entry = ScheduleEntry(name="tick", task=take.name, schedule=60, args=(account,), app=app)
    ticks = [Scheduler(app, lazy=True).apply_async(entry) for _ in range(2)]
    sent = [*ticks, app.send_task(take.name, (account,))]
    told = [one.get(timeout=20) for one in sent]
    assert not any(one["reentered"] for one in told)
    assert len(fences_of(family, account)) == 3


def test_an_eager_child_re_enters_by_the_call_stack(family, account, monkeypatch):
    monkeypatch.setitem(family.module.app.conf, "task_always_eager", True)
    told = family.module.waits_deeper.delay(account, 2).get(disable_sync_subtasks=False)
    found = everyone_in(told)
    assert [one["reentered"] for one in found] == [False, True, True]
    assert {one["fence"] for one in found} == {told["fence"]}


def send_with(worker, account, root, ancestors):
    """Send `take` with ancestors that this process made up."""
    forged = {"v": message.VERSION, "execution_id": ids.new_id(), "ancestors": ancestors}
    return worker.module.take.apply_async(
        (account,), root_id=root, headers={message.HEADER: forged}
    )


@pytest.mark.parametrize(
    "ancestors", [7, "text", [None], {"a": 1}, ["", "a b", "é" * 100, "x" * 500], ["ab"] * 5000]
)
def test_ancestors_that_make_no_sense_are_no_error_and_admit_nobody(family, account, ancestors):
    told = send_with(family, account, "some-root", ancestors).get(timeout=20)
    assert not told["reentered"]


def held_from_within(worker, account):
    """A task that lingers in the lock; its execution id as the server has it."""
    sent = worker.module.lingers.delay(account)
    worker.journal.wait_for("lingering", account=account)
    state = lock_of(worker, f"account:{account}")._engine.inspect(f"account:{account}")
    return sent, state.holds[0].execution_id


def test_ancestors_of_another_workflow_admit_nobody(family, account):
    holder, execution_id = held_from_within(family, account)
    forged = send_with(family, account, "another-root", [execution_id])
    family.journal.add("go on", account=account)
    assert forged.get(timeout=20)["fence"] > holder.get(timeout=20)["fence"]
    assert not forged.get()["reentered"]


def test_the_same_ancestors_of_the_same_workflow_admit(family, account):
    # Without this one, the test above would pass as well if no ancestors were read at all.
    holder, execution_id = held_from_within(family, account)
    child = send_with(family, account, holder.id, ["unknown", execution_id]).get(timeout=20)
    family.journal.add("go on", account=account)
    assert child["reentered"]
    assert child["fence"] == holder.get(timeout=20)["fence"]


def test_ancestors_whose_holds_have_ended_admit_nobody(family, account):
    holder, execution_id = held_from_within(family, account)
    family.journal.add("go on", account=account)
    before = holder.get(timeout=20)
    child = send_with(family, account, holder.id, [execution_id]).get(timeout=20)
    assert not child["reentered"]
    assert child["fence"] > before["fence"]


def test_the_ancestors_do_not_grow_without_end(family, account):
    family.module.tells_its_ancestors.delay(account, message._MOST_ANCESTORS + 3)

    def told(events):
        return {e["again"]: e["ids"] for e in events if e.data.get("account") == account}

    events = family.journal.wait_for(lambda events: 0 in told(events), timeout=20)
    found = told(events)
    assert found[message._MOST_ANCESTORS + 3] is None
    assert len(found[message._MOST_ANCESTORS + 1]) == 2
    assert len(found[0]) == len(set(found[0])) == message._MOST_ANCESTORS
    # The nearest are kept.
    assert found[0][1:] == found[1][:-1]


def test_without_a_lock_the_header_has_no_ancestors():
    published = {"id": "some-id"}
    Context().run(message.write_header, published, {}, ())
    assert set(published[message.HEADER]) == {"v", "execution_id"}


def test_children_that_a_holder_sends_exclude_it_and_each_other_unless_asked(family, account):
    parent = family.module.sends_six_that_count.delay(account)
    wait_for_the_warning(family, account, parent)
    family.journal.add(f"go {account}")
    children = parent.get(timeout=20)
    for child in children:
        result_of(family, child)
    client = family.module.app.backend.client
    assert int(client.get(f"{family.namespace}:{account}")) == 7


def test_of_a_child_that_waits_in_its_slot_the_warning_comes_before_the_wait(family, account):
    parent = family.module.sends_one_that_waits_in_its_slot.delay(account)
    wait_for_the_warning(family, account, parent)
    family.journal.add(f"go {account}")
    result_of(family, parent.get(timeout=20))


def test_the_warning_does_not_advise_what_a_task_with_an_order_cannot_declare(family, account):
    parent = family.module.comes_in_order.delay(account, sends=True)
    warning = wait_for_the_warning(family, account, parent, "comes_in_order")
    [sent] = family.journal.wait_for("sent", account=account)
    family.journal.add(f"go {account}")
    result_of(family, sent["id"])
    assert warning.endswith("then call the task directly")


def test_children_that_do_not_wait_for_the_holder_are_not_warned_of(family, account):
    parent = family.module.sends_those_that_do_not_wait.delay(account)

    def told(events):
        return {e["policy"]: e["id"] for e in events if e.data.get("account") == account}

    sent = told(family.journal.wait_for(lambda events: len(told(events)) == 2, timeout=20))
    assert is_dropped(result_of(family, sent["drop"]))
    with pytest.raises(LockConflict):
        result_of(family, sent["raise"])
    family.journal.add(f"go {account}")
    parent.get(timeout=20)
    assert [each for each in sent.values() if f"counts[{each}] waits for" in family.log()] == []


@pytest.mark.parametrize("by_a_chain", [False, True])
def test_a_task_that_replaced_the_holder_is_not_warned_of_it(family, account, by_a_chain):
    replaced = family.module.replaces_itself.delay(account, by_a_chain)
    family.wait_for_log(rf"counts\[\S{{36}}\] parked: the lock 'account:{account}' is held by")
    family.journal.add(f"go {account}")
    replaced.get(timeout=20)
    assert f"waits for the lock 'account:{account}'" not in family.log()


def test_a_task_that_sends_itself_does_not_overlap_with_itself(family, account):
    family.module.sends_itself.delay(account, 4).get(timeout=20)
    family.journal.wait_for("last", account=account)
