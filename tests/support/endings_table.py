"""Writes the table of docs/endings.md from what a run of the tests has measured."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import celery

from tests.support import page
from tests.support.endings import ROWS, Row

PAGE = Path(__file__).parents[2] / "docs" / "endings.md"


def listed() -> list[str]:
    """The endings in the table as it stands."""
    table = PAGE.read_text().partition("<!-- measured -->")[2].partition("<!-- /measured -->")[0]
    cells = re.findall(r"^\| (.+?) \|", table, re.MULTILINE)
    return [cell for cell in cells if cell not in ("ending", "pool")]


def write(measured: Path) -> None:
    """Put measurements into the page.

    Raises:
        SystemExit: a row has none.
    """
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in measured.read_text().splitlines():
        one = json.loads(line)
        found[one["row"]].append(one)
    missing = [row.name for row in ROWS.values() if row.name not in found]
    if missing:
        raise SystemExit(f"not measured, so the table is left as it is: {', '.join(missing)}")
    parts = dict.fromkeys(row.part for row in ROWS.values())
    tables = "\n\n".join(_table(part, found) for part in parts)
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    made = f"Celery {celery.__version__}, Python {sys.version.split()[0]}, {load}."
    page.write(PAGE, "measured", f"{made}\n\n{tables}")


def _table(part: str, found: dict[str, list[dict[str, Any]]]) -> str:
    head = "| ending | early ack: s | late ack: s | outcome |\n|---|---|---|---|"
    lines = [_line(row, found[row.name]) for row in ROWS.values() if row.part == part]
    return "\n".join([f"### {part}", "", head, *lines])


def _line(row: Row, found: list[dict[str, Any]]) -> str:
    early, late = (_longest(found, ack) for ack in ("early", "late"))
    since = max(row.since, row.so_since)
    mark = f" (since Celery {since[0]}.{since[1]})" if since > (5, 4) else ""
    return f"| {row.name} | {early} | {late} | {_told(found)}{mark} |"


def _longest(found: list[dict[str, Any]], ack: str) -> str:
    seconds = [one["seconds"] for one in found if one["ack"] == ack]
    return f"{max(0.0, *seconds):.2f}" if seconds else ""


def _told(found: list[dict[str, Any]]) -> str:
    """The outcome, for both acknowledgements if they differ."""
    by_ack = {one["ack"]: one["outcome"] for one in found if one["outcome"]}
    texts = {ack: ", ".join(_words(*outcome)) for ack, outcome in by_ack.items()}
    if len(set(texts.values())) <= 1:
        return next(iter(texts.values()), "as without a lock")
    return "; ".join(f"{ack}: {texts[ack]}" for ack in sorted(texts))


def _words(state: str, then: str, chord: str) -> list[str]:
    sent = then.replace("nothing", "nothing is sent").replace("next", "next step")
    words = [state, sent, f"chord {chord}"]
    return [word for word, told in zip(words, (state, then, chord), strict=True) if told != "-"]


if __name__ == "__main__":
    write(Path(sys.argv[1]))
