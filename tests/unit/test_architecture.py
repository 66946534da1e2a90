"""The layers hold: who may import whom, and no cycles.

The checker works on any source tree, so the second half shows on small trees that it can fail.
"""

from __future__ import annotations

import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.worker import ROOT
from tests.unit.imports import Import, imports

PACKAGE = "celery_relock"
#: Which layers a layer may use. "" is the package's own names.
ARROWS: dict[str, set[str]] = {
    "": {"engine", "lock", "task", "version", "worker", "workflow"},
    "cli": {"admin", "contrib", "doctor", "engine", "errors"},
    "admin": {
        "declaration", "engine", "engines", "errors", "naming", "settings", "signals", "worker",
    },
    "doctor": {
        "declaration", "engine", "engines", "errors", "options", "settings", "version", "worker",
    },
    "testing": {"declaration", "engine", "engines", "errors", "naming", "settings"},
    "signals": {"engine"},
    "asyncio": {"contrib", "engine", "errors", "named_lock"},
    "lock": {"contrib", "engine", "errors", "named_lock"},
    "named_lock": {"engine", "engines", "errors", "naming", "worker"},
    "task": {
        "asyncio",
        "debounce", "declaration", "dedup", "engine", "errors", "lock", "naming", "order",
        "worker", "workflow",
    },
    "debounce": {
        "declaration", "dedup", "engine", "errors", "naming", "options", "settings", "worker",
    },
    "worker": {
        "declaration", "dedup", "engine", "errors", "naming", "options", "order", "settings",
        "version", "workflow",
    },
    "order": {"declaration", "engine", "errors", "naming", "worker"},
    "dedup": {"declaration", "engine", "errors", "naming", "options", "signals", "worker"},
    "workflow": {
        "declaration", "engine", "errors", "naming", "options", "settings", "task", "worker",
    },
    "declaration": {"engines", "engine", "errors", "naming", "options", "settings", "worker"},
    "settings": {"engine", "errors", "naming", "options"},
    "options": {"engine", "errors", "naming"},
    "naming": {"errors", "engine"},
    "engines": {"engine", "backends", "errors"},
    "backends": {"engine", "errors"},
    "engine": {"contrib", "errors"},
    "contrib": {"admin", "declaration", "doctor", "engine", "errors", "signals", "version"},
    "errors": {"version"},
    "version": set(),
}  # fmt: skip
#: Which libraries a layer may use besides the standard library.
LIBRARIES: dict[str, set[str]] = {
    "admin": {"celery"},
    "cli": {"click", "rich"},
    "asyncio": {"redis"},
    "testing": {"celery", "pytest"},
    "lock": {"redis"},
    "named_lock": {"redis"},
    "signals": {"celery"},
    "task": {"celery"},
    "worker": {"celery", "kombu", "redis"},
    "dedup": {"celery"},
    "debounce": {"celery", "kombu"},
    "order": {"celery"},
    "workflow": {"celery"},
    "declaration": {"celery"},
    "naming": {"celery", "kombu"},
    "engines": {"redis"},
    "backends": {"redis"},
    "contrib": {"celery", "django", "opentelemetry", "prometheus_client", "sqlalchemy"},
}
# annotationlib: of Python 3.14.
STANDARD = sys.stdlib_module_names | {"__future__", "annotationlib"}


def violations(package: Path) -> list[str]:
    """Every broken rule in a source tree, one line each."""
    found = imports(package)
    complaints = [text for one in found for text in _broken_arrows(one, package.name)]
    complaints += _cycles(found, package.name)
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
    # The errors of redis-py are bases of the public lock's own; the server is the backend's.
    public = ("asyncio", "lock", "named_lock")
    if source in public and not one.typing and one.target != "redis.exceptions":
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


def test_the_package_keeps_its_layers_and_has_no_import_cycle():
    assert violations(ROOT / PACKAGE) == []


def test_every_layer_is_read():
    seen = {_layer(one.source, PACKAGE) for one in imports(ROOT / PACKAGE)}

    assert seen == set(ARROWS) - {"version"}, "which imports nothing"


