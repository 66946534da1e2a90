"""`scripts/smoke` and the engine's script say what they cannot do, and leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "docker" / "engine.sh"
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def smoke(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the script up to the point where pytest would run the tests."""
    inherited = {name: value for name, value in os.environ.items() if name != "SMOKE_NODES"}
    return subprocess.run(
        [ROOT / "scripts" / "smoke", "--collect-only"],
        env={**inherited, "SMOKE_PYTHON": sys.executable, "TMPDIR": str(folder), **env},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def engine(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ENGINE, *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def fake(folder: Path, name: str, text: str) -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)


def test_without_an_engine_the_suite_says_so_and_is_that_of_the_processes(tmp_path: Path) -> None:
    done = smoke(tmp_path, SMOKE_NODES="auto", SMOKE_ENGINE="none")

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == (
        "NOT ON CONTAINERS: no container engine: SMOKE_ENGINE=none. "
        "The smoke suite runs on processes.\n"
    )
    assert "smoke suite on: process" in done.stdout
    assert "test_a_locked_task_runs_on_two_workers" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ('[ "$1" != build ] || { echo no route; exit 1; }', "no image of a worker: no route"),
        ('[ "$2" != inspect ] && [ "$1" != pull ] || { echo no host >&2; exit 1; }', "no host"),
    ],
    ids=["not built", "not pulled"],
)
def test_without_an_image_the_suite_says_so_as_well(
    tmp_path: Path, program: str, reason: str
) -> None:
    programs, temporary = tmp_path / "programs", tmp_path / "temporary"
    programs.mkdir()
    temporary.mkdir()
    fake(programs, "docker", program)

    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    done = smoke(temporary, SMOKE_NODES="auto", PATH=path)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == (f"NOT ON CONTAINERS: {reason}. The smoke suite runs on processes.\n")
    assert "smoke suite on: process" in done.stdout
    assert list(temporary.iterdir()) == []


def test_without_debian_s_packages_there_is_no_base_image_and_that_is_told(tmp_path: Path) -> None:
    fake(tmp_path, "docker", "exit 0")
    fake(tmp_path, "dpkg-query", "echo ii")
    fake(tmp_path, "apt-cache", "exit 1")

    done = subprocess.run(
        [ROOT / "docker" / "local-base-from-host.sh", "an/image", "python3"],
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert done.returncode == 3
    assert done.stderr == (
        "no local image an/image: apt-cache does not tell what the packages depend on\n"
    )


def test_who_asks_for_containers_gets_no_processes_instead(tmp_path: Path) -> None:
    done = smoke(tmp_path, SMOKE_NODES="docker", SMOKE_ENGINE="none")

    assert done.returncode == 1
    assert done.stderr == "no container engine: SMOKE_ENGINE=none\n"
    assert "test_a_locked_task" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_misspelt_form_is_told(tmp_path: Path) -> None:
    done = smoke(tmp_path, SMOKE_NODES="dokcer")

    assert done.returncode == 2
    assert done.stderr == "SMOKE_NODES=dokcer cannot be used. Use process, docker or auto.\n"


def test_the_engine_says_that_it_needs_root(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    for folder in tmp_path.parents[:2]:
        folder.chmod(0o755)

    done = subprocess.run(
        ["sh", "-s", "start", str(tmp_path / "engine")],
        # By its text: nobody may not look into every clone.
        input=ENGINE.read_text(),
        user=NOBODY if os.geteuid() == 0 else None,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert done.returncode == 3
    assert done.stderr.startswith("no container engine: it needs root, and this is user ")


@as_root
def test_the_engine_says_why_dockerd_does_not_start(tmp_path: Path) -> None:
    fake(tmp_path, "docker", "exit 1")
    fake(tmp_path, "iptables", "exit 0")
    refused = 'level=fatal msg="failed to start daemon: Operation not permitted"'
    fake(tmp_path, "dockerd", f"echo '{refused}'; exit 1")

    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = engine("start", tmp_path / "engine", PATH=path)

    assert done.returncode == 3
    assert done.stderr == f"no container engine: dockerd does not start: {refused}\n"


@as_root
@pytest.mark.skipif(os.environ.get("SMOKE_NODES") != "docker", reason="SMOKE_NODES is not docker")
def test_the_engine_is_started_once_and_leaves_no_process_and_no_mount(tmp_path: Path) -> None:
    started = engine("start", tmp_path)
    assert started.returncode == 0, started.stderr
    pid = (tmp_path / "pid").read_text()
    run = ["docker", "-H", started.stdout.strip(), "info"]
    subprocess.run(run, check=True, capture_output=True, timeout=30)

    again = engine("start", tmp_path)
    assert again.stdout == started.stdout
    assert (tmp_path / "pid").read_text() == pid

    assert engine("stop", tmp_path).returncode == 0
    assert not [p for p in psutil.process_iter() if str(tmp_path) in " ".join(_command(p))]
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    assert engine("stop", tmp_path).returncode == 0


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
