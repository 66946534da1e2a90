"""Figures, as Markdown, in a page of the documentation."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path


def table(columns: Iterable[str], rows: Iterable[tuple[str, Sequence[object]]]) -> str:
    """A line for each row: its label, and a cell for each column."""
    head = ["", *columns]
    lines = [head, ["---"] * len(head)]
    lines += [[label, *map(str, cells)] for label, cells in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bold(cells: Iterable[object]) -> list[object]:
    return [f"**{cell}**" for cell in cells]


def write(page: Path | None, mark: str, text: str, command: str = "") -> None:
    """Put a text between the comments `<!-- mark -->` and `<!-- /mark -->` of a page, and the
    command before it, as it was called."""
    if page is None:
        return
    if command:
        text = f"    {' '.join((command, *sys.argv[1:]))}\n\n{text}"
    block = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", re.DOTALL)
    page.write_text(block.sub(lambda found: f"{found[1]}{text}\n{found[2]}", page.read_text()))
