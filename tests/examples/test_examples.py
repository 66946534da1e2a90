"""The examples as a person runs them: `scripts/example`, over HTTP, with a worker and a Redis."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil
import pytest

from celery_relock import Lock
from tests.docs.pages import typed_on
from tests.support import RedisServer, reaper, wait_for
from tests.support.ports import free_port
from tests.support.worker import ROOT, environment_of

pytestmark = pytest.mark.slow


class Example:
    """A running example. `call("PUT /stock/lamp", count=4)` returns the status and the JSON."""

    def __init__(self, name: str, url: str, folder: Path) -> None:
        port = free_port()
        self.folder, self._web = ROOT / "examples" / name, f"http://127.0.0.1:{port}"
        self.environment = environment_of(
            {
                "EXAMPLE_PYTHON": sys.executable,
                "REDIS_URL": url,
                "PORT": str(port),
                "DATABASE": str(folder / "database"),
                "TMPDIR": str(folder),
                "PYTHONWARNINGS": "ignore",
            }
        )
        self._log = folder / "log"
        with self._log.open("w") as log:
            command = [str(ROOT / "scripts" / "example"), name]
            self.process = reaper.start(command, env=self.environment, stdout=log, stderr=log)
        wait_for(lambda: self._answers() or self.process.poll() is not None, 60, name)
        assert self.process.poll() is None, self.log()

    def call(self, what: str, **body: Any) -> tuple[int, Any]:
        method, path = what.split()
        data = json.dumps(body).encode() if method != "GET" else None
        headers = {"Content-Type": "application/json"}
        try:
            with urlopen(Request(self._web + path, data, headers, method=method)) as answer:
                return answer.status, json.load(answer)
        except HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def get(self, path: str) -> Any:
        return self.call(f"GET {path}")[1]

    def wait(self, path: str, **now: Any) -> Any:
        """What is at `path` as soon as it is no longer what it is now."""
        wait_for(lambda: not now.items() <= self.get(path).items(), 40, f"{path} to change")
        return self.get(path)

    def log(self) -> str:
        return self._log.read_text()

    def type(self, command: str) -> list[str]:
        """The lines that a command of the page prints."""
        command = command.replace("http://", "").replace("localhost:8000", self._web[7:])
        said = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
        assert said.returncode == 0, said.stderr
        return said.stdout.splitlines()

    @contextmanager
    def watching(self, command: str) -> Iterator[Callable[[], str]]:
        """What the command that goes on and on has printed, while it runs."""
        typed = re.fullmatch(r"cd \S+ && \S+/bin/(celery .+)", command)
        assert typed
        printed = self._log.with_name("watched")
        with printed.open("w") as out:
            words = [sys.executable, "-m", *typed[1].split()]
            process = reaper.start(words, cwd=self.folder, env=self.environment, stdout=out)
        try:
            yield printed.read_text
        finally:
            reaper.end(process)

    def interrupt(self) -> None:
        """Ctrl-C, as the terminal sends it: to each process of the group."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        os.killpg(self.process.pid, signal.SIGINT)
        self.process.wait(60)
        assert not psutil.wait_procs(family, 20)[1]

    def _answers(self) -> bool:
        try:
            return self.call("GET /")[0] == 404
        except OSError:
            return False


@pytest.fixture
def example(
    own_redis: Callable[..., RedisServer], tmp_path: Path
) -> Iterator[Callable[[str], tuple[Example, str]]]:
    pytest.importorskip("fastapi")
    started: list[Example] = []

    def start(name: str) -> tuple[Example, str]:
        url = own_redis().url
        started.append(Example(name, url, tmp_path))
        return started[-1], url

    yield start
    for one in started:
        reaper.end(one.process)
        print(one.log())  # shown by pytest when the test failed


def test_the_shop_sells_what_it_has_and_a_view_a_task_and_a_command_share_a_lock(example):
    shop, url = example("django")
    (order, made), (look, order_as_shown), _, _, (watch, _), (five, _) = typed_on("examples/README")
    assert shop.type(order) == made
    shop.wait("/orders/1", state="new")
    assert shop.type(look) == order_as_shown

    with Lock(url, "stock:lamp", namespace="shop"), shop.watching(watch) as watched:
        assert len(re.findall('"order"', "".join(shop.type(five)))) == 5
        orders = [f"/orders/{number}" for number in range(2, 7)]
        assert shop.call("PUT /stock/lamp", count=9)[0] == 409
        assert [shop.get(order)["state"] for order in orders] == ["new"] * 5
        wait_for(lambda: "stock:lamp" in watched(), 60, "the lock that is watched")

    ended = [shop.wait(order, state="new") for order in orders]
    assert sorted(order["state"] for order in ended) == ["paid"] * 2 + ["sold out"] * 3
    assert all(bool(order["payment"]) == (order["state"] == "paid") for order in ended)
    assert shop.get("/stock/lamp") == {"stock": 0}

    assert shop.call("PUT /stock/chair", count=4) == (200, {"stock": 4})
    assert shop.call("POST /imports/acme")[0] == 202
    assert shop.wait("/stock/chair", stock=4) == {"stock": 10}
    command = [sys.executable, "manage.py", "set_stock", "lamp", "7"]
    said = subprocess.check_output(command, cwd=shop.folder, env=shop.environment, text=True)
    assert said == "lamp: 7\n"
    assert shop.get("/stock/lamp") == {"stock": 7}

    shop.interrupt()


def test_the_bank_pays_what_is_covered_and_closes_no_account_during_a_payment(example):
    bank, url = example("fastapi")
    _, _, (pay, _), (look, shown), _, _ = typed_on("examples/README")
    paid = json.loads("".join(bank.type(pay)))["payment"]
    assert bank.wait(f"/payments/{paid}", state="new")["state"] == "sent"
    assert bank.type(look) == shown

    with Lock(url, "account:42", namespace="bank"):
        made = [bank.call("POST /accounts/42/payments", cents=4000) for _ in range(2)]
        payments = [f"/payments/{body['payment']}" for status, body in made if status == 202]
        status, error = bank.call("POST /accounts/42/close")
        assert (status, "try again" in error) == (409, True)
        assert [bank.get(payment)["state"] for payment in payments] == ["new"] * 2

    ended = [bank.wait(payment, state="new")["state"] for payment in payments]
    assert sorted(ended) == ["refused", "sent"]
    assert bank.get("/accounts/42") == {"balance": 2000, "closed": False}

    for _ in range(2):  # two lines, booked once
        assert bank.call("POST /imports/acme")[0] == 202
    assert bank.wait("/accounts/7", balance=10000) == {"balance": 12500, "closed": False}
    assert bank.wait("/accounts/42", balance=2000) == {"balance": 2500, "closed": False}
    assert bank.call("POST /accounts/42/close") == (200, {"balance": 2500})
    _, last = bank.call("POST /accounts/42/payments", cents=100)
    assert bank.wait(f"/payments/{last['payment']}", state="new") == {"state": "refused"}

    bank.interrupt()
