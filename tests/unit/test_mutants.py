"""What mutants.txt breaks: each rule names a text, and a text may move."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


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


def test_the_text_that_a_rule_breaks_is_there_exactly_once() -> None:
    rules = _script("mutate").mutants()
    assert len(rules) > 200
    found = [(each, each.path(ROOT).read_text("utf-8").count(each.old)) for each in rules]
    amiss = [f"{e.file}: {e.rule}: found {n} times:\n{e.old}" for e, n in found if n != 1]
    assert not amiss, "a text is not there exactly once; change mutants.txt:\n" + "\n".join(amiss)


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
