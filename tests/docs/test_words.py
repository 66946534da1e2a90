"""Texts for users have the words of docs/architecture.md, and none of those that they replaced."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.worker import ROOT

BANNED = re.compile(
    r"\b(giv(e|es|ing|en) back|gave back|give-backs?|(sends?|sent) on(?! (commit|the|a|its))"
    r"|in line|not to be had|whoever|lineages?|heirs?|(is|are|was) away|nonces?|run ids?)\b",
    re.IGNORECASE,
)
GENERATED = re.compile(
    r"<!-- (figures|parked figures|ordered figures|mixed figures|measured) -->.*?<!-- /\1 -->",
    re.DOTALL,
)
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md")),
    *(ROOT / name / "README.md" for name in ("lua", "docker", "benchmarks", "examples")),
    *(path for path in (ROOT / "docs").rglob("*.md") if path.name != "mutations.md"),
]
CODE = sorted((ROOT / "celery_relock").rglob("*.py"))


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """The strings of a module with their lines: docstrings, errors, log lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _banned(text: str) -> list[str]:
    # A sentence may break at the end of a line.
    return [found[0] for found in BANNED.finditer(re.sub(r"\s+", " ", text))]


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_a_page_has_no_word_that_was_replaced(path: Path) -> None:
    assert not _banned(GENERATED.sub("", path.read_text()))


@pytest.mark.parametrize("path", CODE, ids=_name)
def test_a_string_of_the_package_has_no_word_that_was_replaced(path: Path) -> None:
    assert not [(line, found) for line, text in _texts(path) if (found := _banned(text))]
