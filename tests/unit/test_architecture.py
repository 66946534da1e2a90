"""The layers hold: who may import whom, no cycles, small files.

The checker works on any source tree, so the second half shows on small trees that it can fail.
"""

from __future__ import annotations

import graphlib
import sys
from pathlib import Path

import pytest

from tests.support.imports import Import, imports, modules
from tests.support.worker import ROOT

PACKAGE = "celery_relock"
MOST_LINES = 250

#: Which layers a layer may use. `lock` is the public class, `signals` the
#: public signals, "" the package's own names.
ARROWS: dict[str, set[str]] = {
    "": {"lock", "task"},
    "signals": {"core"},
    "lock": {"compose", "core", "errors", "task"},
    "cli": {"compose", "core", "errors", "task"},
    "task": {"compose", "core", "errors"},
    "compose": {"core", "store", "errors"},
    "store": {"core", "errors"},
    "core": {"errors"},
    "errors": set(),
}
#: Which libraries a layer may use besides the standard library.
LIBRARIES: dict[str, set[str]] = {
    "lock": {"redis"},
    "signals": {"celery"},
    "cli": {"celery", "click"},
    "task": {"celery", "kombu"},
    "compose": {"redis"},
    "store": {"redis"},
}
STANDARD = sys.stdlib_module_names | {"__future__"}


def violations(package: Path) -> list[str]:
    """Every broken rule in a source tree, one line each."""
    found = imports(package)
    complaints = [text for one in found for text in _broken_arrows(one, package.name)]
    complaints += _cycles(found, package.name)
    for name, path in modules(package).items():
        lines = len(path.read_text("utf-8").splitlines())
        if lines > MOST_LINES:
            complaints.append(f"{name} has {lines} lines, {MOST_LINES} are the most")
    return complaints


def _broken_arrows(one: Import, package: str) -> list[str]:
    source, place = _layer(one.source, package), f"{one.source}:{one.line} imports {one.target}"
    if source not in ARROWS:
        return [f"{place}: {source!r} is not a layer"]
    if one.target == package:
        return [f"{place}: the package's own names are for users"]
    if one.target.startswith(f"{package}."):
        target = _layer(one.target, package)
        return [] if target == source or target in ARROWS[source] else [place]
    library = one.target.split(".")[0]
    if library in STANDARD:
        return []
    if library not in LIBRARIES.get(source, set()):
        return [place]
    # The errors of redis-py are bases of the public lock's own; the server is the store's business.
    if source == "lock" and not one.typing and one.target != "redis.exceptions":
        return [f"{place}: only for types, or redis.exceptions"]
    return []


def _layer(module: str, package: str) -> str:
    return module.removeprefix(package).strip(".").split(".")[0]


def _cycles(found: list[Import], package: str) -> list[str]:
    graph: dict[str, set[str]] = {}
    for one in found:
        if one.target.startswith(f"{package}.") and not one.typing:
            graph.setdefault(one.source, set()).add(one.target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [f"import cycle: {' <- '.join(error.args[1])}"]
    return []


def test_the_package_keeps_its_layers_its_files_are_small_and_it_has_no_import_cycle():
    assert violations(ROOT / PACKAGE) == []


def test_every_layer_is_read():
    seen = {_layer(one.source, PACKAGE) for one in imports(ROOT / PACKAGE)}

    assert seen >= {"", "lock", "task", "compose", "store", "core", "errors"}


def test_only_the_composition_root_imports_the_store():
    users = {
        one.source
        for one in imports(ROOT / PACKAGE)
        if _layer(one.target, PACKAGE) == "store" and _layer(one.source, PACKAGE) != "store"
    }

    assert users == {f"{PACKAGE}.compose"}


GOOD = {
    "__init__.py": "def __getattr__(name):\n    from .lock import Lock\n    return Lock\n",
    "errors.py": "import os\n",
    "lock.py": "from redis.exceptions import LockError\nfrom . import compose\n",
    "compose.py": "import redis\nfrom .core.engine import Engine\nfrom .store import keys\n",
    "core/__init__.py": "",
    "core/ids.py": "import uuid\n",
    "core/engine.py": "from . import ids\nfrom ..errors import RelockError\n",
    "store/__init__.py": "",
    "store/keys.py": "import redis\nfrom ..core.engine import Engine\n",
    "task/__init__.py": "",
    "task/base.py": "from celery import Task\nfrom .. import compose\nfrom ..core import ids\n",
}


def _tree(folder: Path, changed: dict[str, str]) -> Path:
    package = folder / PACKAGE
    for name, text in {**GOOD, **changed}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package


def test_the_checker_finds_nothing_in_a_tree_that_keeps_the_rules(tmp_path):
    assert violations(_tree(tmp_path, {})) == []


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("core/ids.py", "import celery", "core.ids:1 imports celery"),
        ("core/ids.py", "from redis import Redis", "core.ids:1 imports redis"),
        ("core/ids.py", "def f():\n    import kombu.utils", "core.ids:2 imports kombu.utils"),
        ("core/ids.py", "import yaml", "core.ids:1 imports yaml"),
        ("core/ids.py", "from ..store import keys", "core.ids:1 imports celery_relock.store.keys"),
        ("core/ids.py", "from ..task.base import T", "core.ids:1 imports celery_relock.task.base"),
        ("core/ids.py", "from .. import compose", "core.ids:1 imports celery_relock.compose"),
        ("core/ids.py", "from celery_relock import Lock", "own names are for users"),
        (
            "core/ids.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from celery import Task",
            "core.ids:3 imports celery",
        ),
        ("store/keys.py", "import celery", "store.keys:1 imports celery"),
        ("store/keys.py", "from ..task import base", "imports celery_relock.task.base"),
        ("task/base.py", "import redis", "task.base:1 imports redis"),
        ("task/base.py", "from ..store.keys import Keys", "imports celery_relock.store.keys"),
        ("task/base.py", "from ..lock import Lock", "task.base:1 imports celery_relock.lock"),
        ("lock.py", "from redis import Redis", "only for types, or redis.exceptions"),
        ("lock.py", "from .store import keys", "lock:1 imports celery_relock.store.keys"),
        ("errors.py", "from .core import ids", "errors:1 imports celery_relock.core.ids"),
        ("helpers.py", "import os", "'helpers' is not a layer"),
        ("core/ids.py", "from . import engine", "import cycle"),
        ("core/ids.py", "def late():\n    from .engine import Engine", "import cycle"),
        ("core/ids.py", "#\n" * 251, "core.ids has 251 lines"),
    ],
)
def test_the_checker_finds_a_broken_rule(tmp_path, file, text, complaint):
    found = violations(_tree(tmp_path, {file: text}))

    assert found
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (
            "core/ids.py",
            "import typing\nif typing.TYPE_CHECKING:\n    from .engine import Engine",
        ),
        ("lock.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from redis import R"),
        ("core/ids.py", "#\n" * 250),
    ],
)
def test_the_checker_lets_pass_what_never_runs_and_what_just_fits(tmp_path, file, text):
    assert violations(_tree(tmp_path, {file: text})) == []
