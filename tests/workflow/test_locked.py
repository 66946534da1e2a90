"""`locked`: any canvas under one permit of a lock, and the results that it has without."""

from __future__ import annotations

import json
import pickle
import re
import threading

import pytest
from celery import Celery, chain, chord, group, signature

from celery_relock import locked
from celery_relock.declaration import declaration
from celery_relock.errors import LockConfigError, LockConflict, LockDeadlock, LockLost
from celery_relock.workflow import steps
from celery_relock.workflow.enter import ENTER
from tests.support import new_namespace, wait_for
from tests.support.parked import held_here, lock_of, wait_until_parked
from tests.workflow.flow import Visitor, wait_for_state

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker("tests.workflow.apps.workflows", concurrency=3)


@pytest.fixture
def step(worker, account):
    def make(name, do="", task=None):
        return (task or worker.module.plain).s(account=account, name=name, do=do)

    return make


@pytest.fixture
def join(worker, account):
    return lambda name: worker.module.joined.s(account=account, name=name)


def events_of(worker, account):
    return worker.journal.events(account=account)


def fences_of(worker, account):
    return [e["fence"] for e in events_of(worker, account) if e.name == "enter"]


def is_free(worker, account):
    lock = lock_of(worker, f"account:{account}")
    if lock.acquire(blocking_timeout=20):
        lock.release()
        return True
    return False


