"""Each recipe is a complete file: it runs with a worker, and prints what its page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from celery import _state

from tests.docs.pages import URL, all_pages, blocks, text
from tests.support import Worker
from tests.support.worker import ROOT

pytestmark = pytest.mark.slow

RECIPES = [page for page in all_pages() if page.startswith("recipes/") and blocks(page)]


@pytest.mark.parametrize("page", RECIPES)
def test_a_recipe_prints_what_it_shows(
    page: str,
    redis_url: str,
    namespace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (code,) = blocks(page)
    name = re.match(r"# (\w+)\.py\n", code)
    assert name, "the first line of the file is its name"
    settings = f'app.conf.update(relock_namespace="{namespace}", task_default_queue="{namespace}")'
    code = re.sub(r"^(app = .+)$", rf"\1\n{settings}", code.replace(URL, redis_url), flags=re.M)
    (tmp_path / f"{name[1]}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(ROOT))))
    before = set(_state._on_app_finalizers)
    worker = Worker(name[1], redis_url, namespace, concurrency=4)
    try:
        command = [sys.executable, f"{name[1]}.py"]
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    finally:
        worker.close()
        _state._on_app_finalizers.intersection_update(before)  # its tasks are no other test's

    console = "".join(blocks(page, "console"))
    shown = console.split(f"$ python {name[1]}.py\n")[1]
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.replace("'", '"') == shown.replace("'", '"')


def test_every_recipe_is_in_the_list_and_warns() -> None:
    listed = re.findall(r"^[\w-]+$", text("recipes/index").split("maxdepth")[1], flags=re.M)

    pages = {page.removeprefix("recipes/") for page in all_pages() if page.startswith("recipes/")}
    assert {*listed, "index"} == pages
    for page in pages - {"index"}:
        assert "\nWatch out:\n" in text(f"recipes/{page}")
