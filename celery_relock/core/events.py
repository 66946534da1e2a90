"""What happens to locks, told to whoever wants to know: the log by default."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

logger = logging.getLogger("celery_relock")


@dataclass(frozen=True, slots=True)
class LockEvent:
    """Something that happened to a run's lock.

    Attributes:
        kind: "acquired", "released", "conflict" or "lost".
        names: the lock names.
        run, owner: short ids.
        fence: of the entry, 0 if there is none.
        reason: a sentence for people, "" where the kind says it all.
        since: seconds since the last good renewal, for "lost".
    """

    kind: str
    names: tuple[str, ...]
    run: str
    owner: str
    fence: int = 0
    reason: str = ""
    since: float = 0.0


Listener = Callable[[LockEvent], None]
_listeners: list[Listener] = []

_LEVELS = {"acquired": logging.DEBUG, "released": logging.DEBUG, "conflict": logging.INFO}


def subscribe(listener: Listener) -> Callable[[], None]:
    """Call `listener` at every event, maybe from another thread. Returns what ends it."""
    # An object of its own for each call: the same function may listen twice, and be ended once.
    ours = partial(listener)
    _listeners.append(ours)

    def end() -> None:
        with suppress(ValueError):
            _listeners.remove(ours)

    return end


def wanted(kind: str) -> bool:
    """Whether anybody would hear of such an event; most locks are taken without anybody looking."""
    return bool(_listeners) or logger.isEnabledFor(_LEVELS.get(kind, logging.WARNING))


def tell(event: LockEvent) -> None:
    """Log the event and call the listeners. Never raises: a lock does not fail by being watched."""
    level = _LEVELS.get(event.kind, logging.WARNING)
    if logger.isEnabledFor(level):
        _log(level, event)
    for listener in tuple(_listeners):
        try:
            listener(event)
        except Exception:
            logger.exception("a listener for lock events failed: %r", listener)


def _log(level: int, event: LockEvent) -> None:
    text = f"lock {', '.join(map(repr, event.names))} {event.kind}: owner {event.owner}"
    if event.fence:
        text += f", fence {event.fence}"
    if event.kind == "lost":
        at = time.strftime("%H:%M:%S", time.localtime(time.time() - event.since))
        text += f", last renewal at {at} ({event.since:.1f} s ago)"
    if event.reason:
        text += f"; {event.reason}"
    logger.log(level, "%s", text, extra={"relock": event})