SHAPES = {
    "a task": lambda s, j: s("1"),
    "a chain": lambda s, j: chain(s("1"), s("2"), s("3")),
    "a group": lambda s, j: group(s("1"), s("2"), s("3")),
    "a chord": lambda s, j: chord([s("1"), s("2")], j("*")),
    "a chain with a group": lambda s, j: chain(s("1"), group(s("2"), s("3"))),
    "a chain of chords": lambda s, j: chain(
        group(s("1"), s("2")), j("*"), group(s("3"), s("4")), j("+")
    ),
    "a chord in a chain": lambda s, j: chain(s("1"), chord([s("2"), s("3")], j("*")), s("4")),
    "a group of chains": lambda s, j: group(chain(s("1"), s("2")), chain(s("3"), s("4"))),
    "a chain in a chord's body": lambda s, j: chord(
        [s("1"), s("2")], chain(j("*"), s("3"), s("4"))
    ),
    "a chord in a chord": lambda s, j: chord(
        [chord([s("1"), s("2")], j("*")), s("3")], chain(j("+"), s("4"))
    ),
    "three deep": lambda s, j: chain(
        s("0"),
        group(chain(s("1"), group(s("2"), chain(s("3"), s("4"))), j("*")), chain(s("5"), s("6"))),
        j("+"),
        s("7"),
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_canvas_has_the_same_result_and_one_permit(worker, account, step, join, shape):
    make = SHAPES[shape]
    without = make(step, join).delay().get(timeout=30)
    before = len(events_of(worker, account))
    with_lock = locked(make(step, join), key=f"account:{account}").delay().get(timeout=30)
    assert with_lock == without
    fences = [e["fence"] for e in events_of(worker, account)[before:]]
    assert len(set(fences)) == 1, fences
    assert fences[0] > 0
    assert len(fences) == before
    assert is_free(worker, account)


@pytest.mark.parametrize("make", ["map", "starmap", "chunks", "chunks in a chain"])
def test_items_of_a_map_share_one_permit(worker, account, step, make):
    adds, of_item = worker.module.adds, worker.module.of_item
    canvas = {
        "map": lambda: of_item.map([1, 2]),
        "starmap": lambda: adds.starmap([(1, 2), (3, 4)]),
        "chunks": lambda: adds.chunks([(1, 2), (3, 4), (5, 6)], 2),
        "chunks in a chain": lambda: chain(step("0"), adds.chunks([(1, 2), (3, 4)], 1).group()),
    }[make]
    without = canvas().apply_async().get(timeout=30)
    blocker = lock_of(worker, f"account:{account}")
    with blocker:
        sent = locked(canvas(), key=f"account:{account}").apply_async()
        first = sent if sent.parent is None else sent.parent
        assert not first.ready()
    assert sent.get(timeout=30) == without
    assert is_free(worker, account)


def test_what_is_locked_twice_at_the_same_time_takes_turns(worker, account, step):
    flow = locked(chain(step("1", "slow"), step("2"), step("3")), key=f"account:{account}")
    both = [one.delay() for one in (flow.clone(), flow.clone())]
    for one in both:
        one.get(timeout=30)
    fences = fences_of(worker, account)
    assert fences[:3] == [fences[0]] * 3
    assert fences[3:] == [fences[3]] * 3
    assert fences[0] < fences[3]


def test_it_may_be_written_down_and_sent_later(worker, account, step):
    flow = locked(chain(step("1"), step("2")), key=f"account:{account}")
    for written in (json.loads(json.dumps(flow)), pickle.loads(pickle.dumps(dict(flow)))):
        later = signature(written, app=worker.module.app)
        assert later.delay().get(timeout=30) == ["1", "2"]
    assert len(set(fences_of(worker, account))) == 2


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [((), {}, 2), ((5,), {}, 7), ((5, 1), {}, 6), ((5,), {"y": 3}, 8)],
)
def test_arguments_given_when_it_is_sent_go_to_the_first_step(
    worker, account, args, kwargs, expected
):
    adds = worker.module.adds
    first = adds.s(2) if len(args) < 2 and not kwargs else adds.s()
    canvas = locked(first, key=f"account:{account}")
    assert canvas.delay(*args, **kwargs).get(timeout=30) == expected


def test_a_locked_part_of_a_larger_canvas_begins_and_ends_inside_of_it(worker, account, step):
    key = f"account:{account}"
    middle = locked(chain(step("1"), step("2")), key=key)
    result = chain(step("0"), middle, step("3")).delay().get(timeout=30)
    assert result == ["0", "1", "2", "3"]
    by_step = {e["step"]: e["fence"] for e in events_of(worker, account)}
    assert by_step["0"] == by_step["3"] == 0
    assert by_step["1"] == by_step["2"] > 0


def test_two_locked_members_of_a_group_take_turns(worker, account, step):
    key = f"account:{account}"
    members = [locked(chain(step(f"{n}", "slow"), step(f"{n}'")), key=key) for n in "12"]
    group(members).delay().get(timeout=30)
    fences = fences_of(worker, account)
    assert fences[0] == fences[1] < fences[2] == fences[3]


def test_nested_workflow_locks_of_one_name_share_a_permit_and_of_two_names_hold_both(
    worker, account, step
):
    key, other = f"account:{account}", f"other:{account}"
    same = locked(chain(step("2"), step("3")), key=key)
    locked(chain(step("1"), same, step("4")), key=key).delay().get(timeout=30)
    assert len(set(fences_of(worker, account))) == 1
    assert is_free(worker, account)

    waits = step("6", "wait", worker.module.adds_nothing)
    inner = locked(waits, key=other)
    sent = locked(chain(step("5"), inner, step("7")), key=key).delay()
    worker.journal.wait_for(
        lambda events: any(e.data.get("account") == f"two {account}" for e in events)
    )
    assert not lock_of(worker, key).acquire(blocking=False)
    assert not lock_of(worker, other).acquire(blocking=False)
    worker.journal.add(f"go on {account}")
    sent.get(timeout=30)
    assert is_free(worker, account)
    with lock_of(worker, other):
        pass


def test_a_nested_workflow_lock_that_is_waited_for_keeps_the_one_around_it(worker, account, step):
    key, other = f"account:{account}", f"other:{account}"
    blocker = lock_of(worker, other)
    with blocker:
        inner = locked(step("2", "", worker.module.adds_nothing), key=other)
        sent = locked(chain(step("1"), inner, step("3")), key=key).delay()
        entered = sent.parent.parent
        wait_for_state(entered, "BLOCKED")
        assert not lock_of(worker, key).acquire(blocking_timeout=0.5)
    assert sent.get(timeout=30) == ["1", "3"]
    fences = fences_of(worker, account)
    assert len(fences) == 2
    assert len(set(fences)) == 1


def test_nested_workflow_locks_that_would_wait_for_each_other_for_ever_are_told(
    worker, account, step
):
    mine, other = f"account:{account}", f"other:{account}"

    def crossing(outer, inner):
        last = locked(step("", "", worker.module.adds_nothing), key=inner)
        meets = worker.module.meets.s(account=account, count=2)
        return locked(chain(meets, last), key=outer).delay()

    sent = [crossing(mine, other), crossing(other, mine)]
    # The two that acquire the inner locks.
    outcomes = [one.parent.get(timeout=30, propagate=False) for one in sent]
    (told,) = [each for each in outcomes if isinstance(each, LockDeadlock)]
    assert mine in str(told)
    assert other in str(told)
    sent[1 - outcomes.index(told)].get(timeout=30)
    assert is_free(worker, account)


def test_members_run_side_by_side_unless_they_acquire_a_lock_of_their_own(worker, account):
    module = worker.module
    members = [module.excluding.s(account=account, name=f"{n}") for n in range(3)]
    together = [module.meets.s(account=account, count=2) for _ in range(2)]
    key = f"account:{account}"
    assert locked(group(together), key=key).delay().get(timeout=30) == ["met", "met"]
    locked(group(members), key=key).delay().get(timeout=30)
    inside = []
    for event in events_of(worker, f"member {account}"):
        (inside.append if event.name == "enter" else inside.remove)(event["step"])
        assert len(inside) <= 1


@pytest.mark.parametrize("order", ["stamped first", "locked first"])
def test_stamps_of_the_user_stay(worker, account, step, order):
    told = worker.module.tells_its_stamps.s()
    flow, key = chain(step("1"), told), f"account:{account}"
    if order == "stamped first":
        flow.stamp(Visitor())
        flow = locked(flow, key=key)
    else:
        flow = locked(flow, key=key)
        flow.stamp(Visitor())
    stamps, fences = flow.delay().get(timeout=30)
    assert stamps["mine"] in ("yes", ["yes"])
    assert fences == [fences_of(worker, account)[0]]


def test_it_is_a_signature_like_others(worker, account, step):
    key = f"account:{account}"
    flow = locked(chain(step("1"), step("2")), key=key).clone()
    flow.link(step("linked"))
    flow.link_error(step("error"))
    (flow | step("3")).set(countdown=0.1).delay().get(timeout=30)
    _steps(worker, account, {"1", "2", "3", "linked"})
    failing = locked(chain(step("4"), step("5", "fail")), key=key).on_error(step("rescue"))
    with pytest.raises(ValueError, match="5"):
        failing.delay().get(timeout=30)
    _steps(worker, account, {"1", "2", "3", "linked", "4", "5", "rescue"})
    assert is_free(worker, account)


def _steps(worker, account, wanted):
    worker.journal.wait_for(
        lambda events: {e["step"] for e in events if e.data.get("account") == account} == wanted
    )


def test_it_goes_where_its_first_step_goes(worker, account, step):
    place = {"queue": f"elsewhere-{account}"}
    locked(chain(step("1").set(**place), step("2")), key="a").delay()
    locked(worker.module.is_routed.s(), key="a").delay()
    locked(worker.module.is_routed.s(f"written-{account}"), key="a").delay()
    locked(group(worker.module.is_routed.s()), key="a").delay(f"given-{account}")
    locked(chain(step("1"), step("2")), key="a").apply_async(queue=f"asked-{account}")
    with worker.module.app.connection_for_read() as connection:
        for queue, count in (
            (place["queue"], 1),
            ("of-the-routes", 1),
            (f"written-{account}", 1),
            (f"given-{account}", 1),
            (f"asked-{account}", 1),
        ):
            size = connection.default_channel._size(queue)
            assert size == count, queue


@pytest.mark.parametrize("way", ["declared", "given"])
def test_its_message_has_the_priority_of_its_first_step(worker, account, step, way, monkeypatch):
    first = worker.module.is_routed.si().set(queue=f"elsewhere-{account}")
    if way == "given":
        first.set(priority=3)
    else:
        task = worker.module.app.tasks[worker.module.is_routed.name]
        monkeypatch.setattr(task, "priority", 3, raising=False)
    locked(chain(first, step("2")), key="a").delay()
    with worker.module.app.connection_for_read() as connection:
        message = connection.SimpleQueue(f"elsewhere-{account}").get(timeout=10)
        message.ack()
    assert message.properties["priority"] == 3


class TestEager:
    @pytest.fixture(autouse=True)
    def _always(self, worker, monkeypatch):
        monkeypatch.setitem(worker.module.app.conf, "task_always_eager", True)

    @pytest.mark.parametrize("shape", ["a task", "a chain", "a chord", "a chord in a chain"])
    def test_what_is_applied_here_is_held_around_the_whole(
        self, worker, account, step, join, shape
    ):
        make, probes = SHAPES[shape], worker.module.probes
        key = f"account:{account}"
        without = make(step, join).delay().get()
        flow = locked(make(step, join) | probes.s(key=key), key=key)
        assert flow.delay().get() == [without, False]
        assert flow.apply().get() == [without, False]
        assert is_free(worker, account)

    def test_members_of_a_group_that_is_applied_here_are_held_wherever_it_stands(
        self, worker, account
    ):
        probe, key = worker.module.probes.s(0, key=f"account:{account}"), f"account:{account}"
        alone = locked(group(probe, probe), key=key)
        assert alone.delay().get() == [[0, False]] * 2
        assert alone.clone().apply().get() == [[0, False]] * 2
        assert group(alone, probe).delay().get() == [[[0, False]] * 2, [0, True]]
        assert (alone | worker.module.of_item.s()).delay().get() == [[0, False]] * 4
        assert locked(group([probe]), key=key).delay().get() == [0, False]
        assert is_free(worker, account)

    @pytest.mark.parametrize("how", ["delay", "apply"])
    def test_a_group_that_is_applied_here_is_one_permit(self, worker, account, step, how):
        members = [step(name, "", worker.module.locking) for name in "12"]
        canvas = locked(group(members), key=f"account:{account}").clone()
        assert getattr(canvas, how)().get() == [["1"], ["2"]]
        first, second = fences_of(worker, account)
        assert first == second > 0

    def test_a_lock_that_is_held_is_waited_for_and_then_a_conflict(self, worker, account, step):
        key = f"account:{account}"
        flow = locked(step("1"), key=key, max_wait=0.2)
        taken, done = threading.Event(), threading.Event()

        def hold():
            with lock_of(worker, key):
                taken.set()
                done.wait(30)

        stranger = threading.Thread(target=hold)
        stranger.start()
        assert taken.wait(30)
        with pytest.raises(LockConflict, match=key):
            flow.apply()
        assert flow.apply(lock_on_conflict="drop").get()["relock"] == "dropped"
        done.set()
        stranger.join()
        assert flow.apply().get() == ["1"]

    def test_what_is_applied_under_a_lock_that_was_lost_does_not_run(self, worker, account, step):
        key = f"account:{account}"
        flow = locked(step("1"), key=key)
        outer = lock_of(worker, key, timeout=0.5, renew=False)
        outer.acquire()
        assert flow.apply().get() == ["1"]
        wait_for(lambda: outer.lost, what="the end of the lease")
        with pytest.raises(LockLost, match=key):
            flow.apply()

    @pytest.mark.parametrize("how", ["delay", "apply"])
    def test_a_part_of_a_larger_canvas_is_refused_with_what_to_do(self, account, step, how):
        inner = locked(chain(step("1"), step("2")), key=f"account:{account}")
        read = signature(json.loads(json.dumps(inner)), app=inner.app)
        for larger in (chain(inner, step("3")), step("0") | inner | step("3"), read):
            with pytest.raises(LockConfigError, match=r"Apply it by itself, or lock the larger"):
                getattr(larger, how)()


def test_arguments_of_a_step_that_are_named_like_parts_of_a_canvas_stay_as_they_are(worker, step):
    given = {"tasks": [1], "header": {"a": 1}, "body": [None]}
    like = step("1").clone(kwargs=given)
    assert locked(like, key="x").tasks[1].kwargs.items() >= given.items()


def test_the_key_may_read_the_first_steps_arguments(worker, account, step):
    flows = [
        locked(chain(step("1"), step("2")), key="account:{account}"),
        locked(group(step("3"), step("4")), key=["account:{account}"]),
        locked(step("5"), key=lambda account: f"account:{account}"),
    ]
    for flow in flows:
        assert flow.tasks[0].args[-1]["unprefixed"] == [f"account:{account}"]
    two = locked(step("6"), key=["b:{name}", "a:{account}"])
    assert two.tasks[0].args[-1]["unprefixed"] == [f"a:{account}", "b:6"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"key": None}, "names no lock"),
        ({"key": ""}, "empty"),
        ({"key": "account:{nobody}"}, "nobody"),
        ({"key": "x", "tll": 5}, "no option tll.*ttl"),
        ({"key": "x", "lock_ttl": 5}, "no option lock_ttl. It is called ttl here."),
        ({"key": "x", "ttl": -1}, "lock_ttl=-1"),
        ({"key": "x", "on_conflict": "queue"}, "lock_on_conflict='queue'"),
        ({"key": "x", "on_conflict": print}, "callable"),
    ],
)
def test_what_cannot_be_is_refused_when_the_canvas_is_made(step, options, says):
    with pytest.raises(LockConfigError, match=f"(?s){says}"):
        locked(step("1"), **options)


