"""The published table has a line for every ending that is tested, and every line has a test."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tests.support.endings import ROWS
from tests.support.endings_table import listed


def _tested():
    names = set()
    for path in Path(__file__).parent.glob("test_endings_*.py"):
        if path.name == Path(__file__).name:
            continue
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name, test in vars(module).items():
            for mark in getattr(test, "pytestmark", []) if name.startswith("test_") else []:
                if mark.name == "parametrize" and mark.args[0] == "row":
                    names |= {row.name for row in mark.args[1]}
    return names


def test_every_ending_of_the_table_has_a_test_and_the_other_way_round():
    assert set(listed()) == set(ROWS)
    assert _tested() == set(ROWS)