def test_only_the_composition_root_imports_a_backend():
    users = {
        one.source
        for one in imports(ROOT / PACKAGE)
        if _layer(one.target, PACKAGE) == "backends" and _layer(one.source, PACKAGE) != "backends"
    }

    assert users == {f"{PACKAGE}.engines"}


def test_the_diagrams_are_drawn_from_their_texts():
    subprocess.run([sys.executable, ROOT / "scripts" / "draw_diagrams.py", "--check"], check=True)


GOOD = {
    "__init__.py": "def __getattr__(name):\n    from .lock import Lock\n    return Lock\n",
    "errors.py": "import os\n",
    "lock.py": "from .named_lock import NamedLock\n",
    "named_lock.py": "from redis.exceptions import LockError\nfrom . import engines\n",
    "engines.py": "import redis\nfrom .engine.engine import Engine\nfrom .backends import keys\n",
    "engine/__init__.py": "",
    "engine/ids.py": "import uuid\n",
    "engine/engine.py": "from . import ids\nfrom ..errors import RelockError\n",
    "backends/__init__.py": "",
    "backends/keys.py": "import redis\nfrom ..engine.engine import Engine\n",
    "task.py": "from celery import Task\nfrom .engine import ids\n",
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
        ("engine/ids.py", "import celery", "engine.ids:1 imports celery"),
        ("engine/ids.py", "from redis import Redis", "engine.ids:1 imports redis"),
        ("engine/ids.py", "def f():\n    import kombu.utils", "engine.ids:2 imports kombu.utils"),
        ("engine/ids.py", "import yaml", "engine.ids:1 imports yaml"),
        (
            "engine/ids.py",
            "from ..backends import keys",
            "engine.ids:1 imports celery_relock.backends.keys",
        ),
        (
            "engine/ids.py",
            "from ..task import T",
            "engine.ids:1 imports celery_relock.task",
        ),
        ("engine/ids.py", "from .. import engines", "engine.ids:1 imports celery_relock.engines"),
        ("engine/ids.py", "from celery_relock import Lock", "own names are for users"),
        (
            "engine/ids.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from celery import Task",
            "engine.ids:3 imports celery",
        ),
        ("backends/keys.py", "import celery", "backends.keys:1 imports celery"),
        ("backends/keys.py", "from ..task import base", "imports celery_relock.task"),
        ("task.py", "import redis", "task:1 imports redis"),
        ("task.py", "from .backends.keys import Keys", "imports celery_relock.backends.keys"),
        ("task.py", "from .admin import Locks", "task:1 imports celery_relock.admin"),
        ("lock.py", "from redis import Redis", "only for types, or redis.exceptions"),
        ("lock.py", "from .backends import keys", "lock:1 imports celery_relock.backends.keys"),
        ("errors.py", "from .engine import ids", "errors:1 imports celery_relock.engine.ids"),
        ("helpers.py", "import os", "'helpers' is not a layer"),
        ("engine/ids.py", "from . import engine", "import cycle"),
        ("engine/ids.py", "def late():\n    from .engine import Engine", "import cycle"),
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
            "engine/ids.py",
            "import typing\nif typing.TYPE_CHECKING:\n    from .engine import Engine",
        ),
        ("lock.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from redis import R"),
    ],
)
def test_the_checker_lets_pass_what_never_runs(tmp_path, file, text):
    assert violations(_tree(tmp_path, {file: text})) == []


def test_a_call_and_its_task_pass_few_rooms_and_a_hand_over_not_many_more() -> None:
    found = subprocess.run(
        [sys.executable, ROOT / "scripts" / "trace_calls.py"],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    counts = re.findall(r"(\d+) calls, +(\d+) modules", found.stdout)
    assert len(counts) == 5
    sent, (calls, modules), *others = [(int(calls), int(modules)) for calls, modules in counts]
    most = 17 if (3, 14) <= sys.version_info < (3, 15) else 16  # see `engine.platform.for_with`
    assert (calls <= 108, modules <= most) == (True, True), found.stdout
    assert max(modules for _, modules in others) <= most + 5, found.stdout
    assert (sent[0] <= 65, sent[1] <= 12) == (True, True), found.stdout