@pytest.mark.parametrize(
    ("canvas", "shown"),
    [
        (lambda m: m.adds, r"<@task: .*adds.*> \(\w+\)"),
        (lambda m: [m.adds.s(1)], r"\[.*adds\(1\)\] \(list\)"),
        (lambda m: (m.adds.s(n) for n in range(2)), r"<generator .* \(generator\)"),
        (lambda m: None, r"None \(NoneType\)"),
        (lambda m: "name", r"'name' \(str\)"),
        (lambda m: m.flat, r"<function flat.* \(function\)"),
        (lambda m: dict(m.adds.s(1)), r"{'task': .* \(dict\)"),
    ],
)
def test_what_is_no_canvas_is_refused_with_what_to_write(worker, canvas, shown):
    with pytest.raises(LockConfigError, match=rf"{shown} is not a signature\. Write locked\(task"):
        locked(canvas(worker.module), key="x")


@pytest.mark.parametrize(
    ("option", "takes"),
    [
        ({"limit": 0}, "a whole number from 1"),
        ({"limit": True}, "a whole number from 1"),
        ({"limit": [2]}, "a whole number from 1"),
        ({"mode": "share"}, "'exclusive' or 'shared'"),
        ({"mode": ["shared"]}, "'exclusive' or 'shared'"),
    ],
)
def test_a_value_is_refused_with_those_that_a_canvas_takes(worker, option, takes):
    [(name, value)] = option.items()
    says = f"locked(): {name}={value!r} cannot be used. It takes {takes}."
    with pytest.raises(LockConfigError, match=f"^{re.escape(says)}"):
        locked(worker.module.adds.s(1), key="x", **option)


