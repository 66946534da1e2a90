"""`watch`."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from itertools import islice

import click

from ..admin import LockInfo, Stats
from .base import AT_LEAST_0, FOUND, SECONDS, Here, command, echo_json
from .commands import rows_of

# Locks to show at most; and the lines beside them, for which a terminal needs room, too.
_SHOWN, _OTHERS = 40, 5


@command
@click.argument("pattern", default="*")
@click.option(
    "--interval", type=SECONDS, default=2.0, show_default=True, help="Seconds between two looks."
)
@click.option(
    "--count", type=AT_LEAST_0, default=0, help="How many looks; 0 until it is interrupted."
)
def watch(here: Here, pattern: str, interval: float, count: int) -> int:
    """Watch the locks with the most waiters, as `top` does.

    With `--json`, print one document per line for each look.
    """
    looks = islice(_looks(here, pattern, interval), count or None)
    try:
        if here.json:
            for locks in looks:
                shown = [lock.as_dict() for lock in locks[:_SHOWN]]
                document = {"locks": shown, "cut": len(locks) > _SHOWN}
                echo_json(document)
        else:
            _draw(map(_screen, looks))
    except KeyboardInterrupt:
        pass
    return FOUND


def _looks(here: Here, pattern: str, interval: float) -> Iterator[list[LockInfo]]:
    """The locks at each look, those with the most waiters first."""
    while True:
        found = here.find(pattern)
        yield sorted(found, key=lambda lock: (-lock.waiting, lock.name))
        time.sleep(interval)


def _screen(locks: list[LockInfo]) -> list[str]:
    told, now = Stats.of(locks), time.strftime("%H:%M:%S")
    head = (
        f"{now}  locks: {told.held} held; executions: {told.waiting} waiting, {told.parked} of "
        "them parked"
    )
    shown = _SHOWN
    if sys.stdout.isatty():
        shown = max(1, min(_SHOWN, shutil.get_terminal_size().lines - _OTHERS))
    rows = rows_of(locks[:shown]) if locks else []
    more = [f"… and {len(locks) - shown} more"] if len(locks) > shown else []
    return [head, "", *rows, *more]


def _draw(screens: Iterator[list[str]]) -> None:
    if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        for lines in screens:
            click.echo("\n".join([*lines, ""]))
        return
    try:
        from rich.live import Live
        from rich.text import Text
    except ImportError:
        for lines in screens:
            click.clear()
            click.echo("\n".join(lines))
        return
    with Live(screen=True, auto_refresh=False) as live:
        for lines in screens:
            live.update(Text("\n".join(lines)), refresh=True)
