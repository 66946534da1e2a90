"""Between two steps of a workflow: the gap that runs out, and the worker that dies there."""

from __future__ import annotations

import signal
import time

import pytest
from celery import VERSION, chain, group

from celery_relock import is_dropped, locked
from celery_relock.errors import LockLost, LockUnavailable
from celery_relock.workflow.steps import WorkflowLock
from tests.support import wait_for
from tests.support.apps import LOOK_EVERY
from tests.support.messages import Message
from tests.support.parked import lock_of, state_of, wait_until_parked
from tests.workflow import flow as flows
from tests.workflow.flow import wait_for_state

GAP = 0.5


@pytest.fixture(scope="module")
def worker(module_worker):
    env = {LOOK_EVERY: "0.3"}
    return module_worker("tests.workflow.apps.workflows", concurrency=2, env=env)


@pytest.fixture
def flow(worker):
    return Flow(worker)


class Flow(flows.Flow):
    def __init__(self, worker):
        super().__init__(worker)
        self.later = f"later-{self.account}"

    def interrupted(self, task="plain", do="", **options):
        """Step 1 goes to a queue that no worker has."""
        middle = self.step("1", do, getattr(self.module, task))
        steps = [self.step("0"), middle.set(queue=self.later), self.step("2")]
        return locked(chain(*steps), key=self.key, gap_ttl=GAP, **options).delay()

    def consume_later(self):
        self.module.app.control.add_consumer(self.later, reply=True)

    def check_exclusion(self):
        """No two permits at the same time, and each step of a permit that lived has run once."""
        inside = []
        for event in self.events("enter", "leave"):
            (inside.append if event.name == "enter" else inside.remove)(event["fence"])
            assert len(set(inside)) < 2, inside
        fences = [e["fence"] for e in self.events()]
        assert fences == sorted(fences)
        return [e["step"] for e in self.events("enter")]


def test_a_queue_that_is_purged_holds_the_lock_for_the_gap_and_no_longer(flow):
    flow.interrupted()
    flow.wait_for("0", event="leave")
    wait_for(lambda: _kept(flow))
    began = time.monotonic()
    assert not flow.lock().acquire(blocking=False)
    with flow.lock():
        assert time.monotonic() - began < GAP + 10


def test_the_lock_is_not_kept_for_a_step_that_has_expired_where_no_worker_sees_it(flow):
    late = flow.step("1").set(queue=flow.later, expires=2)  # RabbitMQ drops it there, unheard
    locked(chain(flow.step("0"), late), key=flow.key).delay()
    flow.wait_for("0", event="leave")
    wait_for(lambda: _kept(flow))
    assert not flow.lock().acquire(blocking=False)
    assert flow.lock().acquire(blocking_timeout=20)  # the gap would be 300 s


@pytest.mark.parametrize("discarded", ["unknown", "unreadable"])
def test_the_lock_is_not_kept_for_a_step_that_was_discarded_before_its_sender_ended(
    worker, flow, discarded
):
    unknown = worker.module.app.signature(f"unknown {flow.account}", immutable=True)
    last = {"unknown": unknown, "unreadable": flow.step("1").set(serializer="pickle")}[discarded]
    first = flow.step("0", task=worker.module.ends_late)
    locked(chain(first, last), key=flow.key).delay()
    worker.wait_for_log(rf"(unregistered task .*{flow.account}|untrusted content of type pickle)")
    # Its main loop has cleared away what was left to it when it answers.
    assert worker.module.app.control.ping(destination=[worker.node], timeout=10, limit=1)
    flow.go_on()
    assert flow.is_free(), "it would be kept for lock_gap_ttl, five minutes"


def test_a_step_that_comes_within_the_gap_goes_on_with_the_same_fence(flow):
    sent = locked(
        chain(flow.step("0"), flow.step("1").set(queue=flow.later), flow.step("2")), key=flow.key
    ).delay()
    flow.wait_for("0", event="leave")
    flow.consume_later()
    assert sent.get(timeout=30) == ["0", "1", "2"]
    assert len({e["fence"] for e in flow.events()}) == 1
    assert all(e["unbroken"] for e in flow.events())


@pytest.mark.parametrize("task", ["plain", "holding"])
def test_a_step_that_finds_its_permit_gone_is_told_and_acquires_a_new_one(flow, task):
    if task == "plain":
        sent = flow.interrupted()
    else:
        first = flow.step("0", "", flow.module.holding_shortly)
        later = flow.step("1", "", flow.module.holding).set(queue=flow.later)
        sent = chain(first, later, flow.step("2")).delay()
    flow.wait_for("0", event="leave")
    stranger = flow.lock()
    wait_for(lambda: stranger.acquire(blocking=False))
    between = stranger.fence
    stranger.release()
    flow.consume_later()
    assert sent.get(timeout=30) == ["0", "1", "2"]
    first, *rest = flow.events("enter")
    assert first["fence"] < between < rest[0]["fence"] == rest[1]["fence"]
    assert [first["unbroken"], *(e["unbroken"] for e in rest)] == [True, False, False]
    told = flow.worker.wait_for_log(rf"{flow.key}.* lost.*ended between two steps")
    assert told
    (lost,) = flow.worker.journal.events("lost", lock=flow.key)
    assert (lost["held"], lost["of_workflow"]) == (0, True)


