"""The backend in memory changes nothing: the tests of the scripts that speak of verbs, and not of
keys, run once more on it. Which these are is read off their code."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from tests.support.memory_desk import MemoryDesk

#: What leads past the verbs.
KEYS = {"client", "keys", "raw", "Ears", "inspection", "go_by", "traces"}
FOLDER = Path(__file__).parents[1] / "lua"
#: Not about the verbs; and one that shows what the short way of `acquire`, which looks at no other
#: lock, leaves for later.
OTHERS = {"test_in_a_cluster", "test_short_ways_same"}
SHORT_WAY = "test_an_execution_that_has_ended_leaves_its_message_nowhere"


def _function(found: Any) -> Any:
    """Of a test or a fixture."""
    return getattr(found, "_get_wrapped_function", lambda: found)()


def _speaks_of_keys(
    code: CodeType, of: ModuleType, seen: frozenset[CodeType] = frozenset()
) -> bool:
    """Whether a function, or one that it uses of its module, looks past the verbs."""
    if KEYS & set(code.co_names):
        return True
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    used = [vars(of).get(name) for name in code.co_names]
    inner += [each.__code__ for each in used if isinstance(each, FunctionType)]
    seen |= {code}
    return any(_speaks_of_keys(each, of, seen) for each in inner if each not in seen)


def _asks_for(found: Any) -> set[str]:
    """The fixtures that a test or a fixture wants."""
    marks = getattr(found, "pytestmark", ())
    given = [mark.args[0] for mark in marks if mark.name == "parametrize"]
    names = {
        n.strip() for each in given for n in (each.split(",") if isinstance(each, str) else each)
    }
    return set(inspect.signature(_function(found)).parameters) - names


def _of_verbs(of: ModuleType) -> Iterator[tuple[str, Any]]:
    known = {"desk"}
    for name, found in vars(of).items():
        is_fixture = hasattr(found, "_get_wrapped_function")
        is_test = name.startswith("test_") and callable(found)  # not a module of tests
        if not is_fixture and not is_test:
            continue
        function = _function(found)
        asks = _asks_for(found)
        if asks and asks <= known and not _speaks_of_keys(function.__code__, of):
            known |= {name} if is_fixture else set()
            yield name, found


for _path in sorted(FOLDER.glob("test_*.py")):
    if _path.stem not in OTHERS:
        for _name, _found in _of_verbs(import_module(f"tests.lua.{_path.stem}")):
            assert _name not in globals(), f"two tests are called {_name}"
            globals()[_name] = _found
del globals()[SHORT_WAY]


@pytest.fixture
def desk() -> MemoryDesk:
    return MemoryDesk()