@pytest.mark.parametrize("empty", [group([]), chain(), group([group([])])])
def test_a_canvas_without_a_step_has_nothing_to_lock(worker, empty):
    same = locked(empty, key="x:{not_read}")
    assert (same.task, list(same.tasks)) == (empty.task, list(empty.tasks))
    with pytest.raises(LockConfigError, match="no option tll"):
        locked(empty, key="x", tll=5)


def test_a_key_over_arguments_that_come_later_is_refused_with_the_reason(worker):
    with pytest.raises(LockConfigError, match="not known when the canvas is made"):
        locked(worker.module.adds.s(), key="x:{x}")


def test_those_that_are_parked_enter_in_their_order(worker, account, step):
    key, sent = f"account:{account}", []
    with lock_of(worker, key):
        for number in (1, 2, 3):
            sent.append(locked(step(str(number)), key=key).delay())
            wait_until_parked(worker, key, number)
    for each in sent:
        each.get(timeout=30)
    fences = fences_of(worker, account)
    assert fences == sorted(fences)
    entered = [e["step"] for e in events_of(worker, account) if e.name == "enter"]
    assert entered == ["1", "2", "3"]


def test_one_that_is_revoked_while_it_is_parked_leaves_the_queue(worker, account, step):
    key = f"account:{account}"
    with lock_of(worker, key):
        flow = locked(chain(step("1"), step("2")), key=key)
        flow.link_error(step("3"))
        entered = flow.delay().parent.parent
        wait_for_state(entered, "BLOCKED")
        wait_until_parked(worker, key)
        entered.revoke()
        wait_for_state(entered, "REVOKED")
    assert is_free(worker, account)
    assert fences_of(worker, account) == []


