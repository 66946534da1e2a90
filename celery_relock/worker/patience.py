"""How long a run waits for its lock, and how long until it asks again."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import Any

from celery.utils.time import maybe_iso8601

from ..engine import ids
from ..options import LockOptions
from . import headers

# Seconds until a message is sent again for the first time, and the longest pause it grows to.
FIRST, LONGEST = 0.25, 10.0


def pause_for(message: Any, options: LockOptions) -> float | None:
    """Seconds until the message is to be sent again, None when `lock_max_wait` is over."""
    pause = pause_before(headers.read(message).attempts + 1)
    left = left_of(message, options)
    return pause if left is None else min(pause, left) if left > 0 else None


def left_of(message: Any, options: LockOptions) -> float | None:
    """What is left of `lock_max_wait`, None without one."""
    if options.max_wait is None:
        return None
    return headers.read(message).again().since + options.max_wait - time.time()


def look_after(left: float | None, message: Any) -> float | None:
    """Seconds until a parked message is to be sent on in any case: its wait is over, or it has
    expired, which a worker finds when it receives it."""
    expires = maybe_iso8601(message.expires)
    if not isinstance(expires, datetime):
        return left
    aware = expires if expires.tzinfo else expires.replace(tzinfo=timezone.utc)
    until = max(aware.timestamp() - time.time() + 0.01, 0.0)
    return until if left is None else min(left, until)


def pause_before(attempt: int) -> float:
    """Seconds to wait before the given attempt (from 1): doubling, and random by half, so that runs
    that met the same holder do not all come back at once."""
    longest = min(LONGEST, FIRST * 2 ** min(attempt, 16))
    return ids.chance.uniform(longest / 2, longest)
