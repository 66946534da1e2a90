"""What tasks say about the locks that they are in, and the check that nobody else was in with them.

with section(journal, task.lock):    # in a task
    ...
sections(journal.events(), "account:7")    # in the test: raises when two were in at once
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.support.journal import Event, Journal


@contextmanager
def section(journal: Journal, hold: Any) -> Iterator[None]:
    """Write down that the work under a hold begins and, if the process lives, that it ends."""
    told = {"lock": hold.name, "fence": hold.fence, "reentered": hold.reentered}
    journal.add("enter", **told)
    try:
        yield
    finally:
        journal.add("leave", **told)


def sections(events: Sequence[Event], lock: str) -> list[int]:
    """The fences of the entries into a lock, in order.

    AssertionError if a stranger was in at the same time, if a fence did not increase from entry to
    entry, or if a re-entry had another fence than the entry it joined.
    """
    inside: list[int] = []
    entries: list[int] = []
    for event in events:
        if event.data.get("lock") != lock:
            continue
        fence = event["fence"]
        if event.name == "leave":
            inside.remove(fence)
        elif event.name == "enter" and event["reentered"]:
            assert fence in inside, f"{lock}: re-entered {fence}, which is not in: {inside}"
            inside.append(fence)
        elif event.name == "enter":
            assert not inside, f"{lock}: {fence} came in while {inside} were in"
            assert not entries or fence > entries[-1], f"{lock}: {fence} after {entries}"
            inside.append(fence)
            entries.append(fence)
    return entries
