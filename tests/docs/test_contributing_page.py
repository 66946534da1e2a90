"""What the page for contributors names is in the repository."""

from __future__ import annotations

import re

from tests.docs.pages import text
from tests.support.worker import ROOT

PAGE = text("contributing")


def test_each_path_is_there() -> None:
    paths = set(re.findall(r"(?:scripts|celery_relock|backends|tests)/[\w/.-]*\w", PAGE))

    assert len(paths) > 10
    for path in paths:
        assert (ROOT / path).exists() or (ROOT / "celery_relock" / path).exists(), path


def test_each_target_of_make_is_there() -> None:
    targets = set(re.findall(r"make (\w+)", PAGE))

    assert targets >= {"test", "check", "dist"}
    assert targets <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_each_campaign_is_named() -> None:
    campaigns = {
        path.name
        for path in (ROOT / "scripts").iterdir()
        if path.suffix == "" and path.is_file() and "tests.chaos" in path.read_text()
    }

    assert {"chaos", "mixed"} < campaigns <= set(re.findall(r"[\w-]+", PAGE))
