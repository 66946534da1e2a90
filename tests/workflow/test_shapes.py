"""Every shape of a canvas gives what it gives without locks: with `locked` around it or around
parts of it, and where every task of the app is a LockedTask."""

from __future__ import annotations

import gc
import json
import uuid

import celery
import pytest
from celery import group, signature

from celery_relock import locked
from tests.support.long import LONG
from tests.support.shapes import SHAPES, Maker

# Celery 5.4 itself never gives the result of these: a group of a chain that ends in a group, and a
# chord in a group whose body is a chain, which a locked body is, as the task that enters is ahead.
_HANG = {"group of one chain that ends in a group"}
_HANG_IN_A_GROUP = {
    *_HANG,
    "group | locked task",
    "locked chord | locked chord",
    "chord with a locked body",
    "chord with a locked chord for a body",
}


def of_this_celery(shapes, hanging):
    old = celery.VERSION < (5, 5)
    return [pytest.param(name, marks=[_SKIP] * (old and name in hanging)) for name in shapes]


_SKIP = pytest.mark.skip(reason="Celery 5.4 hangs")


@pytest.fixture(scope="module")
def apps(module_worker):
    """The same steps as plain tasks and as locked ones, each app with a worker."""
    made = {
        name: module_worker(
            "tests.workflow.apps.shapes",
            namespace=f"ns{uuid.uuid4().hex[:12]}",
            concurrency=3,
            env={"RELOCK_TEST_TASK_CLS": name} if name == "every task" else {},
        )
        for name in ("plain", "every task")
    }
    yield Apps(made)
    for each in made.values():
        # Results look for their Redis when they go, so they go while it is there.
        each.module.app.backend._pending_results.concrete.clear()
    gc.collect()


class Apps(dict):
    """The workers, and what each shape gives without locks."""

    def __init__(self, workers):
        super().__init__(workers)
        self._found = {}

    def plain(self, shape):
        if shape not in self._found:
            self._found[shape] = outcome(Case(self["plain"], shape).plain().apply_async)
        return self._found[shape]


class Case:
    """A shape, and what comes of it in an app."""

    def __init__(self, worker, name):
        self.worker = worker
        self.module = worker.module
        self.name = name
        self.run = uuid.uuid4().hex[:12]

    def plain(self):
        return self.made(lambda canvas: canvas)

    def locked(self):
        return self.made(lambda canvas: locked(canvas, key=f"shape:{self.run}"))

    def made(self, lock):
        return SHAPES[self.name](self.maker(lock))

    def maker(self, lock=None):
        return Maker(self.module, self.run, lock)

    def steps(self):
        return [
            (event["name"], event["fences"])
            for event in self.worker.journal.events()
            if event.data.get("run") == self.run
        ]

    def check_sections(self):
        """Each locked part was one entry; what is outside of all was in none."""
        parts: dict[str, set[int]] = {}
        for name, fences in self.steps():
            parts.setdefault(name[0], set()).update(fences or [0])
        for part, fences in parts.items():
            assert len(fences) == 1, (part, fences)
            assert (fences != {0}) == part.isupper(), (part, fences)
        # What comes at once behind a section, with the same lock, may come in before that has left.
        inside = [fences for part, fences in parts.items() if part.isupper()]
        assert "|" in self.name or len(set().union(*inside)) == len(inside), parts


def outcome(send):
    try:
        result = send()
        kind = type(result).__name__
        return kind, None if result is None else result.get(timeout=15)
    except Exception as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("shape", of_this_celery(SHAPES, _HANG))
def test_a_shape_is_the_same_with_locks_and_without(apps, shape):
    case = Case(apps["plain"], shape)
    plain = apps.plain(shape)
    assert plain[0] in ("AsyncResult", "GroupResult", "NoneType"), plain
    assert outcome(case.locked().apply_async) == plain
    case.check_sections()
    every = Case(apps["every task"], shape)
    assert outcome(every.plain().apply_async) == plain
    every = Case(apps["every task"], shape)
    assert outcome(every.locked().apply_async) == plain
    every.check_sections()


@pytest.mark.parametrize("shape", of_this_celery(SHAPES, _HANG))
def test_a_shape_that_was_written_down_is_the_same(apps, shape):
    case = Case(apps["plain"], shape)
    read = signature(json.loads(json.dumps(case.locked())), app=case.module.app)
    assert outcome(read.apply_async) == apps.plain(shape)
    case.check_sections()


@pytest.mark.parametrize("how", ["apply", "apply_async"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_that_is_applied_here_is_the_same(apps, monkeypatch, shape, how):
    found = []
    for name in apps:
        monkeypatch.setitem(apps[name].module.app.conf, "task_always_eager", True)
        for kind in ("plain", "locked"):
            canvas = getattr(Case(apps[name], shape), kind)()
            found.append(outcome(getattr(canvas, how)))
    assert found == [found[0]] * 4


# A group around it changes little, so the short form looks at some.
@pytest.mark.parametrize(
    "shape", of_this_celery(SHAPES if LONG else list(SHAPES)[::5], _HANG_IN_A_GROUP)
)
def test_a_shape_that_stands_in_a_group_is_the_same(apps, shape):
    case = Case(apps["plain"], shape)
    plain = outcome(group([case.plain(), case.maker().s("z")]).apply_async)
    case = Case(apps["plain"], shape)
    send = group([case.locked(), case.maker().s("z")]).apply_async
    assert outcome(send) == plain
    case.check_sections()
