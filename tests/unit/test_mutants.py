"""What mutants.txt and faults_back.py break: each names a text, and a text may move."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
ONCE = "each text has to be in its file exactly once; change it in scripts/"


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its tuples look for their module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


def _amiss(texts: Iterable[tuple[str, Path, str]]) -> str:
    """What each text is for, and how often it is in its file, where that is not once."""
    found = ((what, path.read_text("utf-8").count(text), text) for what, path, text in texts)
    return "\n".join(f"{what}: found {n} times:\n{text}" for what, n, text in found if n != 1)


def test_the_text_that_a_rule_breaks_is_there_exactly_once() -> None:
    rules = _script("mutate").mutants()
    assert len(rules) > 200
    amiss = _amiss((f"{each.file}: {each.rule}", each.path(ROOT), each.old) for each in rules)
    assert not amiss, f"{ONCE}mutants.txt where it is not:\n{amiss}"


def test_the_tests_of_a_rule_are_there() -> None:
    suites = {suite for each in _script("mutate").mutants() for suite in each.suites}
    assert len(suites) > 20
    assert not [suite for suite in suites if not (ROOT / suite).exists()]


@pytest.mark.parametrize(
    ("name", "comment", "code"),
    [
        ("a.lua", "-- Why.\nreturn 1\n", "return 2\n"),
        ("a.lua", "return 1\n", "-- Uses: lib/base\nreturn 1\n"),
        ("a.py", "x = 1  # why\n", "x = 2\n"),
    ],
)
def test_a_rule_is_asked_about_again_when_code_changes_and_not_for_a_comment(
    tmp_path: Path, name: str, comment: str, code: str
) -> None:
    mutate = _script("mutate")
    rule = mutate.Mutant(name, "a rule", "1", "2")
    file = rule.path(tmp_path)
    file.parent.mkdir(exist_ok=True)
    states = []
    for text in ("return 1\n" if name.endswith("lua") else "x = 1\n", comment, code):
        file.write_text(text, "utf-8")
        states.append(mutate.state_of(rule, "test_that_notices", tmp_path))
    assert states[0] == states[1] != states[2]


def test_the_text_of_a_fault_that_is_put_back_is_there_exactly_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    faults = _script("faults_back").FAULTS
    assert len(faults) >= 5
    amiss = _amiss(
        (f"{edit.file}: {name}", ROOT / edit.file, edit.old)
        for name, (_, edits) in faults.items()
        for edit in edits
    )
    assert not amiss, f"{ONCE}faults_back.py where it is not:\n{amiss}"
