"""Workflows that share one lock, by every shape and every ending: nobody comes in between, and the
lock is free when the last of it is over."""

from __future__ import annotations

import signal

import pytest
import redis
from celery import chain, group

from celery_relock import locked
from celery_relock.engine import ids
from celery_relock.errors import LockConfigError
from celery_relock.worker.message import HEADER, VERSION
from tests.support import new_namespace, wait_for
from tests.support.parked import wait_until_parked
from tests.workflow import flow as flows
from tests.workflow.flow import wait_for_state

pytestmark = pytest.mark.slow

# Between the end of a workflow and a parked rival's body, on a busy machine. A killed process is
# found by its host's workers at once.
SOON = 15.0


@pytest.fixture(scope="module")
def workers(module_worker):
    """Two workers, each with a queue of its own, so that steps go back and forth."""
    namespace = new_namespace()
    return [
        module_worker(
            "tests.workflow.apps.workflows",
            namespace=namespace,
            concurrency=2,
            arguments=(
                "-Q",
                f"{namespace}-{queue},queue-{namespace}",
                "-n",
                f"{queue}-{namespace}@127.0.0.1",
            ),
        )
        for queue in "ab"
    ]


@pytest.fixture
def flow(workers):
    return Flow(workers[0])


class Flow(flows.Flow):
    """One workflow under test, and a rival that waits for its lock."""

    def __init__(self, worker):
        super().__init__(worker)
        self.namespace = self.module.app.conf.relock_namespace

    def step(self, name, do="", task=None, queue="a", **options):
        return super().step(name, do, task).set(queue=f"{self.namespace}-{queue}", **options)

    def join(self, name):
        return super().join(name).set(queue=f"{self.namespace}-b")

    def rival(self):
        """A stranger that has parked by now, while the first step waits to be told to go on."""
        self.wait_for("0")
        sent = self.step("rival", task=self.module.locking, queue="b").delay()
        wait_for_state(sent, "BLOCKED")
        return sent

    def check(self, rival, *steps, unbroken=True):
        """The rival came last and soon, under a fence of its own, and nothing is left behind."""
        rival.get(timeout=30)
        events = self.events("enter", "leave")
        came = next(e for e in events if e["step"] == "rival")
        flow = [e for e in events if e["step"] != "rival"]
        assert events[len(flow)] is came, "the rival was in while the workflow was"
        assert {e["fence"] for e in flow} == {flow[0]["fence"]}
        assert 0 < flow[0]["fence"] < came["fence"]
        assert {e["step"] for e in flow} == set(steps)
        assert came.at - flow[-1].at < SOON
        assert all(e["unbroken"] for e in flow) == unbroken
        self.is_clean()

    def is_clean(self):
        with redis.Redis.from_url(self.module.app.conf.relock_url) as client:
            mine = f"{self.namespace}:*{self.key}*"
            wait_for(lambda: not client.keys(mine), what="its keys to be gone")


def of_locked(flow, middle):
    """Plain steps under `locked`."""
    steps = [flow.step("0", "wait"), middle, flow.step("2", task=flow.module.locking)]
    return locked(chain(*steps), key=flow.key)


def of_holding(flow, middle):
    """A task that holds its lock for the rest of its chain, and steps that know nothing of it."""
    first = flow.step("0", "wait", flow.module.holding)
    return chain(first, middle, flow.step("2", task=flow.module.locking))


def with_a_chord(flow, middle):
    """The step in question is the member of a chord in the middle."""
    members = group(middle, flow.step("other", "slow", queue="b"))
    return locked(
        chain(flow.step("0", "wait"), members, flow.join("*"), flow.step("2")), key=flow.key
    )


def side_by_side(flow, middle):
    """The step in question, and the first, belong to members of a group."""
    members = flow.step("0", "wait"), chain(middle, flow.step("2", task=flow.module.locking))
    return locked(group(members), key=flow.key)


