"""The image and the compose file: on containers alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    os.environ.get("SMOKE_NODES") != "docker", reason="SMOKE_NODES is not docker"
)

ROOT = Path(__file__).parents[2]
IMAGE = os.environ.get("WORKER_IMAGE", "celery-relock/worker")
BASE = os.environ.get("BASE_IMAGE", "python:3.13-slim")
#: What the image may add to its base, in bytes.
MOST = 60_000_000

Run = Callable[..., subprocess.CompletedProcess[str]]


def docker(*arguments: str, timeout: float = 60, ok: bool = True) -> str:
    done = subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0 or not ok, done.stderr
    return done.stdout if ok else str(done.returncode)


def inspect(image: str, what: str) -> object:
    return json.loads(docker("image", "inspect", "--format", f"{{{{json .{what}}}}}", image))


@pytest.fixture
def compose() -> Iterator[Run]:
    """Run `docker compose` with the project's file, as a project of this test's own."""
    v2 = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if v2.returncode == 0:
        command = ["docker", "compose"]
    elif shutil.which("docker-compose"):
        command = ["docker-compose"]
    else:
        pytest.skip("no docker compose")
    project = ["-p", f"relock{uuid.uuid4().hex[:8]}", "-f", str(ROOT / "docker" / "compose.yaml")]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *project, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
            check=False,
        )

    yield run
    run("down", "--volumes")


def test_the_image_runs_as_somebody_who_is_not_root() -> None:
    assert docker("run", "--rm", IMAGE, "id", "-un").strip() == "worker"
    assert docker("run", "--rm", IMAGE, "id", "-u").strip() == "10001"


def test_the_image_adds_little_to_its_base() -> None:
    added = int(str(inspect(IMAGE, "Size"))) - int(str(inspect(BASE, "Size")))

    assert added < MOST, f"{added / 1e6:.0f} MB"


def test_a_container_without_an_answering_worker_is_not_healthy() -> None:
    kind, command = inspect(IMAGE, "Config.Healthcheck.Test")  # type: ignore[misc]
    assert kind == "CMD-SHELL"
    nowhere = ("-e", "DEMO_REDIS_URL=redis://127.0.0.1:1")

    assert docker("run", "--rm", *nowhere, IMAGE, "sh", "-c", command, ok=False) != "0"


@pytest.mark.timeout(240)
def test_compose_up_shows_the_demo_on_two_workers_that_are_healthy(compose: Run) -> None:
    shown = compose("up", "--build", "--no-color", "--exit-code-from", "client")

    assert shown.returncode == 0, shown.stdout
    for title in ("1. Two", "2. A locked", "3. A task", "4. The lock"):
        assert title in shown.stdout
    assert "all of this was checked as it happened" in shown.stdout
    assert "NOT SO" not in shown.stdout
    # The client is started when both are healthy: by the image's own check.
    assert "unhealthy" not in shown.stdout
