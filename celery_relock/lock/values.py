"""What a user of redis-py gives a lock, looked at."""

from __future__ import annotations

import math

from ..errors import LockConfigError

# A lease is told to Redis in these, in seconds.
_SHORTEST = 0.001


def check_length(seconds: float, where: str, name: str) -> None:
    """Raises LockConfigError for what cannot be the length of a lease."""
    if not math.isfinite(seconds) or seconds < _SHORTEST:
        raise LockConfigError(f"{where}: give a lease of {_SHORTEST} s or more", name=name)


def as_text(value: str | bytes) -> str:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise LockConfigError(f"{value!r:.200} is not UTF-8 text") from error
    if not isinstance(value, str):
        raise LockConfigError(f"text is needed, not {value!r:.200}")
    return value