def test_it_may_raise_or_drop_instead_of_waiting(worker, account, step):
    key = f"account:{account}"
    flow = chain(step("1"), step("2"))
    with lock_of(worker, key):
        raising = locked(flow, key=key, on_conflict="raise").delay()
        with pytest.raises(LockConflict, match=key):
            raising.get(timeout=30)
        dropped = locked(flow, key=key, on_conflict="drop").delay().get(timeout=30)
        assert dropped["relock"] == "dropped"
    assert fences_of(worker, account) == []
    assert all(steps.STAMP not in each.options for each in flow.tasks), "the canvas was changed"


def test_a_single_call_has_the_options_of_the_lock_and_no_others(worker, account, step):
    key = f"account:{account}"

    def waits():
        return locked(step("1"), key=key, max_wait=30)

    def fails():
        return locked(step("2"), key=key, on_conflict="raise")

    for make, option, says in [
        (fails, {"lock_max_wait": 5}, "never used"),
        (waits, {"lock_cooldown": 5}, "a workflow holds has no cooldown"),
        (waits, {"lock_dedup": 5}, "no lock_dedup. .* can have lock_on_conflict"),
        (waits, {"lock_limit": 2}, "no message carries it"),
        (waits, {"lock_tll": 2}, "Did you mean lock_ttl"),
        (waits, {"lock_on_conflict": print}, "callable"),
    ]:
        for how in ("apply_async", "apply"):
            with pytest.raises(LockConfigError, match=says):
                getattr(make(), how)(**option)
    with lock_of(worker, key):
        with pytest.raises(LockConflict, match=key):
            waits().apply_async(lock_on_conflict="raise").get(timeout=30)
        dropped = fails().set(lock_on_conflict="drop").apply_async().get(timeout=30)
        assert dropped["relock"] == "dropped"
        later = fails().apply_async(lock_on_conflict="wait", lock_max_wait=60)
        wait_until_parked(worker, key)
    assert later.get(timeout=30) == ["2"]