@pytest.mark.parametrize("holds", ["the same", "one more", "another"])
@pytest.mark.parametrize("is_gone", [True, False])
def test_a_step_hears_that_its_permit_was_gone_whatever_lock_of_its_own_it_has(
    flow, holds, is_gone
):
    task = getattr(flow.module, f"tells_by_{holds.replace(' ', '_')}")
    steps = [flow.step("0"), *(flow.step(name, task=task).set(queue=flow.later) for name in "12")]
    sent = locked(chain(*steps), key=flow.key, gap_ttl=GAP if is_gone else 60).delay()
    flow.wait_for("0", event="leave")
    if is_gone:
        assert flow.is_free(), "the gap has ended"
    flow.consume_later()
    sent.get(timeout=30)
    told = {e["step"]: e["unbroken"] for e in flow.events("told")}
    assert len(told) == 8  # each step, and what it calls
    assert {*told.values()} == {not is_gone}, told


@pytest.mark.parametrize("task", ["plain", "locking"])  # the second is retried, in vain
@pytest.mark.parametrize("gone", ["free again", "held"])
def test_a_step_may_fail_when_its_permit_is_gone(flow, gone, task):
    sent = flow.interrupted(task, on_gap="raise")
    flow.wait_for("0", event="leave")
    stranger = flow.lock()
    wait_for(lambda: stranger.acquire(blocking=False))
    if gone == "free again":
        stranger.release()
    flow.consume_later()
    with pytest.raises(LockLost, match=f"{flow.key}.*lock_on_gap='raise'"):
        sent.get(timeout=30)
    assert [e["step"] for e in flow.events("enter")] == ["0"]
    if gone == "held":
        stranger.release()


def test_the_members_of_a_group_have_the_error_of_the_step_before_them(flow):
    steps = flow.step("0"), flow.step("1").set(queue=flow.later)
    members = group(flow.step("2"), flow.step("3"))
    sent = locked(chain(*steps, members), key=flow.key, gap_ttl=GAP, on_gap="raise").delay()
    flow.wait_for("0", event="leave")
    assert flow.is_free(), "the gap has ended"
    flow.consume_later()
    for each in sent.results:
        with pytest.raises(LockLost, match=flow.key):
            each.get(timeout=30)


def test_a_step_that_waited_for_its_own_lock_until_its_permit_was_gone_leaves_no_place(
    flow,
):
    own = flow.lock(f"account:{flow.later}")
    own.acquire()
    step = flow.module.locking.s(account=flow.later, name="1")
    key = flow.key
    sent = locked(chain(flow.step("0"), step), key=key, gap_ttl=GAP, on_gap="raise").delay()
    wait_until_parked(flow.worker, own.name)
    assert flow.is_free(), "the gap has ended"
    own.release()
    with pytest.raises(LockLost, match=f"{flow.key}.*lock_on_gap='raise'"):
        sent.get(timeout=30)
    wait_for(lambda: state_of(flow.worker, own.name).waiting == 0)


@pytest.mark.parametrize("task", ["plain", "locking"])
def test_a_step_is_dropped_when_its_permit_is_gone_and_the_lock_is_held(flow, task):
    sent = flow.interrupted(task, on_conflict="drop")
    flow.wait_for("0", event="leave")
    with flow.lock():
        flow.consume_later()
        assert is_dropped(sent.get(timeout=30))
    assert is_dropped(sent.parent.get(timeout=30))
    assert flow.check_exclusion() == ["0"]


@pytest.mark.parametrize("task", ["plain", "locking"])
def test_a_step_that_finds_a_stranger_in_its_lock_waits_for_its_turn(flow, task):
    sent = flow.interrupted(task, "tell its state")
    flow.wait_for("0", event="leave")
    stranger = flow.lock()
    wait_for(lambda: stranger.acquire(blocking=False))
    flow.consume_later()
    wait_for_state(sent.parent, "BLOCKED")
    time.sleep(0.2)
    stranger.release()
    assert sent.get(timeout=30) == ["0", "1", "2"]
    assert [e["unbroken"] for e in flow.events("enter")] == [True, False, False]
    assert [e["is_now"] for e in flow.events("state")] == ["STARTED"]
    enter, first, second, third = flow.worker.journal.events("acquired", lock=flow.key)
    assert enter["waited"] == first["waited"] == third["waited"] == 0 < 0.2 <= second["waited"]


@pytest.mark.skipif(VERSION < (5, 6), reason="Celery stores RETRY once more")
def test_the_end_of_a_step_that_was_sent_again_is_not_replaced_by_its_retry(flow):
    sent = flow.interrupted("is_overtaken", on_conflict="retry")
    flow.wait_for("0", event="leave")
    stranger = flow.lock()
    wait_for(lambda: stranger.acquire(blocking=False))
    flow.consume_later()
    flow.worker.journal.wait_for("sent again", account=flow.account)
    stranger.release()
    flow.worker.journal.wait_for("retried", account=flow.account, attempts=0)
    assert sent.parent.state == "FAILURE"
    with pytest.raises(ValueError, match=flow.account):
        sent.get(timeout=10)


