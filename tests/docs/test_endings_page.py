"""The table of the page says since which Celery a task ends so."""

from __future__ import annotations

import importlib.util
import re
import sys
from typing import Any

import billiard
import celery
import pytest

from tests.docs.pages import text
from tests.support import endings

SUPPORTED = ((5, 4), (5, 5), (5, 6), (5, 7))


def _outcomes(version: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What becomes of each ending under a version of Celery, None if that does not have it."""
    spec = importlib.util.spec_from_file_location("tests.endings_of_a_version", endings.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setattr(celery, "VERSION", (*version, 0, "", ""))
        patch.setattr(billiard, "VERSION", (4, 3, 0, "", ""))
        patch.setitem(sys.modules, spec.name, module)  # its dataclass looks for its module
        spec.loader.exec_module(module)
    return {
        name: (row.early, row.late) if row.since <= version else None
        for name, row in module.ROWS.items()
    }


def test_a_row_is_marked_with_the_celery_since_which_it_is_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    since = dict.fromkeys(endings.ROWS, "")
    before, *later = (_outcomes(version, monkeypatch) for version in SUPPORTED)
    for version, outcomes in zip(SUPPORTED[1:], later, strict=True):
        changed = [name for name in outcomes if outcomes[name] != before[name]]
        since |= dict.fromkeys(changed, f" (since Celery {version[0]}.{version[1]})")
        before = outcomes

    table = text("endings").partition("<!-- measured -->")[2].partition("<!-- /measured -->")[0]
    rows = re.findall(r"^\| (.+?) \|.*?( \(since [^|]+\))? \|$", table, flags=re.MULTILINE)
    assert {name: mark for name, mark in rows if name in since} == since
    assert {" (since Celery 5.5)", " (since Celery 5.7)"} < set(since.values())