SHAPES = [of_locked, of_holding, with_a_chord, side_by_side]
ENDINGS = {
    "": {"1", "2"},
    "retry": {"1", "2"},
    "autoretry": {"1", "2"},
    "autoretry in vain": {"1"},
    "replace": {"1", "1'", "2"},
    "replace by a chain": {"1", "1'", '1"', "2"},
    "replace by a group": {"1", "1'", '1"', "2"},
    "fail": {"1"},
    "ignore": {"1"},
    "reject": {"1"},
    "reject and put back": {"1"},  # it was acknowledged: Celery cannot
    "kill": {"1"},
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("task", ["plain", "locking"])
def test_a_workflow_is_one_permit_until_it_is_over(flow, task, shape, ending):
    sent = shape(flow, flow.step("1", ending, getattr(flow.module, task), queue="b")).delay()
    rival = flow.rival()
    flow.go_on()
    more = {"other", *({"*"} if "2" in ENDINGS[ending] else ())} if shape is with_a_chord else set()
    flow.check(rival, "0", *ENDINGS[ending], *more)
    if "2" in ENDINGS[ending]:
        last = sent.get(timeout=30)[-1]
        assert (last[-1] if shape is side_by_side else last) == "2"


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_a_step_that_is_revoked_before_it_began_ends_the_workflow(flow, shape):
    sent = shape(flow, flow.step("1", queue="b")).delay()
    rival = flow.rival()
    replies = flow.module.app.control.revoke(sent.parent.id, reply=True, limit=2, timeout=5)
    assert len(replies) == 2
    flow.go_on()
    flow.check(rival, "0")


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_a_step_that_expires_before_it_began_ends_the_workflow(flow, shape):
    shape(flow, flow.step("1", queue="b", countdown=0.3, expires=0.1)).delay()
    rival = flow.rival()
    flow.go_on()
    flow.check(rival, "0")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_step_that_is_terminated_ends_the_workflow(flow, how):
    steps = [flow.step("0", "wait"), flow.step("1"), flow.step("2")]
    sent = locked(chain(*steps), key=flow.key).delay()
    rival = flow.rival()
    flow.module.app.control.revoke(sent.parent.parent.id, terminate=True, signal=how.name)
    flow.check(rival, "0")


def test_a_step_that_has_a_countdown_is_waited_for(flow):
    of_locked(flow, flow.step("1", queue="b", countdown=0.5)).delay()
    rival = flow.rival()
    flow.go_on()
    flow.check(rival, "0", "1", "2")


def test_a_member_added_to_a_chord_belongs_to_the_workflow(flow):
    adds = flow.module.adds_a_member.s(account=flow.account, name="1").set(immutable=True)
    steps = chain(flow.step("0", "wait"), group(adds, flow.step("3")), flow.join("*"))
    locked(steps, key=flow.key).delay()
    rival = flow.rival()
    flow.go_on()
    flow.check(rival, "0", "1", "1+", "3", "*")


def test_links_are_part_of_the_workflow_and_error_callbacks_are_not(flow):
    linked = flow.step("1", queue="b")
    linked.link(flow.step("linked"))
    of_locked(flow, linked).delay()
    rival = flow.rival()
    flow.go_on()
    flow.check(rival, "0", "1", "linked", "2")


def test_an_error_callback_that_is_sent_is_a_stranger_to_the_workflow(flow):
    failing = flow.step("1", "fail").on_error(flow.step("rescue"))
    of_locked(flow, failing).delay()
    rival = flow.rival()
    flow.go_on()
    rival.get(timeout=30)
    flow.wait_for("rescue")
    fences = {each["step"]: each["fence"] for each in flow.events("enter")}
    assert fences["1"] > 0
    assert fences["rescue"] == 0
    flow.is_clean()


def test_an_error_callback_that_is_called_where_the_step_failed_waits_for_nobody_beside_it(flow):
    failing = flow.step("1", "fail").on_error(flow.module.rescues.s(account=flow.account))
    locked(group(flow.step("0", "wait", queue="b"), failing), key=flow.key).delay()
    flow.wait_for("rescue")
    rival = flow.rival()
    flow.go_on()
    flow.check(rival, "0", "1", "rescue")


def test_two_holding_tasks_in_one_chain_are_one_permit(flow):
    holding = flow.module.holding
    steps = [
        flow.step("0", "wait", holding),
        flow.step("1", queue="b"),
        flow.step("2", "", holding),
    ]
    chain(*steps, flow.step("3", queue="b")).delay()
    rival = flow.rival()
    flow.go_on()
    flow.check(rival, "0", "1", "2", "3")


@pytest.mark.parametrize("how", ["retry", "autoretry"])
def test_a_holding_task_that_retries_keeps_its_permit(flow, how):
    chain(flow.step("0", f"wait, {how}", flow.module.holding), flow.step("1", queue="b")).delay()
    rival = flow.rival()
    flow.go_on()
    flow.check(rival, "0", "1")


@pytest.mark.parametrize("how", ["calls it again", "retries", "returns"])
@pytest.mark.parametrize("task", ["recovers", "recovers_locked"])
def test_a_step_whose_class_handles_its_error_keeps_the_permit_for_what_comes_next(flow, task, how):
    middle = flow.step("1", f"fail, {how}", getattr(flow.module, task), queue="b")
    of_locked(flow, middle).delay()
    rival = flow.rival()
    flow.go_on()
    flow.check(rival, "0", "1", "2")


@pytest.mark.parametrize("option", [{}, {"on_gap": "raise"}, {"on_conflict": "raise"}])
def test_a_step_s_retry_runs_once_the_state_retry_is_stored(flow, option):
    # Else Celery can write RETRY over the retry's SUCCESS.
    step = flow.step("1", "retry", flow.module.stores_late)
    assert locked(step, key=flow.key, **option).delay().get(timeout=30) == ["1"]
    [over] = flow.worker.journal.wait_for("over", account=flow.account)
    assert flow.events("enter")[1].at >= over.at
    flow.is_clean()


@pytest.mark.parametrize("policy", ["wait", "block", "retry", "drop", "raise"])
def test_a_step_passes_who_waits_for_its_workflow_s_lock_and_for_its_own(flow, policy):
    excluding = flow.step("1", "", flow.module.excluding).set(lock_on_conflict=policy)
    steps = flow.step("0", "wait"), excluding
    result = locked(chain(*steps), key=flow.key).delay()
    flow.wait_for("0")
    other = flow.module.wants_both.delay(flow.account)
    wait_until_parked(flow.worker, flow.key)
    flow.go_on()
    assert result.get(timeout=20) == ["0", "1"]
    assert other.get(timeout=20) == flow.account


@pytest.mark.parametrize("policy", ["raise", "drop"])
def test_a_call_of_a_holding_task_that_does_not_wait_has_the_lock_to_the_end_of_its_chain(
    flow, policy
):
    first = flow.step("0", "", flow.module.holding_patiently).set(lock_on_conflict=policy)
    result = chain(first, flow.step("1"), flow.step("2", "", flow.module.holding)).delay()
    assert result.get(timeout=20) == ["0", "1", "2"]
    fences = [each["fence"] for each in flow.events("enter")]
    assert fences[0] > 0
    assert fences == [fences[0]] * 3
    assert flow.is_free()


@pytest.mark.parametrize("later", [{"what a later version adds": 1}, {"on_conflict": "ask"}])
def test_a_step_that_cannot_read_what_it_is_to_hold_does_not_run(flow, later):
    of = {"id": "a", "names": [flow.key], "limits": [1], "fences": [1], "owner": "o"}
    how = {"ttl": 30, "gap_ttl": 300, "on_gap": "tell", "on_conflict": "wait", "max_wait": None}
    lock = {**of, **how, **later}
    said = {"v": VERSION, "execution_id": ids.new_id(), "workflow_locks": [lock]}
    with pytest.raises(LockConfigError, match="cannot read"):
        flow.step("0").apply_async(headers={HEADER: said}).get(timeout=20)
    assert flow.events("enter") == []


def test_a_holding_task_releases_when_nothing_comes_after_it(flow):
    flow.step("0", "wait", flow.module.holding).delay()
    rival = flow.rival()
    flow.go_on()
    flow.check(rival, "0")


def test_two_holding_members_of_one_chord_take_turns_and_do_not_wait_for_its_body(flow):
    holding = flow.module.holding
    members = [chain(flow.step(f"{n}", "", holding), flow.step(f"{n}'")) for n in "12"]
    group(members).delay().get(timeout=30)
    (group(flow.step(n, "slow", holding) for n in "34") | flow.join("*")).delay().get(timeout=30)
    by_fence: dict[int, list[str]] = {}
    for event in flow.events("enter"):
        by_fence.setdefault(event["fence"], []).append(event["step"])
    permits = {tuple(steps) for steps in by_fence.values()}
    # Fence 0: the body took no lock.
    assert permits == {("1", "1'"), ("2", "2'"), ("3",), ("4",), ("*",)}
    flow.is_clean()
