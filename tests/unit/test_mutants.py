"""The rules of scripts/mutants.txt: each names a text of the scripts, and a text may move."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def _mutate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutate", ROOT / "scripts" / "mutate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutate"] = module  # its tuples look for their module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["mutate"]
    return module


def test_the_text_that_a_rule_breaks_is_there_exactly_once() -> None:
    rules = _mutate().mutants()
    assert len(rules) > 200
    amiss = [
        f"{rule.file}: {rule.rule}"
        for rule in rules
        if rule.path(ROOT).read_text("utf-8").count(rule.old) != 1
    ]
    assert amiss == []
