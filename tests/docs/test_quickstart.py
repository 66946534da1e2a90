"""The quick start, from its first command to its last change, with a real worker."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from celery_relock.admin import Locks
from tests.docs.pages import blocks, text, typed_on
from tests.docs.terminal import Terminal
from tests.support import wait_for

pytestmark = pytest.mark.slow

WORK = "time.sleep(2)  # the work"
# The work takes as long as the test wants, so no step depends on how fast the machine is.
HELD = """time.sleep(0.3)
    while __import__("os").path.exists("hold"):
        time.sleep(0.05)"""


@pytest.fixture
def terminal(redis_url: str, namespace: str, tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal("quickstart", redis_url, "", namespace, tmp_path)
    yield opened
    opened.close()


def test_the_readme_is_its_first_part() -> None:
    first = typed_on("README")

    assert len(first) == 3
    assert typed_on("quickstart")[:3] == first


def test_each_command_and_each_change_does_what_the_page_says(
    terminal: Terminal, redis_url: str, namespace: str, tmp_path: Path
) -> None:
    locks, hold = Locks(redis_url, namespace=namespace), tmp_path / "hold"
    shop = blocks("quickstart")[0].replace(WORK, HELD)
    start, call, look, drop, limit, twice = typed_on("quickstart")
    options = re.findall(r"`(lock_\w+=.+?)`", text("quickstart").split("## Three changes")[1])

    def is_so(account: int, held: int, parked: int) -> bool:
        seen = locks.get(f"account:{account}")
        return (seen.held, seen.parked) == (held, parked)

    def change(option: str, *tasks: str) -> None:
        terminal.stop_worker()
        terminal.save(re.sub(rf"\)(?=\ndef ({'|'.join(tasks)})\()", f", {option})", shop))

    terminal.save(shop)
    terminal.type(start[0])
    printed = terminal.type(call[0])
    assert same(printed) == same(call[1])
    turns = re.findall(r"^account 42: (\S+) to (\S+)$", printed, re.MULTILINE)
    assert turns[0][1] <= turns[1][0]
    assert_that_the_log_is_as_explained(terminal.log.read_text())

    hold.touch()
    in_background, command = look[0].split(" & sleep 1; ")
    running = terminal.begin(in_background)
    wait_for(lambda: is_so(42, held=1, parked=1) and is_so(7, held=1, parked=0), 60, "the tasks")
    assert same(terminal.type(command)) == same(look[1])
    hold.unlink()
    assert same(running.communicate(timeout=60)[0]) == same(call[1])

    change(options[0], "checkout")
    terminal.type(start[0])
    hold.touch()
    running = terminal.begin(drop[0])
    wait_for(lambda: options[0].replace('"', "'") in terminal.log.read_text(), 60, "the drop")
    hold.unlink()
    assert same(running.communicate(timeout=60)[0]) == same(drop[1])

    change(options[1], "charge", "checkout")
    terminal.type(start[0])
    hold.touch()
    running = terminal.begin(limit[0])
    wait_for(lambda: is_so(42, held=2, parked=0), 60, "both tasks of account 42")
    hold.unlink()
    assert same(running.communicate(timeout=60)[0]) == same(limit[1])

    change(options[2], "checkout")
    first, second = terminal.type(twice[0]).split()
    assert first == second
    assert len(set(twice[1][0].split())) == 1
    with redis.Redis.from_url(redis_url) as broker:
        assert broker.llen(namespace) == 1
    terminal.type(start[0])
    wait_for(lambda: f"[{first}] succeeded" in terminal.log.read_text(), 60, "the call")
    assert terminal.log.read_text().count(" received") == 1


def assert_that_the_log_is_as_explained(log: str) -> None:
    """The numbered lines of the page are in it, in this order, for the task that was parked."""
    parked = re.search(r"Task shop\.checkout\[(\S+)\] parked", log)
    assert parked
    explained = re.findall(r"^\d\. `(.+?)`", text("quickstart"), re.MULTILINE)
    assert len(explained) == 5
    for line in explained:
        pattern = re.escape(line).replace(r"\[…\]", rf"\[{parked[1]}\]", 1).replace("…", ".+?")
        found = re.search(pattern, log)
        assert found, line
        log = log[found.end() :]


def same(printed: str | list[str]) -> list[str]:
    """The lines, without what differs from run to run."""
    lines = printed.splitlines() if isinstance(printed, str) else printed
    varies = r"\d+\.\d s|\d\d:\d\d:\d\d|[0-9a-f]{8}-[0-9a-f-]{27}| +"
    lines = [re.sub(r"(?<='account:42', ).+\}$", "…}", line) for line in lines]
    return [re.sub(varies, "~", line) for line in lines]
