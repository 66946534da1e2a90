"""docs/company.md names what tests/company runs beside, and nothing else."""

from __future__ import annotations

import re

from tests.company.companions import COMPANIONS
from tests.support.worker import ROOT

PAGE = (ROOT / "docs" / "company.md").read_text()


def rows(heading: str) -> dict[str, list[str]]:
    """The cells of the table under a heading, by the first one."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {first: rest for first, *rest in cells}


def test_the_table_has_every_companion_with_its_packages_and_pools() -> None:
    found = rows("What was run")
    assert list(found) == [companion.name for companion in COMPANIONS]
    for companion in COMPANIONS:
        versions, pools, checked = found[companion.name]
        each = [re.fullmatch(r"(\S+) \d[\w.]*", one) for one in versions.split(", ")]
        assert all(each), versions
        assert tuple(one[1] for one in each if one) == companion.packages
        assert tuple(pools.split(", ")) == companion.pools
        assert checked.startswith("locks")
        assert ("traces" in checked) == companion.traces


def test_there_is_a_line_of_advice_for_each() -> None:
    section = PAGE.split("\n## How to run beside it\n")[1]
    advice = re.findall(r"^- \*\*(.+?)\*\*: \w+", section, re.MULTILINE)
    assert ["nobody", *advice] == [companion.name for companion in COMPANIONS]
