"""What the scripts tell people of holds, in our words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...engine.protocol import HoldInfo


def hold_info(
    of: bytes, ms: int, fence: bytes, attempt_id: bytes, owner: bytes, label: bytes, shared: int = 0
) -> HoldInfo:
    """One hold, as the scripts tell it."""
    ids_of = as_text(attempt_id), as_text(owner)
    told = as_text(label).partition(" ")[2]  # the first word is the holder's inbox
    return HoldInfo(as_text(of), ms / 1000, int(fence), *ids_of, told, shared == 1)


def taken_holds(rows: Sequence[Sequence[Any]]) -> tuple[HoldInfo, ...]:
    """What `force_release` replied."""
    return tuple(hold_info(of, 0, fence, b"", owner, label) for of, fence, owner, label in rows)


def as_text(raw: bytes) -> str:
    """What Redis keeps, also where somebody wrote what is not UTF-8."""
    return raw.decode(errors="backslashreplace")
