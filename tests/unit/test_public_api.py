"""What users may import: these names and no others, documented, and cheap until they are used."""

from __future__ import annotations

import ast
import inspect
import json
import re
from importlib.metadata import version

import pytest
import redis.lock
from celery.utils.dispatch import Signal

import celery_relock
from celery_relock import errors
from celery_relock.engine.hold import Hold
from tests.support.programs import said_by
from tests.support.worker import ROOT

NAMES = ["Hold", "Lock", "LockedTask", "is_dropped", "locked"]
HOLD = [
    "check",
    "continuous",
    "downgrade",
    "fence",
    "fenced",
    "fences",
    "in_order",
    "lost",
    "lost_error",
    "name",
    "names",
    "owner",
    "protected",
    "reentered",
    "remaining",
]
LOCK = [
    "acquire",
    "check",
    "downgrade",
    "extend",
    "fence",
    "fenced",
    "locked",
    "lost",
    "owned",
    "reacquire",
    "release",
    "remaining",
]
ERRORS = [name for name in vars(errors) if name.startswith(("Lock", "Relock"))]


def _public(kind: type) -> list[str]:
    own = [each for each in kind.__mro__ if each.__module__.startswith("celery_relock")]
    return sorted({name for each in own for name in vars(each) if name[0] != "_"})


def _loaded_by(code: str) -> list[str]:
    """The modules that a fresh interpreter has loaded after the code."""
    return json.loads(said_by(f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)))"))


def test_the_package_offers_these_names():
    assert celery_relock.__all__ == NAMES
    assert dir(celery_relock) == sorted([*NAMES, "__version__"])
    assert {type(celery_relock.Lock), type(celery_relock.LockedTask)} == {type}
    assert celery_relock.is_dropped({"relock": "dropped"})
    assert callable(celery_relock.locked)
    with pytest.raises(AttributeError, match="no attribute 'Lok'"):
        _ = celery_relock.Lok


def test_a_lock_and_a_hold_offer_these_names():
    assert _public(celery_relock.Lock) == LOCK
    assert _public(Hold) == HOLD


def test_the_version_is_that_of_the_installed_package():
    assert celery_relock.__version__ == version("celery-relock")


def test_the_signals_are_these_each_documented_and_loaded_when_they_are_asked_for():
    from celery_relock import signals

    kinds = ["acquired", "conflict", "dropped", "duplicate", "forced", "lost", "parked", "passed"]
    kinds += ["reclaimed", "reentered", "released", "resumed", "unavailable", "unprotected"]
    kinds += ["unrenewed", "waiting"]
    names = sorted(name for name, each in vars(signals).items() if isinstance(each, Signal))
    assert names == [f"lock_{kind}" for kind in kinds]
    page = (ROOT / "docs" / "signals.md").read_text()
    assert all(f"`{name}`" in page for name in names)
    assert all(f"`{name}`" in page for name in signals.lock_lost.providing_args)
    assert "celery_relock.signals" not in _loaded_by("import celery_relock")


def test_importing_the_package_loads_neither_celery_nor_redis():
    loaded = _loaded_by("import celery_relock.errors")

    assert "celery_relock.errors" in loaded
    assert not {"celery", "kombu", "redis", "celery_relock.lock"} & set(loaded)


def test_a_lock_outside_of_tasks_loads_no_celery():
    loaded = _loaded_by("from celery_relock import Lock\nLock('redis://localhost', 'a')")

    assert "celery_relock.lock" in loaded
    assert not {"celery", "kombu"} & set(loaded)


def test_every_public_name_has_a_docstring():
    kinds = [celery_relock.Lock, Hold, celery_relock.LockedTask]
    members = [getattr(kind, name) for kind in kinds[:2] for name in _public(kind)]
    members.append(celery_relock.LockedTask.lock)
    kinds += [getattr(errors, name) for name in ERRORS]
    functions = [one for one in members if inspect.isroutine(one) or isinstance(one, property)]
    silent = [one for one in [*kinds, *functions] if not inspect.getdoc(one)]

    assert len(functions) > 20
    assert [getattr(one, "fget", one).__qualname__ for one in silent] == []


def test_lock_takes_what_the_lock_of_redis_py_takes_in_the_same_order():
    theirs = inspect.signature(redis.lock.Lock).parameters
    ours = inspect.signature(celery_relock.Lock).parameters

    assert list(ours)[: len(theirs)] == list(theirs)
    methods = [name for name, one in vars(redis.lock.Lock).items() if inspect.isfunction(one)]
    verbs = {name for name in methods if not re.match("_|do_|register_", name)}
    assert verbs <= set(LOCK)


def test_the_typing_file_uses_every_public_name():
    tree = ast.parse((ROOT / "tests/typing/api.py").read_text())
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}

    assert used >= {*NAMES, *ERRORS}
    assert attributes >= {*LOCK, *HOLD} - {"lost_error"}


def test_what_watches_locks_is_loaded_by_those_alone_who_use_it():
    code = "import celery_relock.worker.bootstep, celery_relock.worker.resuming, celery_relock.cli"
    loaded = _loaded_by(f"import celery_relock.task, celery_relock.lock; {code}")

    ours = {name for name in loaded if name.startswith("celery_relock.")}
    assert "celery_relock.worker.bootstep" in ours
    assert not {f"celery_relock.{name}" for name in ("admin", "contrib", "doctor")} & ours
    # Celery itself loads Django where it is installed, and redis-py OpenTelemetry.
    assert not {"prometheus_client", "rich"} & {name.partition(".")[0] for name in loaded}
