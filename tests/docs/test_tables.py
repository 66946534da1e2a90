"""Tables are for looking up: a cell is a phrase, and what needs more words is text of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.worker import ROOT

# A line of the site has room for about 80 characters, and the widest column of a table for some 50:
# this is three lines there. A row is as much in all.
MOST, MOST_IN_A_ROW = 120, 240
PAGES = [
    ROOT / "README.md",
    *(ROOT / name / "README.md" for name in ("lua", "docker", "benchmarks", "examples")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def tables(page: Path) -> Iterator[list[list[str]]]:
    """The cells of each table, row by row, as a reader sees them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        rows = [re.split(r"(?<!\\)\|", line.strip()[1:-1]) for line in table.splitlines()]
        yield [[_shown(cell) for cell in row] for row in rows]


def _shown(cell: str) -> str:
    return re.sub(r"\[(.+?)\]\(.+?\)", r"\1", cell).replace("`", "").replace("*", "").strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_cell_is_a_paragraph(page: Path) -> None:
    cells = [cell for table in tables(page) for row in table for cell in row]

    assert not [cell for cell in cells if len(cell) > MOST]
    assert not [cell for cell in cells if re.search(r"[.!?] [A-Z]", cell)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_row_is_wider_than_three_lines(page: Path) -> None:
    rows = [row for table in tables(page) for row in table]

    assert not [row for row in rows if sum(map(len, row)) > MOST_IN_A_ROW]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_column_has_a_heading(page: Path) -> None:
    """The first one needs none where each row begins with its own heading."""
    for header, *_ in tables(page):
        assert all(header[1:]) or not any(header), header
