"""The Markdown pages that users read, and the code on them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.worker import ROOT

URL = "redis://localhost:6379"
DOCS = ROOT / "docs"


def text(page: str) -> str:
    """A page, by its path under docs/; "README" is that of the repository."""
    return (ROOT / "README.md" if page == "README" else DOCS / f"{page}.md").read_text()


def blocks(page: str, language: str = "python") -> list[str]:
    """The code blocks of a page, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```", text(page), flags=re.DOTALL | re.MULTILINE)


def all_pages() -> list[str]:
    return ["README", *sorted(str(path.relative_to(DOCS).with_suffix("")) for path in _paths())]


def _paths() -> list[Path]:
    return [path for path in DOCS.rglob("*.md") if "pictures" not in path.parts]
