"""The figures of campaigns, as Markdown, in a page of the documentation."""

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


def write(page: Path | None, name: str, figures: str) -> None:
    """Put the figures between the comments `<!-- <name> figures -->` of a page, with the command
    `scripts/<name>` as it was called."""
    if page is not None:
        block = re.compile(rf"(<!-- {name} figures -->\n).*?(<!-- /{name} figures -->)", re.DOTALL)
        text = f"    scripts/{name} {' '.join(sys.argv[1:])}\n\n{figures}\n"
        page.write_text(block.sub(lambda found: found[1] + text + found[2], page.read_text()))
