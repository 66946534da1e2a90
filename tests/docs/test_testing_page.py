"""The page about testing: its files are a project, and its tests pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from celery import Celery

from tests.docs.pages import blocks

FILES = {block.split("\n")[0].removeprefix("# "): block for block in blocks("testing")}


def test_the_tests_of_the_page_pass(tmp_path: Path) -> None:
    names = [name for name in FILES if name.endswith(".py")]
    assert sorted(names) == ["conftest.py", "shop.py", "test_shop.py", "test_worker.py"]
    for name in names:
        (tmp_path / name).write_text(FILES[name])

    # As an installed plugin; of the others none that takes its time.
    plugins = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, "--rootdir", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout


def test_its_other_block_is_a_setting() -> None:
    (setting,) = (block for name, block in FILES.items() if not name.endswith(".py"))
    app = Celery("shop", broker="memory://")
    exec(setting, {"app": app})
    assert app.conf.relock_enabled is False
