"""Who listens to lock events while a test lasts: in the package they do so for ever."""

from __future__ import annotations

from collections.abc import Callable, Container

from celery_relock.engine import events
from celery_relock.engine.events import LockEvent


class _Every:
    def __contains__(self, kind: object) -> bool:
        return True


def subscribe(
    listener: Callable[[LockEvent], None], kinds: Container[str] | None = None
) -> Callable[[], None]:
    """Call a listener at every event, or those of these kinds, until the function is called that is
    returned."""
    ours = listener, _Every() if kinds is None else kinds
    events.subscribe(*ours)
    mine = events._subscriptions[-1]

    def end() -> None:
        events._subscriptions[:] = [each for each in events._subscriptions if each is not mine]

    return end
