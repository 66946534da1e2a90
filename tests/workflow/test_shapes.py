"""Every shape of a canvas gives what it gives without locks: with `locked` around it or around
parts of it, and where every task of the app is a LockedTask. Where the locked part is a group, it
gives what that group gives behind another task."""

from __future__ import annotations

import json
import uuid

import celery
import pytest
from celery import group, signature

from celery_relock import locked
from celery_relock.workflow.locked import LockedChain
from tests.support import new_namespace
from tests.support.long import LONG
from tests.workflow.shapes import SHAPES, Maker

pytestmark = pytest.mark.slow

# Celery before 5.7 itself never gives the result of these, or does not always: a group or a header
# of a chain that ends in a group, two groups behind a task, as a locked one is, and a chord in a
# group whose body is a chain, which a locked body is, as the task that enters is ahead.
_HANG = {
    "group of one chain that ends in a group",
    "locked group | group",
    "chord with a locked group in its header",
    "chord with a locked group of chains in its header",
    "chord with a locked chain that ends in a group in its header",
}
_HANG_IN_A_GROUP = {
    *_HANG,
    "group | locked task",
    "locked chord | locked chord",
    "chord with a locked body",
    "chord with a locked chord for a body",
}


def of_this_celery(shapes, hanging):
    old = celery.VERSION < (5, 7)
    return [pytest.param(name, marks=[_SKIP] * (old and name in hanging)) for name in shapes]


# A locked group is a chain, which Celery neither merges into a group around it, nor counts by its
# members, nor makes a group of if it has one member: as a group behind another task, it is.
AS_A_CHAIN = {
    "group of one",
    "group in a group, all locked",
    "locked group in a group",
    "locked groups in a group",
    "locked group in a group in a group",
    "locked group of one | task",
    "chord with a locked group in its header",
    "group of one chain that ends in a group",
    "chord with a locked group of chains in its header",
    "locked group in a locked group",
    "chunks as a group | task",
}

_SKIP = pytest.mark.skip(reason="Celery hangs before 5.7")


@pytest.fixture(scope="module")
def apps(module_worker):
    """The same steps as plain tasks and as locked ones, each app with a worker."""
    made = {
        name: module_worker(
            "tests.workflow.apps.shapes",
            namespace=new_namespace(),
            concurrency=3,
            env={"RELOCK_TEST_TASK_CLS": name} if name == "every task" else {},
        )
        for name in ("plain", "every task")
    }
    return Apps(made)


class Apps(dict):
    """The workers, and what each shape gives without locks."""

    def __init__(self, workers):
        super().__init__(workers)
        self._found = {}

    def plain(self, shape):
        """What it gives without locks; where a locked part is a group, with a task ahead of it."""
        if shape not in self._found:
            case = Case(self["plain"], shape)
            self._found[shape] = outcome(case.reference().apply_async)
        return self._found[shape]


class Case:
    """A shape, and what comes of it in an app."""

    def __init__(self, worker, name):
        self.worker = worker
        self.module = worker.module
        self.name = name
        self.run = uuid.uuid4().hex[:12]
        self.locks = 0

    def plain(self):
        return self.made(lambda canvas: canvas)

    def reference(self):
        return self.led() if self.name in AS_A_CHAIN else self.plain()

    def led(self):
        maker = self.maker()
        maker.lock = maker.lock_first
        return SHAPES[self.name](maker)

    def locked(self):
        return self.made(self._lock)

    def _lock(self, canvas):
        self.locks += 1
        return locked(canvas, key=f"shape:{self.run}")

    def made(self, lock):
        return SHAPES[self.name](self.maker(lock))

    def maker(self, lock=None):
        return Maker(self.module, self.run, lock)

    def steps(self):
        return [
            (event["name"], event["fences"]) for event in self.worker.journal.events(run=self.run)
        ]

    def check_permits(self):
        """Each locked part had one permit; what is outside of all had none."""
        parts: dict[str, set[int]] = {}
        for name, fences in self.steps():
            parts.setdefault(name[0], set()).update(fences or [0])
        for part, fences in parts.items():
            assert len(fences) == 1, (part, fences)
            assert (fences != {0}) == part.isupper(), (part, fences)
        # What comes at once behind a part with the same lock may join it before it is released.
        inside = [fences for part, fences in parts.items() if part.isupper()]
        assert "|" in self.name or len(set().union(*inside)) == len(inside), parts


def outcome(send):
    try:
        result = send()
        kind = type(result).__name__
        return kind, None if result is None else result.get(timeout=30)
    except Exception as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("shape", of_this_celery(SHAPES, _HANG))
def test_a_shape_is_the_same_with_locks_and_without(apps, shape):
    case = Case(apps["plain"], shape)
    plain = apps.plain(shape)
    assert plain[0] in ("AsyncResult", "GroupResult", "NoneType"), plain
    assert outcome(case.locked().apply_async) == plain
    case.check_permits()
    every = Case(apps["every task"], shape)
    assert outcome(every.reference().apply_async) == plain
    every = Case(apps["every task"], shape)
    assert outcome(every.locked().apply_async) == plain
    every.check_permits()


# What is written down does not depend on the shape around it, so the short form looks at some.
@pytest.mark.parametrize("shape", of_this_celery(SHAPES if LONG else list(SHAPES)[1::3], _HANG))
def test_a_shape_that_was_written_down_is_the_same(apps, shape):
    case = Case(apps["plain"], shape)
    read = signature(json.loads(json.dumps(case.locked())), app=case.module.app)
    assert outcome(read.apply_async) == apps.plain(shape)
    case.check_permits()


# With `task_always_eager` the one comes to the other, so the short form looks at some.
@pytest.mark.parametrize(
    ("shape", "how"),
    [
        *((shape, "apply") for shape in SHAPES),
        *((shape, "apply_async") for shape in (SHAPES if LONG else list(SHAPES)[::4])),
    ],
)
def test_a_shape_that_is_applied_here_is_the_same_or_refused(apps, monkeypatch, shape, how):
    for name in apps:
        monkeypatch.setitem(apps[name].module.app.conf, "task_always_eager", True)
    plain = outcome(getattr(Case(apps["plain"], shape).reference(), how))
    for name in apps:
        assert outcome(getattr(Case(apps[name], shape).reference(), how)) == plain
        case = Case(apps[name], shape)
        canvas = case.locked()
        found = outcome(getattr(canvas, how))
        # Only what is a whole by itself can be held.
        is_whole = case.locks == 1 and isinstance(canvas, LockedChain)
        refused = found[0] == "LockConfigError" and "larger canvas" in found[1]
        assert found == plain or (refused and not is_whole), found


# A group around it changes little, so the short form looks at some.
@pytest.mark.parametrize(
    "shape", of_this_celery(SHAPES if LONG else list(SHAPES)[::5], _HANG_IN_A_GROUP)
)
def test_a_shape_that_stands_in_a_group_is_the_same(apps, shape):
    case = Case(apps["plain"], shape)
    # Celery merges a group into the one around it, and does not merge a chain that ends in one.
    inner = case.led() if isinstance(case.plain(), group) else case.reference()
    plain = outcome(group([inner, case.maker().s("z")]).apply_async)
    case = Case(apps["plain"], shape)
    send = group([case.locked(), case.maker().s("z")]).apply_async
    assert outcome(send) == plain
    case.check_permits()
