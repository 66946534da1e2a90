"""What tasks say about the locks that they hold, and the check that nobody else held one meanwhile.

with holding(journal, task.lock):    # in a task
    ...
permits(journal.events(), "account:7")    # in the test: raises when two held it at once
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.support.journal import Event, Journal


@contextmanager
def holding(journal: Journal, hold: Any) -> Iterator[None]:
    """Write down that the work under a hold begins and, if the process lives, that it ends."""
    told = {"lock": hold.name, "fence": hold.fence, "reentered": hold.reentered}
    journal.add("enter", **told)
    try:
        yield
    finally:
        journal.add("leave", **told)


def permits(events: Sequence[Event], lock: str) -> list[int]:
    """The fences of the permits of a lock, in order.

    AssertionError if two permits were live at the same time, if a fence did not increase from
    permit to permit, or if a re-entry had another fence than the permit that it joined.
    """
    inside: list[int] = []
    found: list[int] = []
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
            assert not found or fence > found[-1], f"{lock}: {fence} after {found}"
            inside.append(fence)
            found.append(fence)
    return found
