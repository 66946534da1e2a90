"""docs/operations.md: each situation is brought about, and each command prints what the page shows.

`RELOCK_WRITE_PAGE=1` puts the outputs of this run into the page.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery.worker import state
from click.testing import CliRunner

from celery_relock import Lock
from celery_relock.admin import Locks
from celery_relock.cli import relock
from tests.docs.pages import DOCS, is_typed, text, typed_on
from tests.support import RedisServer, Worker, wait_for
from tests.support.missing import missing
from tests.support.redis_server import bundled_redis_server
from tests.support.worker import environment_of

PAGE = text("operations")
HOLDER, WAITER = "6a0e5bb2-91a4-4a6f-8d7e-1c2f3b4a5d60", "0b7d4c1e-5a2f-4e8b-b3c6-9d8e7f6a5b41"
SECOND, DROPPED = "e2a9c8d7-6f5b-4c3a-92e1-d0f9b8a7c6e5", "c4b3a291-8070-4f6e-9d5c-4b3a29180f7e"
OTHER = "127f9fee-efc3-4af0-850d-adcbba4c2efd"
LATER, POISON = "5d6e7f80-91a2-4b3c-8d4e-5f60718293a4", "a1b2c3d4-e5f6-4a7b-8c9d-0e1f2a3b4c5d"
# What is another each time.
VARIES = (
    (r"\d+(\.\d+)? s\b|\b\d+m\d\ds|\b\d+h\d\dm", "TIME"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|\d\d:\d\d:\d\d", "CLOCK"),
    (r"process \d+ of [^\s;,]+|pid \d+|worker \S+@[^\s,]+", "PROCESS"),
    (r"\] \S+:\d+ \(", "] PROCESS ("),
    (r"\b\d{16}\b", "TOKEN"),
    (r"_repl_offset:\d+", "OFFSET"),
    (r"owner [0-9a-f-]{36}", "OWNER"),
    (r'"(at|since|lease_left|host|pid|token|execution_id|owner)": [^,\n]+', "FIELD"),
    (r" +", " "),
    # Of the doctor, at the end of all situations.
    (r"(\n [\w ]+: about \d+ \(\d+ kB\))+", " KINDS"),
    (r"(?<=keys: )\d+|\d+(?= looked at)|-?\d+\.\d+(?= ms)|locked tasks: \d+", "NUMBER"),
    (r"Redis \d\S+,|worker: \S+@\S+,", "SERVER"),
    (r"clock [+-]", "clock "),
)


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.+)\n", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def steps(heading: str) -> Iterator[tuple[str, str]]:
    """The commands of a section, and what each has printed."""
    for block in re.findall(r"```console\n(.*?)```", sections()[heading], flags=re.DOTALL):
        for step in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, printed = step.partition("\n")
            if is_typed(command):
                yield command, printed


def same(printed: str) -> str:
    for pattern, word in VARIES:
        printed = re.sub(pattern, word, printed)
    return printed.strip()


def redis_cli() -> str:
    """Path of a redis-cli."""
    beside = Path(bundled_redis_server() or "-").with_name("redis-cli")
    found = shutil.which("redis-cli") or shutil.which("valkey-cli") or shutil.which(beside)
    return shlex.quote(found or missing("no redis-cli"))


class Shop:
    """The worker of the page, and what happens around it."""

    def __init__(self, server: RedisServer, new: RedisServer) -> None:
        self.server, self.new = server, new
        self.worker = self.start_worker()
        self.module = self.worker.module
        self.code = self._held = self.old_one_has = 0

    def start_worker(self) -> Worker:
        return Worker("tests.docs.apps.operations", self.server.url, "relock", concurrency=3)

    def run(self, command: str) -> str:
        if command == "echo $?":
            return f"{self.code}\n"
        words = shlex.split(command)
        if words[0] == "redis-cli":
            return self.ask_redis(command)
        if words[3] == "control":
            return self.shut_down()
        if words[3] == "worker":
            return self.start_again()
        app = self.module.app if words[1] == "-A" else None
        arguments = words[words.index("relock") + 1 :]
        for name, server in (("localhost", self.server), ("new-redis", self.new)):
            url = f"redis://{name}:6379"
            arguments = [word.replace(url, server.url) for word in arguments]
        done = CliRunner().invoke(relock, arguments, obj=SimpleNamespace(app=app))
        self.code = done.exit_code
        if "release account:42" in command:
            wait_for(lambda: self.state(WAITER) == "SUCCESS", 60, "the next one's end")
        return done.output

    def ask_redis(self, command: str) -> str:
        """As the page says, the new Redis is asked again until it has reached the old one."""
        line = command.replace("redis-cli", redis_cli())
        for name, server in (("old-redis", self.server), ("new-redis", self.new)):
            line = line.replace(f"{name} 6379", f"127.0.0.1 {server.port}")
            line = line.replace(f"-h {name}", f"-p {server.port}")

        def printed() -> str:
            done = subprocess.run(line, shell=True, capture_output=True, text=True)
            return done.stdout.replace("\r", "")  # as a terminal shows it

        first = printed()
        if "replicaof 127.0.0.1" in line:
            self.fall_behind()
        if found := re.match(r"master_repl_offset:(\d+)", first):
            self.old_one_has = int(found[1])
        if "slave_repl_offset" not in first:
            return first
        assert not self.has_all(first), "what was parked last is not there yet"
        self.new.client().client_unpause()
        return wait_for(lambda: self.has_all(printed()), 60, what="the copy")

    def fall_behind(self) -> None:
        """The new Redis has a copy, and not yet what is parked from now on."""
        client = self.new.client()
        copied = partial(client.info, "replication")
        wait_for(lambda: copied()["master_link_status"] == "up", 60, what="the first copy")
        client.client_pause(60_000, all=False)
        self.since_the_copy.enter_context(self.held(42, WAITER))

    def has_all(self, told: str) -> str:
        """What the new Redis told, if by that it has all that the old one had."""
        status, offset = re.findall(r":(\w+)$", told, re.MULTILINE)
        return told if status == "up" and int(offset) >= self.old_one_has else ""

    def shut_down(self) -> str:
        """The tasks that run end, and the worker with them."""
        self.module.app.control.shutdown()
        self.worker.wait_for_log("Got shutdown", 60)
        self.worker.journal.add("go", account=42)
        wait_for(lambda: self.worker.ended, 60, what="the worker's end")
        return ""

    def start_again(self) -> str:
        self.worker = self.start_worker()
        wait_for(lambda: self.state(WAITER) == "SUCCESS", 60, what="what was parked")
        return ""

    @contextmanager
    def moving(self) -> Iterator[None]:
        """From the copy on, something is parked."""
        with ExitStack() as self.since_the_copy:
            yield

    @contextmanager
    def held(self, account: int, *waiters: str) -> Iterator[None]:
        """A lock is held, and runs are parked for it."""
        holder = {42: HOLDER, 7: OTHER}[account]
        self.module.charge.apply_async((account,), task_id=holder)
        self._held += 1
        self.worker.journal.wait_for("inside", count=self._held)
        locks = Locks(self.module.app)
        for number, task_id in enumerate(waiters, 1):
            self.module.import_file.apply_async((account,), task_id=task_id)
            name = f"account:{account}"
            wait_for(lambda: locks.get(name).parked == number, 60, "a run to be parked")  # noqa: B023
        yield
        if len(self.worker.journal.events("go")) < self._held:
            self.worker.journal.add("go", account=account)
        ids = (holder, *waiters)
        ready = ("SUCCESS", "REVOKED")
        wait_for(lambda: all(self.state(each) in ready for each in ids), 60, "their ends")
        for each in ids:
            self.module.app.backend.forget(each)

    def state(self, task_id: str) -> str:
        """Of a task, from Redis: the ids come again, and results of before might still be told."""
        return str(self.module.app.backend.get_task_meta(task_id, cache=False)["status"])

    @contextmanager
    def full(self) -> Iterator[None]:
        with self.held(7):
            self.server.client().config_set("maxmemory", 1)
            yield
            self.server.client().config_set("maxmemory", 0)

    @contextmanager
    def as_a_cache(self) -> Iterator[None]:
        """For a doctor."""
        self.server.client().config_set("maxmemory", "1gb")
        self.server.client().config_set("maxmemory-policy", "allkeys-lru")
        yield

    @contextmanager
    def host_gone(self) -> Iterator[None]:
        """Nobody renews: as if the host had gone that took the lock."""
        Lock(self.server.url, "account:8", timeout=30, renew=False).acquire()
        yield

    @contextmanager
    def many(self) -> Iterator[None]:
        with self.held(42, WAITER, SECOND, POISON):
            yield

    @contextmanager
    def never(self) -> Iterator[None]:
        with self.held(42, WAITER):
            dropped = self.module.refresh.apply_async((42,), task_id=DROPPED)
            dropped.get(timeout=60)
            later = self.module.import_file.apply_async((42,), task_id=LATER, countdown=600)
            wait_for(lambda: "ETA" in self.run(f"celery -A shop relock why {LATER}"), 60)
            yield
            self.module.app.control.revoke(later.id)


SITUATIONS: dict[str, Callable[[Shop], Any]] = {
    "A lock is stuck": lambda shop: shop.held(42, WAITER),
    "A worker is gone": Shop.host_gone,
    "Redis is full": Shop.full,
    "A deploy": lambda shop: shop.held(42, WAITER),
    "A failover": lambda shop: shop.held(42, WAITER),
    "Moving to another Redis": Shop.moving,
    "Too many wait": Shop.many,
    "The wrong namespace": lambda shop: shop.held(42),
    "A task never runs": Shop.never,
    "A poison message": lambda shop: shop.held(42, POISON),
}


def write(seen: list[tuple[str, str, str]]) -> None:
    """Put what was printed into the page."""
    left = iter(seen)

    def printed(block: re.Match[str]) -> str:
        commands = re.findall(r"^\$ (.+)$", block[0], flags=re.MULTILINE)
        if not all(map(is_typed, commands)):
            return block[0]
        made = [f"$ {command}\n{output}" for command, _, output in islice(left, len(commands))]
        return f"```console\n{''.join(made)}```"

    made = re.sub(r"```console\n.*?```", printed, PAGE, flags=re.DOTALL)
    (DOCS / "operations.md").write_text(made)


def test_the_commands_of_the_page_are_in_its_ten_situations() -> None:
    with_commands = [heading for heading in sections() if list(steps(heading))]

    assert with_commands == list(SITUATIONS)
    assert sum(len(list(steps(each))) for each in SITUATIONS) == len(typed_on("operations"))


def test_the_command_that_ends_a_task_ends_it(own_redis: Callable[..., RedisServer]) -> None:
    (command,) = re.findall(r"^\$ celery -A shop (control terminate .+)$", PAGE, re.MULTILINE)
    shop = Shop(own_redis(), own_redis())
    try:
        with shop.held(42, WAITER):
            celery = [sys.executable, "-m", "celery", "-A", "tests.docs.apps.operations"]
            env = environment_of(shop.worker.settings)
            subprocess.run([*celery, *command.split()], env=env, check=True)
            wait_for(lambda: shop.state(WAITER) == "SUCCESS", 60, "the next one's end")
    finally:
        shop.worker.close()


@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore:Call to deprecated setex")
def test_each_command_prints_what_the_page_shows(own_redis: Callable[..., RedisServer]) -> None:
    shop = Shop(own_redis(), own_redis())
    seen: list[tuple[str, str, str]] = []
    try:
        for heading, situation in SITUATIONS.items():
            if situation is Shop.never and not hasattr(state, "task_scheduled"):
                continue  # before 5.7, a worker does not tell of a message that waits for its ETA
            with situation(shop):
                seen += [(command, shown, shop.run(command)) for command, shown in steps(heading)]
        with shop.as_a_cache():
            for command, lines in typed_on("doctor"):
                seen.append((command, "\n".join(lines), shop.run(command)))
    finally:
        shop.worker.close()
    if os.environ.get("RELOCK_WRITE_PAGE"):
        write(seen)
        return
    for command, shown, printed in seen:
        assert same(printed) == same(shown), command
