"""The Markdown pages that users read, and the code on them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.worker import ROOT

URL = "redis://localhost:6379"
DOCS = ROOT / "docs"
# The commands that no test types, and why.
NOT_TYPED = {
    r"python3 -m venv .+|pip install .+": "tests/unit/test_packaging.py installs the built wheel",
    r"redis-server .+": "each test has a server of its own, on a free port",
    r"git clone .+": "it needs the network",
    r"make demo": "tests/demo runs the same script",
    r"make (test|check)": "it is what runs this test, and what .ci/run begins with",
    r"make example-\w+": "tests/examples runs the same script",
    r"(docker|make example-\w+-compose|export \w+=).*": "tests/docker, where there is a Docker",
    r"(SMOKE_NODES=\w+ )?make smoke": "it is a suite, which make test runs",
    r"(RELOCK_LONG=1 )?scripts/company": "it is a suite, which make test runs",
    r"rm -rf /run/.+|PROMETHEUS_MULTI.+|celery .+ relock exporter .+": "tests/contrib/"
    "test_prometheus.py starts both, with a folder and a port of its own",
    r"scripts/endings": "it runs tests/worker/test_endings_*.py",
    r"celery .+ control terminate .+": "a test of its own: it ends the task that the next "
    "commands are about",
}


def text(page: str) -> str:
    """A page, by its path under docs/; a README, by its path in the repository."""
    return ((ROOT if page.endswith("README") else DOCS) / f"{page}.md").read_text()


def blocks(page: str, language: str = "python") -> list[str]:
    """The code blocks of a page, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```", text(page), flags=re.DOTALL | re.MULTILINE)


def is_typed(command: str) -> bool:
    return not any(re.fullmatch(pattern, command) for pattern in NOT_TYPED)


def typed_on(page: str) -> list[tuple[str, list[str]]]:
    """The commands of a page that a test types, and the lines that the page shows after each."""
    return [(command, shown) for command, shown in sessions(page) if is_typed(command)]


def sessions(page: str) -> Iterator[tuple[str, list[str]]]:
    """Each command of a page, without its comment, and the lines that are shown after it."""
    for session in re.split(r"^\$ ", "".join(blocks(page, "console")), flags=re.MULTILINE)[1:]:
        command, *shown = session.splitlines()
        yield re.split(r"  +# ", command)[0], shown


def all_pages() -> list[str]:
    return ["README", *sorted(str(path.relative_to(DOCS).with_suffix("")) for path in _paths())]


def _paths() -> list[Path]:
    return [path for path in DOCS.rglob("*.md") if "pictures" not in path.parts]
