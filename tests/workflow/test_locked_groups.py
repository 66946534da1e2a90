"""`locked(group(…))`: the chain of the task that acquires the lock and the group."""

from __future__ import annotations

import time

import pytest
from billiard.exceptions import WorkerLostError
from celery import VERSION, chain, chord, group
from celery.exceptions import TaskRevokedError

from celery_relock import locked
from celery_relock.errors import LockConfigError, LockConflict, LockLost
from tests.support.parked import wait_until_parked
from tests.workflow import flow as flows
from tests.workflow.flow import Visitor, wait_for_state


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker("tests.workflow.apps.workflows", concurrency=3)


@pytest.fixture
def flow(worker):
    return Flow(worker)


class Flow(flows.Flow):
    def locked(self, *members, **options):
        return locked(group(members), key=self.key, **options)

    def entered(self):
        """The steps that have begun, and their fences."""
        return {e["step"]: e["fence"] for e in self.events("enter")}


def test_the_members_wait_for_the_lock_as_one(flow):
    with flow.lock() as held:
        sent = flow.locked(flow.step("1"), chain(flow.step("2"), flow.step("3"))).delay()
        wait_for_state(sent.parent, "BLOCKED")
        wait_until_parked(flow.worker, flow.key)  # the state is told before
        assert flow.entered() == {}
        before = held.fence
    assert sent.get(timeout=30) == [["1"], ["2", "3"]]
    fences = flow.entered()
    assert set(fences) == {"1", "2", "3"}
    assert len(set(fences.values())) == 1
    assert fences["1"] > before
    assert flow.is_free()


def _members(flow):
    return (
        flow.step("1"),
        chain(flow.step("2"), flow.step("3")),
        chord([flow.step("4")], flow.join("5")),
        locked(group(flow.step("8"), flow.step("9")), key=f"other:{flow.account}"),
    )


@pytest.mark.parametrize("place", ["alone", "header"])
def test_a_conflict_that_is_raised_is_the_result_of_each_member(flow, place):
    with flow.lock():
        members = flow.locked(*_members(flow), on_conflict="raise")
        sent = members if place == "alone" else chord([members, flow.step("6")], flow.join("7"))
        result = sent.apply_async()
        with pytest.raises(LockConflict, match=flow.key):
            result.get(timeout=30)
        if place == "alone":
            for each in result:
                with pytest.raises(LockConflict, match=flow.key):
                    each.get(timeout=30)
    assert set(flow.entered()) <= {"6"}


def test_a_conflict_that_is_raised_calls_the_error_callback_of_the_whole(flow):
    with flow.lock():
        members = flow.locked(flow.step("1"), flow.step("2"), on_conflict="raise")
        members.link_error(flow.step("rescue").set(immutable=True))
        members.delay()
        flow.wait_for("rescue")
    assert set(flow.entered()) == {"rescue"}


@pytest.mark.parametrize("place", ["alone", "header"])
def test_members_that_are_dropped_are_dropped_together_and_hang_nobody(flow, place):
    with flow.lock():
        members = flow.locked(*_members(flow), on_conflict="drop")
        if place == "alone":
            found = members.delay().get(timeout=30)
            assert [each["relock"] for each in found[:3]] == ["dropped"] * 3
            assert [each["relock"] for each in found[3]] == ["dropped"] * 2
        else:
            header = [each.si(1) for each in (flow.module.of_item,)]
            body = flow.module.of_item.s()
            found = chord([members, *header], body).delay().get(timeout=30)
            assert found[1::2] == [2, 2]
            assert len(found[0]) == 4
            assert [each["relock"] for each in found[0][3]] == ["dropped"] * 2
    assert flow.entered() == {}


def test_the_members_have_the_error_if_the_lock_around_is_gone_before_theirs_is_acquired(flow):
    inner = f"other:{flow.account}"
    with flow.lock(inner):
        members = locked(group(flow.step("1"), flow.step("2")), key=inner)
        outer = {"key": flow.key, "gap_ttl": 0.5, "on_gap": "raise"}
        sent = locked(chain(flow.step("0"), members), **outer).delay()
        wait_until_parked(flow.worker, inner)
        assert flow.is_free(), "the gap has ended"
    for each in sent.results:
        with pytest.raises(LockLost, match=flow.key):
            each.get(timeout=30)
    assert set(flow.entered()) == {"0"}


@pytest.mark.parametrize("how", ["expired", "revoked"])
def test_nothing_runs_and_nothing_waits_where_the_task_that_acquires_is_revoked(flow, how):
    members = flow.locked(flow.step("1"), chain(flow.step("2"), flow.step("3")))
    if how == "expired":
        sent = members.apply_async(expires=0.1, countdown=0.3)
    else:
        with flow.lock():
            sent = members.delay()
            wait_for_state(sent.parent, "BLOCKED")
            wait_until_parked(flow.worker, flow.key)
            sent.parent.revoke()
            wait_for_state(sent.parent, "REVOKED")
    with pytest.raises(TaskRevokedError):
        sent.parent.get(timeout=30)
    assert flow.is_free()
    assert flow.entered() == {}


