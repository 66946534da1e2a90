"""Waiting as most do: for one lock, behind one holder."""

from __future__ import annotations

from typing import Any

from tests.support.desk import Desk


def wait(desk: Desk, run: str, channel: str = "p-1", **more: Any) -> int:
    """Wait as a process does whose inbox this channel is; returns the rank."""
    return desk.queue(run, inbox=channel, **more)


def in_a_row(desk: Desk, *runs: str, **more: Any) -> list[int]:
    """r1 has the lock, these wait; returns their ranks."""
    desk.fence("r1")
    return [wait(desk, run, **more) for run in runs]


def granted(messages: list[str]) -> list[str]:
    assert all(message.startswith("granted ") for message in messages)
    return [message.split(" ")[1] for message in messages]
