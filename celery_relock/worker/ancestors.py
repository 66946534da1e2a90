"""Lineage: the holds of a run's ancestors, by which a task that a holder spawned enters again.

It rides in the message header, so it passes through tasks that are not locked, and to any depth.
Nothing here decides who enters: an id in it admits a run only while the server has a live hold of
that run and of the same owner. So a lineage that is old, or made up, admits nobody, and it does no
harm that a callback or the next step of a chain carries holds that have ended by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from ..engine import ids, reentrancy

#: So many ids are passed on, the nearest ancestors first: a task that sends itself for ever must
#: not make its message longer each time.
MOST = 32


def parse(value: Any) -> tuple[str, ...]:
    """The lineage in a header; empty if it is none."""
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        return ()
    return tuple(ids.short(each) for each in value[:MOST] if each)


def extended(inherited: Iterable[str]) -> tuple[str, ...]:
    """The lineage of what this call stack publishes: all that it holds, then its own lineage."""
    held = reentrancy.runs()
    return tuple(islice(dict.fromkeys((*held, *inherited)), MOST)) if held else tuple(inherited)
