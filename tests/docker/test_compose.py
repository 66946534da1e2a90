"""The image, and the compose files of the demo and of the examples: on containers alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.support import wait_for
from tests.support.ports import free_port

pytestmark = pytest.mark.skipif(
    os.environ.get("SMOKE_NODES") != "docker", reason="SMOKE_NODES is not docker"
)

ROOT = Path(__file__).parents[2]
IMAGE = os.environ.get("WORKER_IMAGE", "celery-relock/worker")
BASE = os.environ.get("BASE_IMAGE", "python:3.13-slim")
#: What the image may add to its base, in bytes.
MOST = 60_000_000


def docker(*arguments: str, timeout: float = 60, ok: bool = True) -> str:
    done = subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0 or not ok, done.stderr
    return done.stdout if ok else str(done.returncode)


def inspect(image: str, what: str) -> object:
    return json.loads(docker("image", "inspect", "--format", f"{{{{json .{what}}}}}", image))


@pytest.fixture
def compose() -> Iterator[Callable[..., Compose]]:
    """Run `docker compose` with a file of this repository, as a project of this test's own."""
    started: list[Compose] = []

    def make(file: str, **environment: str) -> Compose:
        started.append(Compose(file, environment))
        return started[-1]

    yield make
    for one in started:
        one.run("down", "--volumes", "--timeout", "20")


class Compose:
    def __init__(self, file: str, environment: dict[str, str]) -> None:
        v2 = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
        if v2.returncode == 0:
            program = ["docker", "compose"]
        elif shutil.which("docker-compose"):
            program = ["docker-compose"]
        else:
            pytest.skip("no docker compose")
        project = f"relock{uuid.uuid4().hex[:8]}"
        self._command = [*program, "-p", project, "-f", str(ROOT / file)]
        self._options: dict[str, Any] = {
            "env": {**os.environ, **environment},
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
        }

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._command, *arguments], **self._options, timeout=280, check=False
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._command, *arguments], **self._options, stdin=subprocess.PIPE
        )


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
def test_compose_up_shows_the_demo_on_two_workers_that_are_healthy(
    compose: Callable[..., Compose],
) -> None:
    shown = compose("docker/compose.yaml").run(
        "up", "--build", "--no-color", "--exit-code-from", "client"
    )

    assert shown.returncode == 0, shown.stdout
    for title in ("1. Two", "2. A locked", "3. A task", "4. The lock"):
        assert title in shown.stdout
    assert "all of this was checked as it happened" in shown.stdout
    assert "NOT SO" not in shown.stdout
    # The client is started when both are healthy: by the image's own check.
    assert "unhealthy" not in shown.stdout


#: Of each example: its app, a lock, a call that waits for it, where its state is, and the last one.
EXAMPLES = {
    "django": (
        ("shop", "shop", "stock:lamp"),
        ("/orders", {"sku": "lamp", "quantity": 1}, "/orders/{order}", "paid"),
    ),
    "fastapi": (
        ("bank.tasks", "bank", "account:42"),
        ("/accounts/42/payments", {"cents": 4000}, "/payments/{payment}", "sent"),
    ),
}
#: Holds a lock until its input ends.
HOLD = """
import os, sys
from celery_relock import Lock
with Lock(os.environ["REDIS_URL"], sys.argv[1], namespace=sys.argv[2]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_in_containers_does_what_it_is_asked_when_its_lock_is_free(
    compose: Callable[..., Compose], name: str
) -> None:
    (app, namespace, lock), (path, asked, there, end) = EXAMPLES[name]
    port = free_port()
    example = compose(f"examples/{name}/compose.yaml", PORT=str(port))

    def call(path: str, asked: object = None) -> Any:
        data = None if asked is None else json.dumps(asked).encode()
        headers = {"Content-Type": "application/json"}
        try:
            with urlopen(Request(f"http://127.0.0.1:{port}{path}", data, headers)) as answer:
                return json.load(answer)
        except HTTPError as error:
            error.close()
            return error.code
        except OSError:
            return None

    started = example.run("up", "--build", "-d")
    assert started.returncode == 0, started.stdout
    try:
        wait_for(lambda: call("/") == 404, 100, "the web server")

        with example.start("exec", "-T", "web", "python", "-c", HOLD, lock, namespace) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            there = there.format_map(call(path, asked))
            listed = ("exec", "-T", "web", "celery", "-A", app, "relock", "ls")
            wait_for(
                lambda: re.search(rf"^{lock} .* 1 +1$", example.run(*listed).stdout, re.MULTILINE),
                60,
                "the call to be parked",
            )
            assert call(there)["state"] == "new"
        wait_for(lambda: call(there)["state"] == end, 60, f"{there} to be {end}")
    except BaseException:
        print(example.run("logs", "--no-color").stdout)
        raise