def test_one_that_was_sent_by_a_worker_without_the_library_fails_with_the_reason(worker, account):
    flow = locked(worker.module.adds.s(1), key=f"account:{account}")
    enter, step = flow.tasks
    # As Celery sends a task that it does not know. Without an id of the step the failure could be
    # followed by one of Celery's own, which wants to mark the step as failed.
    step.freeze()
    sent = worker.module.app.send_task(enter.task, args=(5, *enter.args), chain=[step])
    with pytest.raises(LockConfigError, match="has not loaded celery_relock"):
        sent.get(timeout=30)


def test_protocol_1_is_refused_with_the_reason(worker, monkeypatch):
    monkeypatch.setitem(worker.module.app.conf, "task_protocol", 1)
    with pytest.raises(LockConfigError, match="protocol"):
        locked(worker.module.adds.s(1), key="x").delay()


def test_where_the_result_backend_cannot_join_a_chord_the_lock_is_held_until_its_body_ends(
    module_worker, tmp_path, account
):
    # A task of Celery's own looks again and again whether the members are done.
    worker = module_worker(
        "tests.workflow.apps.workflows",
        namespace=new_namespace(),
        concurrency=1,
        env={"RELOCK_TEST_RESULTS": f"file://{tmp_path}"},
    )
    module = worker.module
    members = [module.plain.s(account=account, name=f"{n}") for n in range(2)]
    flow = chord(members, module.joined.s(account=account, name="*"))
    sent = locked(flow, key=f"account:{account}").delay()
    assert sent.get(timeout=20, interval=0.1) == ["0", "1", "*"]
    assert len(set(fences_of(worker, account))) == 1
    assert all(e["unbroken"] for e in events_of(worker, account))
    assert is_free(worker, account)


@pytest.fixture(scope="module")
def every(module_worker, redis_server):
    """`Celery(task_cls=LockedTask)`: Celery's own tasks are steps of a workflow too."""
    return module_worker(
        "tests.worker.apps.canvas",
        namespace=new_namespace(),
        concurrency=2,
        env={"RELOCK_TEST_LOCKS": redis_server.url},
    )


@pytest.mark.parametrize("kind", ["locked", "plain"])
def test_where_every_task_is_locked_a_canvas_ends_as_it_does_without(every, kind):
    module = every.module
    plain, tasks = module.canvases(*module.plain), module.canvases(*getattr(module, kind))
    for name, canvas in plain.items():
        key = f"{kind}:{name}"
        assert _outcome(locked(tasks[name], key=key)) == _outcome(canvas), name
        lock = lock_of(every, key)
        assert lock.acquire(blocking_timeout=20), name
        lock.release()


