"""Each recipe is a complete program: its commands, with a worker, print what its page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import URL, all_pages, blocks, text
from tests.support import nursery, reaper, wait_for
from tests.support.redis_server import free_port
from tests.support.worker import environment_of

pytestmark = pytest.mark.slow

RECIPES = [page for page in all_pages() if page.startswith("recipes/") and blocks(page)]
DATABASE = "postgresql://localhost/shop"

# Ours is there as an installed plugin. Of the others none that takes its time.
PLUGINS = "-p no:cacheprovider -p no:hypothesispytest -p no:xdist -p no:valkey -p no:anyio"


class Terminal:
    """What a reader types, in an empty folder with the page's files."""

    def __init__(self, page: str, redis_url: str, database: str, namespace: str, folder: Path):
        self._folder, self._port, self._started = folder, free_port(), []
        settings = f'app.conf.update(task_default_queue="{namespace}")'
        if "relock_namespace" not in text(page).lower():
            settings += f'; app.conf.relock_namespace = "{namespace}"'
        for code in blocks(page):
            name = re.match(r"# (\w+\.py)\n", code)
            assert name, "the first line of a file is its name"
            code = code.replace(URL, redis_url).replace(DATABASE, database)
            code = re.sub(r"^(app = .+(?:\napp\..+)*)$", rf"\1\n{settings}", code, flags=re.M)
            (folder / name[1]).write_text(code)
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        own = {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_ADDOPTS": PLUGINS}
        self._environment = environment_of(own)
        self._environment["PYTHONPATH"] += os.pathsep + str(folder)

    def type(self, command: str) -> str:
        """What a command prints; a worker or a server goes on in the background."""
        program, *arguments = command.split()
        if program == "celery":
            log = self._folder / "log"
            more = ["--loglevel", "INFO", "--logfile", str(log), "--without-mingle"]
            arguments = ["--workdir", str(self._folder), *arguments, *more]
            self._started.append(nursery.start(arguments, self._environment))
            return self._wait(log, " ready.")
        if program == "uvicorn":
            log = self._folder / "web"
            with log.open("w") as out:
                command = [sys.executable, "-m", program, *arguments, "--port", str(self._port)]
                self._started.append(self._run(reaper.start, command, stdout=out, stderr=out))
            return self._wait(log, "running on")
        command = command.replace("localhost:8000", f"localhost:{self._port}")
        plain = {"shell": True, "text": True, "timeout": 60, "capture_output": True}
        done = self._run(subprocess.run, command, **plain)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def close(self) -> None:
        for process in self._started:
            reaper.end(process)
            if process.stdout:
                process.stdout.close()

    def _run(self, start: Any, command: Any, **options: Any) -> Any:
        return start(command, cwd=self._folder, env=self._environment, **options)

    def _wait(self, log: Path, word: str) -> str:
        wait_for(lambda: log.exists() and word in log.read_text(), 60, f"{word!r} in the log")
        return ""


def typed_on(page: str) -> Iterator[tuple[str, list[str]]]:
    """The commands of a page, and the lines that it shows after each."""
    for session in "".join(blocks(page, "console")).split("$ ")[1:]:
        command, *shown = session.splitlines()
        yield command, shown


@pytest.mark.parametrize("page", RECIPES)
def test_a_recipe_prints_what_it_shows(
    page: str, redis_url: str, namespace: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
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
