"""Each recipe is a complete program: its commands, with a worker, print what its page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from celery import VERSION

from tests.docs.pages import all_pages, blocks, text, typed_on
from tests.docs.terminal import DATABASE, Terminal

pytestmark = pytest.mark.slow

RECIPES = [page for page in all_pages() if page.startswith("recipes/") and blocks(page)]


@pytest.mark.parametrize("page", RECIPES)
def test_a_recipe_prints_what_it_shows(
    page: str, redis_url: str, namespace: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if page == "recipes/index-rebuild" and VERSION < (5, 7):
        pytest.skip("Celery before 5.7 takes a second for each further result of the same call")
    database = DATABASE
    if database in text(page):
        database = request.getfixturevalue("postgres").fresh(namespace)
    terminal = Terminal(page, redis_url, database, namespace, tmp_path)
    try:
        for command, shown in typed_on(page):
            assert _same(terminal.type(command).splitlines()) == _same(shown), command
    finally:
        terminal.close()


def _same(lines: list[str]) -> list[str]:
    """Without what differs from run to run, and without pytest's dots."""
    lines = [line for line in lines if "[100%]" not in line]
    return [re.sub(r"in [\d.]+s", "in a moment", line).replace("'", '"') for line in lines]


def test_every_recipe_is_in_the_list_and_warns() -> None:
    listed = re.findall(r"^[\w-]+$", text("recipes/index").split("maxdepth")[1], flags=re.M)

    pages = {page.removeprefix("recipes/") for page in all_pages() if page.startswith("recipes/")}
    assert {*listed, "index"} == pages
    for page in pages - {"index"}:
        assert "\nWatch out:\n" in text(f"recipes/{page}")