# Celery's own way to store a result, with redis-py 8.
@pytest.mark.filterwarnings("ignore:Call to deprecated:DeprecationWarning")
def test_a_step_that_was_parked_and_has_failed_since_does_not_run(flow):
    """Its failure could not be told to the Redis of the locks."""
    sent = flow.interrupted()
    flow.wait_for("0", event="leave")
    stranger = flow.lock()
    wait_for(lambda: stranger.acquire(blocking=False))
    flow.consume_later()
    wait_until_parked(flow.worker, flow.key)
    flow.module.app.backend.store_result(sent.parent.id, LockUnavailable("away"), "FAILURE")
    stranger.release()
    flow.worker.wait_for_log(rf"{sent.parent.id}\] has ended already")
    assert flow.is_free()
    assert flow.check_exclusion() == ["0"]


def test_a_late_copy_of_a_step_that_is_revoked_while_it_is_parked_leaves_no_place(worker):
    lock = WorkflowLock("w", ("account:late",), (1,), (1,), "w", 30.0, GAP, "tell", "wait", None)
    task = worker.module.leaves_no_result
    step = Message(worker, task, "late", workflow_locks=[lock._asdict()])
    step.deliver()
    worker.wait_for_log(rf"{step.id}\] ignored")
    with lock_of(worker, step.lock):
        step.deliver()
        wait_until_parked(worker, step.lock)
        worker.module.app.control.revoke(step.id)
        wait_for(lambda: state_of(worker, step.lock).waiting == 0, what="an empty queue")


def test_a_worker_that_is_killed_while_the_next_step_is_in_the_broker_breaks_nothing(
    flow, module_worker
):
    namespace = f"ns{flow.account}"
    first = module_worker("tests.workflow.apps.workflows", namespace=namespace, concurrency=1)
    flow = Flow(first)
    steps = [flow.step("0"), flow.step("1").set(queue=flow.later), flow.step("2")]
    sent = locked(chain(*steps), key=flow.key).delay()
    wait_for_state(sent.parent.parent, "SUCCESS")
    flow.wait_for("0", event="leave")
    wait_for(lambda: _kept(flow))
    first.kill()
    second = module_worker(
        "tests.workflow.apps.workflows",
        namespace=namespace,
        concurrency=1,
        arguments=("-Q", f"{flow.later},queue-{namespace}"),
    )
    assert second.pid != first.pid
    assert sent.get(timeout=20) == ["0", "1", "2"]
    assert len({e["fence"] for e in flow.events()}) == 1
    assert all(e["unbroken"] for e in flow.events())


@pytest.mark.skipif(VERSION < (5, 5), reason="Celery 5.4 acknowledges what it breaks off")
@pytest.mark.parametrize("task", ["unstored", "holding_unstored"])
def test_a_step_that_a_cold_shutdown_breaks_off_runs_again(flow, module_worker, task):
    app, namespace = "tests.workflow.apps.workflows", f"ns{flow.account}"
    first = module_worker(app, namespace=namespace, concurrency=1)
    flow = Flow(first)
    last = flow.step("1", "wait", getattr(flow.module, task))
    (last if task == "holding_unstored" else locked(last, key=flow.key)).delay()
    flow.wait_for("1")
    first.stop(signal.SIGQUIT)
    flow.go_on()
    module_worker(app, namespace=namespace, concurrency=1)
    flow.worker.journal.wait_for("enter", account=flow.account, step="1", count=2)


def _kept(flow):
    holds = flow.lock()._engine.inspect(flow.key).holds
    return [hold.attempt_id for hold in holds] == ["-"]


@pytest.mark.parametrize(
    ("place", "ran"),
    [
        ("publish", ["0", "rival"]),
        ("published", ["0", "1", "2", "rival"]),
    ],
)
def test_a_child_that_is_killed_around_the_publishing_of_the_next_step(flow, place, ran):
    locked(
        chain(flow.step("0", f"wait, kill at {place}"), flow.step("1"), flow.step("2")),
        key=flow.key,
    ).delay()
    rival = _rival(flow)
    flow.go_on()
    rival.get(timeout=30)
    flow.wait_for(ran[-1], event="leave")
    assert flow.check_exclusion() == ran
    assert all(e["unbroken"] for e in flow.events())
    with flow.lock():
        pass


def test_a_child_that_is_killed_in_the_last_release(flow):
    locked(chain(flow.step("0", "wait"), flow.step("1", "kill at release")), key=flow.key).delay()
    rival = _rival(flow)
    flow.go_on()
    rival.get(timeout=30)
    assert flow.check_exclusion() == ["0", "1", "rival"]
    with flow.lock():
        pass


def _rival(flow):
    flow.wait_for("0")
    sent = flow.step("rival", "", flow.module.locking).delay()
    wait_for_state(sent, "BLOCKED")
    return sent