def _outcome(canvas):
    result = canvas.apply_async()
    # Of a failed chord, Celery raises the member's error if that is there when `get` begins.
    wait_for(result.ready)
    try:
        return result.get(timeout=30)
    except Exception as error:
        return type(error).__name__, str(error).partition("(")[0].partition(" ")[0]


@pytest.mark.parametrize("name", ["plain", "exclusive"])
def test_the_steps_have_what_the_apps_class_does_for_each_task_it_sends(module_worker, name):
    module = module_worker("tests.workflow.apps.tenants", namespace=new_namespace()).module
    step = getattr(module, name)
    token = module.tenant.set("acme")
    try:
        sent = locked(group(step.si(), chain(step.si(), step.si())), key=f"tenant {name}").delay()
    finally:
        module.tenant.reset(token)
    assert sent.get(timeout=20) == ["acme", "acme"]


@pytest.fixture(scope="module")
def handling(module_worker):
    return module_worker("tests.workflow.apps.own_class", namespace=new_namespace())


def test_the_steps_do_not_run_where_the_apps_class_handles_every_error_also_a_conflict(
    handling, account
):
    flow = handling.module.flow
    with held_here(handling, account):
        refused = flow(account, on_conflict="raise").delay()
        with pytest.raises(LockConflict):
            refused.get(timeout=20)
        waits = flow(account).delay()
        wait_until_parked(handling, account)
        assert not handling.journal.events(account=account)
    assert waits.get(timeout=20) == "last"
    assert [e.name for e in handling.journal.events(account=account)] == ["first", "last"]


def test_who_waits_for_the_last_step_hears_of_a_conflict_where_the_apps_class_ignores_results(
    handling, account
):
    with held_here(handling, account):
        refused = handling.module.flow(account, on_conflict="raise").delay()
        with pytest.raises(LockConflict):
            refused.get(timeout=20)


@pytest.mark.parametrize(
    "default",
    [
        {"relock_order": "sent"},
        {"relock_limit": {"account:{account}": 3}},
        {"relock_limit": [3]},
        {"relock_limit": lambda account: 3},
        {"relock_mode": lambda account: "shared"},
    ],
)
def test_a_default_of_the_app_that_is_made_for_tasks_leaves_a_canvas_alone(default, namespace):
    with Celery(namespace, set_as_current=False) as app:
        app.conf.update(relock_url="memory://", relock_namespace=namespace, **default)

        @app.task(name="step", shared=False)
        def step():
            return "done"

        assert declaration(type(app.tasks[ENTER])).rule.off  # as a worker asks at its start
        assert locked(chain(step.si(), step.si()), key="account:42").apply().get() == "done"


def test_an_option_of_its_call_is_left_out_where_the_app_has_no_use_for_it(namespace):
    with Celery(namespace, set_as_current=False) as app:
        app.conf.update(
            relock_url="memory://", relock_namespace=namespace, relock_on_conflict="drop"
        )

        @app.task(name="step", shared=False)
        def step():
            return "done"

        canvas = locked(chain(step.si(), step.si()), key="account:42")
        assert canvas.apply(lock_max_wait=5).get() == "done"


def test_a_function_for_conflicts_of_the_whole_app_leaves_a_canvas_to_wait(
    module_worker, redis_server, account
):
    worker = module_worker(
        "tests.workflow.apps.workflows",
        namespace=new_namespace(),
        concurrency=2,
        env={"RELOCK_TEST_CHOOSES": "raise"},
    )

    def steps(task):
        given = {"account": account, "do": ""}
        return chain(task.s(name="1", **given), worker.module.plain.s(name="2", **given))

    key = f"account:{account}"
    with lock_of(worker, key):
        waits = locked(steps(worker.module.plain), key=key).delay()
        wait_until_parked(worker, key)
    assert waits.get(timeout=20) == ["1", "2"]
    assert steps(worker.module.holding).delay().get(timeout=20) == ["1", "2"]
    fences = fences_of(worker, account)
    assert len(fences) == 4
    assert len(set(fences)) == 2
