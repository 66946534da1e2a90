"""Wheel, sdist and editable install all carry the Lua files, and a lock works from each."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import celery_relock
from celery_relock import Lock
from tests.docs.pages import URL, blocks
from tests.support import leftovers, reaper, wait_for
from tests.support.worker import ROOT

pytestmark = pytest.mark.slow

VERSION = celery_relock.__version__
NEEDED = {
    "celery_relock/__init__.py",
    "celery_relock/py.typed",
    *(f"celery_relock/{path.relative_to(ROOT)}" for path in (ROOT / "lua").rglob("*.lua")),
}
TAKE_AND_GIVE_BACK = """
import sys, celery_relock
from celery import Celery
from celery_relock import Lock, LockedTask

_, url, namespace = sys.argv
app = Celery("shop")
app.conf.update(task_always_eager=True, relock_url=url, relock_namespace=namespace)

@app.task(base=LockedTask, lock_key="account:{n}", bind=True)
def charge(self, n):
    return self.lock.fence

lock = Lock(url, "account:1", namespace=namespace)
with lock:
    assert lock.fence > 0 and lock.owned()
assert not lock.locked()
assert charge.delay(1).get() > 0
print(celery_relock.__file__, celery_relock.__version__)
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """A copy of what goes into a distribution: building must not touch the working tree."""
    copy = tmp_path_factory.mktemp("sources") / "clone"
    without = shutil.ignore_patterns(".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=without)
    return copy


def _build(sources: Path, kind: str) -> Path:
    folder = sources.parent / f"{sources.name}-{kind}"
    _run([sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)], sources)
    (built,) = folder.iterdir()
    return built


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=_environment())
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def wheel(sources) -> Path:
    return _build(sources, "wheel")


@pytest.fixture(scope="module")
def sdist(sources) -> Path:
    return _build(sources, "sdist")


@pytest.fixture
def clean_python(tmp_path) -> Path:
    """The interpreter of a new environment. It borrows the libraries of this one, found last."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    paths = sysconfig.get_paths()
    show = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = Path(_run([str(python), "-I", "-c", show], tmp_path).strip())
    (site / "borrowed.pth").write_text(f"{paths['purelib']}\n{paths['platlib']}\n")
    return python


def _install(python: Path, *what: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    alone = ["--no-deps", "--no-index", "--no-build-isolation", "--force-reinstall"]
    _run([*pip, "--disable-pip-version-check", *alone, *what], python.parent)


def _files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def test_the_wheel_carries_the_package_with_its_lua_files_and_nothing_else(wheel):
    files = _files(wheel)

    assert len(NEEDED) >= 9
    assert files >= NEEDED
    tops = {name.split("/")[0] for name in files}
    assert tops == {"celery_relock", f"celery_relock-{VERSION}.dist-info"}
    assert f"celery_relock-{VERSION}.dist-info/licenses/LICENSE" in files


def test_pages_and_changelog_speak_of_this_version():
    (newest,) = re.findall(r"^## \[(\d\S+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[
        :1
    ]
    assert newest == VERSION
    for page in (ROOT / "docs").rglob("*.md"):
        assert set(re.findall(r"readthedocs.io/en/(\d[\d.]*)/", page.read_text())) <= {VERSION}, (
            page
        )


def test_the_sdist_carries_the_lua_files_as_files_and_what_the_tests_need(sdist):
    with tarfile.open(sdist) as archive:
        files = {member.name.split("/", 1)[1]: member for member in archive if not member.isdir()}

    assert set(files) >= NEEDED
    assert all(files[name].isfile() for name in NEEDED)
    more = {"pyproject.toml", "README.md", "LICENSE", "Makefile", "scripts/venv", "lua/README.md"}
    assert set(files) >= {*more, "tests/conftest.py", "tests/unit/test_packaging.py"}
    assert not [name for name in files if name.startswith((".venv", ".git/")) or ".pyc" in name]


def test_a_wheel_built_from_the_sdist_is_the_wheel(sdist, wheel, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, **({"filter": "data"} if sys.version_info >= (3, 12) else {}))
    (unpacked,) = tmp_path.iterdir()

    again = _build(unpacked, "wheel")
    assert _files(again) == _files(wheel)


@pytest.mark.parametrize("kind", ["wheel", "sdist", "editable"])
def test_an_installed_package_acquires_and_releases_a_lock_from_another_folder(
    kind, request, sources, clean_python, tmp_path, redis_url, client, namespace
):
    if kind == "editable":
        _install(clean_python, "-e", str(sources))
    else:
        _install(clean_python, str(request.getfixturevalue(kind)))

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = [str(clean_python), "-I", "-c", TAKE_AND_GIVE_BACK, redis_url, namespace]
    place, version = _run(command, elsewhere).split()

    home = sources if kind == "editable" else tmp_path / "venv"
    assert Path(place).is_relative_to(home)
    assert version == VERSION
    kept = [key for key in leftovers(client, namespace) if not key.endswith(":meta")]
    assert [key for key in kept if client.pttl(key) < 0] == []


def test_what_the_readme_says_works_from_the_wheel_in_an_empty_folder(
    wheel, clean_python, tmp_path, redis_url, namespace
):
    _install(clean_python, str(wheel))
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    settings = f'app.conf.update(relock_namespace="{namespace}", task_default_queue="{namespace}")'
    shop = max(blocks("README"), key=len).replace(URL, redis_url)
    (folder / "shop.py").write_text(shop.replace("\n@app.task", f"\n{settings}\n\n@app.task", 1))
    console = "".join(blocks("README", "console"))
    (command,) = re.findall(r"^\$ celery (-A shop worker .+)$", console, re.MULTILINE)

    log = folder / "log"
    calls = None
    with log.open("w") as output:
        celery = [str(clean_python), "-m", "celery"]
        start = {"cwd": folder, "env": _environment() | {"C_FORCE_ROOT": "1"}, "stdout": output}
        worker = reaper.start([*celery, *command.split()], stderr=output, **start)
    try:
        wait_for(lambda: " ready." in log.read_text(), 60, "the worker")
        with Lock(redis_url, "account:42", namespace=namespace):
            calls = reaper.start(
                [str(clean_python), "shop.py"], **start | {"stdout": subprocess.PIPE}
            )
            wait_for(lambda: log.read_text().count("parked: the lock") == 2, 60, "two to be parked")
            locks = _run([*celery, *["-A", "shop", "relock", "ls"]], folder)
        said = calls.communicate(timeout=60)[0].decode()
    finally:
        reaper.end(worker)
        if calls:
            reaper.end(calls)

    line = re.compile(r"^account (\d+): (\d\d:\d\d:\d\d) to (\d\d:\d\d:\d\d)$", re.MULTILINE)
    accounts = [account for account, _, _ in line.findall(said)]
    assert accounts == [account for account, _, _ in line.findall(console)] == ["42", "42", "7"]
    (_, _, ends), (_, begins, _) = line.findall(said)[:2]
    assert ends <= begins, "two tasks of one account ran at the same time"
    (shown,) = re.findall(r"^LOCK .+$", console, re.MULTILINE)
    header, held = (" ".join(line.split()) for line in locks.splitlines()[:2])
    assert (header, held[:15]) == (" ".join(shown.split()), "account:42 Lock")
    assert held.endswith("2 2")
