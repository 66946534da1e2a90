"""What each policy does in each place: the tables in docs/conflicts.md, cell by cell."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from celery.exceptions import ChordError

from celery_relock import is_dropped
from celery_relock.errors import LockConfigError, LockConflict
from celery_relock.options import POLICIES
from tests.support import wait_for
from tests.support.parked import lock_of, state_of

pytestmark = pytest.mark.slow

DOC = Path(__file__).parents[2] / "docs" / "conflicts.md"


def table():
    """The two tables of the document as one: {place: {policy: "state; end"}}."""
    lines = [line for line in DOC.read_text("utf-8").splitlines() if line.startswith("| ")]
    cells = [line.strip("| ").split(" | ") for line in lines]
    rows = {first.strip('`"'): rest for first, *rest in cells}
    columns = dict.fromkeys(POLICIES, 0) | {"drop": 1, "raise": 2}
    return {
        place: {
            policy: f"{rows[policy][place == 'inline call']}; {rows[place][columns[policy]]}"
            for policy in rows
            if policy in POLICIES
        }
        for place in rows
        if place in END
    }


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker("tests.worker.apps.policies", concurrency=3)


def observe(worker, policy, place, word=""):
    """Run the canvas against a held lock, and say what it came to in the words of the document."""
    module, account = worker.module, f"{uuid.uuid4().hex}-{word}"
    name = f"account:{account}"
    with lock_of(worker, name):
        run, canvas = module.PLACES[place](module.locked[policy], account)
        wait_for(
            lambda: run.state not in ("PENDING", "STARTED") or state_of(worker, name).waiting,
            what="the conflict",
        )
        wait_for(lambda: run.state != "PENDING" or not _parked(worker, name))
        held = run.state
    final = _final(run)
    said = f"`{held}`" if run.state == held else f"`{held}`, then `{run.state}`"
    said += " with the dropped result" if final == "dropped result" else ""
    assert not state_of(worker, name).waiting
    return f"{said}{END[place](canvas, final, lambda: _noted(worker, account))}"


def _noted(worker, account):
    """Whether a link or a next step was run."""
    module = worker.module
    for result in [module.value.delay(0) for _ in range(3)]:
        result.get(timeout=30)  # what was published before has been run by now
    return bool(worker.journal.events("noted", account=account))


def _parked(worker, name):
    return state_of(worker, name).parked > 0


def _final(result):
    """ "result", "dropped result" or "conflict"; anything else fails the test."""
    wait_for(result.ready, 30)  # in Celery 5.4 `get` can miss the message of a chord's member
    try:
        got = result.get(timeout=30)
    except LockConflict:
        return "conflict"
    if is_dropped(got):
        assert got["lock"].startswith("account:")
        assert "is held by" in got["reason"]
        return "dropped result"
    return "result"


def _plain(canvas, final, noted):
    if final == "dropped result":
        return "; no link is called" if not noted() else "; a link is called"
    wait_for(noted, what="the link")
    return f"; its {'links' if final == 'result' else 'errbacks'} are called"


def _chain(canvas, final, noted):
    last = _final(canvas)
    if last == "result":
        return "; the next step runs"
    assert not noted()
    return f"; the chain stops, its result is the {last}"


def _chord(canvas, final, noted):
    if final == "conflict":
        with pytest.raises(LockConflict):
            canvas.get(timeout=30)
        return "; the body fails"
    first, middle, last = canvas.get(timeout=30)
    assert (first, last) == (1, 3)
    return f"; the body gets the {'dropped result' if is_dropped(middle) else 'result'}"


def _group(canvas, final, noted):
    first, middle, last = canvas.get(timeout=30, propagate=False)
    assert (first, last) == (1, 3)
    if isinstance(middle, LockConflict):
        return "; the group has the conflict"
    return f"; the group has the {'dropped result' if is_dropped(middle) else 'result'}"


def _link(canvas, final, noted):
    assert canvas.get(timeout=30) == 1
    return "; the task before keeps its result"


def _inline(canvas, final, noted):
    if final == "conflict":
        return "; the call raises"
    after, got = canvas.get(timeout=30)
    assert after == "after"
    return f"; the call returns the {'dropped result' if is_dropped(got) else 'result'}"


END = {
    "plain task": _plain,
    "step of a chain": _chain,
    "member of a chord": _chord,
    "member of a group": _group,
    "link": _link,
    "replacement (`self.replace`)": _chain,
    "inline call": _inline,
}


def test_the_document_has_every_place_and_every_policy():
    assert {place: tuple(cells) for place, cells in table().items()} == dict.fromkeys(END, POLICIES)


@pytest.mark.parametrize("place", END)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_does_in_each_place_what_the_document_says(worker, policy, place):
    assert observe(worker, policy, place) == table()[place][policy]


@pytest.mark.parametrize("place", ["plain task", "member of a chord", "inline call"])
@pytest.mark.parametrize("word", POLICIES)
def test_a_callable_chooses_a_policy_for_each_conflict(worker, word, place):
    assert observe(worker, "callable", place, word) == table()[place][word]


@pytest.mark.parametrize("name", ["nonsense", "fails"])
def test_a_callable_that_chooses_no_policy_fails_its_task(worker, name):
    account = uuid.uuid4().hex
    with (
        lock_of(worker, f"account:{account}"),
        pytest.raises(LockConfigError, match=r"locked\..*lock_on_conflict"),
    ):
        worker.module.locked[name].delay(account).get(timeout=30)


SHAPES = {
    "group at the end": ["dropped result", "dropped result"],
    "chord at the end": "dropped result",
    "chain in a chord": ["dropped result", 2],
    "group in a chain in a chord": [["dropped result", "dropped result"], 2],
    "long chain": "dropped result",
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_result_that_was_to_come_after_a_dropped_execution_is_the_dropped_result(
    worker, shape
):
    module, account = worker.module, uuid.uuid4().hex
    with lock_of(worker, f"account:{account}"):
        result = module.nested(module.locked["drop"], account)[shape].apply_async()
        got = result.get(timeout=30)
    assert _as_told(got) == SHAPES[shape]


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_that_was_to_come_after_a_refused_execution_is_waited_for(worker, shape):
    module, account = worker.module, uuid.uuid4().hex
    with lock_of(worker, f"account:{account}"):
        result = module.nested(module.locked["raise"], account)[shape].apply_async()
        for each in result.results if shape == "group at the end" else [result]:
            with pytest.raises((LockConflict, ChordError), match=account):
                each.get(timeout=10)


def test_a_group_runs_after_a_task_whose_own_call_has_handled_the_conflict(worker):
    module, account = worker.module, uuid.uuid4().hex
    with lock_of(worker, f"account:{account}"):
        canvas = module.nested(module.locked["answered"], account)["group at the end"]
        assert canvas.apply_async().get(timeout=30) == [1, 2]


def _as_told(got):
    if isinstance(got, list):
        return [_as_told(each) for each in got]
    return "dropped result" if is_dropped(got) else got