@pytest.mark.skipif(
    VERSION < (5, 7), reason="Celery loses a member: chains that end in groups, in a group"
)
def test_the_same_locked_group_twice_in_a_group_takes_turns(flow):
    twice = flow.locked(flow.step("1", "slow"), flow.step("2"))
    assert group(twice, twice).delay().get(timeout=30) == [[["1"], ["2"]]] * 2
    fences = [e["fence"] for e in flow.events("enter")]
    assert len(fences) == 4
    assert fences[0] == fences[1] < fences[2] == fences[3]


def test_a_nested_group_that_has_to_wait_keeps_the_lock_around_it(flow):
    other, nothing = f"other:{flow.account}", flow.module.adds_nothing
    members = [flow.step(name, "", nothing) for name in "23"]
    with flow.lock(other):
        inner = locked(group(members), key=other)
        sent = locked(chain(flow.step("1"), inner, flow.join("4")), key=flow.key).delay()
        flow.wait_for("1")
        wait_until_parked(flow.worker, other)
        assert not flow.lock().acquire(blocking_timeout=0.5)
    assert sent.get(timeout=30) == ["1", "1", "4"]
    assert set(flow.entered()) == {"1", "4"}
    assert len(set(flow.entered().values())) == 1
    assert flow.is_free()


@pytest.mark.skipif(
    VERSION < (5, 7),
    reason="Celery hangs before 5.7: replaced by a chain that ends in a group",
)
def test_a_task_may_be_replaced_by_a_locked_group(flow):
    sent = flow.step("1", "replace by a locked group").delay()
    assert sent.get(timeout=30) == [["1'"], ['1"']]
    fences = flow.entered()
    assert fences["1'"] == fences['1"'] > fences["1"] == 0
    assert flow.is_free()


def test_a_sender_that_is_killed_between_two_members_leaves_the_lock_to_those_it_has_sent(flow):
    sent = flow.locked(flow.step("1", "wait"), flow.step("2", "kill the sender")).delay()
    flow.wait_for("1")
    with pytest.raises(WorkerLostError):
        sent.parent.get(timeout=30)
    assert not flow.lock().acquire(blocking_timeout=0.3)
    flow.go_on()
    assert flow.is_free()
    assert set(flow.entered()) == {"1"}


@pytest.mark.parametrize(("args", "kwargs"), [((5,), {}), ((), {"y": 5})])
def test_arguments_given_when_it_is_sent_go_to_each_member(flow, args, kwargs):
    adds = flow.module.adds
    members = [adds.s(1), adds.s(2)] if args else [adds.s(1), adds.s(x=2)]
    canvas = locked(group(members), key=flow.key)
    assert canvas.apply_async(args, kwargs).get(timeout=30) == [6, 7]


def test_options_given_when_it_is_sent_are_for_the_task_that_acquires_the_lock(flow):
    place = f"asked-{flow.account}"
    began = time.monotonic()
    when = flow.module.tells_when.s()
    sent = flow.locked(flow.step("1"), when).apply_async(queue=place, countdown=0.7)
    with flow.module.app.connection_for_read() as connection:
        assert connection.default_channel._size(place) == 1
    with flow.lock():  # as it is not held for the countdown
        flow.module.app.control.add_consumer(place, reply=True)
        wait_for_state(sent.parent, "BLOCKED")
        assert time.monotonic() - began > 0.7
        assert flow.entered() == {}
    own = flow.module.app.conf.task_default_queue
    assert sent.get(timeout=30) == [["1"], [own, None]]
    flow.module.app.control.cancel_consumer(place, reply=True)


@pytest.mark.parametrize("order", ["stamped first", "locked first"])
def test_stamps_of_the_user_stay(flow, order):
    steps = group(chain(flow.step(name), flow.module.tells_its_stamps.s()) for name in "12")
    if order == "stamped first":
        steps.stamp(Visitor())
    canvas = locked(steps, key=flow.key)
    if order == "locked first":
        canvas.stamp(Visitor())
    for stamps, fences in canvas.delay().get(timeout=30):
        assert stamps["mine"] in ("yes", ["yes"])
        assert fences == [flow.entered()["1"]]


def test_the_canvas_that_was_locked_stays_as_it_was(flow):
    canvas = group(flow.step("1"), chord([flow.step("2")], flow.join("3")))
    before = repr([dict(each) for each in canvas.tasks])
    locked(canvas, key=flow.key)
    assert repr([dict(each) for each in canvas.tasks]) == before


@pytest.mark.parametrize("part", ["task", "group"])
def test_one_that_celery_takes_apart_is_refused_with_what_to_write_instead(flow, part):
    step = flow.step("1")
    header = locked(group(step, step) if part == "group" else step, key=flow.key)
    with pytest.raises(LockConfigError, match=r"chord\(\[locked.*locked\(group\(…\)\) \| body"):
        chord(header, flow.join("2")).delay()


def test_a_locked_group_before_a_body_is_a_chord(flow):
    canvas = flow.locked(flow.step("1"), flow.step("2")) | flow.join("3")
    assert canvas.delay().get(timeout=30) == ["1", "2", "3"]


def test_protocol_1_is_refused_when_it_is_sent(flow, monkeypatch):
    monkeypatch.setitem(flow.module.app.conf, "task_protocol", 1)
    with pytest.raises(LockConfigError, match="protocol"):
        flow.locked(flow.step("1"), flow.step("2")).delay()
